"""FlashAttention-2's backward (Dao, 2023, arXiv 2307.08691) in two passes.

The two passes compute dk, dv and dq without atomics, so these gradients are bitwise deterministic. With
probabilities ``P = exp(S - lse)`` and ``dP = dout @ v.T``, the gradient of the scores is
``dS = P * (dP - delta)``.
"""

import triton
import triton.language as tl

from .band import (
    KeyBand,
    bounds,
    key_range,
    origin_of,
    query_range,
    sees_any,
    tile_at,
    tiles_of,
    visible,
)
from .mask_tiles import MOST, entry, sparse_tiles_of
from .scores import (
    LOG2E,
    Modifiers,
    changed,
    dropout_keep,
    load_slope,
    modify,
    placed,
    unchanged,
    unit_behind,
)
from .tile import (
    COUNTS,
    Channels,
    Rows,
    TilePlace,
    add_products,
    load_tile,
    locate,
    products,
    store_tile,
    zeros,
)


@triton.jit(do_not_specialize=COUNTS)
def prepare(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr,
    stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh, stride_dlb, stride_dlh, stride_dls,
    heads, s, E: tl.constexpr, E_MAIN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write ``lse2`` and ``delta = rowsum(out * dout) - dlse``, both ``[b, h, s]`` in fp32.

    ``lse2`` is the LSE in log2 units. If a query sees no key, its ``lse2`` is +inf, which makes all its
    probabilities 0. Packed sequences are treated as a batch with one sequence.
    """
    blocks = tl.cdiv(s, BLOCK_M)
    pair, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK_M
    sequence, head = pair // heads, pair % heads
    m, place = tl.arange(0, BLOCK_M), TilePlace(sequence, 0, head)
    e: tl.constexpr = Channels(E, E_MAIN, 0)
    stored, at = start + m < s, pair * s + start + m
    out = load_tile(Rows(out_ptr, stride_ob, stride_os, stride_oh), place, start, stored, e, True).main
    dout = load_tile(Rows(dout_ptr, stride_dob, stride_dos, stride_doh), place, start, stored, e, True).main
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        dlse_ptr += sequence * stride_dlb + head * stride_dlh
        delta -= tl.load(dlse_ptr + (start + m).to(tl.int64) * stride_dls, mask=stored)
    lse = tl.load(lse_ptr + at, mask=stored)
    tl.store(lse2_ptr + at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E), mask=stored)
    tl.store(delta_ptr + at, delta, mask=stored)


@triton.jit(do_not_specialize=COUNTS)
def backward_keys(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
    alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, dropout_seed_ptr, origin_ptr, lists_ptr,
    q_desc, q_tail_desc, dout_desc, mask_tensors, score_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_dob, stride_dos, stride_doh, stride_dkb, stride_dkt, stride_dkg, stride_dvb, stride_dvt,
    stride_dvg, stride_lb, stride_lh, stride_slopes, stride_list_b, stride_list_h, room, batch, kv_heads, s,
    t, heads_per_wave, left, right, prefix, scale, softcap, threshold, dropout_scale, D: tl.constexpr,
    D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr, DERIVATIVE: tl.constexpr,  # mask and score functions, or None
    DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys, dk ``[b, t, g, d]`` (if ``DK``), and values, dv ``[b, t, g, e]`` (``DV``).

    One program computes them for one block of keys of one KV head and sequence. Score tiles are transposed,
    ``[BLOCK_N, BLOCK_M]``, so that the gradients of each key stay in registers.
    """
    work = locate(
        tl.program_id(0), cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, kv_heads, t, s, heads_per_wave, BLOCK_N,
        False,
    )  # fmt: skip
    if work.start >= work.rows:
        return
    sequence, kv_head, n0, keys, rows = work.sequence, work.head, work.start, work.rows, work.others
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    of_k = TilePlace(work.plane, work.row, kv_head)
    q_rows = Rows(q_ptr, stride_qb, stride_qs, stride_qh, q_desc, q_tail_desc)
    dout_rows = Rows(dout_ptr, stride_dob, stride_dos, stride_doh, dout_desc)
    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)
    e: tl.constexpr = Channels(E, E_MAIN, 0)

    lse2_ptr += work.plane * stride_lb + work.other
    delta_ptr += work.plane * stride_lb + work.other
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    stored = n0 + n < keys
    k = load_tile(Rows(k_ptr, stride_kb, stride_kt, stride_kg), of_k, n0, stored, d, True)
    v = load_tile(Rows(v_ptr, stride_vb, stride_vt, stride_vg), of_k, n0, stored, e, True)
    dk, dv = zeros(d, BLOCK_N), zeros(e, BLOCK_N)  # the compiler removes what DK and DV leave unused

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
        count = counts[MASKED]
        # The divisor is at least 1. If we divided by the count itself, the compiler could assume that it is
        # positive, and prefetch the first steps of a loop even if the loop is empty. These loads would
        # overwrite the tiles of the next loop.
        tiles_of_head = MOST if SPARSE else tl.maximum(count, 1)
        steps = count if SPARSE else GROUP * count  # a sparse list already covers all heads of the group
        for step in tl.range(0, steps, num_stages=STAGES):  # one loop for all heads keeps the pipeline full
            tile = entry(tiles, step, MASKED) if SPARSE else step
            head = kv_head * GROUP + tile // tiles_of_head if GROUP > 1 else kv_head
            tile = tile % tiles_of_head if GROUP > 1 else tile
            m0 = tile * BLOCK_M if SPARSE else tile_at(tile, tiles, MASKED, BLOCK_M, BLOCK_M)
            i, of_q = (i0 + m0 + m)[None, :], TilePlace(work.plane, work.other, head)
            rows_at = head * stride_lh + m0
            # Load zeros for queries that see no key of this block, since they may be padding with any values.
            valid = (i0 + m0 + m >= low) & (i0 + m0 + m < high)
            # Load lse2 and delta as late as possible: a vector with one value per tile column takes many
            # registers.
            if MASKED:
                lse2 = tl.load(lse2_ptr + rows_at + m, mask=valid, other=0.0)
            q = load_tile(q_rows, of_q, m0, valid, d, MASKED, True, True)
            slope = None
            if alibi_slopes_ptr is not None:
                slope = load_slope(alibi_slopes_ptr, stride_slopes, sequence, head, batch)
            modifiers = Modifiers(scale, softcap, slope)
            s_ij, derivative = modify(products(k, q, d, PRECISION), modifiers, i + band.offset, j)
            place = placed(origin, sequence, head, i, j, i0)
            score = changed(s_ij, modifiers, place, score_tensors, SCORE)
            if not MASKED:
                lse2 = tl.load(lse2_ptr + rows_at + m)
            p = tl.exp2(score * unit_behind(modifiers, SCORE) - lse2[None, :])
            seen = True
            if MASKED:
                seen = visible(i, j, band)
                if SCORE is not None:  # hides queries past the last, whose scores may be anything
                    seen = seen & (i < keys)
                if MASK is not None:
                    seen = seen & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
                p = tl.where(seen, p, 0.0)
            dout = load_tile(dout_rows, of_q, m0, valid, e, MASKED, True, True)
            if dropout_seed_ptr is not None:
                seed, q_i = tl.load(dropout_seed_ptr), i0 + m0 + m
                keep = dropout_keep(
                    seed, threshold, origin, sequence, head, q_i, n0, BLOCK_N, origin_ptr is None
                ).T
            if DK:
                if MASKED:
                    delta = tl.load(delta_ptr + rows_at + m, mask=valid, other=0.0)
                dp = products(v, dout, e, PRECISION)
                if not MASKED:
                    delta = tl.load(delta_ptr + rows_at + m)
                if dropout_seed_ptr is not None:
                    dp = tl.where(keep, dp * dropout_scale, 0.0)
                ds = p * (dp - delta[None, :])
                ds = (
                    unchanged(ds, s_ij, modifiers, seen, place, score_tensors, None, DERIVATIVE, None)
                    * derivative
                )
                if MASKED:
                    ds = tl.where(seen, ds, 0.0)
            if DV:
                kept = p if dropout_seed_ptr is None else tl.where(keep, p, 0.0)
                dv = add_products(dv, kept, dout, e, PRECISION)
            if DK:
                dk = add_products(dk, ds, q, d, PRECISION)

    bounded = (j >= start) & (j < end)  # full tiles ignore these bounds
    if DV:
        store_tile(
            Rows(dv_ptr, stride_dvb, stride_dvt, stride_dvg), of_k, n0, stored, dv, dropout_scale, bounded, e
        )
    if DK:
        store_tile(Rows(dk_ptr, stride_dkb, stride_dkt, stride_dkg), of_k, n0, stored, dk, scale, bounded, d)


@triton.jit(do_not_specialize=COUNTS)
def backward_queries(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr,
    dslopes_ptr, alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, dropout_seed_ptr, origin_ptr, lists_ptr,
    k_desc, k_tail_desc, v_desc, mask_tensors, score_tensors, grad_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_dob, stride_dos, stride_doh, stride_dqb, stride_dqs, stride_dqh,
    stride_lb, stride_lh, stride_slopes, stride_sb, stride_sh, stride_list_b, stride_list_h, room,
    batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale, softcap, threshold, dropout_scale,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr, DERIVATIVE: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of queries, dq ``[b, s, h, d]``; each program computes a block of queries.

    If slopes of ALiBi need gradients, each program also writes its partial sum of them, ``[b, h, blocks]``
    (packed: ``[h, blocks]``). Gradients of tensors that a score function captures are accumulated with
    atomics, in no fixed order.
    """
    work = locate(
        tl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, s, t, heads_per_wave, BLOCK_M,
        right is not None,
    )  # fmt: skip
    if work.start >= work.rows:
        return
    sequence, head, kv_head, m0 = work.sequence, work.head, work.head // group, work.start
    keys, rows = work.others, work.rows
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    slope = (
        None
        if alibi_slopes_ptr is None
        else load_slope(alibi_slopes_ptr, stride_slopes, sequence, head, batch)
    )
    modifiers = Modifiers(scale, softcap, slope)
    seed = None if dropout_seed_ptr is None else tl.load(dropout_seed_ptr)
    of_q, of_k = TilePlace(work.plane, work.row, head), TilePlace(work.plane, work.other, kv_head)
    k_rows = Rows(k_ptr, stride_kb, stride_kt, stride_kg, k_desc, k_tail_desc)
    v_rows = Rows(v_ptr, stride_vb, stride_vt, stride_vg, v_desc)
    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)
    e: tl.constexpr = Channels(E, E_MAIN, 0)
    # True if the rows after a sequence's visible keys may hold other keys (packed or bounded sequences).
    HOLES: tl.constexpr = (
        cu_seqlens_k_ptr is not None or key_starts_ptr is not None or key_ends_ptr is not None
    )

    m = tl.arange(0, BLOCK_M)
    stored = m0 + m < rows
    q = load_tile(Rows(q_ptr, stride_qb, stride_qs, stride_qh), of_q, m0, stored, d, True)
    dout = load_tile(Rows(dout_ptr, stride_dob, stride_dos, stride_doh), of_q, m0, stored, e, True)
    at = work.plane * stride_lb + head * stride_lh + work.row + m0
    lse2 = tl.load(lse2_ptr + at + m, mask=stored, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + at + m, mask=stored, other=0.0)[:, None]
    dq, dslope = zeros(d, BLOCK_M), tl.zeros([BLOCK_M], tl.float32)

    i0 = keys - rows + m0
    i = (i0 + m)[:, None]
    i_whole = i + band.offset
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
            valid = (j >= start) & (j < end)
            k = load_tile(k_rows, of_k, n0, valid, d, MASKED, HOLES)
            s_ij, derivative = modify(products(q, k, d, PRECISION), modifiers, i_whole, j[None, :])
            place = placed(origin, sequence, head, i, j[None, :], keys - rows)
            p = tl.exp2(
                changed(s_ij, modifiers, place, score_tensors, SCORE) * unit_behind(modifiers, SCORE) - lse2
            )
            v = load_tile(v_rows, of_k, n0, valid, e, MASKED, HOLES)
            dp = products(dout, v, e, PRECISION)
            if dropout_seed_ptr is not None:
                keep = dropout_keep(
                    seed, threshold, origin, sequence, head, i0 + m, n0, BLOCK_N, origin_ptr is None
                )
                dp = tl.where(keep, dp * dropout_scale, 0.0)
            ds, seen = p * (dp - delta), i < keys
            if MASKED:
                seen = seen & visible(i, j[None, :], band)
                if MASK is not None:
                    seen = seen & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
                ds = tl.where(seen, ds, 0.0)
            ds = unchanged(
                ds, s_ij, modifiers, seen, place, score_tensors, grad_tensors, DERIVATIVE, GRADIENTS
            )
            if dslopes_ptr is not None:
                dslope -= tl.sum(ds * tl.abs(i_whole - j[None, :]).to(tl.float32), 1)
            # A product with ds = 0 is not enough: in rows that see no key, the derivative may be NaN.
            ds = tl.where(seen, ds * derivative, 0.0) if MASKED else ds * derivative
            dq = add_products(dq, ds, k, d, PRECISION)

    seen = sees_any(i, band)  # rows that see no key hold arbitrary numbers
    store_tile(Rows(dq_ptr, stride_dqb, stride_dqs, stride_dqh), of_q, m0, stored, dq, scale, seen, d)
    if dslopes_ptr is not None:
        # Packed sequences share one row of partial sums. Each has an extra sum, for its last, partial block.
        slot = work.row // BLOCK_M + m0 // BLOCK_M
        tl.store(dslopes_ptr + sequence * stride_sb + head * stride_sh + slot, tl.sum(dslope, 0))
