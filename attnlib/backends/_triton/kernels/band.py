"""Which keys a query sees: the band of a mask, within the bounds of one sequence."""

from typing import NamedTuple

import triton
import triton.language as tl

MASK_FIELDS = ("left", "right", "prefix")  # kernels' parameters


class KeyBand(NamedTuple):
    """Query ``i`` sees keys ``[start, end)`` from ``i - left`` to ``i + right``, or below ``prefix``.

    None is a side without a bound, or no prefix; kernels are compiled for what there is. In the whole of
    which this is a piece, queries lie ``offset`` more from the keys, and keys begin at ``key``.
    """

    start: tl.tensor
    end: tl.tensor
    left: tl.tensor | None
    right: tl.tensor | None
    prefix: tl.tensor | None
    offset: tl.tensor
    key: tl.tensor


class ChunkOrigin(NamedTuple):
    """Where a piece of a call begins in the whole."""

    query: tl.tensor
    key: tl.tensor
    head: tl.tensor
    sequence: tl.tensor


@triton.jit
def origin_of(origin_ptr, sequence, batch):
    """The origin of one sequence from int32 ``[b, 4]``; zeros where there is none."""
    if origin_ptr is None:
        return ChunkOrigin(0, 0, 0, 0)
    else:
        known, at = sequence < batch, origin_ptr + sequence * 4
        query, key = tl.load(at, mask=known, other=0), tl.load(at + 1, mask=known, other=0)
        return ChunkOrigin(
            query, key, tl.load(at + 2, mask=known, other=0), tl.load(at + 3, mask=known, other=0)
        )


@triton.jit
def bounds(starts_ptr, ends_ptr, sequence, keys):
    """The first key of a sequence and the end of its keys, as a dense call may bound them."""
    start = 0 if starts_ptr is None else tl.maximum(tl.load(starts_ptr + sequence), 0)
    end = keys if ends_ptr is None else tl.minimum(tl.load(ends_ptr + sequence), keys)
    return start, end


@triton.jit
def visible(i, j, band):
    """Whether query ``i`` sees key ``j``, for index tensors that broadcast."""
    seen = (i == i) & (j >= band.start) & (j < band.end)
    i += band.offset
    if band.left is not None:
        seen = seen & (j >= i - band.left)
    if band.right is not None:
        before = j <= i + band.right
        if band.prefix is not None:
            before = before | (j < band.prefix - band.key)
        seen = seen & before
    return seen


@triton.jit
def reach(x0, x1, first, last, before, after):
    """The indices ``[low, high)`` from ``x - before`` to ``x + after`` for some ``x`` in ``[x0, x1)``, and
    for each.

    They are of ``[first, last)``; None is a side without a bound.
    """
    low, all_low, high, all_high = first, first, last, last
    if before is not None:
        low, all_low = tl.maximum(first, x0 - before), tl.maximum(first, x1 - 1 - before)
    if after is not None:
        high, all_high = tl.minimum(last, x1 + after), tl.minimum(last, x0 + after + 1)
    return low, high, all_low, all_high


@triton.jit
def key_range(i0, i1, band):
    """The keys ``[low, high)`` that some query in ``[i0, i1)`` may see, and ``[all_low, all_high)`` that each
    does.
    """
    i0, i1 = i0 + band.offset, i1 + band.offset
    low, high, all_low, all_high = reach(i0, i1, band.start, band.end, band.left, band.right)
    if band.prefix is not None:
        prefix = tl.minimum(band.prefix - band.key, band.end)
        high, all_high = tl.maximum(high, prefix), tl.maximum(all_high, prefix)
    return low, high, all_low, tl.maximum(all_high, 0)


@triton.jit
def sees_any(i, band):
    """Whether query ``i`` sees a key at all."""
    low, high, _, _ = key_range(i, i + 1, band)
    return (i == i) & (low < high)


@triton.jit
def query_range(j0, j1, first, last, band):
    """The queries ``[low, high)`` that may see some key in ``[j0, j1)``, and ``[all_low, all_high)`` that see
    each.
    """
    low, high, all_low, all_high = reach(
        j0 - band.offset, j1 - band.offset, first, last, band.right, band.left
    )
    if band.prefix is not None:
        low = tl.where(j0 < band.prefix - band.key, first, low)
        all_low = tl.where(j1 <= band.prefix - band.key, first, all_low)
    if band.left is not None and band.right is not None:
        high = tl.where(band.left + band.right < 0, first, high)  # a band that holds no key
    return low, tl.where(j0 < j1, high, first), all_low, all_high


class Tiles(NamedTuple):
    """A range in tiles, from ``first`` on: how many before the full ones, how many full, and masked around
    them.
    """

    first: tl.tensor
    before: tl.tensor
    full: tl.tensor
    masked: tl.tensor


@triton.jit
def tiles_of(low, high, all_low, all_high, FULL: tl.constexpr, EDGE: tl.constexpr):
    """The tiles of ``[low, high)``: full ones of ``FULL``, within ``[all_low, all_high)``, and masked ones of
    ``EDGE``.

    ``FULL`` is a multiple of ``EDGE``; or 0, and all tiles are masked.
    """
    first = low // EDGE
    count = tl.maximum(tl.cdiv(high, EDGE) - first, 0)
    if FULL:
        RATIO: tl.constexpr = FULL // EDGE
        begin = tl.maximum(tl.cdiv(all_low, FULL), tl.cdiv(first, RATIO))
        full = tl.maximum(tl.minimum(all_high // FULL, (first + count) // RATIO) - begin, 0)
        return Tiles(first * EDGE, begin * RATIO - first, full, count - full * RATIO)
    else:
        return Tiles(first * EDGE, count, count * 0, count)


@triton.jit
def tile_at(n, tiles, MASKED: tl.constexpr, FULL: tl.constexpr, EDGE: tl.constexpr):
    """Where the ``n``-th tile begins of those that need a mask, or of those that need none."""
    if MASKED:
        return tiles.first + n * EDGE + tl.where(n < tiles.before, 0, tiles.full * FULL)
    else:
        return tiles.first + tiles.before * EDGE + n * FULL
