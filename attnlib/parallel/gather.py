"""Context parallelism by gathering: every rank gets all keys and values, and computes its own queries."""

import torch
from torch import Tensor

from ..call.call import Call
from ..dispatch.run import ExplainOnly, Runner, attend
from .pieces import piece_of, seen, whole_of
from .sharding import Sharing, TokenRange, unshard
from .source import KeyValueSource


def gather(call: Call, sharing: Sharing, name: Runner, source: KeyValueSource) -> Tensor:
    """Return the output of this rank's queries over the keys of all ranks."""
    call, dim = whole_of(call), call.q.dim() - 3
    k, v = source.expand(
        *(_whole(x, sharing, dim, explain_only=isinstance(name, ExplainOnly)) for x in source.tensors)
    )
    outs = []
    ranges = sharing.ranges(sharing.rank, call.q.shape[dim])
    for q, queries in zip(call.q.chunk(len(ranges), dim), ranges, strict=True):
        keys = seen(call, queries, TokenRange(0, k.shape[dim]))
        keys_values = (x.narrow(dim, keys.start, keys.size) for x in (k, v))
        outs.append(attend(piece_of(call, q, *keys_values, queries, keys), name)[0])
    return torch.cat(outs, dim)


def _whole(x: Tensor, sharing: Sharing, dim: int, *, explain_only: bool) -> Tensor:
    """Return x gathered from all ranks, or a placeholder of that shape if the call is only explained."""
    if explain_only:
        return x.narrow(dim, 0, 1).expand(*x.shape[:dim], x.shape[dim] * sharing.ranks, *x.shape[dim + 1 :])
    return unshard(x, sharing.mesh, dim=dim, zigzag=sharing.zigzag)
