"""The band: the keys that sliding-window, causal and prefix options let a query see, within its sequence."""

from typing import NamedTuple

import triton
import triton.language as tl

MASK_FIELDS = ("left", "right", "prefix")  # parameters of every kernel that applies a mask


class KeyBand(NamedTuple):
    """The keys that query ``i`` sees: from ``i - left`` to ``i + right``, or below ``prefix``.

    All of these keys lie in ``[start, end)``. A bound or prefix that is absent is None, and Triton compiles a
    separate kernel for this case. If the call is a chunk of a larger call, ``offset`` is added to query
    indices before they are compared with keys, and ``key`` is the index of the chunk's first key in the
    larger call.
    """

    start: tl.tensor
    end: tl.tensor
    left: tl.tensor | None
    right: tl.tensor | None
    prefix: tl.tensor | None
    offset: tl.tensor
    key: tl.tensor


class ChunkOrigin(NamedTuple):
    """The indices that a chunk's first query, key, head and sequence have in the larger call."""

    query: tl.tensor
    key: tl.tensor
    head: tl.tensor
    sequence: tl.tensor


@triton.jit
def origin_of(origin_ptr, sequence, batch):
    """Load a sequence's chunk origin from int32 ``[b, 4]``; it is zero if the call is not a chunk."""
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
    """Return the start and end of a sequence's keys, narrowed by ``starts_ptr`` and ``ends_ptr`` if given."""
    start = 0 if starts_ptr is None else tl.maximum(tl.load(starts_ptr + sequence), 0)
    end = keys if ends_ptr is None else tl.minimum(tl.load(ends_ptr + sequence), keys)
    return start, end


@triton.jit
def visible(i, j, band):
    """True if the band lets query ``i`` see key ``j``; the index tensors ``i`` and ``j`` broadcast."""
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
    """Return ``low, high, all_low, all_high`` for windows from ``x - before`` to ``x + after``.

    ``[low, high)`` is the union of the windows of all ``x`` in ``[x0, x1)``, and ``[all_low, all_high)`` is
    their intersection, both clipped to ``[first, last)``. If ``before`` or ``after`` is None, windows have no
    limit on that side.
    """
    low, all_low, high, all_high = first, first, last, last
    if before is not None:
        low, all_low = tl.maximum(first, x0 - before), tl.maximum(first, x1 - 1 - before)
    if after is not None:
        high, all_high = tl.minimum(last, x1 + after), tl.minimum(last, x0 + after + 1)
    return low, high, all_low, all_high


@triton.jit
def key_range(i0, i1, band):
    """Return ``low, high, all_low, all_high``, the bounds of keys that the queries in ``[i0, i1)`` see.

    Keys in ``[low, high)`` may be visible to some of the queries, and keys in ``[all_low, all_high)`` are
    visible to all of them.
    """
    i0, i1 = i0 + band.offset, i1 + band.offset
    low, high, all_low, all_high = reach(i0, i1, band.start, band.end, band.left, band.right)
    if band.prefix is not None:
        prefix = tl.minimum(band.prefix - band.key, band.end)
        high, all_high = tl.maximum(high, prefix), tl.maximum(all_high, prefix)
    return low, high, all_low, tl.maximum(all_high, 0)


@triton.jit
def sees_any(i, band):
    """True if the band of query ``i`` contains a key."""
    low, high, _, _ = key_range(i, i + 1, band)
    return (i == i) & (low < high)


@triton.jit
def query_range(j0, j1, first, last, band):
    """Return ``low, high, all_low, all_high``, the bounds of queries that see the keys in ``[j0, j1)``.

    Queries in ``[low, high)`` may see some of the keys; queries in ``[all_low, all_high)`` see all of them.
    """
    low, high, all_low, all_high = reach(
        j0 - band.offset, j1 - band.offset, first, last, band.right, band.left
    )
    if band.prefix is not None:
        low = tl.where(j0 < band.prefix - band.key, first, low)
        all_low = tl.where(j1 <= band.prefix - band.key, first, all_low)
    if band.left is not None and band.right is not None:
        high = tl.where(band.left + band.right < 0, first, high)  # an empty band
    return low, tl.where(j0 < j1, high, first), all_low, all_high


class Tiles(NamedTuple):
    """The tiles that cover a range of keys; the first begins at key ``first``.

    The range has ``before`` masked tiles, then ``full`` tiles without a mask, then more masked tiles.
    ``masked`` is the number of all masked tiles.
    """

    first: tl.tensor
    before: tl.tensor
    full: tl.tensor
    masked: tl.tensor


@triton.jit
def tiles_of(low, high, all_low, all_high, FULL: tl.constexpr, EDGE: tl.constexpr):
    """Divide the keys ``[low, high)`` into full tiles of ``FULL`` keys and masked tiles of ``EDGE`` keys.

    Full tiles lie within ``[all_low, all_high)``. ``FULL`` is a multiple of ``EDGE``; if ``FULL`` is 0, all
    tiles are masked.
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
    """Return the first key of the ``n``-th masked tile if ``MASKED``, otherwise of the ``n``-th full tile."""
    if MASKED:
        return tiles.first + n * EDGE + tl.where(n < tiles.before, 0, tiles.full * FULL)
    else:
        return tiles.first + tiles.before * EDGE + n * FULL
