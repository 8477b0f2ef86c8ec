"""How a dense or packed call falls into attention problems of equal lengths."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ..mask import Mask
from ..terms import read_offsets
from . import _tiles
from ._tiles import Part, Rule


class Extras(NamedTuple):
    """The operators' optional tensors and numbers, in schema order."""

    slopes: Tensor | None
    sinks: Tensor | None
    starts: Tensor | None
    ends: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    seed: Tensor | None
    left: int | None
    right: int | None
    prefix: int
    scale: float
    softcap: float | None
    dropout_p: float
    max_q: int | None
    max_k: int | None

    def rule(self) -> Rule:
        seed = 0 if self.seed is None else int(self.seed)
        return Rule(Mask(self.left, self.right, self.prefix), self.scale, self.softcap, self.dropout_p, seed)


class Span(NamedTuple):
    """One attention problem: its batch entries, rows and keys; keys before ``low`` are hidden, row 0 is ``first``."""

    batch: slice
    sequence: int
    rows: slice
    keys: slice
    low: int
    first: int


def spans(q: Tensor, k: Tensor, x: Extras) -> Iterator[Span]:
    """The attention problems of a call on ``[b, s, h, d]`` and ``[b, t, g, d]``; packed ones have ``b = 1``."""
    if x.cu_q is not None:
        yield from _packed_spans(q, k, x)
        return
    b, s, h, _ = q.shape
    t = k.shape[1]
    rows = slice(0, s)
    if x.starts is None and x.ends is None:
        # As many sequences together as a tile of up to 64 rows has room for.
        several = max(1, _tiles.SCORES // max(1, h * min(s, 64) * min(t, _tiles.KEYS)))
        for n in range(0, b, several):
            yield Span(slice(n, min(b, n + several)), n, rows, slice(0, t), 0, t - s)
        return
    starts = [0] * b if x.starts is None else x.starts.tolist()
    ends = [t] * b if x.ends is None else x.ends.tolist()
    for n in range(b):
        low, high = max(starts[n], 0), max(0, min(ends[n], t))
        yield Span(slice(n, n + 1), n, rows, slice(0, high), min(low, high), t - s)


def _packed_spans(q: Tensor, k: Tensor, x: Extras) -> Iterator[Span]:
    rows, keys = read_offsets(x.cu_q, x.cu_k, queries=q.shape[1], keys=k.shape[1], max_q=x.max_q, max_k=x.max_k)
    for n, ((r0, r1), (k0, k1)) in enumerate(zip(pairwise(rows), pairwise(keys), strict=True)):
        yield Span(slice(0, 1), n, slice(r0, r1), slice(k0, k1), 0, (k1 - k0) - (r1 - r0))


def part_of(q: Tensor, k: Tensor, v: Tensor, span: Span, x: Extras) -> tuple[Part, Tensor, Tensor]:
    """The part of one span, and its visible keys and values as tensors."""
    q, k, v = q[span.batch, span.rows], k[span.batch, span.keys], v[span.batch, span.keys]
    slopes, sinks = _tiles.per_head(x.slopes, x.sinks, span.sequence, q)
    part = Part(
        q,
        lambda a, b: (k[:, a:b], v[:, a:b]),
        span.low,
        k.shape[1],
        k.shape[2],
        span.first,
        span.sequence,
        slopes,
        sinks,
    )
    return part, k[:, span.low :], v[:, span.low :]
