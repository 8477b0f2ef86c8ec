"""Quantization of q, k and v to fp8 (e4m3), with a scale for each sequence and head."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .internal.checks import bind, is_strided, refuse_tensor
from .internal.signatures import kind, leading_to
from .kv import DTYPES

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
OF_ZEROS = (
    2.0**-40
)  # the smallest scale; the product of two and the scale of scores is still a normal fp32 number
LOW = 0xFFFFFFFF


class Descales(NamedTuple):
    """The fp32 scales that dequantize e4m3 inputs: ``q_descale`` ``[b, h]``, the others ``[b, g]``.

    Over a cache only ``q_descale`` is set.
    """

    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


@leading_to("quantize_fp8(q, k, v) makes them")
class Fp8Inputs(NamedTuple):
    """The result of :func:`quantize_fp8`: fp8 q, k and v and their scales, by argument name."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor

    @property
    def descales(self) -> Descales:
        """The three scales."""
        return Descales(self.q_descale, self.k_descale, self.v_descale)


def descales_of(q: Tensor | None, k: Tensor | None = None, v: Tensor | None = None) -> Descales | None:
    """Return the scales that dequantize the inputs of a call, or None if the call has none."""
    return None if q is k is v is None else Descales(q, k, v)


def check_descales(
    descales: Descales | None, dtype: torch.dtype, sizes: dict[str, int], *, over_view: bool
) -> None:
    """Raise TypeError or ValueError unless a call has exactly the scales that inputs of ``dtype`` need.

    ``sizes`` has the call's sizes b, h and g.
    """
    needed = () if dtype != E4M3 else ("q_descale",) if over_view else Descales._fields
    for name, x in (descales or Descales())._asdict().items():
        if name not in needed and x is not None:
            raise TypeError(
                f"{name}: expected None with {dtype} inputs, since it scales {E4M3}; see quantize_fp8()"
            )
        if name not in needed:
            continue
        if not is_strided(x) or x.dtype != torch.float32:
            got = x.dtype if isinstance(x, Tensor) else None if x is None else type(x).__name__
            raise TypeError(
                f"{name}: expected an fp32 tensor with {dtype} inputs, got {got}; see quantize_fp8()"
            )
        bind((name, x, "bh" if name == "q_descale" else "bg"), known=sizes)


def check_compute_dtype(compute_dtype: object, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError unless a call on inputs of ``dtype`` can compute in ``compute_dtype``."""
    if not isinstance(compute_dtype, torch.dtype):
        raise TypeError(
            f"compute_dtype: expected None or {E4M3}, got {type(compute_dtype).__name__} {compute_dtype!r}"
        )
    if compute_dtype != E4M3:
        raise ValueError(f"compute_dtype: expected None or {E4M3}, got {compute_dtype}; cast q, k and v")
    if dtype == E4M3:
        raise TypeError(f"compute_dtype: expected None with {E4M3} inputs, got {E4M3}; leave it out")
    if dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"q: expected fp16 or bf16 with compute_dtype={E4M3}, got {dtype}; cast q, k and v, or run under "
            "torch.autocast"
        )


@kind
def quantize_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    incoherent: bool = False,
) -> Fp8Inputs:
    """Quantize q, k and v to e4m3, with a scale for each sequence and head.

    q is ``[b, s, h, d]``, k ``[b, t, g, d]`` and v ``[b, t, g, e]``; with offsets all three are packed. The
    largest magnitude of a head becomes 448, the maximum of e4m3. Infinities and NaN become NaN and do not
    affect the scale.

    ``incoherent`` multiplies q and k by the same orthogonal matrix. This leaves every q·k unchanged but
    spreads outliers over all channels, which reduces the quantization error of the other values. The matrix
    is a fixed pattern of random signs, followed by one Hadamard matrix for each power of two in the binary
    expansion of ``d`` ("incoherent processing"; Shah et al., 2024, arXiv 2407.08608; Chee et al., 2023, arXiv
    2307.13304).

    Raises:
        ValueError, TypeError: a shape or dtype does not fit.

    >>> q, k = torch.randn(2, 9, 8, 64), torch.randn(2, 9, 2, 64)
    >>> attention(**quantize_fp8(q, k, k, incoherent=True)._asdict(), mask=CAUSAL).dtype
    torch.bfloat16
    """
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
    if not isinstance(incoherent, bool):
        raise TypeError(f"incoherent: expected a bool, got {type(incoherent).__name__}")
    if incoherent:
        turn = rotation(q.shape[-1], q.device)
        # Autocast would round these products, so it is turned off; meta tensors do not support autocast.
        device = q.device.type
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            q, k = q.float() @ turn, k.float() @ turn
    return quantized((q, k, v), (cu_seqlens_q, cu_seqlens_k))


def quantized(
    tensors: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor | None, Tensor | None],
    bounds: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Fp8Inputs:
    """Quantize q, k and v, given their offsets if they are packed.

    Keys and values outside ``bounds``, which are key_starts and key_ends, become zeros.
    """
    (q, k, v), (cu_seqlens_q, cu_seqlens_k) = tensors, offsets
    q, q_descale = _quantized(q, cu_seqlens_q)
    (k, k_descale), (v, v_descale) = (_quantized(x, cu_seqlens_k, *bounds) for x in (k, v))
    return Fp8Inputs(q, k, v, q_descale, k_descale, v_descale)


def per_token(scale: Tensor, tokens: int, cu_seqlens: Tensor | None) -> Tensor:
    """Reshape a scale ``[b, h]`` to broadcast over a tensor ``[b, t, h, d]`` or packed ``[t, h, d]``.

    Packed rows after the last offset have the factor 1.
    """
    if cu_seqlens is None:
        return scale[:, None, :, None]
    return torch.cat((scale, scale.new_ones(1, scale.shape[1])))[_owners(tokens, cu_seqlens)][..., None]


def _owners(tokens: int, cu_seqlens: Tensor) -> Tensor:
    """Return the sequence index of each token, int64 ``[t]``; tokens after the last offset get ``b``."""
    n = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], n, right=True)


def _quantized(
    x: Tensor, cu_seqlens: Tensor | None, starts: Tensor | None = None, ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a tensor in e4m3, and the scale ``[b, h]`` that dequantizes it.

    Tokens before ``starts`` or from ``ends`` on become zeros.
    """
    x = x.float() if x.dtype == torch.float64 else x
    if not starts is ends is None:
        at = torch.arange(x.shape[1], device=x.device)
        hidden = [at < starts[:, None]] if starts is not None else []
        hidden += [at >= ends[:, None]] if ends is not None else []
        x = x.masked_fill(torch.stack(hidden).any(0)[..., None, None], 0)
    sizes = torch.linalg.vector_norm(x.nan_to_num(0, 0, 0), torch.inf, -1).float()  # [b, t, h]
    if cu_seqlens is None:
        largest = sizes.amax(1) if sizes.shape[1] else sizes.sum(1)
    else:
        owners = _owners(len(x), cu_seqlens)[:, None].expand(sizes.shape)
        largest = sizes.new_zeros(len(cu_seqlens), x.shape[1]).scatter_reduce(0, owners, sizes, "amax")[:-1]
    # A product, because torch divides by a number as CPUs do or multiplies by its inverse, depending on the
    # device.
    descale = (largest * (1 / LARGEST)).clamp(min=OF_ZEROS)
    x = x.nan_to_num(torch.nan, torch.nan, torch.nan)  # some versions of torch convert infinity to 448
    return (x / per_token(descale, x.shape[-3], cu_seqlens)).to(E4M3), descale


def rotation(d: int, device: torch.device) -> Tensor:
    """Return the orthogonal matrix ``[d, d]`` of :func:`quantize_fp8`'s incoherent processing."""
    powers = [1 << n for n in reversed(range(d.bit_length())) if d >> n & 1]
    blocks = [_hadamard(n, device) * n**-0.5 for n in powers]
    return _signs(d, device)[:, None] * torch.block_diag(*blocks)


def _hadamard(n: int, device: torch.device) -> Tensor:
    """Return the Hadamard matrix of size n, a power of two, by Sylvester's construction."""
    x = torch.ones(1, 1, device=device)
    while len(x) < n:
        x = torch.cat((torch.cat((x, x), 1), torch.cat((x, -x), 1)))
    return x


def _signs(d: int, device: torch.device) -> Tensor:
    """Return a fixed pattern of random signs, a hash of each channel's index, computed on the device."""
    x = torch.arange(1, d + 1, device=device)
    for factor in (0x7FEB352D, 0x846CA68B):
        x = ((x ^ x >> 16) * factor) & LOW
    return 1.0 - 2.0 * (x >> 16 & 1)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    packed = not cu_seqlens_q is cu_seqlens_k is None
    offsets = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)) if packed else ()
    for name, x in (("q", q), ("k", k), ("v", v), *offsets):
        if not is_strided(x):
            refuse_tensor(name, x)
        if x.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} like q, got {x.device}")
        if name in ("q", "k", "v") and x.dtype not in DTYPES:
            raise TypeError(f"{name}: expected fp16, bf16, fp32 or fp64, got {x.dtype}")
    for name, x in offsets:
        if x.dtype != torch.int32 or x.dim() != 1 or not len(x):
            raise TypeError(f"{name}: expected int32 [b + 1] offsets, got {x.dtype} {tuple(x.shape)}")
    of_q, of_k, of_v = ("shd", "tgd", "tge") if packed else ("bshd", "btgd", "btge")
    bind(("q", q, of_q), ("k", k, of_k), ("v", v, of_v))
    bind(*((name, x, "n") for name, x in offsets))
