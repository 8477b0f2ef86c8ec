"""Writing to and attending over a paged cache in plain torch: the torch backend's part for cached calls."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import _tiles
from ._tiles import Part


def quantise(x: Tensor, store: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` ``[..., g, d]`` in one byte a value, and its fp32 scale ``[..., g]`` per token and head."""
    x = x.float()
    limit = 127.0 if store == torch.int8 else torch.finfo(store).max
    scale = x.abs().amax(-1) / limit
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = x / scale[..., None]
    return (scaled.round() if store == torch.int8 else scaled).to(store), scale


def store(plane: Tensor, new: Tensor, slots: Tensor, kept: Tensor | None) -> None:
    """Write one token a slot into ``plane`` ``[pages, page_size, ...]``; ``kept`` marks slots that are not skipped."""
    new = new.reshape(slots.shape[0], *plane.shape[2:])
    if kept is not None:
        new, slots = new[kept], slots[kept]
    if plane.is_contiguous():
        plane.view(-1, *plane.shape[2:]).index_copy_(0, slots, new)
    else:
        plane[slots // plane.shape[1], slots % plane.shape[1]] = new


class Stored(NamedTuple):
    """A cache's planes, and the dtype to read them in."""

    k: Tensor
    v: Tensor
    k_tail: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    dtype: torch.dtype

    def read(self, at) -> tuple[Tensor, Tensor]:
        """K, with its tail, and V where ``at`` indexes ``[pages, page_size]``."""
        k = self._plane(self.k, self.k_scale, at)
        v = k if self.v is self.k else self._plane(self.v, self.v_scale, at)
        return (k if self.k_tail is None else torch.cat((k, self.k_tail[at]), -1)), v

    def _plane(self, plane: Tensor, scale: Tensor | None, at) -> Tensor:
        return plane[at] if scale is None else (plane[at].float() * scale[at][..., None]).to(self.dtype)


class Batch(NamedTuple):
    """Which pages and tokens belong to the sequences of a step, as the host knows them."""

    table: Tensor
    starts: list[int]
    lengths: list[int]
    cu_q: list[int] | None
    slopes: Tensor | None
    sinks: Tensor | None


class Problem(NamedTuple):
    """One attention problem of a step, and the batch entries and rows of q that it solves.

    ``view`` are K and V as views of the cache, where they lie in one piece.
    """

    part: Part
    at: slice
    rows: slice
    view: tuple[Tensor, Tensor] | None


def problems(q: Tensor, stored: Stored, batch: Batch) -> Iterator[Problem]:
    """The attention problems of a step with q ``[b, s, h, d]`` (packed: ``b = 1``).

    Raises:
        ValueError: a length beyond the table, or a page outside the cache.
    """
    whole_rows = batch.table.shape[1] == 1
    for n, m in _together(batch) if whole_rows else ((n, n + 1) for n in range(len(batch.lengths))):
        at, rows = slice(n, m), slice(0, q.shape[1])
        if batch.cu_q is not None:
            at, rows = slice(0, 1), slice(batch.cu_q[n], batch.cu_q[n + 1])
        low, high = batch.starts[n], batch.lengths[n]
        pages = _used_pages(stored, batch.table[n], low, high, n)
        tile, step = _row_reader(stored, pages, m - n) if whole_rows else _page_reader(stored, pages, low)
        ours = q[at, rows]
        slopes, sinks = _tiles.per_head(batch.slopes, batch.sinks, n, ours)
        first = high - (rows.stop - rows.start)
        part = Part(ours, tile, low, high, stored.k.shape[2], first, n, slopes, sinks, step)
        in_place = whole_rows and stored.k_tail is None and stored.k_scale is None and low < high
        yield Problem(part, at, rows, tile(low, high) if in_place else None)


def _together(batch: Batch) -> Iterator[tuple[int, int]]:
    """Runs ``[n, m)`` of sequences with equal bounds in consecutive rows of a contiguous cache."""
    pages = batch.table[:, 0].tolist()
    n = 0
    for m in range(1, len(pages) + 1):
        if m < len(pages) and batch.cu_q is None:
            equal = batch.starts[m] == batch.starts[n] and batch.lengths[m] == batch.lengths[n]
            if equal and pages[m] == pages[n] + m - n:
                continue
        yield n, m
        n = m


def _used_pages(stored: Stored, row: Tensor, low: int, high: int, n: int) -> Tensor:
    """The pages of sequence ``n`` that hold visible keys."""
    pages, page_size = stored.k.shape[:2]
    if high > row.shape[0] * page_size:
        raise ValueError(f"lengths: expected at most {row.shape[0] * page_size} tokens like the table, got {high}")
    used = row[low // page_size : -(-high // page_size)]
    if used.numel() and not (int(used.min()) >= 0 and int(used.max()) < pages):
        raise ValueError(f"table: expected pages in [0, {pages}) for sequence {n}, got {used.tolist()}")
    return used


def _row_reader(stored: Stored, pages: Tensor, many: int) -> tuple[Callable[[int, int], tuple[Tensor, Tensor]], int]:
    """Tiles of ``many`` consecutive rows that hold a sequence each, as views, and the step of their ranges."""
    row = int(pages[0]) if pages.numel() else 0
    return lambda a, b: stored.read((slice(row, row + many), slice(a, b))), _tiles.KEYS


def _page_reader(stored: Stored, pages: Tensor, low: int) -> tuple[Callable[[int, int], tuple[Tensor, Tensor]], int]:
    """Tiles of one sequence gathered from its pages, and the step of their ranges, which never cut a small page."""
    size = stored.k.shape[1]
    skipped = low // size

    def tile(a: int, b: int) -> tuple[Tensor, Tensor]:
        first = a // size
        if size > _tiles.KEYS:
            return stored.read((pages[first - skipped, None], slice(a - first * size, b - first * size)))
        k, v = stored.read(pages[first - skipped : -(-b // size) - skipped])
        tokens = slice(a - first * size, b - first * size)
        return k.flatten(0, 1)[None, tokens], v.flatten(0, 1)[None, tokens]

    return tile, _tiles.KEYS // size * size if size <= _tiles.KEYS else _tiles.KEYS
