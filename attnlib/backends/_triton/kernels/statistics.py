"""Largest scores and probabilities from q, k and the LSE: one product of matrices per tile, and no values.

``maxima`` walks over tiles like the forward, and ``mass`` like the pass of the backward over blocks of keys.
``row_weights`` and ``mean_weights`` gather the queries, or the keys, that they compute.
"""

import triton
import triton.language as tl

from .band import KeyBand, bounds, key_range, origin_of, query_range, tile_at, tiles_of, visible
from .mask_tiles import entry, sparse_tiles_of
from .scores import LN2, LOG2E, Modifiers, changed, load_slope, modify, natural, placed, unit_behind
from .tile import COUNTS, Channels, Rows, TilePlace, gathered_tile, load_tile, locate, products


@triton.jit(do_not_specialize=COUNTS)
def convert_lse(lse_ptr, lse2_ptr, rows, BLOCK_M: tl.constexpr):
    """Write an LSE in log2 units; -inf becomes +inf, which makes all probabilities of its row 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    lse = tl.load(lse_ptr + at, mask=at < rows).to(tl.float32)
    tl.store(lse2_ptr + at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E), mask=at < rows)


@triton.jit(do_not_specialize=COUNTS)
def maxima(
    q_ptr, k_ptr, result_ptr,
    alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, lists_ptr,
    k_desc, k_tail_desc, mask_tensors, score_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_lb, stride_lh, stride_slopes,
    stride_list_b, stride_list_h, room, batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale,
    softcap, D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, MASK: tl.constexpr,
    SCORE: tl.constexpr,
):  # fmt: skip
    """Write the largest visible score of each query, ``[b, h, s]``, packed ``[h, s]``, or -inf.

    One program computes one block of queries of one head and sequence.
    """
    work = locate(
        tl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, s, t, heads_per_wave, BLOCK_M,
        right is not None,
    )  # fmt: skip
    if work.start >= work.rows:
        return
    sequence, head, keys = work.sequence, work.head, work.others
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    slope = (
        None
        if alibi_slopes_ptr is None
        else load_slope(alibi_slopes_ptr, stride_slopes, sequence, head, batch)
    )
    modifiers = Modifiers(scale, softcap, slope)
    of_q, of_k = TilePlace(work.plane, work.row, head), TilePlace(work.plane, work.other, head // group)
    k_rows = Rows(k_ptr, stride_kb, stride_kt, stride_kg, k_desc, k_tail_desc)
    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)
    # True if the rows after a sequence's visible keys may hold other keys (packed or bounded sequences).
    HOLES: tl.constexpr = (
        cu_seqlens_k_ptr is not None or key_starts_ptr is not None or key_ends_ptr is not None
    )

    m = tl.arange(0, BLOCK_M)
    stored = work.start + m < work.rows
    q = load_tile(Rows(q_ptr, stride_qb, stride_qs, stride_qh), of_q, work.start, stored, d, True)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    i0 = keys - work.rows + work.start
    i = (i0 + m)[:, None]
    low, high, all_low, all_high = key_range(i0, tl.minimum(i0 + BLOCK_M, keys), band)
    SPARSE: tl.constexpr = MASK is not None
    if SPARSE:
        tiles = sparse_tiles_of(
            lists_ptr, work, stride_list_b, stride_list_h, room, BLOCK_M, cu_seqlens_q_ptr is not None
        )
        counts = tiles.whole, tiles.cut
    else:
        tiles = tiles_of(low, high, all_low, all_high, BLOCK_N, BLOCK_N)
        counts = tiles.full, tiles.masked
    for MASKED in tl.static_range(2):
        for step in tl.range(0, counts[MASKED], num_stages=STAGES):
            n0 = (
                entry(tiles, step, MASKED) * BLOCK_N
                if SPARSE
                else tile_at(step, tiles, MASKED, BLOCK_N, BLOCK_N)
            )
            j = n0 + tl.arange(0, BLOCK_N)
            k = load_tile(k_rows, of_k, n0, (j >= start) & (j < end), d, MASKED, HOLES)
            j = j[None, :]
            place = placed(origin, sequence, head, i, j, keys - work.rows)
            x, _ = modify(products(q, k, d, PRECISION), modifiers, i + band.offset, j)
            x = changed(x, modifiers, place, score_tensors, SCORE)
            if MASKED:
                seen = visible(i, j, band)
                if MASK is not None:
                    seen = seen & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
                x = tl.where(seen, x, float("-inf"))
            largest = tl.maximum(largest, tl.max(x, 1))

    largest = natural(largest, modifiers) if SCORE is None else largest * LN2
    at = work.plane * stride_lb + head * stride_lh + work.row + work.start
    tl.store(result_ptr + at + m, largest, mask=stored)


@triton.jit(do_not_specialize=COUNTS)
def mass(
    q_ptr, k_ptr, lse2_ptr, result_ptr,
    alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, lists_ptr,
    q_desc, q_tail_desc, mask_tensors, score_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_lb, stride_lh, stride_rb,
    stride_rh, stride_slopes, stride_list_b, stride_list_h, room, batch, heads, group, s, t, heads_per_wave,
    left, right, prefix, scale, softcap, D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """Write the sum of the probabilities of each key over all queries, ``[b, h, t]``, packed ``[h, t]``.

    One program computes one block of keys of one query head and sequence. Score tiles are transposed,
    ``[BLOCK_N, BLOCK_M]``, so that each thread sums along its own registers.
    """
    work = locate(
        tl.program_id(0), cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, heads, t, s, heads_per_wave, BLOCK_N,
        False,
    )  # fmt: skip
    if work.start >= work.rows:
        return
    sequence, head, n0, keys, rows = work.sequence, work.head, work.start, work.rows, work.others
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    slope = (
        None
        if alibi_slopes_ptr is None
        else load_slope(alibi_slopes_ptr, stride_slopes, sequence, head, batch)
    )
    modifiers = Modifiers(scale, softcap, slope)
    of_k, of_q = TilePlace(work.plane, work.row, head // group), TilePlace(work.plane, work.other, head)
    q_rows = Rows(q_ptr, stride_qb, stride_qs, stride_qh, q_desc, q_tail_desc)
    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)

    lse2_ptr += work.plane * stride_lb + head * stride_lh + work.other
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    stored = n0 + n < keys
    k = load_tile(Rows(k_ptr, stride_kb, stride_kt, stride_kg), of_k, n0, stored, d, True)
    total = tl.zeros([BLOCK_N], tl.float32)
    j, i0 = (n0 + n)[:, None], keys - rows
    low, high, all_low, all_high = query_range(
        tl.maximum(n0, start), tl.minimum(n0 + BLOCK_N, end), i0, keys, band
    )
    SPARSE: tl.constexpr = MASK is not None
    if SPARSE:
        tiles = sparse_tiles_of(
            lists_ptr, work, stride_list_b, stride_list_h, room, BLOCK_N, cu_seqlens_k_ptr is not None
        )
        counts = tiles.whole, tiles.cut
    else:
        tiles = tiles_of(low - i0, high - i0, all_low - i0, all_high - i0, BLOCK_M, BLOCK_M)
        counts = tiles.full, tiles.masked
    for MASKED in tl.static_range(2):
        for step in tl.range(0, counts[MASKED], num_stages=STAGES):
            m0 = (
                entry(tiles, step, MASKED) * BLOCK_M
                if SPARSE
                else tile_at(step, tiles, MASKED, BLOCK_M, BLOCK_M)
            )
            i = i0 + m0 + m
            # Load zeros for queries that see no key of this block, since they may be padding with any values.
            valid = (i >= low) & (i < high)
            q = load_tile(q_rows, of_q, m0, valid, d, MASKED, True, True)
            i = i[None, :]
            place = placed(origin, sequence, head, i, j, i0)
            x, _ = modify(products(k, q, d, PRECISION), modifiers, i + band.offset, j)
            x = changed(x, modifiers, place, score_tensors, SCORE)
            # Load lse2 as late as possible: a vector with one value per tile column takes many registers.
            lse2 = (
                tl.load(lse2_ptr + m0 + m, mask=valid, other=float("inf"))
                if MASKED
                else tl.load(lse2_ptr + m0 + m)
            )
            p = tl.exp2(x * unit_behind(modifiers, SCORE) - lse2[None, :])
            if MASKED:
                seen = visible(i, j, band) & valid[None, :]
                if MASK is not None:
                    seen = seen & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
                p = tl.where(seen, p, 0.0)
            total += tl.sum(p, 1)

    bounded = (n0 + n >= start) & (n0 + n < end)  # full tiles ignore these bounds
    at = work.plane * stride_rb + head * stride_rh + work.row + n0
    tl.store(result_ptr + at + n, tl.where(bounded, total, 0.0), mask=stored)


@triton.jit(do_not_specialize=COUNTS)
def row_weights(
    q_ptr, k_ptr, lse2_ptr, rows_ptr, result_ptr,
    alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, mask_tensors, score_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_lb, stride_lh, stride_rb,
    stride_rh, stride_rows, stride_slopes, batch, heads, group, s, t, heads_per_wave, slots, columns,
    left, right, prefix, scale, softcap, D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Write the probabilities of the queries ``rows``, ``[b, h, slots, columns]``, packed without ``b``.

    Or their sum over these queries (``SUM``), ``[b, h, t]``. One program computes one block of keys of one
    query head and sequence. Queries that a sequence does not have are left out; without ``SUM``, the caller
    fills the result with zeros.
    """
    work = locate(
        tl.program_id(0), cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, heads, t, s, heads_per_wave, BLOCK_N,
        False,
    )  # fmt: skip
    if work.start >= work.rows:
        return
    sequence, head, n0, keys = work.sequence, work.head, work.start, work.rows
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    slope = (
        None
        if alibi_slopes_ptr is None
        else load_slope(alibi_slopes_ptr, stride_slopes, sequence, head, batch)
    )
    modifiers = Modifiers(scale, softcap, slope)
    of_k, of_q = TilePlace(work.plane, work.row, head // group), TilePlace(work.plane, work.other, head)
    q_rows = Rows(q_ptr, stride_qb, stride_qs, stride_qh)
    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)

    lse2_ptr += work.plane * stride_lb + head * stride_lh + work.other
    result_ptr += work.plane * stride_rb + head * stride_rh
    n = n0 + tl.arange(0, BLOCK_N)
    k = load_tile(Rows(k_ptr, stride_kb, stride_kt, stride_kg), of_k, n0, n < keys, d, True)
    total, j = tl.zeros([BLOCK_N], tl.float32), n[None, :]
    column = n + origin.key
    for first in tl.range(0, slots, BLOCK_M, num_stages=STAGES):
        slot = first + tl.arange(0, BLOCK_M)
        asked = tl.load(rows_ptr + work.plane * stride_rows + slot, mask=slot < slots, other=-1) - work.other
        valid = (asked >= 0) & (asked < work.others)
        if tl.max(valid.to(tl.int32), 0) > 0:  # packed rows are mostly those of other sequences
            row = tl.where(valid, asked, 0).to(tl.int32)
            q = gathered_tile(q_rows, of_q, row, stride_qs, valid, d)
            i = (keys - work.others + row)[:, None]
            place = placed(origin, sequence, head, i, j, keys - work.others)
            x, _ = modify(products(q, k, d, PRECISION), modifiers, i + band.offset, j)
            x = changed(x, modifiers, place, score_tensors, SCORE)
            lse2 = tl.load(lse2_ptr + row, mask=valid, other=float("inf"))
            seen = visible(i, j, band) & valid[:, None]
            if MASK is not None:
                seen = seen & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
            p = tl.where(seen, tl.exp2(x * unit_behind(modifiers, SCORE) - lse2[:, None]), 0.0)
            if SUM:
                total += tl.sum(p, 0)
            else:
                at = slot.to(tl.int64)[:, None] * columns + column[None, :]
                inside = (n < keys) & (column < columns)
                tl.store(result_ptr + at, p, mask=valid[:, None] & inside[None, :])
    if SUM:
        tl.store(result_ptr + work.row + n, total, mask=n < keys)


@triton.jit(do_not_specialize=COUNTS)
def mean_weights(
    q_ptr, k_ptr, lse2_ptr, at_ptr, result_ptr,
    alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, mask_tensors, score_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_lb, stride_lh, stride_slopes,
    batch, heads, kv_heads, s, t, slots, left, right, prefix, scale, softcap,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """Write the mean over heads of the probabilities of the ``slots`` keys ``at`` of each query.

    ``at`` and the result are ``[b, s, slots]``, packed ``[s, slots]``. One program computes ``BLOCK_N`` keys
    of one query, and multiplies them with ``BLOCK_M`` heads of a group at a time.
    """
    blocks = tl.cdiv(slots, BLOCK_N)
    work = locate(tl.program_id(0) // blocks, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, 1, False)
    if work.start >= work.rows:
        return
    sequence, keys, token = work.sequence, work.others, work.row + work.start
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    k_rows, q_rows = (
        Rows(k_ptr, stride_kb, stride_kt, stride_kg),
        Rows(q_ptr, stride_qb, stride_qs, stride_qh),
    )
    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)

    c = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    place_of_at = (work.plane * s + token) * slots + c
    j = tl.load(at_ptr + place_of_at, mask=c < slots, other=-1).to(tl.int32) - origin.key
    there = (j >= start) & (j < end)
    j = tl.where(there, j, 0)
    total, i = tl.zeros([BLOCK_N], tl.float32), tl.zeros([1, 1], tl.int32) + (keys - work.rows + work.start)
    seen = visible(i, j[None, :], band) & there[None, :]
    for kv_head in range(kv_heads):
        k = gathered_tile(k_rows, TilePlace(work.plane, work.other, kv_head), j, stride_kt, there, d)
        for member in tl.static_range(0, GROUP, BLOCK_M):
            m = member + tl.arange(0, BLOCK_M)
            valid, head = m < GROUP, kv_head * GROUP + m
            q = gathered_tile(q_rows, TilePlace(work.plane, token, 0), head, stride_qh, valid, d)
            slope = None
            if alibi_slopes_ptr is not None:
                known = tl.where(valid, head, 0)
                slope = load_slope(alibi_slopes_ptr, stride_slopes, sequence, known, batch)[:, None]
            modifiers = Modifiers(scale, softcap, slope)
            place = placed(origin, sequence, head[:, None], i, j[None, :], keys - work.rows)
            x, _ = modify(products(q, k, d, PRECISION), modifiers, i + band.offset, j[None, :])
            x = changed(x, modifiers, place, score_tensors, SCORE)
            lse_at = work.plane * stride_lb + head * stride_lh + token
            lse2 = tl.load(lse2_ptr + lse_at, mask=valid, other=float("inf"))
            shown = seen & valid[:, None]
            if MASK is not None:
                shown = shown & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
            p = tl.exp2(x * unit_behind(modifiers, SCORE) - lse2[:, None])
            total += tl.sum(tl.where(shown, p, 0.0), 0)
    tl.store(result_ptr + place_of_at, total / heads, mask=c < slots)
