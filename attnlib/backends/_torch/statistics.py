"""Largest scores and probabilities of a call in plain torch, tile by tile; only keys ``at`` are gathered."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.statistic import Statistic
from ...tracing.evaluation import evaluated
from ..operators import Arguments, wide
from .batches import Batch, batches
from .tiles import QueryBlock, indices_of, key_ranges, modified, moved, query_blocks, shown_to, tile_of

GATHERED = 2**22  # the most numbers of gathered keys and scores at a time; 16 MiB in fp32


class Run(NamedTuple):
    """Adjacent queries ``span`` of a batch, whose results begin at ``slot``.

    ``only`` is the sequence that they are in, or None for all sequences of the batch.
    """

    span: slice | None
    slot: int
    only: int | None


def statistic(a: Arguments, wanted: Statistic) -> Tensor:
    """Return a statistic of a call on tensors."""
    result = wanted.result(a.q, a.k).fill_(-torch.inf if wanted.kind == "maxima" else 0)
    # Rows whose LSE is -inf get +inf, which makes their probabilities 0.
    lse = None if wanted.lse is None else wanted.lse.masked_fill(wanted.lse == -torch.inf, torch.inf)
    rows = None if wanted.rows is None else wanted.rows.tolist()
    for batch in batches(a):
        own_lse = None if lse is None else batch.select_lse(lse).to(wide(batch.q))
        if wanted.kind == "maxima":
            _add_maxima(batch, batch.select_lse(result))
        elif wanted.kind == "heads":
            own = batch.index or (None if wanted.at.dim() == 2 else slice(None),)
            _add_means(batch, own_lse, wanted.at[own], result[own])
        elif wanted.kind == "mass":
            index = batch.keys.index
            _add_mass(batch, own_lse, result.mT[index].mT if index else result, _runs(batch, rows))
        else:
            own = result[None] if batch.is_packed else result[batch.index] if batch.index else result
            _add_rows(batch, own_lse, own, _runs(batch, rows))
    return result


def _runs(batch: Batch, rows: list | None) -> Iterator[Run]:
    """Yield the runs of adjacent queries of a batch in a list of rows; one run of all without a list."""
    s, before = batch.q.shape[1], batch.index[1].start if batch.is_packed else 0
    if rows is None:
        yield Run(None, 0, None)
    elif rows and isinstance(rows[0], list):
        for n in range(batch.q.shape[0]):
            for run in _runs(batch, rows[batch.sequence + n]):
                yield run._replace(only=n)
    else:
        kept = [(row - before, slot) for slot, row in enumerate(rows) if 0 <= row - before < s]
        begin = 0
        for n in range(1, len(kept) + 1):
            if n == len(kept) or kept[n] != (kept[n - 1][0] + 1, kept[n - 1][1] + 1):
                (first, slot), (last, _) = kept[begin], kept[n - 1]
                yield Run(slice(first, last + 1), slot, None)
                begin = n


def _add_maxima(batch: Batch, result: Tensor) -> None:
    """Write the largest score of each query, ``[b, h, s]``."""
    for block in query_blocks(batch):
        found = block.q.new_full((*block.q.shape[:2], 1), -torch.inf)
        for start, stop in key_ranges(batch.keys, block):
            if (tile := tile_of(batch, block, start, stop)) is not None:
                found = torch.maximum(found, tile.scores.amax(-1, keepdim=True))
        own = result[block.sequences, :, block.rows]
        own.copy_(found.view_as(own))


def _probabilities(
    batch: Batch, lse: Tensor, runs: Iterator[Run]
) -> Iterator[tuple[Run, QueryBlock, slice | Tensor, Tensor]]:
    """Yield the probabilities ``[n, h, s, t]`` of each visible tile of the runs, and its keys."""
    for run in runs:
        for block in query_blocks(batch, run.span, run.only):
            row_lse, n = block.column(lse), block.sequences.stop - block.sequences.start
            for start, stop in key_ranges(batch.keys, block):
                if (tile := tile_of(batch, block, start, stop)) is not None:
                    p = tile.scores.sub_(row_lse).exp_()
                    yield run, block, tile.at, p.view(n, batch.q.shape[2], -1, p.shape[-1])


def _add_mass(batch: Batch, lse: Tensor, result: Tensor, runs: Iterator[Run]) -> None:
    """Add the probabilities of the runs' queries to ``[b, h, t]``."""
    for _, block, at, p in _probabilities(batch, lse, runs):
        result[block.sequences, :, at] += p.sum(2)


def _add_rows(batch: Batch, lse: Tensor, result: Tensor, runs: Iterator[Run]) -> None:
    """Write the probabilities of the runs' queries, ``[b, h, r, t]``."""
    for run, block, at, p in _probabilities(batch, lse, runs):
        slot = run.slot + block.rows.start - run.span.start
        result[block.sequences, :, slot : slot + p.shape[2], moved(at, batch.origin.key)] = p


def _add_means(batch: Batch, lse: Tensor, at: Tensor, result: Tensor) -> None:
    """Write the mean over heads of the probabilities of the keys ``at``, ``[b, s, n]``."""
    b, s, h, d = batch.q.shape
    width = max(1, at.shape[-1] * (h + batch.keys.k.shape[2] * d))
    sequences = max(1, GATHERED // (width * max(1, min(s, 16))))
    queries = max(1, GATHERED // (width * min(b, sequences)))
    for n in range(0, b, sequences):
        for row in range(0, s, queries):
            of = slice(n, min(b, n + sequences)), slice(row, min(s, row + queries))
            q = batch.q[of].to(wide(batch.q)) * batch.score.scale
            block = QueryBlock(*of, batch.keys.start, batch.keys.stop, q)
            result[of] = _means(batch, block, lse[of[0], :, of[1]], at[of])


def _means(batch: Batch, block: QueryBlock, lse: Tensor, at: Tensor) -> Tensor:
    """Return the mean over heads of the probabilities of the keys ``at`` of a block, ``[n, s, c]``.

    Unlike in a tile, every query has keys of its own; so indices of keys are ``[n, 1, s, c]``.
    """
    keys, (n, s, h, _), device = batch.keys, block.q.shape, at.device
    first = batch.first + block.rows.start
    i, j = torch.arange(first, first + s, device=device)[:, None], (at.long() - batch.origin.key)[:, None]
    seen = batch.mask.visible(i, j) & (j >= keys.start) & (j < keys.stop)
    # Hidden numbers may be anything; they read a visible key.
    j = torch.where(seen, j, min(keys.start, max(keys.k.shape[1] - 1, 0)))
    if keys.start >= keys.stop:
        return torch.zeros_like(lse[:, 0, :, None] * at)
    k = keys.k[block.sequences][torch.arange(n, device=device)[:, None, None], j[:, 0]].to(block.q.dtype)
    scores = torch.einsum("nsgfd,nscgd->ngfsc", block.q.unflatten(2, (k.shape[3], -1)), k).flatten(1, 2)
    scores, _, _ = modified(batch, block, scores, i, j)
    if (shown := shown_to(batch, block.sequences, block.rows, keys.start, keys.stop)) is not None:
        seen = seen & shown.keys(j[:, 0] + batch.origin.key, h)
    if (functions := batch.functions) is not None:
        indices = indices_of(batch, block, i, j)
        if functions.mask is not None:
            seen = seen & evaluated(functions.mask, indices, functions.mask_tensors)
        if functions.score is not None:
            scores = evaluated(
                functions.score, indices | {"score": scores}, functions.score_tensors, scores.dtype
            )
    p = torch.exp(scores - lse[..., None])
    return torch.where(seen, p, 0).expand(n, h, *at.shape[1:]).mean(1)
