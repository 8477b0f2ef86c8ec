"""FlashAttention-2's backward (Dao, 2023, arXiv 2307.08691) in two passes, which need no atomics: the bits never vary.

With probabilities ``P = exp(S - lse)`` and ``dP = dout @ v.T``, the scores have the gradient ``dS = P * (dP - delta)``.
"""

import triton
import triton.language as tl

from .band import Band, block_at, blocks_of, bounds, key_range, origin_of, query_range, sees_any, visible
from .scores import LOG2E, Modifiers, dropout_keep, dropout_of, load_slope, recompute
from .tile import COUNTS, Rows, load_rows, load_tile, locate, store_rows


@triton.jit(do_not_specialize=COUNTS)
def prepare(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr,
    stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh, stride_dlb, stride_dlh, stride_dls, heads, s,
    E: tl.constexpr, E_MAIN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Writes ``lse2``, the LSE in log2 units, and ``delta = rowsum(out * dout) - dlse``, all ``[b, h, s]`` in fp32.

    ``lse2`` is +inf where a query saw nothing, so that all of its probabilities are 0. A packed call is a batch of one.
    """
    blocks = tl.cdiv(s, BLOCK_M)
    pair, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK_M
    sequence, head = pair // heads, pair % heads
    m, e = tl.arange(0, BLOCK_M), tl.arange(0, E_MAIN)
    out_ptr += sequence * stride_ob + head * stride_oh
    dout_ptr += sequence * stride_dob + head * stride_doh
    out = load_rows(out_ptr, start, m, e, stride_os, s, E).to(tl.float32)
    dout = load_rows(dout_ptr, start, m, e, stride_dos, s, E).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    stored, at = start + m < s, pair * s + start + m
    if dlse_ptr is not None:
        dlse_ptr += sequence * stride_dlb + head * stride_dlh
        delta -= tl.load(dlse_ptr + (start + m).to(tl.int64) * stride_dls, mask=stored)
    lse = tl.load(lse_ptr + at, mask=stored)
    tl.store(lse2_ptr + at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E), mask=stored)
    tl.store(delta_ptr + at, delta, mask=stored)


@triton.jit(do_not_specialize=COUNTS)
def backward_keys(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
    alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # each may be None, and so may those below
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, dropout_seed_ptr, origin_ptr,
    q_desc, q_tail_desc, dout_desc,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_dob, stride_dos, stride_doh, stride_dkb, stride_dkt, stride_dkg, stride_dvb, stride_dvt, stride_dvg,
    stride_lb, stride_lh, stride_slopes,
    batch, kv_heads, s, t, heads_per_wave, left, right, prefix, scale, softcap, threshold, dropout_scale,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes dk ``[b, t, g, d]`` and dv ``[b, t, g, e]``: one program for each block of keys, KV head and sequence.

    Tiles are transposed, ``[BLOCK_N, BLOCK_M]``, so that each key's gradients stay in registers.
    """
    work = locate(cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, kv_heads, t, s, heads_per_wave, BLOCK_N, False)
    if work.start >= work.rows:
        return
    sequence, kv_head, n0, keys, rows = work.sequence, work.head, work.start, work.rows, work.others
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = Band(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    q_ptr += sequence * stride_qb + work.other * stride_qs
    k_ptr += sequence * stride_kb + work.row * stride_kt + kv_head * stride_kg
    v_ptr += sequence * stride_vb + work.row * stride_vt + kv_head * stride_vg
    dout_ptr += sequence * stride_dob + work.other * stride_dos
    lse2_ptr += sequence * stride_lb + work.other
    delta_ptr += sequence * stride_lb + work.other
    dk_ptr += sequence * stride_dkb + work.row * stride_dkt + kv_head * stride_dkg
    dv_ptr += sequence * stride_dvb + work.row * stride_dvt + kv_head * stride_dvg
    plane = sequence * 0 if cu_seqlens_q_ptr is not None else sequence  # of descriptors

    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, e = tl.arange(0, D_MAIN), tl.arange(0, E_MAIN)
    k = load_rows(k_ptr, n0, n, d, stride_kt, keys, D)
    v = load_rows(v_ptr, n0, n, e, stride_vt, keys, E)
    dk = tl.zeros([BLOCK_N, D_MAIN], tl.float32)
    dv = tl.zeros([BLOCK_N, E_MAIN], tl.float32)
    if D_TAIL:
        tail = tl.arange(0, D_TAIL)
        k_tail = load_rows(k_ptr + D_MAIN, n0, n, tail, stride_kt, keys, D - D_MAIN)
        dk_tail = tl.zeros([BLOCK_N, D_TAIL], tl.float32)

    j, i0 = (n0 + n)[:, None], keys - rows
    low, high, all_low, all_high = query_range(tl.maximum(n0, start), tl.minimum(n0 + BLOCK_N, end), i0, keys, band)
    blocks = blocks_of(low - i0, high - i0, all_low - i0, all_high - i0, BLOCK_M)
    for MASKED in tl.static_range(2):
        count = blocks.masked if MASKED else blocks.full
        for step in tl.range(0, GROUP * count, num_stages=STAGES):  # one loop for the group's heads never drains
            head, block = kv_head, step
            if GROUP > 1:
                head, block = kv_head * GROUP + step // count, step % count
            m0 = block_at(block, blocks, MASKED) * BLOCK_M
            i = (i0 + m0 + m)[None, :]
            rows_at = (head * stride_lh + m0) + m
            q_rows = Rows(q_ptr + head * stride_qh, stride_qs, q_desc, plane, work.other, head)
            tail_rows = Rows(q_ptr + head * stride_qh, stride_qs, q_tail_desc, plane, work.other, head)
            dout_rows = Rows(dout_ptr + head * stride_doh, stride_dos, dout_desc, plane, work.other, head)
            # Rows that see nothing may be padding, and hold anything.
            valid = (m < rows - m0) & sees_any(i0 + m0 + m, band)
            # Each vector is read as late as may be: its values, one for each column of a tile, fill many registers.
            if MASKED:
                lse2 = tl.load(lse2_ptr + rows_at, mask=valid, other=0.0)
            q = load_tile(q_rows, m0, valid, 0, D, BLOCK_M, D_MAIN, MASKED, True)
            s_ij = tl.dot(k, q.T, input_precision=PRECISION)
            if D_TAIL:
                q_tail = load_tile(tail_rows, m0, valid, D_MAIN, D - D_MAIN, BLOCK_M, D_TAIL, MASKED, True)
                s_ij = tl.dot(k_tail, q_tail.T, s_ij, input_precision=PRECISION)
            slope = None
            if alibi_slopes_ptr is not None:
                slope = load_slope(alibi_slopes_ptr, sequence * stride_slopes + head, sequence < batch)
            if not MASKED:
                lse2 = tl.load(lse2_ptr + rows_at)
            modifiers = Modifiers(scale, softcap, slope)
            p, derivative = recompute(s_ij, lse2[None, :], modifiers, i + band.apart, j)
            if MASKED:
                seen = visible(i, j, band) & (i < keys)
                p = tl.where(seen, p, 0.0)
            dout = load_tile(dout_rows, m0, valid, 0, E, BLOCK_M, E_MAIN, MASKED, True)
            if MASKED:
                delta = tl.load(delta_ptr + rows_at, mask=valid, other=0.0)
            dp = tl.dot(v, dout.T, input_precision=PRECISION)
            if not MASKED:
                delta = tl.load(delta_ptr + rows_at)
            kept = p
            if dropout_seed_ptr is not None:
                dropout = dropout_of(dropout_seed_ptr, threshold, head, sequence, origin)
                keep = dropout_keep(dropout, i0 + m0 + m, n0, BLOCK_M, BLOCK_N, origin_ptr is None).T
                dp = tl.where(keep, dp * dropout_scale, 0.0)
                kept = tl.where(keep, p, 0.0)
            ds = p * (dp - delta[None, :]) * derivative
            if MASKED:
                ds = tl.where(seen, ds, 0.0)
            dv = tl.dot(kept.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
            if D_TAIL:
                dk_tail = tl.dot(ds.to(q_tail.dtype), q_tail, dk_tail, input_precision=PRECISION)

    bounded = (j >= start) & (j < end)  # tiles without a mask disregard these bounds
    store_rows(dv_ptr, tl.where(bounded, dv * dropout_scale, 0.0), n0, n, e, stride_dvt, keys, E)
    store_rows(dk_ptr, tl.where(bounded, dk * scale, 0.0), n0, n, d, stride_dkt, keys, D)
    if D_TAIL:
        store_rows(dk_ptr + D_MAIN, tl.where(bounded, dk_tail * scale, 0.0), n0, n, tail, stride_dkt, keys, D - D_MAIN)


@triton.jit(do_not_specialize=COUNTS)
def backward_queries(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr, dslopes_ptr,
    alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # each may be None, and so may those below
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, dropout_seed_ptr, origin_ptr,
    k_desc, k_tail_desc, v_desc,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_dob, stride_dos, stride_doh, stride_dqb, stride_dqs, stride_dqh,
    stride_lb, stride_lh, stride_slopes, stride_sb, stride_sh,
    batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale, softcap, threshold, dropout_scale,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes dq ``[b, s, h, d]``: one program for each block of queries, head and sequence.

    With slopes also each program's share of their gradient, ``[b, h, blocks]``, packed ``[h, blocks]``.
    """
    work = locate(cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, s, t, heads_per_wave, BLOCK_M, right is not None)
    if work.start >= work.rows:
        return
    sequence, head, kv_head, m0 = work.sequence, work.head, work.head // group, work.start
    keys, rows = work.others, work.rows
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = Band(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    slope = None
    if alibi_slopes_ptr is not None:
        slope = load_slope(alibi_slopes_ptr, sequence * stride_slopes + head, sequence < batch)
    modifiers = Modifiers(scale, softcap, slope)
    if dropout_seed_ptr is not None:
        dropout = dropout_of(dropout_seed_ptr, threshold, head, sequence, origin)
    q_ptr += sequence * stride_qb + work.row * stride_qs + head * stride_qh
    k_ptr += sequence * stride_kb + work.other * stride_kt + kv_head * stride_kg
    v_ptr += sequence * stride_vb + work.other * stride_vt + kv_head * stride_vg
    dout_ptr += sequence * stride_dob + work.row * stride_dos + head * stride_doh
    dq_ptr += sequence * stride_dqb + work.row * stride_dqs + head * stride_dqh
    at = sequence * stride_lb + head * stride_lh + work.row + m0
    plane = sequence * 0 if cu_seqlens_q_ptr is not None else sequence  # of descriptors
    k_rows = Rows(k_ptr, stride_kt, k_desc, plane, work.other, kv_head)
    tail_rows = Rows(k_ptr, stride_kt, k_tail_desc, plane, work.other, kv_head)
    v_rows = Rows(v_ptr, stride_vt, v_desc, plane, work.other, kv_head)

    m, d, e = tl.arange(0, BLOCK_M), tl.arange(0, D_MAIN), tl.arange(0, E_MAIN)
    q = load_rows(q_ptr, m0, m, d, stride_qs, rows, D)
    dout = load_rows(dout_ptr, m0, m, e, stride_dos, rows, E)
    lse2 = tl.load(lse2_ptr + at + m, mask=m0 + m < rows, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + at + m, mask=m0 + m < rows, other=0.0)[:, None]
    dq = tl.zeros([BLOCK_M, D_MAIN], tl.float32)
    if D_TAIL:
        tail = tl.arange(0, D_TAIL)
        q_tail = load_rows(q_ptr + D_MAIN, m0, m, tail, stride_qs, rows, D - D_MAIN)
        dq_tail = tl.zeros([BLOCK_M, D_TAIL], tl.float32)
    dslope = tl.zeros([BLOCK_M], tl.float32)

    i0 = keys - rows + m0
    i = (i0 + m)[:, None]
    i_whole = i + band.apart
    low, high, all_low, all_high = key_range(i0, tl.minimum(i0 + BLOCK_M, keys), band)
    blocks = blocks_of(low, high, all_low, all_high, BLOCK_N)
    for MASKED in tl.static_range(2):
        for block in tl.range(0, blocks.masked if MASKED else blocks.full, num_stages=STAGES):
            n0 = block_at(block, blocks, MASKED) * BLOCK_N
            j = n0 + tl.arange(0, BLOCK_N)
            valid = (j >= start) & (j < end)
            k = load_tile(k_rows, n0, valid, 0, D, BLOCK_N, D_MAIN, MASKED, False)
            s_ij = tl.dot(q, k.T, input_precision=PRECISION)
            if D_TAIL:
                k_tail = load_tile(tail_rows, n0, valid, D_MAIN, D - D_MAIN, BLOCK_N, D_TAIL, MASKED, False)
                s_ij = tl.dot(q_tail, k_tail.T, s_ij, input_precision=PRECISION)
            p, derivative = recompute(s_ij, lse2, modifiers, i_whole, j[None, :])
            v = load_tile(v_rows, n0, valid, 0, E, BLOCK_N, E_MAIN, MASKED, False)
            dp = tl.dot(dout, v.T, input_precision=PRECISION)
            if dropout_seed_ptr is not None:
                keep = dropout_keep(dropout, i0 + m, n0, BLOCK_M, BLOCK_N, origin_ptr is None)
                dp = tl.where(keep, dp * dropout_scale, 0.0)
            ds = p * (dp - delta)
            if MASKED:
                seen = visible(i, j[None, :], band) & (i < keys)
                ds = tl.where(seen, ds, 0.0)
            if alibi_slopes_ptr is not None:
                dslope -= tl.sum(ds * tl.abs(i_whole - j[None, :]).to(tl.float32), 1)
            ds *= derivative
            if MASKED and softcap is not None:  # the derivative of a row that sees nothing may be NaN
                ds = tl.where(seen, ds, 0.0)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
            if D_TAIL:
                dq_tail = tl.dot(ds.to(k_tail.dtype), k_tail, dq_tail, input_precision=PRECISION)

    sees = sees_any(i, band)  # a row that sees nothing has met whatever its tiles hold
    store_rows(dq_ptr, tl.where(sees, dq * scale, 0.0), m0, m, d, stride_dqs, rows, D)
    if D_TAIL:
        store_rows(dq_ptr + D_MAIN, tl.where(sees, dq_tail * scale, 0.0), m0, m, tail, stride_dqs, rows, D - D_MAIN)
    if alibi_slopes_ptr is not None:
        slot = (m0 // BLOCK_M).to(tl.int64)
        if cu_seqlens_q_ptr is not None:
            slot += work.row // BLOCK_M + sequence
        tl.store(dslopes_ptr + sequence * stride_sb + head * stride_sh + slot, tl.sum(dslope, 0))
