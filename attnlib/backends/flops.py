"""What attention counts as in torch's FlopCounterMode: as much as torch's own attention of the same shapes.

A query meets every key of its sequence, whatever the mask hides. Lengths are read where they are not fake.
"""

from math import prod

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from .operators import Arguments, CachedArguments


def forward_flops(*arguments, out_val=None) -> int:
    """Two products for each pair: the score over d, the output over e."""
    a = Arguments(*arguments)
    return 2 * a.q.shape[-2] * _pairs(a) * (a.q.shape[-1] + a.v.shape[-1])


def backward_flops(dout, dlse, out, lse, *arguments, out_val=None) -> int:
    """Five: the score again, dq and dk over d, the probability's gradient and dv over e."""
    a = Arguments(*arguments)
    return 2 * a.q.shape[-2] * _pairs(a) * (3 * a.q.shape[-1] + 2 * a.v.shape[-1])


def cached_flops(*arguments, out_val=None) -> int:
    """As a forward over the keys that a sequence still stores; over a full table where lengths are fake."""
    a = CachedArguments(*arguments)
    if _unknown(a.lengths):
        pairs = prod(a.q.shape[:-2]) * a.table.shape[1] * a.k.shape[1]
    else:
        queries = a.q.shape[1] if a.cu_seqlens_q is None else a.cu_seqlens_q.diff()
        pairs = int(((a.lengths - a.starts).long().clamp(min=0) * queries).sum())
    return 2 * a.q.shape[-2] * pairs * (a.q.shape[-1] + a.value_plane.shape[-1])


def _pairs(a: Arguments) -> int:
    """Queries times keys, summed over the sequences; every sequence is the longest where offsets are fake."""
    if a.cu_seqlens_q is None or _unknown(a.cu_seqlens_q):
        return prod(a.q.shape[:-2]) * (a.k.shape[-3] if a.max_seqlen_k is None else a.max_seqlen_k)
    return int((a.cu_seqlens_q.diff().long() * a.packing.cu_seqlens_k.diff()).sum())


def _unknown(x: Tensor) -> bool:
    return x.is_meta or is_fake(x)
