"""Block sparsity for mask functions: list the tiles that attention kernels must visit.

``classify_tiles`` calls the mask function for every pair of query and key within the band (the window and
causal limits), and marks small tiles as hidden, partial or full. ``list_tiles`` joins them into the larger
tiles of an attention kernel, and applies the band and the bounds of sequences. For a tree of sequences it
compares bounds of ends and depths instead; see ``tree_tiles.py``. Each block of queries, or of
keys, has one line in the list. After a header, partial tiles are listed in ascending order from the front of
the line, and full tiles in ascending order from its back.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .band import KeyBand, bounds, key_range, origin_of, query_range
from .scores import placed
from .tile import COUNTS, locate, slot_of
from .tree_tiles import bounds_of, tree_states

HIDDEN: tl.constexpr = tl.constexpr(0)  # no pair of the tile is visible; state 1 means that some are
WHOLE: tl.constexpr = tl.constexpr(2)  # all pairs are visible
HEADER: tl.constexpr = tl.constexpr(4)  # length of a line's header: three counts, one unused
EACH: tl.constexpr = tl.constexpr(4)  # adjacent tiles that a program classifies
CHUNK: tl.constexpr = tl.constexpr(128)  # tiles that list_tiles handles at a time
# The same for trees, whose states it computes. 128 take 12.4 us (32k tokens, groups of 4, H200, 2026-11).
TREE_CHUNK: tl.constexpr = tl.constexpr(512)
# A list of a block of keys has the tiles of several heads: tile ``n`` of head ``m`` in the group is number
# ``m * MOST + n``.
MOST: tl.constexpr = tl.constexpr(1 << 21)


class SparseTiles(NamedTuple):
    """The list of tiles that a block of queries, or of keys, visits: two pointers and three counts.

    ``first`` points to the first partial tile, and ``last`` to the first full tile (full tiles are listed
    backwards). ``cut`` is the number of partial tiles, ``before`` the number of partial tiles that precede
    the first full tile, and ``whole`` the number of full tiles.
    """

    first: tl.tensor
    last: tl.tensor
    before: tl.tensor
    cut: tl.tensor
    whole: tl.tensor


@triton.jit
def line_of(work, stride_b, stride_h, room, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Return the offset of the list of tiles for one block of queries or keys."""
    at = work.plane * stride_b + work.head * stride_h
    return at + slot_of(work.row, work.sequence, work.start, BLOCK, PACKED).to(tl.int64) * (HEADER + room)


@triton.jit
def lines_of(rows, batch, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Return the number of blocks for ``rows`` rows of a sequence, or of all packed sequences together."""
    return rows // BLOCK + batch + 1 if PACKED else tl.cdiv(rows, BLOCK)


@triton.jit
def sparse_tiles_of(lists_ptr, work, stride_b, stride_h, room, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Return the list of tiles that a block of queries, or of keys, visits."""
    line = lists_ptr + line_of(work, stride_b, stride_h, room, BLOCK, PACKED)
    first = line + HEADER
    return SparseTiles(first, first + room - 1, tl.load(line), tl.load(line + 1), tl.load(line + 2))


@triton.jit
def entry(tiles, n, CUT: tl.constexpr):
    """Return the ``n``-th partial tile of a list if ``CUT``, otherwise its ``n``-th full tile."""
    return tl.load(tiles.first + n if CUT else tiles.last - n)


@triton.jit(do_not_specialize=COUNTS)
def classify_tiles(
    states_ptr, lengths_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr,  # all but states may be None
    mask_tensors, batch, planes, s, t, columns, chunks, left, right, prefix,
    BLOCK_M: tl.constexpr, GRAIN: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Write the state of each tile of queries and keys: hidden, partial or full.

    States are int8 ``[b, h, tile rows, columns]``. ``planes`` is 1 if all heads have the same mask,
    otherwise the number of heads. Pairs past the last query or key are ignored. For a cache, ``lengths``
    holds the number of keys of each sequence, at most ``t``. ``chunks`` programs share a row of tiles.
    """
    pid, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    work = locate(pid, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, planes, s, t, 1, BLOCK_M, False)
    keys, rows = work.others, work.rows
    if lengths_ptr is not None:
        keys = tl.minimum(tl.load(lengths_ptr + work.sequence, mask=work.sequence < batch, other=0), t)
    if work.start >= rows:
        return
    origin = origin_of(origin_ptr, work.sequence, batch)
    band = KeyBand(0, keys, left, right, prefix, origin.query - origin.key, origin.key)
    i0 = keys - rows + work.start
    low, high, _, _ = key_range(i0, tl.minimum(i0 + BLOCK_M, keys), band)
    PACKED: tl.constexpr = cu_seqlens_q_ptr is not None
    row = (work.plane * planes + work.head) * lines_of(s, batch, BLOCK_M, PACKED)
    row += slot_of(work.row, work.sequence, work.start, BLOCK_M, PACKED)
    i = (i0 + tl.arange(0, BLOCK_M))[:, None]
    for first in range(chunk * EACH, tl.cdiv(keys, GRAIN), chunks * EACH):
        j = (first * GRAIN + tl.arange(0, EACH * GRAIN))[None, :]
        m, state = first + tl.arange(0, EACH), tl.full([EACH], HIDDEN, tl.int32)
        if (first * GRAIN < high) & ((first + EACH) * GRAIN > low):
            place = placed(origin, work.sequence, work.head, i, j, keys - rows)
            seen = MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
            counts = tl.sum(tl.where(seen & (i < keys) & (j < keys), 1, 0), 0)
            count = tl.sum(counts.reshape(EACH, GRAIN), 1)
            pairs = tl.minimum(BLOCK_M, keys - i0) * tl.minimum(GRAIN, keys - m * GRAIN)
            state = tl.where(count == pairs, WHOLE, tl.minimum(count, 1))
        tl.store(states_ptr + row * columns + m, state.to(tl.int8), mask=m < columns)


@triton.jit
def joined_states(
    states, work, n, columns, OWN: tl.constexpr, OTHER: tl.constexpr, GRAIN: tl.constexpr,
    BY_KEYS: tl.constexpr,
):  # fmt: skip
    """Return if some pairs of a program's block and of tiles ``n`` are visible, and if all of them are."""
    some, every = tl.full([CHUNK], HIDDEN, tl.int32), tl.full([CHUNK], WHOLE, tl.int32)
    for a in tl.static_range(max(1, OWN // GRAIN)):
        for b in tl.static_range(max(1, OTHER // GRAIN)):
            own, other = work.start // GRAIN + a, n * OTHER // GRAIN + b
            i, j = (other, own) if BY_KEYS else (own, other)
            there = (other * GRAIN < tl.where(own * GRAIN < work.rows, work.others, 0)) & (n >= 0)
            state = tl.load(states + i.to(tl.int64) * columns + j, mask=there, other=HIDDEN).to(tl.int32)
            some = tl.maximum(some, state)
            every = tl.minimum(every, tl.where(there, state, WHOLE))
    return some > HIDDEN, every == WHOLE


@triton.jit(do_not_specialize=COUNTS)
def list_tiles(
    lists_ptr, states_ptr, key_starts_ptr, key_ends_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr,
    batch, planes, s, t, columns, room, stride_state_b, stride_state_h, stride_list_b, stride_list_h,
    left, right, prefix, reach,
    GRAIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_KEYS: tl.constexpr,
    GROUP: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Write the list of key tiles that each block of queries visits, int32 ``[b, h, blocks, HEADER + room]``.

    ``room`` is the most tiles that a list can hold. ``BY_KEYS``: list the query tiles that each block of keys
    visits instead, for one query head of the group after another. ``TREE``: the states are the bounds of a
    tree's tokens, and ``reach`` is how many ancestors a query sees, or None.
    """
    if BY_KEYS:
        OWN: tl.constexpr = BLOCK_N
        OTHER: tl.constexpr = BLOCK_M
        work = locate(
            tl.program_id(0), cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, planes, t, s, 1, OWN, False
        )
        first_known, queries, keys = work.row if TREE else work.other, work.others, work.rows
    else:
        OWN: tl.constexpr = BLOCK_M
        OTHER: tl.constexpr = BLOCK_N
        work = locate(
            tl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, planes, s, t, 1, OWN, False
        )
        first_known, queries, keys = work.other if TREE else work.row, work.rows, work.others
    if work.start >= work.rows:
        return
    origin = origin_of(origin_ptr, work.sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, work.sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    i0, stop = keys - queries, work.start + OWN
    if BY_KEYS:
        first = tl.maximum(work.start, start)
        low, high, all_low, all_high = query_range(first, tl.minimum(stop, end), i0, keys, band)
        low, high, all_low, all_high = low - i0, high - i0, all_low - i0, all_high - i0
    else:
        low, high, all_low, all_high = key_range(i0 + work.start, tl.minimum(i0 + stop, keys), band)
    low = tl.maximum(low, 0)

    PACKED: tl.constexpr = cu_seqlens_q_ptr is not None
    of_sequence = states_ptr + work.plane * stride_state_b
    slot = tl.cast(slot_of(first_known, work.sequence, 0, GRAIN, PACKED), tl.int64)
    of_sequence += slot if TREE else slot * columns
    own_first = work.start if BY_KEYS else i0 + work.start
    own_last = tl.minimum(own_first + OWN, keys)
    if TREE:
        own_bounds = bounds_of(of_sequence, columns, own_first, own_last, reach, OWN, GRAIN)
    line = lists_ptr + line_of(work, stride_list_b, stride_list_h, room, OWN, PACKED)
    WIDTH: tl.constexpr = TREE_CHUNK if TREE else CHUNK
    before, cut, whole = 0, 0, 0
    for member in range(GROUP):
        states = of_sequence + (work.head * GROUP + member) * stride_state_h
        for first in range(low // OTHER, tl.cdiv(high, OTHER), WIDTH):
            n = first + tl.arange(0, WIDTH)
            if TREE:
                other_first = n * OTHER + (i0 if BY_KEYS else 0)
                other_last = tl.minimum(other_first + OTHER, keys)
                other_bounds = bounds_of(states, columns, other_first, other_last, reach, OTHER, GRAIN)
                if BY_KEYS:
                    some, every = tree_states(other_bounds, own_bounds, other_first, other_last, reach)
                else:
                    some, every = tree_states(own_bounds, other_bounds, own_first, own_last, reach)
            else:
                some, every = joined_states(states, work, n, columns, OWN, OTHER, GRAIN, BY_KEYS)
            visited = some & (n * OTHER < high)
            is_whole = visited & every & (n * OTHER >= all_low) & ((n + 1) * OTHER <= all_high)
            is_cut, value = visited & ~is_whole, n + member * MOST
            cuts, wholes = tl.cumsum(is_cut.to(tl.int32), 0), tl.cumsum(is_whole.to(tl.int32), 0)
            tl.store(line + HEADER + cut + cuts - 1, value, mask=is_cut)
            tl.store(line + HEADER + room - whole - wholes, value, mask=is_whole)
            before += tl.sum(tl.where(is_cut & (whole + wholes == 0), 1, 0), 0)
            cut += tl.sum(is_cut.to(tl.int32), 0)
            whole += tl.sum(is_whole.to(tl.int32), 0)
    tl.store(line + HEADER, 0, mask=cut + whole == 0)  # some kernels read an entry even if the list is empty
    tl.store(line, before)
    tl.store(line + 1, cut)
    tl.store(line + 2, whole)
