"""FlashAttention-2 in plain torch (Dao, 2023, arXiv 2307.08691): forward and backward over tiles of queries and keys.

A tile of scores is ``[n * g, f * s, t]``: sequences and KV heads side by side, a group's query heads stacked as rows.
What lies outside a sequence is never part of a product. Inside it, what the mask hides in a tile is multiplied by zero.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...philox import dropout_keep
from .batches import Batch, Keys

KEYS = 512  # of a tile, at most
# Scores per tile: 2 MiB in fp32, so that the softmax passes over a tile stay in a core's cache.
SCORES = 2**19


class QueryBlock(NamedTuple):
    """The ``rows`` of some ``sequences`` of a batch, which see the keys ``[start, stop)``: a row of tiles."""

    sequences: slice
    rows: slice
    start: int
    stop: int
    q: Tensor  # [n * g, f * s, d], scaled, in the dtype of scores

    def of(self, x: Tensor) -> Tensor:
        """One number for each row of tiles, ``[b, h, s]`` -> ``[n * g, f * s, 1]``."""
        return x[self.sequences, :, self.rows].reshape(*self.q.shape[:2], 1)


class Tile(NamedTuple):
    """A tile of scores, and what the backward needs of how they came to be."""

    k: Tensor
    v: Tensor
    scores: Tensor  # [n * g, f * s, t], hidden ones -inf
    tanh: Tensor | None  # of the capped scores
    hidden: Tensor | None  # bool [s, t]; None when every pair is visible
    distance: Tensor | None  # [s, t]
    weight: Tensor | None  # of dropout

    def dropped(self, p: Tensor) -> Tensor:
        """Probabilities, or their gradients, after dropout."""
        return p if self.weight is None else p * self.weight


def is_plain(batch: Batch) -> bool:
    """Whether a score is the scaled product alone, and every probability counts."""
    score = batch.score
    return score.softcap is score.alibi_slopes is score.sinks is None and batch.dropout.p == 0


def forward(batch: Batch) -> tuple[Tensor, Tensor]:
    """The output ``[b, s, h, e]`` and the LSE ``[b, h, s]``."""
    q, g = batch.q, batch.keys.heads
    b, s, h, _ = q.shape
    out = q.new_zeros(b, s, h, batch.keys.value_dim)
    lse = q.new_full((b, h, s), -torch.inf, dtype=_wide(q))  # of what a query has seen: a sink, if there is one
    if batch.score.sinks is not None:
        lse.copy_(batch.score.sinks[:, None])
    for block in _query_blocks(batch):
        m_i = block.of(lse)
        l_i = (m_i > -torch.inf).to(m_i.dtype)
        acc = block.q.new_zeros(*block.q.shape[:2], out.shape[-1])
        for start, stop in _key_ranges(batch.keys, block):
            tile = _tile(batch, block, start, stop)
            new_m = torch.maximum(m_i, tile.scores.amax(-1, keepdim=True))
            # A row that has seen nothing yet keeps -inf as its maximum; subtracting it would give NaN.
            safe = new_m.masked_fill(new_m == -torch.inf, 0)
            p = tile.scores.sub_(safe).exp_()
            correction = torch.exp(m_i - safe)
            l_i = l_i * correction + p.sum(-1, keepdim=True)
            acc = acc * correction + tile.dropped(p) @ tile.v
            m_i = new_m
            del tile, p  # the next tile takes their memory: 8 % of the time
        lse[block.sequences, :, block.rows] = (m_i + l_i.log()).view_as(lse[block.sequences, :, block.rows])
        acc = acc / l_i.masked_fill(l_i == 0, 1)
        out[block.sequences, block.rows] = _unrows(acc, g, block.rows)
    return out, lse


def backward(batch: Batch, dout: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq ``[b, s, h, d]``, dk and dv ``[b, t, g, *]`` of the batch's keys, and the gradient of slopes ``[b, h]``.

    ``lse`` and ``delta = rowsum(out * dout) - dlse`` are ``[b, h, s]``.
    """
    q, keys, scale = batch.q, batch.keys, batch.score.scale
    b, _, h, d = q.shape
    g, t = keys.heads, keys.stop - keys.start
    dq, dslopes = q.new_zeros(q.shape), lse.new_zeros(b, h)
    dk, dv = lse.new_zeros(b, t, g, d), lse.new_zeros(b, t, g, keys.value_dim)
    # Rows that saw nothing have lse = -inf; +inf makes every probability of theirs 0.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    for block in _query_blocks(batch):
        do = _rows(dout[block.sequences, block.rows], g, lse.dtype)
        row_lse, row_delta, row_dq = block.of(lse), block.of(delta), torch.zeros_like(block.q)
        for start, stop in _key_ranges(keys, block):
            tile = _tile(batch, block, start, stop)
            p = tile.scores.sub_(row_lse).exp_()
            ds = tile.dropped(do @ tile.v.mT).sub_(row_delta).mul_(p)
            _hide(ds, tile.hidden, 0)
            if tile.distance is not None:
                dslopes[block.sequences] -= (ds.view(-1, h, *tile.distance.shape) * tile.distance).sum((-1, -2))
            if tile.tanh is not None:
                ds = ds * (1 - tile.tanh.square())
            row_dq += ds @ tile.k
            at = (block.sequences, slice(start - keys.start, stop - keys.start))
            dk[at] += _uncols(ds.mT @ block.q, g)  # q carries the scale already
            dv[at] += _uncols(tile.dropped(p).mT @ do, g)
            del tile, p, ds  # as in the forward
        dq[block.sequences, block.rows] = _unrows(row_dq * scale, g, block.rows)
    return dq, dk.to(q.dtype), dv.to(q.dtype), dslopes


def _query_blocks(batch: Batch) -> Iterator[QueryBlock]:
    """The queries that see a key, so many together that a tile's scores stay small; the others may hold anything."""
    q, keys, mask = batch.q, batch.keys, batch.mask
    b, s, h, _ = q.shape
    first, last = mask.queries(batch.first, batch.first + s, keys.start, keys.stop)
    width = max(1, h * min(KEYS, keys.page_size, keys.stop - keys.start))
    sequences = max(1, SCORES // (width * max(1, min(s, 64))))
    queries = max(16, min(512, SCORES // (width * min(b, sequences))))
    for n in range(0, b, sequences):
        for i0 in range(first, last, queries):
            i1 = min(last, i0 + queries)
            at = slice(n, min(b, n + sequences)), slice(i0 - batch.first, i1 - batch.first)
            start, stop = mask.keys(i0, i1, keys.stop)
            yield QueryBlock(*at, max(start, keys.start), stop, _rows(q[at], keys.heads, _wide(q)) * batch.score.scale)


def _key_ranges(keys: Keys, block: QueryBlock) -> Iterator[tuple[int, int]]:
    """The keys of a row of tiles, tile by tile, none on two pages."""
    start = block.start
    while start < block.stop:
        page, inside = start - start % keys.page_size, start % keys.page_size
        stop = min(block.stop, page + min(keys.page_size, inside - inside % KEYS + KEYS))
        yield start, stop
        start = stop


def _tile(batch: Batch, block: QueryBlock, start: int, stop: int) -> Tile:
    h, rows, q, score = batch.q.shape[2], block.rows, block.q, batch.score
    k, v = (_cols(x, q.dtype) for x in batch.keys.read(block.sequences, start, stop))
    scores = q @ k.mT
    tanh = distance = hidden = weight = None
    if score.softcap is not None:
        tanh = torch.tanh(scores / score.softcap)
        scores = tanh * score.softcap
    i = torch.arange(batch.first + rows.start, batch.first + rows.stop, device=q.device)[:, None]
    j = torch.arange(start, stop, device=q.device)
    if score.alibi_slopes is not None:
        distance = (i - j).abs().to(q.dtype)
        scores = (scores.view(-1, h, *distance.shape) - _slopes(batch, block) * distance).view_as(scores)
    if not batch.mask.covers(batch.first + rows.start, batch.first + rows.stop, start, stop):
        hidden = ~batch.mask.visible(i, j)
        _hide(scores, hidden, -torch.inf)
    if batch.dropout.p > 0:
        weight = _dropout(batch, block, start, stop).view_as(scores)
    return Tile(k, v, scores, tanh, hidden, distance, weight)


def _slopes(batch: Batch, block: QueryBlock) -> Tensor:
    """The slopes ``[n or 1, h, 1, 1]`` of a block's sequences, in the dtype of its scores."""
    slopes, n = batch.score.alibi_slopes, batch.sequence
    if slopes.dim() == 2:
        slopes = slopes[n + block.sequences.start : n + block.sequences.stop]
    return slopes.to(block.q.dtype).view(-1, batch.q.shape[2], 1, 1)


def _dropout(batch: Batch, block: QueryBlock, start: int, stop: int) -> Tensor:
    """The weights ``[n, h, s, t]`` of a tile's probabilities: ``1 / (1 - p)``, or 0."""
    p, seed, origin, device = batch.dropout.p, batch.dropout.seed, batch.origin, batch.q.device
    sequence, row = origin.sequence + batch.sequence, batch.first + origin.key
    keep = dropout_keep(
        int(seed),
        p,
        sequences=torch.arange(sequence + block.sequences.start, sequence + block.sequences.stop, device=device),
        heads=torch.arange(origin.head, origin.head + batch.q.shape[2], device=device),
        rows=torch.arange(row + block.rows.start, row + block.rows.stop, device=device),
        first=start + origin.key,
        last=stop + origin.key,
    )
    return keep.to(block.q.dtype) / (1 - p)


def _hide(x: Tensor, hidden: Tensor | None, value: float) -> None:
    """Overwrite the hidden pairs of a tile ``[*, f * s, t]`` in place."""
    if hidden is not None:
        x.view(x.shape[0], -1, *hidden.shape).masked_fill_(hidden, value)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rows(x: Tensor, g: int, wide: torch.dtype) -> Tensor:
    """``[n, s, h, d]`` -> ``[n * g, f * s, d]``."""
    n, s, h, d = x.shape
    return x.unflatten(2, (g, h // g)).permute(0, 2, 3, 1, 4).reshape(n * g, h // g * s, d).to(wide)


def _unrows(x: Tensor, g: int, rows: slice) -> Tensor:
    """``[n * g, f * s, d]`` -> ``[n, s, h, d]``."""
    s = rows.stop - rows.start
    return x.view(x.shape[0] // g, g, x.shape[1] // s, s, x.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _cols(x: Tensor, wide: torch.dtype) -> Tensor:
    """``[n, t, g, d]`` -> ``[n * g, t, d]``."""
    n, t, g, d = x.shape
    return x.permute(0, 2, 1, 3).reshape(n * g, t, d).to(wide)


def _uncols(x: Tensor, g: int) -> Tensor:
    """``[n * g, t, d]`` -> ``[n, t, g, d]``."""
    return x.view(x.shape[0] // g, g, *x.shape[1:]).transpose(1, 2)
