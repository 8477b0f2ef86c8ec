"""What attention counts as in torch's FlopCounterMode: as much as torch's own attention of the same shapes.

A query meets every key of its sequence, whatever the mask hides. Lengths are read where they are not fake.
"""

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from .operators import Arguments, CachedArguments


def _takes_tensors(formula: Callable) -> Callable:
    formula._get_raw = True  # what FlopCounterMode looks for in a custom_mapping; else it would hand over shapes
    return formula


@_takes_tensors
def forward_flops(*arguments, out_val=None) -> int:
    """Two products for each pair: the score over d, the output over e."""
    a = Arguments(*arguments)
    return 2 * a.q.shape[-2] * _pairs(a) * (a.q.shape[-1] + a.v.shape[-1])


@_takes_tensors
def backward_flops(dout, dlse, out, lse, *arguments, out_val=None) -> int:
    """Five: the score again, dq and dk over d, the probability's gradient and dv over e."""
    a = Arguments(*arguments)
    return 2 * a.q.shape[-2] * _pairs(a) * (3 * a.q.shape[-1] + 2 * a.v.shape[-1])


@_takes_tensors
def cached_flops(*arguments, out_val=None) -> int:
    """As a forward over the keys that a sequence still stores; over a full table where lengths are fake."""
    a = CachedArguments(*arguments)
    if _unknown(a.lengths):
        pairs = prod(a.q.shape[:-2]) * a.table.shape[1] * a.k.shape[1]
    else:
        queries = a.q.shape[1] if a.cu_seqlens_q is None else a.cu_seqlens_q.diff()
        pairs = int(((a.lengths - a.starts).long().clamp(min=0) * queries).sum())
    return 2 * a.q.shape[-2] * pairs * (a.q.shape[-1] + a.value_plane.shape[-1])


def formulas() -> Mapping[object, Callable]:
    """The formula of each operator that computes attention; the backends must be loaded."""
    kinds = {"forward": forward_flops, "backward": backward_flops, "cached": cached_flops}
    named = ((f"{backend}_{kind}", flops) for backend in ("torch", "triton") for kind, flops in kinds.items())
    return MappingProxyType({getattr(torch.ops.attnlib, name): flops for name, flops in named})


def _pairs(a: Arguments) -> int:
    """Queries times keys, summed over the sequences; every sequence is the longest where offsets are fake."""
    if a.cu_seqlens_q is None or _unknown(a.cu_seqlens_q):
        return prod(a.q.shape[:-2]) * (a.k.shape[-3] if a.max_seqlen_k is None else a.max_seqlen_k)
    return int((a.cu_seqlens_q.diff().long() * a.packing.cu_seqlens_k.diff()).sum())


def _unknown(x: Tensor) -> bool:
    return x.is_meta or type(x) is not Tensor  # such as a fake one
