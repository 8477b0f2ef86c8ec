"""What attention counts as in torch's FlopCounterMode: as much as torch's own attention of the same shapes.

A query meets every key of its sequence, whatever the mask hides. Lengths are read where they are not fake.
"""

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from .operators import Arguments, CachedArguments

BACKENDS = ("torch", "triton", "triton_plain")  # that are operators


def _formula(named: Callable, pairs: Callable, *, d: int, e: int) -> Callable[..., int]:
    """What an operator counts: for each pair of a query and a key so many products over d and over e.

    ``named`` gives the names to what the operator takes.
    """

    def flops(*arguments, out_val=None) -> int:
        a = named(*arguments)
        widths = d * a.q.shape[-1] + e * (a.k if a.v is None else a.v).shape[-1]
        return 2 * a.q.shape[-2] * pairs(a) * widths

    flops._get_raw = (
        True  # what FlopCounterMode looks for in a custom_mapping; else it would hand over shapes
    )
    return flops


def _pairs(a: Arguments) -> int:
    """Queries times keys, summed over the sequences; every sequence is the longest where offsets are fake."""
    if a.cu_seqlens_q is None or _unknown(a.cu_seqlens_q):
        return prod(a.q.shape[:-2]) * (a.k.shape[-3] if a.max_seqlen_k is None else a.max_seqlen_k)
    return int((a.cu_seqlens_q.diff().long() * a.cu_seqlens_k.diff()).sum())


def _cached_pairs(a: CachedArguments) -> int:
    """As over tensors, with the keys that a sequence still stores; over a full table where lengths are
    fake.
    """
    if _unknown(a.lengths):
        return prod(a.q.shape[:-2]) * a.table.shape[1] * a.k.shape[1]
    queries = a.q.shape[1] if a.cu_seqlens_q is None else a.cu_seqlens_q.diff()
    return int(((a.lengths - a.starts).long().clamp(min=0) * queries).sum())


def _unknown(x: Tensor) -> bool:
    return x.is_meta or type(x) is not Tensor  # such as a fake one


forward_flops: Callable[..., int] = _formula(
    Arguments, _pairs, d=1, e=1
)  # the score over d, the output over e
# The score again, dq and dk over d, the probability's gradient and dv over e.
backward_flops: Callable[..., int] = _formula(
    lambda dout, dlse, out, lse, *rest: Arguments(*rest), _pairs, d=3, e=2
)
cached_flops: Callable[..., int] = _formula(CachedArguments, _cached_pairs, d=1, e=1)


def formulas() -> Mapping[object, Callable[..., int]]:
    """The formula of each operator that computes attention; the backends must be loaded."""
    kinds = {"forward": forward_flops, "backward": backward_flops, "cached": cached_flops}
    named = ((f"{backend}_{kind}", flops) for backend in BACKENDS for kind, flops in kinds.items())
    return MappingProxyType({getattr(torch.ops.attnlib, name): flops for name, flops in named})
