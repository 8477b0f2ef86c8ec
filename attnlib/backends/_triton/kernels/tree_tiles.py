"""Tell the tiles of a tree of sequences apart by bounds of its ends and depths, without calling its function.

``bound_tiles`` reduces each run of ``GRAIN`` tokens to the least and greatest end of a subtree, and to the
least and greatest depth if the mask has a window. ``tree_states`` compares the bounds of queries and keys.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .elements import int_of
from .tile import COUNTS, locate, slot_of

EACH: tl.constexpr = tl.constexpr(16)  # adjacent tiles of tokens that a program reduces
MOST: tl.constexpr = tl.constexpr((1 << 31) - 1)
DEEPEST: tl.constexpr = tl.constexpr((1 << 30) - 1)  # as in mask functions; see attnlib.tracing.depths


class Bounds(NamedTuple):
    """The least and greatest end and depth of some tokens; the depths are arbitrary without a window."""

    least_end: tl.tensor
    most_end: tl.tensor
    least_depth: tl.tensor
    most_depth: tl.tensor


@triton.jit
def numbers_of(table, work, j):
    """Load the numbers of tokens ``j`` of a sequence from a tensor ``[b, t]``, or ``[t]`` if it is packed."""
    if len(table.sizes) == 2:
        return int_of(table, (work.sequence, j), tl.int32)
    else:
        return int_of(table, (work.row + j,), tl.int32)


@triton.jit
def store_bounds(
    ptr, columns, x, known, is_there, LOW: tl.constexpr, HIGH: tl.constexpr, GRAIN: tl.constexpr
):
    """Write the least and greatest number of each tile of tokens, ``columns`` apart; skip unknown tokens."""
    least = tl.min(tl.where(known, x, HIGH).reshape(EACH, GRAIN), 1)
    most = tl.max(tl.where(known, x, LOW).reshape(EACH, GRAIN), 1)
    tl.store(ptr, least, mask=is_there)
    tl.store(ptr + columns, most, mask=is_there)


@triton.jit(do_not_specialize=COUNTS)
def bound_tiles(
    states_ptr, cu_seqlens_k_ptr, mask_tensors, batch, t, columns, stride_state_b, reach,
    GRAIN: tl.constexpr, ENDS: tl.constexpr, DEPTHS: tl.constexpr,
):  # fmt: skip
    """Write the bounds of each tile of tokens, int32 ``[b, 2, columns]``, or 4 numbers with ``reach``.

    ``ENDS`` and ``DEPTHS`` are the numbers of the tensors in ``mask_tensors``.
    """
    BLOCK: tl.constexpr = EACH * GRAIN
    PACKED: tl.constexpr = cu_seqlens_k_ptr is not None
    work = locate(tl.program_id(0), cu_seqlens_k_ptr, None, batch, 1, t, t, 1, BLOCK, False)
    if work.start >= work.rows:
        return
    j, m = work.start + tl.arange(0, BLOCK), work.start // GRAIN + tl.arange(0, EACH)
    at = states_ptr + work.plane * stride_state_b + slot_of(work.row, work.sequence, 0, GRAIN, PACKED) + m
    known, is_there = j < work.rows, m * GRAIN < work.rows
    store_bounds(at, columns, numbers_of(mask_tensors[ENDS], work, j), known, is_there, 0, MOST, GRAIN)
    if reach is not None:
        depths = tl.minimum(tl.maximum(numbers_of(mask_tensors[DEPTHS], work, j), 0), DEEPEST)
        store_bounds(at + 2 * columns, columns, depths, known, is_there, 0, DEEPEST, GRAIN)


@triton.jit
def bounds_of(ptr, columns, first, last, reach, SIZE: tl.constexpr, GRAIN: tl.constexpr):
    """Return the bounds of all tiles that the tokens ``[first, last)`` touch, at most ``SIZE`` tokens."""
    m = tl.maximum(first, 0) // GRAIN
    least_end, most_end, least_depth, most_depth = m * 0 + MOST, m * 0, m * 0 + DEEPEST, m * 0
    for n in tl.static_range(max(1, SIZE // GRAIN) + 1):
        at, there = ptr + m + n, (m + n) * GRAIN < last
        least_end = tl.minimum(least_end, tl.load(at, mask=there, other=MOST))
        most_end = tl.maximum(most_end, tl.load(at + columns, mask=there, other=0))
        if reach is not None:
            least_depth = tl.minimum(least_depth, tl.load(at + 2 * columns, mask=there, other=DEEPEST))
            most_depth = tl.maximum(most_depth, tl.load(at + 3 * columns, mask=there, other=0))
    return Bounds(least_end, most_end, least_depth, most_depth)


@triton.jit
def tree_states(queries, keys, first, last, reach):
    """Return if the queries ``[first, last)`` may see some of the keys, and if they see all earlier ones.

    ``queries`` and ``keys`` are the :class:`Bounds` of both. The band hides keys after a query.
    """
    some = (keys.most_end > first) & (queries.most_end > 0)
    every = (keys.least_end >= last) & (queries.least_end > 0)
    if reach is not None:
        some = some & (queries.least_depth - keys.most_depth <= reach)
        every = every & (queries.most_depth - keys.least_depth <= reach)
    return some, every
