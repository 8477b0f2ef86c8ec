"""Compute a quantity from the scores of a call, on the selected backend, or explain the call."""

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from ..call.call import Call, Origin, Packing, checked
from ..call.score_options import with_score_options
from ..call.selection import selection_of
from ..call.statistic import Statistic, checked_statistic, first_column
from ..internal.checks import are_checks_on
from ..internal.watched import have_tangents
from ..scores import Score
from .placements import LocalCall, MeshPlacement, local_call
from .run import ExplainOnly
from .select import explained, select
from .storage import stored_keys

# The dimensions of results of dense calls; packed ones have no ``b``.
LETTERS = MappingProxyType(
    {"maxima": "bhs", "products": "bhs", "rows": "bhrt", "mass": "bht", "heads": "bsn"}
)


@torch.no_grad()
def compute(call: Call, statistic: Statistic, name: str | ExplainOnly | None = None) -> Tensor:
    """Compute a statistic of a call on the backend of this name, or explain the call and return zeros."""
    part = MeshPlacement.empty if type(name) is ExplainOnly else MeshPlacement.local
    if (local := local_call(call, part)) is not None:
        return _of_dtensors(local, statistic, name, part)
    call = checked(with_score_options(call))
    statistic = checked_statistic(call, statistic)
    if statistic.kind == "products":  # scores without options
        plain = call._replace(score=Score(call.score.scale), spec=None)
        return compute(plain, statistic._replace(kind="maxima"), name)
    if call.kv is not None:
        return _over_view(call, statistic, name)
    if call.spec.grad and have_tangents(call.q, call.k, statistic.lse, *call.optional.values()):
        raise NotImplementedError(
            "q: expected no forward-mode derivative, since attention weights have none; pass x.detach()"
        )
    call = call._replace(spec=call.spec._replace(grad=False, statistic=statistic.kind))
    if type(name) is ExplainOnly:
        name.explanations.append(explained(call, name.name))
        return statistic.result(call.q, call.k).zero_()
    return select(call.spec, name).statistic(call, statistic)


def _of_dtensors(
    local: LocalCall, statistic: Statistic, name: str | ExplainOnly | None, part: Callable[..., Tensor]
) -> Tensor:
    """Compute a statistic of a call on DTensors: every rank computes its own sequences and heads.

    The mean over heads is the mean over ranks of their means, so ranks exchange it. ``part`` shards a tensor.
    """
    from torch.distributed.tensor import DTensor, Partial

    skipped, sharing = 0 if local.call.packing is None else 1, local.sharing
    by_sequence = isinstance(statistic.rows, Tensor) and statistic.rows.dim() == 2
    given = {"lse": "bhs"[skipped:], "rows": "br" if by_sequence else "r", "at": "bsn"[skipped:]}
    parts = {
        key: part(sharing, x, letters)
        for key, letters in given.items()
        if isinstance(x := getattr(statistic, key), Tensor)
    }
    result = compute(local.call, statistic._replace(**parts), name)
    if type(name) is ExplainOnly:
        name.note(f"on DTensors, {sharing}")
        return result
    letters = LETTERS[statistic.kind][skipped:]
    sharing = sharing._replace(sizes={**dict(zip(letters, result.shape, strict=True)), **sharing.sizes})
    if statistic.kind == "rows":  # whose columns may be fewer than the packed keys
        sharing = sharing._replace(sizes={**sharing.sizes, "t": result.shape[-1]})
    if statistic.kind != "heads":
        return sharing.whole(result, letters)
    whole = sharing.placements(letters)
    own = [Partial("avg") if x == "h" else place for x, place in zip(sharing.shared, whole, strict=True)]
    shape = torch.Size([sharing.sizes[letter] for letter in letters])
    stride = torch.empty(shape, device="meta").stride()
    found = DTensor.from_local(result, sharing.mesh, own, run_check=False, shape=shape, stride=stride)
    return found.redistribute(placements=whole)


def _over_view(call: Call, statistic: Statistic, name: str | ExplainOnly | None) -> Tensor:
    """Compute a statistic over a cache: gather its keys, and run a packed call on them.

    The packed keys begin with the first visible key of each sequence. The origin of the call tells masks and
    functions where that is in the cache.
    """
    kv, q = call.kv, call.q
    if kv.is_partial:
        raise NotImplementedError(
            "kv: expected a cache that this device stores whole, got one that is sharded over ranks; compute "
            "attention weights on the ranks' own queries and keys"
        )
    if are_checks_on(kv.lengths):
        kv.check_contents(q.shape[0])
    b, (h, _) = len(kv.lengths), q.shape[-2:]
    keys, cu_seqlens_q = stored_keys(kv), kv.cu_seqlens_q
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(b + 1, dtype=torch.int32, device=q.device) * q.shape[1]
        statistic = _packed(statistic, b, q.shape[1])
    packing = Packing(cu_seqlens_q, keys.offsets, None, keys.longest)
    k, origin = keys.k, Origin(keys.starts, keys.starts)
    mask = call.mask
    if (selection := selection_of(mask)) is not None:
        mask = mask.with_lists(selection.indices.flatten(0, -3))
    packed = Call(q.flatten(0, -3), mask, call.score, k, first_column(k), packing=packing, origin=origin)
    result = compute(packed, statistic, name)
    if statistic.kind == "mass":
        mass = result.new_zeros(h, b, keys.longest)
        mass[:, keys.sequence, keys.position] = result
        return mass.transpose(0, 1)
    if kv.cu_seqlens_q is not None:
        return result
    if statistic.kind == "heads":
        return result.view(*q.shape[:2], result.shape[-1])
    own = statistic.rows.shape[0] // max(b, 1) if statistic.kind == "rows" else q.shape[1]
    return result.unflatten(1, (b, own)).transpose(0, 1)


def _packed(statistic: Statistic, b: int, s: int) -> Statistic:
    """Return the statistic of ``b`` sequences of ``s`` queries for the same queries in one packed row."""
    lse, rows, at = statistic.lse, statistic.rows, statistic.at
    if rows is not None:
        first = torch.arange(b, device=rows.device)[:, None] * s
        rows = torch.where((rows >= 0) & (rows < s), rows + first, -1).flatten()
    lse = None if lse is None else lse.transpose(0, 1).flatten(1)
    return statistic._replace(lse=lse, rows=rows, at=None if at is None else at.flatten(0, 1))
