"""FLOPs of attention in torch's FlopCounterMode, the same as for torch's own attention on the same shapes.

A query counts with every key of its sequence, even if the mask hides some. Lengths are read from their
tensors unless those are fake.
"""

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from .operators import Arguments, CachedArguments

BACKENDS = ("torch", "triton", "triton_plain")  # the backends that register operators


def _formula(named: Callable, pairs: Callable, *, d: int, e: int) -> Callable[..., int]:
    """Return the FLOP formula of an operator.

    Each pair of a query and a key counts as ``d`` dot products over a key's channels and ``e`` over a
    value's. ``named`` turns the operator's arguments into a named tuple.
    """

    def flops(*arguments, out_val=None) -> int:
        a = named(*arguments)
        widths = d * a.q.shape[-1] + e * (a.k if a.v is None else a.v).shape[-1]
        return 2 * a.q.shape[-2] * pairs(a) * widths

    # Without this attribute, FlopCounterMode would pass shapes to a custom_mapping's function, not tensors.
    flops._get_raw = True
    return flops


def _pairs(a: Arguments) -> int:
    """Return the number of query-key pairs, summed over the sequences.

    If the offsets are fake, every sequence counts as the longest.
    """
    if a.cu_seqlens_q is None or _is_fake(a.cu_seqlens_q):
        return prod(a.q.shape[:-2]) * (a.k.shape[-3] if a.max_seqlen_k is None else a.max_seqlen_k)
    return int((a.cu_seqlens_q.diff().long() * a.cu_seqlens_k.diff()).sum())


def _cached_pairs(a: CachedArguments) -> int:
    """Return the number of query-key pairs over a cache, counting only tokens that it still stores.

    If the lengths are fake, the page table counts as full.
    """
    if _is_fake(a.lengths):
        return prod(a.q.shape[:-2]) * a.table.shape[1] * a.k.shape[1]
    queries = a.q.shape[1] if a.cu_seqlens_q is None else a.cu_seqlens_q.diff()
    return int(((a.lengths - a.starts).long().clamp(min=0) * queries).sum())


def _is_fake(x: Tensor) -> bool:
    return x.is_meta or type(x) is not Tensor  # FakeTensor is a subclass


# A forward has one product over d for the score, and one over e for the output.
forward_flops: Callable[..., int] = _formula(Arguments, _pairs, d=1, e=1)
# A backward has the recomputed score, dq and dk over d, and dv and the gradient of probabilities over e.
backward_flops: Callable[..., int] = _formula(
    lambda dout, dlse, out, lse, *rest: Arguments(*rest), _pairs, d=3, e=2
)
cached_flops: Callable[..., int] = _formula(CachedArguments, _cached_pairs, d=1, e=1)


def formulas() -> Mapping[object, Callable[..., int]]:
    """Return the FLOP formula of each attention operator; the backends must be loaded."""
    kinds = {"forward": forward_flops, "backward": backward_flops, "cached": cached_flops}
    return MappingProxyType(
        {
            getattr(torch.ops.attnlib, f"{backend}_{kind}"): flops
            for backend in BACKENDS
            for kind, flops in kinds.items()
        }
    )
