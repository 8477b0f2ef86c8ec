"""The scores and the choice of an index branch, by the published formula and a stable sort."""

import torch
from torch import Tensor

from attnlib import Indexer
from attnlib.indexing import IndexBranch, IndexTensors


def plain_scores(index: IndexTensors, indexer: Indexer, branch: IndexBranch | None = None) -> Tensor:
    """The scores ``[b, s, c, blocks]`` of all blocks by the published formula, head by head; -inf if hidden.

    The queries are the last ``s`` of ``t`` tokens.
    """
    queries, keys, weights = index
    (s, heads), t, size = queries.shape[1:3], keys.shape[1], indexer.block_size
    position = torch.arange(t - s, t)
    if indexer.pool == "mean":
        count = t // size
        means = [keys[:, n * size : (n + 1) * size].mean(1, keepdim=True) for n in range(count)]
        keys = torch.cat([keys[:, :0], *means], 1)
        if indexer.norm_after_pool:
            keys = branch.finish(keys, torch.arange(count) * size)
        last = (torch.arange(count) + 1) * size - 1  # a block is scored once its last key is seen
    else:
        last = torch.arange(t)
        if indexer.tail:
            last = last // size * size + size - 1
    scores = []
    for head in range(heads):
        x = queries[:, :, head].to(keys.dtype) @ keys.mT
        x = x.relu() if indexer.activation else x
        scores.append(x if weights is None else x * weights[:, :, head, None])
    scores = torch.stack(scores, 2) if indexer.per == "group" else torch.stack(scores).sum(0)[:, :, None]
    scores = scores * indexer.score_scale
    scores = scores.masked_fill((last > position[:, None])[:, None], -torch.inf)
    if indexer.pool != "max":
        return scores
    blocks = [scores[..., n : n + size].amax(-1) for n in range(0, t, size)]
    return torch.stack(blocks, -1)


def plain_choice(scores: Tensor, indexer: Indexer, t: int) -> Tensor:
    """The keys ``[b, s, c, t]`` that a stable sort of scores chooses, before the causal mask."""
    b, s, c = scores.shape[:3]
    size = indexer.block_size
    found = torch.zeros(b, s, c, -(-t // size) + 1, dtype=torch.bool)
    for i in range(s):
        seen = t - s + i + 1
        candidates = seen // size if indexer.tail else -(-seen // size)
        row = scores[:, i].clone()
        for n in (*range(indexer.first), *range(candidates - indexer.local, candidates)):
            if 0 <= n < candidates:
                row[..., n] = torch.inf
        order = row.sort(dim=-1, descending=True, stable=True).indices[..., : min(indexer.top, candidates)]
        found[:, i].scatter_(-1, order, True)
        if indexer.tail and seen % size:
            found[:, i, :, seen // size] = True
    return found[..., :-1].repeat_interleave(size, -1)[..., :t]
