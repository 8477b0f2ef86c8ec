"""AttentionSpec describes a call without its lengths; ``describe`` makes the spec of a call."""

import os
from functools import lru_cache
from typing import NamedTuple

import torch

from ..fp8 import E4M3
from ..internal.watched import is_forward_mode
from ..kv import DTYPES, KVLayout, KVView
from ..masks.band import Mask, refuse_mask
from ..masks.function import MaskFunction
from .functions import Programs
from .selection import SelectedLists, lists_of

NO_BACKWARD = "cached attention has no backward; wrap the call in torch.no_grad()"
NO_FP8_BACKWARD = (
    "fp8 inputs have no backward; wrap the call in torch.no_grad(), or train in bf16, with "
    "compute_dtype=torch.float8_e4m3fn for a forward in e4m3"
)


class AttentionSpec(NamedTuple):
    """The description of a call without its lengths: everything that decides which backend or kernel runs.

    Attributes:
        kind: ``dense``, ``varlen`` or ``cached``.
        arch: the compute capability of the GPU, such as 90 for sm_90, or 0 without CUDA.
        mask: the band of visible keys; ``functions`` may hide more of them.
        score: the names of the score options in use.
        strided: the names of tensors whose last dimension is not contiguous.
        layout, page_size, batch_invariant: set for cached calls only.
        interpreted: True if Triton's interpreter runs the kernels, without a GPU.
        compute_dtype: the dtype that the forward rounds q, k and v to, or None for their own.
        statistic: the kind of a :class:`~attnlib.call.statistic.Statistic` that is computed instead of the
            output; empty for attention.
        selected: the lists of keys that the mask selects for each query, or None.
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
    score: tuple[str, ...]
    bounds: bool
    dropout: bool
    grad: bool
    lse: bool
    strided: tuple[str, ...]
    layout: KVLayout | None
    page_size: int
    batch_invariant: bool
    interpreted: bool = False
    functions: Programs | None = None
    compute_dtype: torch.dtype | None = None
    statistic: str = ""
    selected: SelectedLists | None = None

    @property
    def without_backward(self) -> list[str]:
        """The reasons why no backend can compute the gradients that this call needs."""
        if not self.grad:
            return []
        return [NO_BACKWARD] if self.kind == "cached" else [NO_FP8_BACKWARD] if self.dtype == E4M3 else []


def describe(call, sizes: dict[str, int]) -> AttentionSpec:
    """Return the spec of a :class:`~attnlib.call.Call` whose shapes have been validated.

    ``sizes`` has the call's sizes h, g, d and e. This is the only function that queries a device.

    Raises:
        TypeError: ``mask`` is not a Mask, or a dtype is unsupported or differs between tensors.
        ValueError: tensors are on different devices.
    """
    mask, score, kv, dropout = call.mask, call.score, call.kv, call.dropout
    if type(mask) not in (Mask, MaskFunction):  # kernels would ignore the methods of a subclass
        refuse_mask(mask)
    functions = call.functions
    device, dtype = call.q.device, call.q.dtype
    if dtype not in DTYPES and dtype != E4M3:
        raise TypeError(f"q: expected fp16, bf16, fp32 or fp64, got {dtype}")
    strided, grad = (), False
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)) if kv is None else (("q", call.q),):
        if x.dtype != dtype:
            remedy = (
                "quantize all three" if E4M3 in (dtype, x.dtype) else "cast it, or run under torch.autocast"
            )
            raise TypeError(f"{name}: expected {dtype} like q, got {x.dtype}; {remedy}")
        if x.device != device:
            raise ValueError(f"{name}: expected device {device} like q, got {x.device}")
        if not x.is_contiguous() and x.stride(-1) != 1 and x.shape[-1] > 1:
            strided += (name,)
        grad = grad or x.requires_grad
    optional = call.optional
    for name, x in optional.items():
        if x.device != device:
            raise ValueError(f"{name}: expected device {device} like q, got {x.device}")
        grad = grad or x.requires_grad
    if kv is not None:
        _check_view(kv, device, dtype)
    forward = is_forward_mode(call.q, call.k, call.v, *optional.values())
    device_type = device.type
    return AttentionSpec(  # keyword arguments would take 1.4 us more
        call.kind,
        device_type,
        arch_of(device),
        dtype,
        mask.band,
        sizes["h"],
        sizes["g"],
        sizes["d"],
        sizes["e"],
        score.options,
        call.key_starts is not None or call.key_ends is not None,
        dropout.p > 0,
        (grad and torch.is_grad_enabled()) or forward,  # forward mode counts, so that backends reject it
        call.lse,
        strided,
        None if kv is None else kv.layout,
        0 if kv is None else kv.page_size,
        kv is not None and kv.split_size > 0,
        device_type == "cpu" and is_interpreted(),
        None if functions is None else functions.programs,
        call.compute_dtype,
        "",
        lists_of(mask),
    )


def is_interpreted() -> bool:
    """True if TRITON_INTERPRET=1 makes Triton interpret kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def arch_of(device: torch.device) -> int:
    """Return the compute capability of a CUDA device, such as 90 for sm_90, and 0 for other devices."""
    if device.type != "cuda":
        return 0
    return _read_arch(device) if torch.compiler.is_compiling() else _known_arch(device)


def _read_arch(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# Reading the capability takes 3 us, so it is cached. Under torch.compile it is a constant anyway.
_known_arch = lru_cache(_read_arch)


def _check_view(kv: KVView, device: torch.device, dtype: torch.dtype) -> None:
    layout = kv.layout
    if dtype == E4M3:
        if (layout.dtype, layout.storage_dtype) != (torch.bfloat16, E4M3):
            given = f"dtype={layout.dtype} and storage_dtype={layout.storage_dtype}"
            raise TypeError(
                f"q: expected a cache of dtype={torch.bfloat16} and storage_dtype={E4M3} for {dtype}, "
                f"got {given}"
            )
    elif layout.dtype != dtype:
        raise TypeError(
            f"q: expected {layout.dtype} like the cache, got {dtype}; cast it, or the cache's layout"
        )
    if kv.k.device != device:
        raise ValueError(f"kv: expected device {device} like q, got {kv.k.device}")
