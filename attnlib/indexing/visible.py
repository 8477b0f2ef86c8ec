"""The choice among the keys that a mask shows, which may have holes and packed sequences."""

import torch
from torch import Tensor

from .branch import IndexTensors
from .choosing import BUDGET, first_keys, largest
from .indexer import Indexer
from .scores import bytes_per_query, index_scores


@torch.no_grad()
def choose_visible(index: IndexTensors, indexer: Indexer, visible: Tensor) -> Tensor:
    """Return the keys that an index branch chooses among the visible ones, int32 ``[b, s, 1, n]``.

    Like :func:`.choosing.choose`, but for any mask ``visible``, bool ``[b, s, t]``. The indexer has one list
    for all heads, of keys rather than blocks. Keys beyond those of the mask are not visible.
    """
    queries, weights, t = index.queries, index.weights, min(index.keys.shape[1], visible.shape[-1])
    (b, s), keys, visible = queries.shape[:2], first_keys(index.keys, t), visible[..., :t]
    rows = max(1, BUDGET // bytes_per_query(queries, keys, indexer))
    ends = torch.full((b, s), t, dtype=torch.int32, device=queries.device)
    found = []
    for part in (slice(start, start + rows) for start in range(0, s, rows)):
        scores = index_scores(queries[:, part], keys, weights[:, part], ends[:, part], indexer)[:, :, 0]
        scores = scores.masked_fill(~visible[:, part], -torch.inf)
        lists = largest(scores, min(indexer.top, t))
        found.append(torch.where(scores.gather(-1, lists) > -torch.inf, lists, -1).int())
    return torch.cat(found, 1)[:, :, None]
