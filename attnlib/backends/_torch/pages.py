"""Writing to and attending over a paged cache in plain torch: the torch backend's part for cached calls."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...mask import Mask
from . import tiles
from .tiles import Part

OF_ZEROS = 2.0**-40  # the scale of nothing but zeros, less than others, so that it never is the largest that counts


def quantise(x: Tensor, store: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` ``[..., g, d]`` in one byte a value, and its fp32 scale ``[..., g]`` per token and head."""
    x = x.float()
    limit = 127.0 if store == torch.int8 else torch.finfo(store).max
    scale = x.abs().amax(-1) / limit
    scale = torch.where(scale == 0, OF_ZEROS, scale)
    scaled = x / scale[..., None]
    return (scaled.round() if store == torch.int8 else scaled).to(store), scale


def store(plane: Tensor, new: Tensor, slots: Tensor, kept: Tensor | None) -> None:
    """Write one token a slot into ``plane`` ``[pages, page_size, ...]``; ``kept`` marks slots that are not skipped."""
    new = new.reshape(slots.shape[0], *plane.shape[2:])
    if kept is not None:
        new, slots = new[kept], slots[kept]
    if plane.dtype == torch.float8_e4m3fn:  # copied as bytes: torch 2.11 cannot index fp8 on a CPU
        plane, new = plane.view(torch.uint8), new.view(torch.uint8)
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
    mask: Mask
    origin: Tensor | None


class Problem(NamedTuple):
    """One attention problem of a step, and the batch entries and rows of q that it solves.

    ``whole`` reads K and V at once, where they lie in one piece or are gathered as one tile.
    """

    part: Part
    at: slice
    rows: slice
    whole: Callable[[], tuple[Tensor, Tensor]] | None


def problems(q: Tensor, stored: Stored, batch: Batch) -> Iterator[Problem]:
    """The attention problems of a step with q ``[b, s, h, d]`` (packed: ``b = 1``).

    Raises:
        ValueError: a length beyond the table, or a page outside the cache.
    """
    capacity = batch.table.shape[1] * stored.k.shape[1]
    for length in batch.lengths:
        if length > capacity:
            raise ValueError(f"lengths: expected at most {capacity} tokens like the table, got {length}")
    return _row_problems(q, stored, batch) if batch.table.shape[1] == 1 else _page_problems(q, stored, batch)


def _row_problems(q: Tensor, stored: Stored, batch: Batch) -> Iterator[Problem]:
    """Problems over a contiguous cache: equal sequences in consecutive rows are one, on views of those rows."""
    rows = batch.table[:, 0].tolist()
    in_place = stored.k_tail is None and stored.k_scale is None
    for n, m in _together(batch, rows):
        low, high, row = batch.starts[n], batch.lengths[n], rows[n]
        if low < high:
            _check_pages(row, rows[m - 1], stored, n)

        def tile(a: int, b: int, row: int = row, many: int = m - n) -> tuple[Tensor, Tensor]:
            return stored.read((slice(row, row + many), slice(a, b)))

        yield _problem(q, stored, batch, n, m, tile, tiles.KEYS, one_piece=in_place)


def _page_problems(q: Tensor, stored: Stored, batch: Batch) -> Iterator[Problem]:
    """Problems over pages, one a sequence: tiles are gathered; small pages are not cut."""
    size = stored.k.shape[1]
    step = tiles.KEYS // size * size if size <= tiles.KEYS else tiles.KEYS
    for n, (low, high) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        skipped = low // size
        pages = batch.table[n, skipped : -(-high // size)]
        if pages.numel():
            _check_pages(int(pages.min()), int(pages.max()), stored, n)

        def tile(a: int, b: int, pages: Tensor = pages, skipped: int = skipped) -> tuple[Tensor, Tensor]:
            first, last = a // size, (b - 1) // size
            tokens = slice(a - first * size, b - first * size)
            if size > tiles.KEYS and first == last:
                return stored.read((pages[first - skipped, None], tokens))
            if size > tiles.KEYS:
                at = torch.arange(a, b, device=pages.device)
                return stored.read((pages[at // size - skipped][None], (at % size)[None]))
            k, v = stored.read(pages[first - skipped : last + 1 - skipped])
            return k.flatten(0, 1)[None, tokens], v.flatten(0, 1)[None, tokens]

        yield _problem(q, stored, batch, n, n + 1, tile, step, one_piece=low // step == (high - 1) // step)


def _problem(
    q: Tensor,
    stored: Stored,
    batch: Batch,
    n: int,
    m: int,
    tile: Callable[[int, int], tuple[Tensor, Tensor]],
    step: int,
    *,
    one_piece: bool,
) -> Problem:
    at, rows = slice(n, m), slice(0, q.shape[1])
    if batch.cu_q is not None:
        at, rows = slice(0, 1), slice(batch.cu_q[n], batch.cu_q[n + 1])
    ours = q if m - n == q.shape[0] and batch.cu_q is None else q[at, rows]
    low, high = batch.starts[n], batch.lengths[n]
    slopes, sinks = tiles.per_head(batch.slopes, batch.sinks, n, ours)
    origin = tiles.origin_of(batch.origin, n)
    mask, first = tiles.moved(batch.mask, high - (rows.stop - rows.start), origin)
    whole = partial(tile, low, high) if one_piece and low < high else None
    part = Part(ours, tile, mask, low, high, stored.k.shape[2], first, origin, slopes, sinks, step)
    return Problem(part, at, rows, whole)


def _together(batch: Batch, pages: list[int]) -> Iterator[tuple[int, int]]:
    """Runs ``[n, m)`` of sequences with equal bounds in consecutive rows of a contiguous cache."""
    n = 0
    for m in range(1, len(pages) + 1):
        if m < len(pages) and batch.cu_q is batch.origin is None:
            equal = batch.starts[m] == batch.starts[n] and batch.lengths[m] == batch.lengths[n]
            if equal and pages[m] == pages[n] + m - n:
                continue
        yield n, m
        n = m


def _check_pages(lowest: int, highest: int, stored: Stored, n: int) -> None:
    if lowest < 0 or highest >= stored.k.shape[0]:
        raise ValueError(
            f"table: expected pages in [0, {stored.k.shape[0]}), got {lowest} to {highest} in sequence {n}"
        )
