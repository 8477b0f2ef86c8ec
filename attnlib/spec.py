"""AttentionSpec, a problem without its lengths, and describe(), which makes it."""

import os
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .kv import DTYPES, KVLayout, KVView
from .mask import Mask

if TYPE_CHECKING:
    from .call import Call


class AttentionSpec(NamedTuple):
    """A problem without its lengths: everything that may decide which backend or kernel runs it.

    ``kind`` is ``dense``, ``varlen`` or ``cached``; ``arch`` is 90 for sm_90 and 0 off CUDA; ``strided`` names the
    tensors whose last dimension is not contiguous; ``layout``, ``page_size`` and ``batch_invariant`` belong to cached
    calls; ``interpreted`` says that Triton runs kernels without a GPU.
    """

    kind: str
    device: str
    arch: int
    dtype: torch.dtype
    mask: Mask
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    softcap: bool
    alibi: bool
    sinks: bool
    bounds: bool
    dropout: bool
    grad: bool
    lse: bool
    strided: tuple[str, ...]
    layout: KVLayout | None
    page_size: int
    batch_invariant: bool
    interpreted: bool = False


def describe(call: "Call", sizes: dict[str, int]) -> AttentionSpec:
    """The spec of a call whose shapes agree already; the only place that looks at a device.

    ``sizes`` have the call's h, g, d and e.

    Raises:
        TypeError: not a Mask; a dtype that attention does not take, or several.
        ValueError: tensors on different devices.
    """
    mask, score, kv, dropout = call.mask, call.score, call.kv, call.dropout
    if type(mask) is not Mask:  # what a subclass says of visible(), no kernel would know
        raise TypeError(f"mask: expected a Mask such as CAUSAL, FULL or sliding(n), got {type(mask).__name__}")
    device, dtype = call.q.device, call.q.dtype
    if dtype not in DTYPES:
        raise TypeError(f"q: expected fp16, bf16, fp32 or fp64, got {dtype}")
    strided, grad = (), False
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)) if kv is None else (("q", call.q),):
        if x.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype} like q, got {x.dtype}; cast it, or run under torch.autocast")
        if x.device != device:
            raise ValueError(f"{name}: expected device {device} like q, got {x.device}")
        if not x.is_contiguous() and x.stride(-1) != 1 and x.shape[-1] > 1:
            strided += (name,)
        grad = grad or x.requires_grad
    for name, x in _optional(call):
        if x is not None:
            if x.device != device:
                raise ValueError(f"{name}: expected device {device} like q, got {x.device}")
            grad = grad or x.requires_grad
    if kv is not None:
        _check_view(kv, device, dtype)
    device_type = device.type
    return AttentionSpec(
        kind=call.kind,
        device=device_type,
        arch=arch_of(device) if device_type == "cuda" else 0,
        dtype=dtype,
        mask=mask,
        heads=sizes["h"],
        kv_heads=sizes["g"],
        head_dim=sizes["d"],
        value_dim=sizes["e"],
        softcap=score.softcap is not None,
        alibi=score.alibi_slopes is not None,
        sinks=score.sinks is not None,
        bounds=call.key_starts is not None or call.key_ends is not None,
        dropout=dropout.p > 0,
        # What cannot be done in forward mode is refused there.
        grad=(grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0,
        lse=call.lse,
        strided=strided,
        layout=None if kv is None else kv.layout,
        page_size=0 if kv is None else kv.page_size,
        batch_invariant=kv is not None and kv.section > 0,
        interpreted=device_type == "cpu" and is_interpreted(),
    )


def _optional(call: "Call") -> Iterator[tuple[str, Tensor | None]]:
    """The tensors of a call that need not be there."""
    yield "alibi_slopes", call.score.alibi_slopes
    yield "sinks", call.score.sinks
    yield "key_starts", call.key_starts
    yield "key_ends", call.key_ends
    if call.packing is not None:
        yield "cu_seqlens_q", call.packing.cu_seqlens_q
        yield "cu_seqlens_k", call.packing.cu_seqlens_k
    yield "dropout_seed", call.dropout.seed


def is_interpreted() -> bool:
    """Whether Triton is asked to interpret kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def arch_of(device: torch.device) -> int:
    """90 for a CUDA device of sm_90."""
    return _read_arch(device) if torch.compiler.is_compiling() else _known_arch(device)


def _read_arch(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


_known_arch = lru_cache(_read_arch)  # reading takes longer than all else here; the compiler folds it by itself


def _check_view(kv: KVView, device: torch.device, dtype: torch.dtype) -> None:
    if kv.layout.dtype != dtype:
        raise TypeError(f"q: expected {kv.layout.dtype} like the cache, got {dtype}; cast it, or the cache's layout")
    if kv.k.device != device:
        raise ValueError(f"kv: expected device {device} like q, got {kv.k.device}")
