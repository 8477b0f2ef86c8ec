"""FlashAttention in plain torch (Dao, 2023, arXiv 2307.08691): forward and backward over tiles of queries and keys.

A tile of scores is ``[n * g, f * s, t]``: sequences and KV heads side by side, a group's query heads stacked as rows.
What lies outside a sequence is never part of a product. Inside it, what the mask hides in a tile is multiplied by zero.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...call import Origin
from ...checks import INT32
from ...mask import Mask
from ...philox import kept
from ..operators import Arguments, CachedArguments

KEYS = 512
# Scores per tile: 2 MiB in fp32, so that the softmax passes over a tile stay in a core's cache.
SCORES = 2**19


class Rule(NamedTuple):
    """How a score comes from q·k, beside what belongs to sequences and heads."""

    scale: float
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: int = 0

    @property
    def plain(self) -> bool:
        """Whether a score is the scaled product, and every probability counts."""
        return self.softcap is None and self.dropout_p == 0


def rule_of(a: Arguments | CachedArguments) -> Rule:
    """How scores come from q·k in this call."""
    if isinstance(a, CachedArguments):
        return Rule(a.scale, a.softcap)
    seed = 0 if a.dropout_seed is None else int(a.dropout_seed)
    return Rule(a.scale, a.softcap, a.dropout_p, seed)


class Part(NamedTuple):
    """Sequences of equal lengths that are solved together.

    ``q`` is ``[n, s, h, d]`` and its row 0 is query ``first``. ``tile(a, b)`` gives k ``[n, b - a, g, d]`` and v
    ``[n, b - a, g, e]`` of keys ``low <= a < b <= high``, where no range crosses a multiple of ``step``. ``slopes`` are
    ``[n, h]``, ``sinks`` ``[h]``. The mask and ``first`` count from the first key that there is; dropout adds
    ``origin.key`` to keys and queries, and the origin's head and sequence.
    """

    q: Tensor
    tile: Callable[[int, int], tuple[Tensor, Tensor]]
    mask: Mask
    low: int
    high: int
    kv_heads: int
    first: int
    origin: Origin = Origin()
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    step: int = KEYS


def origin_of(origin: Tensor | None, sequence: int) -> Origin:
    """Where one sequence of a call begins in the whole, in ints; int32 ``[b, 4]`` says so of all."""
    begin = Origin() if origin is None else Origin(*origin[sequence].tolist())
    return begin._replace(sequence=begin.sequence + sequence)


def moved(mask: Mask, first: int, origin: Origin) -> tuple[Mask, int]:
    """The mask and the first query of a piece, with indices that count from the piece's first key."""
    if mask.prefix:
        mask = Mask(mask.left, mask.right, max(0, min(mask.prefix - origin.key, INT32)))
    return mask, first + origin.query - origin.key


def per_head(
    slopes: Tensor | None, sinks: Tensor | None, sequence: int, q: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Slopes ``[n, h]`` of these sequences and sinks ``[h]``, in the dtype of the scores."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if slopes is not None:
        n = q.shape[0]
        slopes = (slopes[sequence : sequence + n] if slopes.dim() == 2 else slopes.expand(n, -1)).to(wide)
    return slopes, None if sinks is None else sinks.to(wide)


class _Tile(NamedTuple):
    """One tile of scores in the making."""

    k: Tensor
    v: Tensor
    scores: Tensor  # [n * g, f * s, t], hidden ones -inf
    tanh: Tensor | None  # of the capped scores
    hidden: Tensor | None  # bool [s, t]; None when every pair is visible
    distance: Tensor | None  # [s, t]
    weight: Tensor | None  # of dropout


def forward(part: Part, rule: Rule, out: Tensor, lse: Tensor) -> None:
    """Write the output ``[n, s, h, e]`` and the LSE ``[n, h, s]`` of ``part`` in place."""
    g = part.kv_heads
    start, stop = _seeing_rows(part)
    for blind in (slice(0, start), slice(stop, None)):
        out[:, blind] = 0
        lse[:, :, blind] = -torch.inf if part.sinks is None else part.sinks[:, None]
    for i0, i1, spans in _query_tiles(part):
        q = _rows(part.q[:, i0:i1], g, lse.dtype) * rule.scale
        top = q.new_full((*q.shape[:2], 1), -torch.inf)
        total = torch.zeros_like(top)
        acc = q.new_zeros(*q.shape[:2], out.shape[-1])
        for j0, j1 in spans:
            tile = _scores(part, rule, q, i0, i1, j0, j1)
            new_top = torch.maximum(top, tile.scores.amax(-1, keepdim=True))
            # A row that has seen nothing yet keeps -inf as its maximum; subtracting it would give NaN.
            safe = new_top.masked_fill(new_top == -torch.inf, 0)
            p = tile.scores.sub_(safe).exp_()
            correction = torch.exp(top - safe)
            total = total * correction + p.sum(-1, keepdim=True)
            weights = p if tile.weight is None else p * tile.weight
            acc = acc * correction + weights @ tile.v
            top = new_top
        row_lse = top + total.log()
        acc = acc / total.masked_fill(total == 0, 1)
        if part.sinks is not None:
            with_sink = torch.logaddexp(row_lse, _per_row(part.sinks.expand(part.q.shape[0], -1), g, i1 - i0))
            acc = acc * torch.exp(row_lse - with_sink).masked_fill(row_lse == -torch.inf, 0)
            row_lse = with_sink
        out[:, i0:i1] = _unrows(acc, g, i1 - i0)
        lse[:, :, i0:i1] = row_lse.view(part.q.shape[0], -1, i1 - i0)


def backward(
    part: Part,
    rule: Rule,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dslopes: Tensor,
) -> None:
    """Write dq ``[n, s, h, d]`` where a query sees a key, and add to dk, dv (wide, ``[n, t, g, *]``) and dslopes
    ``[n, h]``, in place.

    ``lse`` and ``delta = rowsum(out * dout) - dlse`` are ``[n, h, s]``; ``lse`` is +inf where every score is -inf.
    """
    n, g = part.q.shape[0], part.kv_heads
    for i0, i1, spans in _query_tiles(part):
        width = i1 - i0
        q = _rows(part.q[:, i0:i1], g, lse.dtype) * rule.scale
        do = _rows(dout[:, i0:i1], g, lse.dtype)
        row_lse, row_delta = (x[:, :, i0:i1].reshape(n * g, -1, 1) for x in (lse, delta))
        row_dq = torch.zeros_like(q)
        for j0, j1 in spans:
            tile = _scores(part, rule, q, i0, i1, j0, j1)
            p = tile.scores.sub_(row_lse).exp_()
            dp = do @ tile.v.mT
            if tile.weight is not None:
                dp = dp * tile.weight
            ds = dp.sub_(row_delta).mul_(p)
            _hide(ds, tile.hidden, 0)
            if tile.distance is not None:
                dslopes -= (ds.view(n, -1, width, j1 - j0) * tile.distance).sum((-1, -2))
            if tile.tanh is not None:
                ds = ds * (1 - tile.tanh.square())
            weights = p if tile.weight is None else p * tile.weight
            row_dq += ds @ tile.k
            dk[:, j0:j1] += _uncols(ds.mT @ q, g)  # q carries the scale already
            dv[:, j0:j1] += _uncols(weights.mT @ do, g)
        dq[:, i0:i1] = _unrows(row_dq * rule.scale, g, width)


def _query_tiles(part: Part) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Ranges of the queries that see a key, each with the key ranges that it sees."""
    n, _, h, _ = part.q.shape
    first, last = _seeing_rows(part)
    rows = max(16, min(512, SCORES // max(1, n * h * min(part.step, part.high - part.low))))
    for i0 in range(first, last, rows):
        i1 = min(last, i0 + rows)
        start, stop = part.mask.keys(part.first + i0, part.first + i1, part.high)
        start = max(start, part.low)
        cuts = [start, *range(start - start % part.step + part.step, stop, part.step), stop] if start < stop else []
        yield i0, i1, list(pairwise(cuts))


def _seeing_rows(part: Part) -> tuple[int, int]:
    """The rows ``[start, stop)`` whose queries see a key; the others may hold anything."""
    mask, s = part.mask, part.q.shape[1]
    if mask.keys(part.first, part.first + s, part.high)[1] <= part.low:
        return 0, 0
    start = 0 if mask.right is None or part.low < mask.prefix else part.low - mask.right - part.first
    stop = s if mask.left is None else part.high + mask.left - part.first
    return max(0, start), min(s, stop)


def _scores(part: Part, rule: Rule, q: Tensor, i0: int, i1: int, j0: int, j1: int) -> _Tile:
    g = part.kv_heads
    k, v = (_cols(x, q.dtype) for x in part.tile(j0, j1))
    scores = q @ k.mT
    tanh = distance = hidden = weight = None
    if rule.softcap is not None:
        tanh = torch.tanh(scores / rule.softcap)
        scores = tanh * rule.softcap
    i = torch.arange(part.first + i0, part.first + i1, device=q.device)[:, None]
    j = torch.arange(j0, j1, device=q.device)
    if part.slopes is not None:
        distance = (i - j).abs().to(q.dtype)
        scores = scores - _per_row(part.slopes, g, i1 - i0) * distance.repeat(scores.shape[1] // (i1 - i0), 1)
    if not part.mask.covers(part.first + i0, part.first + i1, j0, j1):
        hidden = ~part.mask.visible(i, j)
        _hide(scores, hidden, -torch.inf)
    if rule.dropout_p > 0:
        weight = _dropout(part, rule, i0, i1, j0, j1, q.dtype).reshape(scores.shape)
    return _Tile(k, v, scores, tanh, hidden, distance, weight)


def _dropout(part: Part, rule: Rule, i0: int, i1: int, j0: int, j1: int, dtype: torch.dtype) -> Tensor:
    n, _, h, _ = part.q.shape
    origin, device = part.origin, part.q.device
    row = part.first + origin.key
    keep = kept(
        rule.seed,
        rule.dropout_p,
        sequences=torch.arange(origin.sequence, origin.sequence + n, device=device),
        heads=torch.arange(origin.head, origin.head + h, device=device),
        rows=torch.arange(row + i0, row + i1, device=device),
        first=j0 + origin.key,
        last=j1 + origin.key,
    )
    return keep.to(dtype) / (1 - rule.dropout_p)


def _hide(x: Tensor, hidden: Tensor | None, value: float) -> None:
    """Overwrite the hidden pairs of a tile ``[*, f * s, t]`` in place."""
    if hidden is not None:
        x.view(x.shape[0], -1, *hidden.shape).masked_fill_(hidden, value)


def _rows(x: Tensor, g: int, wide: torch.dtype) -> Tensor:
    """``[n, s, h, d]`` -> ``[n * g, f * s, d]``."""
    n, s, h, d = x.shape
    return x.unflatten(2, (g, h // g)).permute(0, 2, 3, 1, 4).reshape(n * g, h // g * s, d).to(wide)


def _unrows(x: Tensor, g: int, s: int) -> Tensor:
    """``[n * g, f * s, d]`` -> ``[n, s, h, d]``."""
    return x.view(x.shape[0] // g, g, x.shape[1] // s, s, x.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _cols(x: Tensor, wide: torch.dtype) -> Tensor:
    """``[n, t, g, d]`` -> ``[n * g, t, d]``."""
    n, t, g, d = x.shape
    return x.permute(0, 2, 1, 3).reshape(n * g, t, d).to(wide)


def _uncols(x: Tensor, g: int) -> Tensor:
    """``[n * g, t, d]`` -> ``[n, t, g, d]``."""
    return x.view(x.shape[0] // g, g, *x.shape[1:]).transpose(1, 2)


def _per_row(x: Tensor, g: int, s: int) -> Tensor:
    """One number per sequence and head, ``[n, h]`` -> ``[n * g, f * s, 1]``."""
    n, h = x.shape
    return x.reshape(n * g, h // g, 1).expand(-1, -1, s).reshape(n * g, -1, 1)
