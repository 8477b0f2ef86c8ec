"""Which keys a query sees: the band of a mask, within the bounds of one sequence."""

from typing import NamedTuple

import triton
import triton.language as tl


class Band(NamedTuple):
    """Query ``i`` sees keys ``[start, end)`` from ``i - left`` to ``i + right``, or below ``prefix``.

    None is a side without a bound, or no prefix; kernels are compiled for what there is. In the whole of which this is
    a piece, queries lie ``apart`` more from the keys, and keys begin at ``key``.
    """

    start: tl.tensor
    end: tl.tensor
    left: tl.tensor | None
    right: tl.tensor | None
    prefix: tl.tensor | None
    apart: tl.tensor
    key: tl.tensor


class Origin(NamedTuple):
    """Where a piece of a call begins in the whole."""

    query: tl.tensor
    key: tl.tensor
    head: tl.tensor
    sequence: tl.tensor


@triton.jit
def origin_of(origin_ptr, sequence, batch):
    """The origin of one sequence from int32 ``[b, 4]``; zeros where there is none."""
    if origin_ptr is None:
        return Origin(0, 0, 0, 0)
    else:
        known = sequence < batch
        at = origin_ptr + sequence * 4
        return Origin(
            tl.load(at, mask=known, other=0), tl.load(at + 1, mask=known, other=0),
            tl.load(at + 2, mask=known, other=0), tl.load(at + 3, mask=known, other=0),
        )  # fmt: skip


@triton.jit
def bounds(starts_ptr, ends_ptr, sequence, keys):
    """The first key of a sequence and the end of its keys, as a dense call may bound them."""
    start, end = 0, keys
    if starts_ptr is not None:
        start = tl.maximum(tl.load(starts_ptr + sequence), 0)
    if ends_ptr is not None:
        end = tl.minimum(tl.load(ends_ptr + sequence), keys)
    return start, end


@triton.jit
def visible(i, j, band):
    """Whether query ``i`` sees key ``j``, for index tensors that broadcast."""
    seen = (i == i) & (j >= band.start) & (j < band.end)
    i += band.apart
    if band.left is not None:
        seen = seen & (j >= i - band.left)
    if band.right is not None:
        before = j <= i + band.right
        if band.prefix is not None:
            before = before | (j < band.prefix - band.key)
        seen = seen & before
    return seen


@triton.jit
def key_range(i0, i1, band):
    """The keys ``[low, high)`` that some query in ``[i0, i1)`` may see, and ``[all_low, all_high)`` that each does."""
    low, all_low, high, all_high = band.start, band.start, band.end, band.end
    i0 += band.apart
    i1 += band.apart
    if band.left is not None:
        low = tl.maximum(band.start, i0 - band.left)
        all_low = tl.maximum(band.start, i1 - 1 - band.left)
    if band.right is not None:
        high = i1 + band.right
        all_high = i0 + band.right + 1
        if band.prefix is not None:
            high = tl.maximum(high, band.prefix - band.key)
            all_high = tl.maximum(all_high, band.prefix - band.key)
        high = tl.minimum(high, band.end)
        all_high = tl.maximum(tl.minimum(all_high, band.end), 0)
    return low, high, all_low, all_high


@triton.jit
def sees_any(i, band):
    """Whether query ``i`` sees a key at all."""
    low, high, _, _ = key_range(i, i + 1, band)
    return (i == i) & (low < high)


@triton.jit
def query_range(j0, j1, first, last, band):
    """The queries ``[low, high)`` that may see some key in ``[j0, j1)``, and ``[all_low, all_high)`` that see each."""
    low, all_low, high, all_high = first, first, last, last
    if band.right is not None:
        low = tl.maximum(first, j0 - band.right - band.apart)
        all_low = tl.maximum(first, j1 - 1 - band.right - band.apart)
        if band.prefix is not None:
            low = tl.where(j0 < band.prefix - band.key, first, low)
            all_low = tl.where(j1 <= band.prefix - band.key, first, all_low)
    if band.left is not None:
        high = tl.minimum(last, j1 + band.left - band.apart)
        all_high = tl.minimum(last, j0 + band.left + 1 - band.apart)
    return low, tl.where(j0 < j1, high, first), all_low, all_high


class Blocks(NamedTuple):
    """How a range falls into blocks: the first; how many before the full ones, full, and masked around them."""

    first: tl.tensor
    before: tl.tensor
    full: tl.tensor
    masked: tl.tensor


@triton.jit
def blocks_of(low, high, all_low, all_high, BLOCK: tl.constexpr):
    """The blocks of ``[low, high)``, of which those within ``[all_low, all_high)`` need no mask."""
    first = low // BLOCK
    stop = tl.maximum(tl.cdiv(high, BLOCK), first)
    begin = tl.maximum(tl.cdiv(all_low, BLOCK), first)
    full = tl.maximum(tl.minimum(all_high // BLOCK, stop) - begin, 0)
    return Blocks(first, begin - first, full, stop - first - full)


@triton.jit
def block_at(n, blocks, MASKED: tl.constexpr):
    """The ``n``-th block that needs a mask, or the ``n``-th that needs none."""
    if MASKED:
        return blocks.first + n + tl.where(n < blocks.before, 0, blocks.full)
    else:
        return blocks.first + n + blocks.before
