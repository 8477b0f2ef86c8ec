"""How a dense or packed call falls into attention problems of equal lengths."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ..operators import Arguments
from . import tiles
from .tiles import Part


class Span(NamedTuple):
    """One attention problem: its batch entries, rows and keys; keys before ``low`` are hidden, row 0 is ``first``."""

    batch: slice
    sequence: int
    rows: slice
    keys: slice
    low: int
    first: int


def spans(q: Tensor, k: Tensor, a: Arguments) -> Iterator[Span]:
    """The attention problems of a call on ``[b, s, h, d]`` and ``[b, t, g, d]``; packed ones have ``b = 1``."""
    if a.cu_seqlens_q is not None:
        yield from _packed_spans(q, k, a)
        return
    b, s, h, _ = q.shape
    t = k.shape[1]
    rows = slice(0, s)
    if a.key_starts is a.key_ends is a.origin is None:
        # As many sequences together as a tile of up to 64 rows has room for.
        several = max(1, tiles.SCORES // max(1, h * min(s, 64) * min(t, tiles.KEYS)))
        for n in range(0, b, several):
            yield Span(slice(n, min(b, n + several)), n, rows, slice(0, t), 0, t - s)
        return
    starts = [0] * b if a.key_starts is None else a.key_starts.tolist()
    ends = [t] * b if a.key_ends is None else a.key_ends.tolist()
    for n in range(b):
        low, high = max(starts[n], 0), max(0, min(ends[n], t))
        yield Span(slice(n, n + 1), n, rows, slice(0, high), min(low, high), t - s)


def _packed_spans(q: Tensor, k: Tensor, a: Arguments) -> Iterator[Span]:
    rows, keys = a.packing.read(queries=q.shape[1], keys=k.shape[1])
    for n, ((r0, r1), (k0, k1)) in enumerate(zip(pairwise(rows), pairwise(keys), strict=True)):
        yield Span(slice(0, 1), n, slice(r0, r1), slice(k0, k1), 0, (k1 - k0) - (r1 - r0))


def part_of(q: Tensor, k: Tensor, v: Tensor, span: Span, a: Arguments) -> tuple[Part, Tensor, Tensor]:
    """The part of one span, and its visible keys and values as tensors."""
    q, k, v = q[span.batch, span.rows], k[span.batch, span.keys], v[span.batch, span.keys]
    slopes, sinks = tiles.per_head(a.alibi_slopes, a.sinks, span.sequence, q)
    origin = tiles.origin_of(a.origin, span.sequence)
    mask, first = tiles.moved(a.mask, span.first, origin)
    part = Part(
        q,
        lambda start, end: (k[:, start:end], v[:, start:end]),
        mask,
        span.low,
        k.shape[1],
        k.shape[2],
        first,
        origin,
        slopes,
        sinks,
    )
    return part, k[:, span.low :], v[:, span.low :]
