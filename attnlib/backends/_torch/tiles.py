"""FlashAttention-2 in plain torch (Dao, 2023, arXiv 2307.08691): forward and backward, tile by tile.

A tile of scores is ``[n * g, f * s, t]``. Its first dimension combines sequences and KV heads, its second the
query heads of a group and the queries, and its third has the keys. A product never includes keys outside a
sequence. Inside, hidden pairs of a query and a key get the probability zero. If lists select keys, a tile has
only the keys that some of its queries see.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...internal.checks import are_checks_on
from ...internal.philox import dropout_keep
from ...masks.selection import ShownBlocks
from ...tracing.derivative import Derivative, derivative
from ...tracing.evaluation import evaluated
from ..operators import result_dtype, wide
from .batches import Batch, rows, unrows
from .pages import KEYS, Keys
from .programs import differentiated

# The number of scores in a tile. In fp32 they take 2 MiB, so they stay in a core's cache during the softmax.
SCORES = 2**19


class QueryBlock(NamedTuple):
    """The queries ``rows`` of some ``sequences`` of a batch, for which tiles are computed one after another.

    All keys that these queries see lie in ``[start, stop)``.
    """

    sequences: slice
    rows: slice
    start: int
    stop: int
    q: Tensor  # [n * g, f * s, d], scaled, in the dtype of scores
    shown: ShownBlocks | None = None  # if lists select keys

    def column(self, x: Tensor) -> Tensor:
        """Return the block's part of ``x`` ``[b, h, s]`` (a number per query) as ``[n * g, f * s, 1]``."""
        return x[self.sequences, :, self.rows].reshape(*self.q.shape[:2], 1)


class Tile(NamedTuple):
    """A tile of scores, with the intermediate results that the backward needs.

    ``at`` has the numbers of its keys.
    """

    at: slice | Tensor
    k: Tensor
    v: Tensor
    scores: Tensor  # [n * g, f * s, t]; -inf if the mask hides a pair
    tanh: Tensor | None  # tanh(score / softcap), [n, h, s, t]
    hidden: Tensor | None  # bool [s, t], with a mask function [n, h, s, t]; None if nothing is hidden
    distance: Tensor | None  # |i - j| for ALiBi, [s, t]
    indices: dict[str, Tensor] | None  # the inputs of mask and score functions
    weight: Tensor | None  # dropout factors, 0 or 1 / (1 - p)

    def dropped(self, p: Tensor) -> Tensor:
        """Apply dropout to probabilities or their gradients."""
        return p if self.weight is None else p * self.weight


def forward(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the output ``[b, s, h, e]`` and the LSE ``[b, h, s]``."""
    b, s, h, _ = batch.q.shape
    out = batch.q.new_zeros(b, s, h, batch.keys.v.shape[-1], dtype=result_dtype(batch.q.dtype))
    # Each LSE starts with what a query sees before any key: nothing, or a sink.
    lse = batch.q.new_full((b, h, s), -torch.inf, dtype=wide(batch.q))
    if batch.score.sinks is not None:
        lse.copy_(batch.score.sinks[:, None])
    for block in query_blocks(batch):
        m_i = block.column(lse)
        l_i = (m_i > -torch.inf).to(m_i.dtype)
        acc = block.q.new_zeros(*block.q.shape[:2], out.shape[-1])
        for start, stop in key_ranges(batch.keys, block):
            if (tile := tile_of(batch, block, start, stop)) is None:
                continue
            new_m = torch.maximum(m_i, tile.scores.amax(-1, keepdim=True))
            # If a query has not seen a key yet, its maximum is -inf, and subtracting that would give NaN.
            safe = new_m.masked_fill(new_m == -torch.inf, 0)
            p = tile.scores.sub_(safe).exp_()
            correction = torch.exp(m_i - safe)
            l_i = l_i * correction + p.sum(-1, keepdim=True)
            acc = acc * correction + tile.dropped(p) @ tile.v
            m_i = new_m
            del tile, p  # the next tile then reuses their memory, which saves 8 % of the time
        acc = acc if batch.value_factor is None else acc * block.column(batch.value_factor)
        own_lse, own_out = lse[block.sequences, :, block.rows], out[block.sequences, block.rows]
        own_lse.copy_((m_i + l_i.log()).view_as(own_lse))
        own_out.copy_(unrows(acc / l_i.masked_fill(l_i == 0, 1), own_out.shape))
    return out, lse


def backward(
    batch: Batch, dout: Tensor, lse: Tensor, delta: Tensor, dcaptured: Tensor, *, learns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq ``[b, s, h, d]``, dk and dv ``[b, t, g, *]`` of the batch's keys, and dslopes ``[b, h]``.

    The gradients of ALiBi slopes, dslopes, are zeros unless the call ``learns``.

    ``lse`` and ``delta = rowsum(out * dout) - dlse`` are ``[b, h, s]``. The gradients of floating-point
    tensors that the score function captures are added to ``dcaptured``, one flat tensor for all of them.
    """
    q, keys, g = batch.q, batch.keys, batch.keys.k.shape[2]
    b, _, h, _ = q.shape
    dq, dslopes = q.new_zeros(q.shape), lse.new_zeros(b, h)
    dk, dv = (lse.new_zeros(b, keys.stop - keys.start, g, x.shape[-1]).transpose(1, 2) for x in (q, keys.v))
    changes = batch.functions is not None and batch.functions.score is not None
    by_score = derivative(batch.functions.score) if changes else None
    if by_score is not None and not dcaptured.numel():  # no captured tensor needs a gradient
        by_score = by_score._replace(reads=())
    # A query that sees no key has the LSE -inf. Replacing it with +inf makes its probabilities 0.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    for block in query_blocks(batch):
        do = rows(dout[block.sequences, block.rows], g).flatten(0, 1).to(lse.dtype)
        row_lse, row_delta, row_dq = block.column(lse), block.column(delta), torch.zeros_like(block.q)
        for start, stop in key_ranges(keys, block):
            if (tile := tile_of(batch, block, start, stop)) is None:
                continue
            p = tile.scores.sub_(row_lse).exp_()
            ds = tile.dropped(do @ tile.v.mT).sub_(row_delta).mul_(p)
            _hide(ds, tile.hidden, h, 0)
            if by_score is not None:
                ds = _score_backward(batch, by_score, tile, ds, dcaptured)
            if learns and tile.distance is not None:
                dslopes[block.sequences] -= (ds.view(-1, h, *tile.distance.shape) * tile.distance).sum(
                    (-1, -2)
                )
            if tile.tanh is not None:
                ds = ds * (1 - tile.tanh.view_as(ds).square())
            row_dq += ds @ tile.k
            at = (block.sequences, slice(None), moved(tile.at, -keys.start))
            dk[at] += (ds.mT @ block.q).unflatten(0, (-1, g))  # block.q already includes the scale
            dv[at] += (tile.dropped(p).mT @ do).unflatten(0, (-1, g))
            del tile, p, ds  # the next tile then reuses their memory
        own_dq = dq[block.sequences, block.rows]
        own_dq.copy_(unrows(row_dq * batch.score.scale, own_dq.shape))
    return dq, *(x.transpose(1, 2).to(q.dtype) for x in (dk, dv)), dslopes


def query_blocks(batch: Batch, span: slice | None = None, only: int | None = None) -> Iterator[QueryBlock]:
    """Yield blocks of queries, small enough that a tile of their scores fits in a core's cache.

    Queries that see no key are left out and never read, so they may be NaN. ``span`` restricts the blocks to
    some queries, and ``only`` to one sequence of the batch.
    """
    q, keys, mask = batch.q, batch.keys, batch.mask
    b, s, h, _ = q.shape
    span = slice(0, s) if span is None else span
    first, last = batch.first + span.start, batch.first + span.stop
    first, last = mask.queries(first, last, keys.start, keys.stop)
    width = max(1, h * min(KEYS, keys.span, keys.stop - keys.start))
    sequences = max(1, SCORES // (width * max(1, min(s, 64))))
    sequences = sequences if batch.selection is None else 1  # a tile has the keys of its sequences' lists
    queries = max(16, min(512, SCORES // (width * min(b, sequences))))
    end = b if only is None else only + 1
    for n in range(only or 0, end, sequences):
        for i0 in range(first, last, queries):
            i1 = min(last, i0 + queries)
            at = slice(n, min(end, n + sequences)), slice(i0 - batch.first, i1 - batch.first)
            start, stop = mask.keys(i0, i1, keys.stop)
            start = max(start, keys.start)
            own = rows(q[at], keys.k.shape[2]).flatten(0, 1).to(wide(q)) * batch.score.scale
            block = QueryBlock(*at, start, stop, own, shown_to(batch, *at, start, stop))
            factor = batch.score_factor
            yield block if factor is None else block._replace(q=own * block.column(factor))


def key_ranges(keys: Keys, block: QueryBlock) -> Iterator[tuple[int, int]]:
    """Yield the ranges of keys for the tiles of a block, each of which can be read at once."""
    start = block.start
    while start < block.stop:
        inside = start % keys.span
        stop = min(block.stop, start - inside + min(keys.span, inside - inside % KEYS + KEYS))
        yield start, stop
        start = stop


def tile_of(batch: Batch, block: QueryBlock, start: int, stop: int) -> Tile | None:
    """Compute the tile of a block and the keys ``[start, stop)``; None if a function or lists hide all."""
    h, q, at = batch.q.shape[2], block.q, slice(start, stop)
    first, last = batch.first + block.rows.start, batch.first + block.rows.stop
    i, j = torch.arange(first, last, device=q.device)[:, None], torch.arange(start, stop, device=q.device)
    hidden = None if batch.mask.covers(first, last, start, stop) else ~batch.mask.visible(i, j)
    if block.shown is not None:
        unlisted = ~block.shown.keys(j + batch.origin.key, h)
        hidden = unlisted if hidden is None else hidden | unlisted
        columns = (~hidden).flatten(0, -2).any(0).nonzero()[:, 0]
        if not len(columns):
            return None
        at, j, hidden = j[columns], j[columns], hidden[..., columns]
    indices = None if batch.functions is None else indices_of(batch, block, i, j)
    if batch.functions is not None and batch.functions.mask is not None:
        hidden = _hidden(batch, indices, hidden)
        if hidden.all():
            return None
        hidden = hidden if hidden.any() else None
    kv = batch.keys.read(block.sequences, start, stop)
    kv = kv if block.shown is None else (x.index_select(2, at - start) for x in kv)
    k, v = (x.flatten(0, 1).to(q.dtype) for x in kv)
    products, weight = q @ k.mT, None
    scores, tanh, distance = modified(batch, block, products.view(-1, h, last - first, len(j)), i, j)
    scores = scores.view_as(products)
    if batch.functions is not None and batch.functions.score is not None:
        indices |= {"score": scores.view(-1, h, *i.shape[:1], *j.shape)}
        scores = _score_forward(batch, indices, hidden).view_as(scores)
    _hide(scores, hidden, h, -torch.inf)
    if batch.dropout.p > 0:
        weight = _dropout(batch, block, i[:, 0], start, stop)
        weight = (weight if block.shown is None else weight[..., at - start]).view_as(scores)
    return Tile(at, k, v, scores, tanh, hidden, distance, indices, weight)


def shown_to(batch: Batch, sequences: slice, queries: slice, start: int, stop: int) -> ShownBlocks | None:
    """Return the blocks of keys ``[start, stop)`` that lists show to some queries; None without lists."""
    if batch.selection is None:
        return None
    lists = batch.selection._replace(indices=batch.selection.indices[sequences, queries])
    return ShownBlocks.of(lists, start + batch.origin.key, stop + batch.origin.key)


def moved(at: slice | Tensor, by: int) -> slice | Tensor:
    """Add ``by`` to the numbers of keys."""
    return slice(at.start + by, at.stop + by) if isinstance(at, slice) else at + by


def modified(
    batch: Batch, block: QueryBlock, scores: Tensor, i: Tensor, j: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Apply softcap and ALiBi to products ``[n, h, s, t]``.

    Return the scores, the tanh of the softcap, and the distances ``|i - j|``; these are None without options.
    """
    tanh = distance = None
    if (softcap := batch.score.softcap) is not None:
        tanh = torch.tanh(scores / softcap)
        scores = tanh * softcap
    if batch.score.alibi_slopes is not None:
        distance = (i - j).abs().to(scores.dtype)
        scores = scores - _slopes(batch, block) * distance
    return scores, tanh, distance


def _slopes(batch: Batch, block: QueryBlock) -> Tensor:
    """Return the ALiBi slopes ``[n or 1, h, 1, 1]`` of a block, in the dtype of its scores."""
    slopes, n = batch.score.alibi_slopes, batch.sequence
    if slopes.dim() == 2:
        slopes = slopes[n + block.sequences.start : n + block.sequences.stop]
    return slopes.to(block.q.dtype).view(-1, batch.q.shape[2], 1, 1)


def _dropout(batch: Batch, block: QueryBlock, i: Tensor, start: int, stop: int) -> Tensor:
    """Return the dropout factors ``[n, h, s, t]`` of probabilities: ``1 / (1 - p)`` if kept, else 0."""
    p, origin, n, device = (
        batch.dropout.p,
        batch.origin,
        batch.sequence + batch.origin.sequence,
        batch.q.device,
    )
    sequences = torch.arange(n + block.sequences.start, n + block.sequences.stop, device=device)
    heads = torch.arange(origin.head, origin.head + batch.q.shape[2], device=device)
    tile = {"rows": i + origin.key, "first": start + origin.key, "last": stop + origin.key}
    keep = dropout_keep(int(batch.dropout.seed), p, sequences=sequences, heads=heads, **tile)
    return keep.to(block.q.dtype) / (1 - p)


def _hide(x: Tensor, hidden: Tensor | None, heads: int, value: float) -> None:
    """Overwrite the hidden pairs of a tile ``[n * g, f * s, t]`` with ``value``, in place."""
    if hidden is not None:
        x.view(-1, heads, *hidden.shape[-2:]).masked_fill_(hidden, value)


def indices_of(batch: Batch, block: QueryBlock, i: Tensor, j: Tensor) -> dict[str, Tensor]:
    """Return the inputs of mask and score functions for a tile ``[n, h, s, t]`` of queries and keys."""
    origin, device = batch.origin, i.device
    n, sequences = batch.sequence + origin.sequence, block.sequences
    return {
        "b": torch.arange(n + sequences.start, n + sequences.stop, device=device)[:, None, None, None],
        "h": torch.arange(origin.head, origin.head + batch.q.shape[2], device=device)[:, None, None],
        "i": i + origin.key,
        "j": j + origin.key,
        "first": torch.tensor(batch.first + origin.key, device=device),
    }


def _hidden(batch: Batch, indices: dict[str, Tensor], hidden: Tensor | None) -> Tensor:
    """Return a bool tensor ``[n or 1, h or 1, s, t]``, True for pairs that the band or the mask hides."""
    functions = batch.functions
    seen = evaluated(functions.mask, indices, functions.mask_tensors, counted=_checked_pairs(batch, hidden))
    shape = (indices["i"].shape[0], indices["j"].shape[0])
    seen = seen.broadcast_to((*(1,) * (4 - seen.dim()), *seen.shape)[:2] + shape)
    return ~seen if hidden is None else hidden | ~seen


def _score_forward(batch: Batch, indices: dict[str, Tensor], hidden: Tensor | None) -> Tensor:
    """Apply the score function to the scores of a tile, and return the results in new memory."""
    functions, score = batch.functions, indices["score"]
    changed = evaluated(
        functions.score, indices, functions.score_tensors, score.dtype, counted=_checked_pairs(batch, hidden)
    )
    return changed.broadcast_to(score.shape).clone()


def _score_backward(batch: Batch, by: Derivative, tile: Tile, ds: Tensor, dcaptured: Tensor) -> Tensor:
    """Return the gradient of a score function's input scores, given ``ds``, the gradient of its results.

    The gradients of the tensors that the function captures are added to ``dcaptured``.
    """
    functions, d = batch.functions, ds.view_as(tile.indices["score"])
    found = differentiated(by, d, tile.hidden, tile.indices, functions.score_tensors, dcaptured)
    return found.reshape(ds.shape)


def _checked_pairs(batch: Batch, hidden: Tensor | None) -> Tensor | None:
    """Return the pairs of a tile whose indices are checked with ``ATTNLIB_CHECK=1``, or None without checks.

    Every pair is checked unless ``hidden`` marks it.
    """
    if not are_checks_on(batch.q):
        return None
    return torch.tensor(True, device=batch.q.device) if hidden is None else ~hidden
