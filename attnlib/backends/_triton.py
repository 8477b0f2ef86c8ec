"""The Triton backend: one FlashAttention core for dense and packed calls on a GPU; forward only so far."""

import math
import os

import torch
from torch import Tensor

from ..cache.layout import KVView
from ..kernels import launch
from ..spec import AttentionSpec
from ..terms import Terms
from ._schema import EXTRAS, LIMITS, NUMBERS, outputs, register


def unsupported(spec: AttentionSpec) -> list[str]:
    """Why this backend cannot run ``spec``."""
    reasons = []
    if spec.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"needs a CUDA device, got {spec.device}")
    if spec.device == "cuda" and spec.arch < 80:
        reasons.append(f"needs sm_80 or newer, got sm_{spec.arch}")
    if spec.kind == "cached":
        reasons.append("has no kernel for cached attention yet")
        if spec.grad:
            reasons.append("cached attention has no backward; wrap the call in torch.no_grad()")
        return reasons
    if spec.dtype == torch.float64:
        reasons.append("computes in fp32, got fp64")
    if spec.grad:
        reasons.append("has no backward yet; wrap the call in torch.no_grad()")
    if spec.head_dim > launch.WIDEST or spec.value_dim > launch.WIDEST:
        reasons.append(f"has tiles for heads of up to {launch.WIDEST}, got {max(spec.head_dim, spec.value_dim)}")
    return reasons


def slow(spec: AttentionSpec) -> list[str]:
    """Why this backend would copy K or V."""
    return [f"{name}: the last dimension is not contiguous, so it is copied once" for name in spec.strided]


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Dense or packed attention and its LSE."""
    q, k, v = (x.contiguous() if name in spec.strided else x for name, x in (("q", q), ("k", k), ("v", v)))
    if terms.cu_seqlens_k is terms.cu_seqlens_q:  # torch.compile passes a tensor once
        terms = terms._replace(cu_seqlens_k=None)
    mask = spec.mask
    numbers = (mask.left, mask.right, mask.prefix, terms.scale, terms.softcap, *terms[9:])
    return torch.ops.attnlib.triton_forward(q, k, v, *terms[2:9], *numbers)


def cached_attention(q: Tensor, kv: KVView, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Refused by ``unsupported``."""
    raise NotImplementedError("triton: cached attention has no kernel yet")


def _forward(
    q, k, v, slopes, sinks, starts, ends, cu_q, cu_k, seed,
    left, right, prefix, scale, softcap, dropout_p, max_q, max_k,
):  # fmt: skip
    from ..kernels.forward import forward

    # Small, and read by position alone.
    slopes, sinks, starts, ends, cu_q, cu_k = (
        None if x is None else x.contiguous() for x in (slopes, sinks, starts, ends, cu_q, cu_k)
    )
    out, lse = outputs(q, v)
    packed = cu_q is not None
    (s, h, d), (t, g), e = q.shape[-3:], k.shape[-3:-1], v.shape[-1]
    batch = cu_q.shape[0] - 1 if packed else q.shape[0]
    problem = launch.Problem(
        head_dim=d, value_dim=e, itemsize=q.element_size(), causal=right is not None, arch=_arch(q),
        plain=softcap is None and slopes is None and dropout_p == 0,
    )  # fmt: skip
    config = launch.forward(problem, keys=t)
    pairs = h if packed else batch * h
    programs = pairs * (s // config.block_m + batch + 1 if packed else -(-s // config.block_m))
    if programs == 0:
        return out, lse
    strides = [(0, *x.stride()[:2]) if packed else x.stride()[:3] for x in (q, k, v, out)]
    for name, stride in zip(("q", "k", "v"), strides, strict=False):
        if stride[1] >= launch.FARTHEST:
            raise NotImplementedError(f"triton: rows of {name} lie {stride[1]} elements apart; call .contiguous()")
    main, tail = launch.head_split(d)
    with torch.cuda.device_of(q):
        forward[(programs,)](
            q, k, v, out, lse, slopes, sinks, starts, ends, cu_q, cu_q if cu_k is None else cu_k, seed,
            *(n for stride in strides for n in stride),
            0 if packed else h * s, s, slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            batch, h, h // g, s, t, pairs if packed else launch.section(problem, keys=t, pairs=pairs, group=h // g),
            left or 0, right or 0, prefix, scale, softcap or 1.0,
            math.ceil(dropout_p * 2**32), 1 / (1 - dropout_p),
            D=d, D_MAIN=main, D_TAIL=tail, E=e, E_MAIN=max(16, 1 << (e - 1).bit_length()),
            LEFT=left is not None, RIGHT=right is not None, PREFIX=prefix > 0,
            STARTS=starts is not None, ENDS=ends is not None, VARLEN=packed, SOFTCAP=softcap is not None,
            SLOPES=slopes is not None, SINKS=sinks is not None, DROPOUT=dropout_p > 0,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.stages,
            PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return out, lse


def _arch(x: Tensor) -> int:
    major, minor = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
    return 10 * major + minor


def _fake_forward(q, k, v, *extras):
    return outputs(q, v)


_library = register(
    (
        (
            f"triton_forward(Tensor q, Tensor k, Tensor v, {EXTRAS}, {NUMBERS}, {LIMITS}) -> (Tensor, Tensor)",
            _forward,
            _fake_forward,
        ),
    )
)
