"""FLOPs of attention for torch's FlopCounterMode, counted as torch counts them for its own attention.

Every pair of a query and a key of its sequence counts, even if the mask hides it. If lists select keys, a
query counts as many keys as its list has room for, at most all. The lengths of sequences are read from
tensors, unless these are fake (have no values).
"""

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from ..internal.checks import INT32
from .operators import Arguments, CachedArguments, statistic_of

BACKENDS = ("torch", "triton", "triton_generic")  # the backends that register operators


def _formula(named: Callable, pairs: Callable, *, d: int, e: int) -> Callable[..., int]:
    """Return the FLOP formula of an operator.

    Each pair of a query and a key counts as ``d`` dot products over the channels of a key, and ``e`` over the
    channels of a value. ``named`` turns the arguments of the operator into a named tuple, and ``pairs``
    counts the pairs.
    """

    def flops(*arguments, out_val=None) -> int:
        a = named(*arguments)
        widths = d * a.q.shape[-1] + e * (a.k if a.v is None else a.v).shape[-1]
        return 2 * a.q.shape[-2] * pairs(a) * widths

    # This attribute makes FlopCounterMode pass tensors to a function in custom_mapping, not only their
    # shapes.
    flops._get_raw = True
    return flops


def _pairs(a: Arguments) -> int:
    """Return the number of pairs of a query and a key in all sequences together.

    If the offsets of packed sequences are fake (have no values), every sequence counts as the longest.
    """
    most = _most_selected(a)
    if a.cu_seqlens_q is None or _is_fake(a.cu_seqlens_q):
        return prod(a.q.shape[:-2]) * min(most, a.k.shape[-3] if a.max_seqlen_k is None else a.max_seqlen_k)
    return int((a.cu_seqlens_q.diff().long() * a.cu_seqlens_k.diff().clamp(max=most)).sum())


def _most_selected(a: Arguments | CachedArguments) -> int:
    """Return the most keys that a list can select for a query; without lists, more than there are keys."""
    return INT32 if a.selected is None else min(INT32, a.selected.shape[-1] * a.block_size)


def _cached_pairs(a: CachedArguments) -> int:
    """Return the number of pairs of a query and a token that the cache still stores.

    If the lengths are fake (have no values), every sequence counts as filling its row of the page table.
    """
    if _is_fake(a.lengths):
        return prod(a.q.shape[:-2]) * min(_most_selected(a), a.table.shape[1] * a.k.shape[1])
    queries = a.q.shape[1] if a.cu_seqlens_q is None else a.cu_seqlens_q.diff()
    return int(((a.lengths - a.starts).long().clamp(min=0, max=_most_selected(a)) * queries).sum())


def _is_fake(x: Tensor) -> bool:
    return x.is_meta or type(x) is not Tensor  # FakeTensor is a subclass


# A forward has one product over the d channels of a key (score), and one over the e channels of a value.
forward_flops: Callable[..., int] = _formula(Arguments, _pairs, d=1, e=1)
# A backward has three products over d (score, dq, dk), and two over e (dv, gradient of the probability).
backward_flops: Callable[..., int] = _formula(
    lambda dout, dlse, out, lse, *rest: Arguments(*rest), _pairs, d=3, e=2
)
cached_flops: Callable[..., int] = _formula(CachedArguments, _cached_pairs, d=1, e=1)


def statistic_flops(*arguments, out_val=None) -> int:
    """Return the FLOPs of a statistic operator: one product over the channels of a key for each pair.

    If there are ``rows``, only their queries count, and with ``at`` only these keys.
    """
    a, statistic = statistic_of(arguments)
    pairs = _pairs(a)
    if statistic.at is not None:
        pairs = statistic.at.numel()
    elif statistic.rows is not None:
        rows = statistic.rows
        sequences = 1 if a.cu_seqlens_q is not None or rows.dim() == 2 else a.q.shape[0]
        pairs = sequences * rows.numel() * (statistic.width or a.k.shape[-3])
    return 2 * a.q.shape[-2] * pairs * a.q.shape[-1]


statistic_flops._get_raw = True  # see _formula


def index_flops(q: Tensor, *rest, out_val=None) -> int:
    """Return the FLOPs of index scores: one product over the channels of a key for each pair and head."""
    *_, tokens = rest
    return 2 * q.numel() * tokens


index_flops._get_raw = True


def formulas() -> Mapping[object, Callable[..., int]]:
    """Return the FLOP formula of each operator that computes; the backends must be loaded."""
    kinds = {
        "forward": forward_flops,
        "backward": backward_flops,
        "cached": cached_flops,
        "statistic": statistic_flops,
    }
    return MappingProxyType(
        {
            getattr(torch.ops.attnlib, f"{backend}_{kind}"): flops
            for backend in BACKENDS
            for kind, flops in kinds.items()
        }
        | {torch.ops.attnlib.triton_index_scores: index_flops}
    )
