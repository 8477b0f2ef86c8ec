"""Choose among blocks that contain visible keys only."""

from collections.abc import Callable

import torch
from torch import Tensor

from .branch import IndexTensors
from .choosing import BUDGET, choose
from .indexer import Indexer

FinishAt = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def choose_compacted(
    index: IndexTensors, indexer: Indexer, visible: Tensor, finish: FinishAt, *, budget: int = BUDGET
) -> Tensor:
    """Return the keys that an index branch chooses from blocks of visible keys, int32 ``[b, s, 1, n]``.

    Like :func:`.choosing.choose`, but blocks of a query begin at the first key that it sees, and leave out
    keys that it does not see. ``visible`` is bool ``[b, s, t]``; or ``[b, 1, t]`` for the last query, if each
    query sees one key more than the query before it. ``finish`` is called with pooled keys ``[b, n, dI]`` and
    the places of their blocks' first keys, ``[b, n]``.

    The indexer has ``pool="mean"`` and ``norm_after_pool``, one list for all heads, and no weights.
    """
    (b, rows, t), keys = visible.shape, index.keys
    together = index.queries.shape[1] // rows
    row_bytes = b * t * (2 * keys.shape[-1] * keys.itemsize + 16)
    step = max(1, budget // row_bytes)
    found = []
    for start in range(0, rows, step):
        queries = index.queries[:, start * together : (start + step) * together]
        found.append(_of_rows(queries, keys[:, :t], indexer, visible[:, start : start + step], finish))
    return torch.cat(found, 1)


def _of_rows(queries: Tensor, keys: Tensor, indexer: Indexer, visible: Tensor, finish: FinishAt) -> Tensor:
    """Return the lists of queries; each row of ``visible`` is that of equally many queries in a row."""
    (b, rows), size = visible.shape[:2], indexer.block_size
    order = visible.byte().argsort(dim=-1, descending=True, stable=True)  # [b, rows, t]
    count = visible.sum(-1, dtype=torch.int32).flatten()
    moved = keys.take_along_dim(order.flatten(1)[..., None], 1).unflatten(1, (rows, -1)).flatten(0, 1)
    queries = queries.unflatten(1, (rows, -1)).flatten(0, 1)

    def finish_moved(pooled: Tensor, at: Tensor) -> Tensor:
        pooled = pooled.unflatten(0, (b, rows)).flatten(1, 2)
        return finish(pooled, order[..., at].flatten(1)).unflatten(1, (rows, -1)).flatten(0, 1)

    blocks = choose(queries, moved, None, indexer, finish=finish_moved, lengths=count)
    places = (blocks[..., None] * size + torch.arange(size, device=keys.device)).flatten(-2).long()
    seen = count[:, None] + torch.arange(1 - queries.shape[1], 1, device=keys.device)
    hidden = (blocks < 0).repeat_interleave(size, -1) | (places >= seen[..., None, None])
    lists = order.flatten(0, 1)[:, None, None].take_along_dim(places.masked_fill(hidden, 0), -1)
    return lists.masked_fill(hidden, -1).int().unflatten(0, (b, rows)).flatten(1, 2)
