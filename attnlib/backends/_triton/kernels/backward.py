"""FlashAttention-2's backward (Dao, 2023, arXiv 2307.08691) in two passes, which need no atomics: the bits never vary.

With weights ``P = exp(S - lse)`` and ``dP = dout @ v.T``, the gradient of the scores is ``dS = P * (dP - delta)``.
"""

import triton
import triton.language as tl

from .tile import (
    COUNTS,
    LOG2E,
    block_at,
    finite_part,
    kept,
    key_range,
    load_block,
    load_rows,
    load_some,
    locate,
    not_finite,
    query_range,
    recall,
    split,
    stain,
    store_rows,
    visible,
)


@triton.jit(do_not_specialize=COUNTS)
def prepare(
    q_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr,
    q_b, q_s, q_h, out_b, out_s, out_h, dout_b, dout_s, dout_h, dlse_b, dlse_h, dlse_s,
    heads, s,
    D: tl.constexpr, D_ALL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    DLSE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Writes ``lse2``, the LSE in log2 units, and ``delta = rowsum(out * dout) - dlse``, all ``[b, h, s]`` in fp32.

    ``lse2`` is +inf where a query saw nothing, so that all of its weights are 0, and NaN where its q or its gradient
    is not finite, so that the gradients of all it sees are NaN. A packed call is a batch of one.
    """
    blocks = tl.cdiv(s, BLOCK_M)
    pair, m0 = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK_M
    sequence, head = pair // heads, pair % heads
    m, e = tl.arange(0, BLOCK_M), tl.arange(0, E_MAIN)
    out = load_rows(out_ptr + sequence * out_b + head * out_h, m0, m, e, out_s, s, E, True).to(tl.float32)
    dout = load_rows(dout_ptr + sequence * dout_b + head * dout_h, m0, m, e, dout_s, s, E, True).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    stored, at = m0 + m < s, pair * s + m0 + m
    if DLSE:
        delta -= tl.load(dlse_ptr + sequence * dlse_b + head * dlse_h + (m0 + m).to(tl.int64) * dlse_s, mask=stored)
    lse = tl.load(lse_ptr + at, mask=stored)
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    lse2 = tl.where(tl.max(not_finite(dout), 1) > 0, float("nan"), lse2)
    if SOFTCAP or SINKS:  # without either the LSE is not finite where q is not
        q = load_rows(q_ptr + sequence * q_b + head * q_h, m0, m, tl.arange(0, D_ALL), q_s, s, D, True)
        lse2 = tl.where(tl.max(not_finite(q), 1) > 0, float("nan"), lse2)
    tl.store(lse2_ptr + at, lse2, mask=stored)
    tl.store(delta_ptr + at, delta, mask=stored)


@triton.jit(do_not_specialize=COUNTS)
def backward_keys(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
    slopes_ptr, starts_ptr, ends_ptr, cu_q_ptr, cu_k_ptr, seed_ptr, q_desc, q_tail_desc, dout_desc,
    q_b, q_s, q_h, k_b, k_t, k_g, v_b, v_t, v_g, dout_b, dout_s, dout_h, dk_b, dk_t, dk_g, dv_b, dv_t, dv_g,
    lse_b, lse_h, slopes_b,
    batch, kv_heads, s, t, heads_per_wave, left, right, prefix, scale, softcap, threshold, dropout_scale,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, STARTS: tl.constexpr, ENDS: tl.constexpr,
    VARLEN: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, DROPOUT: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes dk ``[b, t, g, d]`` and dv ``[b, t, g, e]``: one program for each block of keys, KV head and sequence.

    Tiles are transposed, ``[BLOCK_N, BLOCK_M]``, so that each key's gradients stay in registers.
    """
    sequence, kv_head, n0, key, keys, row, rows = locate(
        cu_k_ptr, cu_q_ptr, batch, kv_heads, t, s, heads_per_wave, BLOCK_N, False, VARLEN
    )
    if n0 >= keys:
        return
    start, end = 0, keys
    if STARTS:
        start = tl.maximum(tl.load(starts_ptr + sequence), 0)
    if ENDS:
        end = tl.minimum(tl.load(ends_ptr + sequence), keys)
    q_ptr += sequence * q_b + row * q_s
    k_ptr += sequence * k_b + key * k_t + kv_head * k_g
    v_ptr += sequence * v_b + key * v_t + kv_head * v_g
    dout_ptr += sequence * dout_b + row * dout_s
    lse2_ptr += sequence * lse_b + row
    delta_ptr += sequence * lse_b + row
    dk_ptr += sequence * dk_b + key * dk_t + kv_head * dk_g
    dv_ptr += sequence * dv_b + key * dv_t + kv_head * dv_g

    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, e = tl.arange(0, D_MAIN), tl.arange(0, E_MAIN)
    k = load_rows(k_ptr, n0, n, d, k_t, keys, D, True)
    v = load_rows(v_ptr, n0, n, e, v_t, keys, E, True)
    dk = tl.zeros([BLOCK_N, D_MAIN], tl.float32)
    dv = tl.zeros([BLOCK_N, E_MAIN], tl.float32)
    k_tail, dk_tail, tail = k, dk, d
    if D_TAIL:
        tail = tl.arange(0, D_TAIL)
        k_tail = load_rows(k_ptr + D_MAIN, n0, n, tail, k_t, keys, D - D_MAIN, True)
        dk_tail = tl.zeros([BLOCK_N, D_TAIL], tl.float32)
    slope, seed = 0.0, 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    j, i0 = (n0 + n)[:, None], keys - rows
    plane = sequence * 0 if VARLEN else sequence  # of the descriptors
    low, high, all_low, all_high = query_range(
        tl.maximum(n0, start), tl.minimum(n0 + BLOCK_N, end), i0, keys, left, right, prefix, LEFT, RIGHT, PREFIX
    )
    first, before, clear, masked = split(low - i0, high - i0, all_low - i0, all_high - i0, BLOCK_M)
    for MASKED in tl.static_range(2):
        count = masked if MASKED else clear
        for step in tl.range(0, GROUP * count, num_stages=STAGES):  # one loop for the group's heads never drains
            head, block = kv_head, step
            if GROUP > 1:
                head, block = kv_head * GROUP + step // count, step % count
            m0 = block_at(block, first, before, clear, MASKED) * BLOCK_M
            i = (i0 + m0 + m)[None, :]
            rows_at = (head * lse_h + m0) + m
            # Each vector is read as late as may be: its values, one for each column of a tile, fill many registers.
            if MASKED:
                inside = m < rows - m0
                lse2 = tl.load(lse2_ptr + rows_at, mask=inside, other=0.0)
                # A row of q or dout that is not finite would turn its products with 0 into NaN; its LSE tells.
                sound = inside & (tl.abs(lse2) < float("inf"))
                q = load_some(q_ptr + head * q_h, m0, m, d, q_s, sound, D, True)
            elif TMA:
                q = load_block(q_desc, plane, row + m0, head, 0, BLOCK_M, D_MAIN)
            else:
                q = load_some(q_ptr + head * q_h, m0, m, d, q_s, m, D, False)
            products = tl.dot(k, q.T, input_precision=PRECISION)
            q_tail = q
            if D_TAIL:
                if MASKED:
                    q_tail = load_some(q_ptr + head * q_h + D_MAIN, m0, m, tail, q_s, sound, D - D_MAIN, True)
                elif TMA:
                    q_tail = load_block(q_tail_desc, plane, row + m0, head, D_MAIN, BLOCK_M, D_TAIL)
                else:
                    q_tail = load_some(q_ptr + head * q_h + D_MAIN, m0, m, tail, q_s, m, D - D_MAIN, False)
                products = tl.dot(k_tail, q_tail.T, products, input_precision=PRECISION)
            if SLOPES:
                slope = tl.load(slopes_ptr + sequence * slopes_b + head, mask=sequence < batch, other=0)
                slope = slope.to(tl.float32) * LOG2E
            if not MASKED:
                lse2 = tl.load(lse2_ptr + rows_at)
            weights, derivative = recall(products, lse2[None, :], scale, softcap, slope, i, j, SOFTCAP, SLOPES)
            seen = True
            if MASKED:
                seen = visible(i, j, start, end, left, right, prefix, LEFT, RIGHT, PREFIX) & (i < keys)
                weights = tl.where(seen, weights, 0.0)
                dout = load_some(dout_ptr + head * dout_h, m0, m, e, dout_s, sound, E, True)
                delta = tl.load(delta_ptr + rows_at, mask=inside, other=0.0)
            elif TMA:
                dout = load_block(dout_desc, plane, row + m0, head, 0, BLOCK_M, E_MAIN)
            else:
                dout = load_some(dout_ptr + head * dout_h, m0, m, e, dout_s, m, E, False)
            dp = tl.dot(v, dout.T, input_precision=PRECISION)
            if not MASKED:
                delta = tl.load(delta_ptr + rows_at)
            given = weights
            if DROPOUT:
                keep = kept(seed, threshold, m0 + m, n0 // 4, head, sequence, BLOCK_N // 4, BLOCK_M).T
                dp = tl.where(keep, dp * dropout_scale, 0.0)
                given = tl.where(keep, weights, 0.0)
            ds = weights * (dp - delta[None, :]) * derivative
            if MASKED:
                ds = tl.where(seen, ds, 0.0)
            dv = tl.dot(given.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
            if D_TAIL:
                dk_tail = tl.dot(ds.to(q_tail.dtype), q_tail, dk_tail, input_precision=PRECISION)

    bounded = (j >= start) & (j < end)  # tiles without a mask disregard these bounds
    store_rows(dv_ptr, tl.where(bounded, dv * dropout_scale, 0.0), n0, n, e, dv_t, keys, E)
    store_rows(dk_ptr, tl.where(bounded, dk * scale, 0.0), n0, n, d, dk_t, keys, D)
    if D_TAIL:
        dk_tail = tl.where(bounded, dk_tail * scale, 0.0)
        store_rows(dk_ptr + D_MAIN, dk_tail, n0, n, tail, dk_t, keys, D - D_MAIN)


@triton.jit(do_not_specialize=COUNTS)
def backward_queries(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr, dslopes_ptr,
    slopes_ptr, starts_ptr, ends_ptr, cu_q_ptr, cu_k_ptr, seed_ptr, k_desc, k_tail_desc, v_desc,
    q_b, q_s, q_h, k_b, k_t, k_g, v_b, v_t, v_g, dout_b, dout_s, dout_h, dq_b, dq_s, dq_h,
    lse_b, lse_h, slopes_b, dslopes_b, dslopes_h,
    batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale, softcap, threshold, dropout_scale,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, STARTS: tl.constexpr, ENDS: tl.constexpr,
    VARLEN: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, DROPOUT: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes dq ``[b, s, h, d]``: one program for each block of queries, head and sequence.

    With slopes also each program's share of their gradient, ``[b, h, blocks]``, packed ``[h, blocks]``.
    """
    sequence, head, m0, row, rows, key, keys = locate(
        cu_q_ptr, cu_k_ptr, batch, heads, s, t, heads_per_wave, BLOCK_M, RIGHT, VARLEN
    )
    if m0 >= rows:
        return
    start, end = 0, keys
    if STARTS:
        start = tl.maximum(tl.load(starts_ptr + sequence), 0)
    if ENDS:
        end = tl.minimum(tl.load(ends_ptr + sequence), keys)
    q_ptr += sequence * q_b + row * q_s + head * q_h
    kv_head = head // group
    k_ptr += sequence * k_b + key * k_t + kv_head * k_g
    v_ptr += sequence * v_b + key * v_t + kv_head * v_g
    dout_ptr += sequence * dout_b + row * dout_s + head * dout_h
    dq_ptr += sequence * dq_b + row * dq_s + head * dq_h
    at = sequence * lse_b + head * lse_h + row + m0

    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, e = tl.arange(0, D_MAIN), tl.arange(0, E_MAIN)
    q = load_rows(q_ptr, m0, m, d, q_s, rows, D, True)
    dout = load_rows(dout_ptr, m0, m, e, dout_s, rows, E, True)
    lse2 = tl.load(lse2_ptr + at + m, mask=m0 + m < rows, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + at + m, mask=m0 + m < rows, other=0.0)[:, None]
    dq = tl.zeros([BLOCK_M, D_MAIN], tl.float32)
    q_tail, dq_tail, tail = q, dq, d
    if D_TAIL:
        tail = tl.arange(0, D_TAIL)
        q_tail = load_rows(q_ptr + D_MAIN, m0, m, tail, q_s, rows, D - D_MAIN, True)
        dq_tail = tl.zeros([BLOCK_M, D_TAIL], tl.float32)
    slope, seed = 0.0, 0
    if SLOPES:
        slope = tl.load(slopes_ptr + sequence * slopes_b + head, mask=sequence < batch, other=0).to(tl.float32) * LOG2E
    if DROPOUT:
        seed = tl.load(seed_ptr)
    dslope = tl.zeros([BLOCK_M], tl.float32)
    stained = False

    plane = sequence * 0 if VARLEN else sequence  # of the descriptors
    i0 = keys - rows + m0
    i = (i0 + m)[:, None]
    low, high, all_low, all_high = key_range(
        i0, tl.minimum(i0 + BLOCK_M, keys), start, end, left, right, prefix, LEFT, RIGHT, PREFIX
    )
    first, before, clear, masked = split(low, high, all_low, all_high, BLOCK_N)
    for MASKED in tl.static_range(2):
        for block in tl.range(0, masked if MASKED else clear, num_stages=STAGES):
            n0 = block_at(block, first, before, clear, MASKED) * BLOCK_N
            j = (n0 + n)[None, :]
            if TMA and not MASKED:
                k = load_block(k_desc, plane, key + n0, kv_head, 0, BLOCK_N, D_MAIN)
            else:
                k = load_rows(k_ptr, n0, n, d, k_t, keys, D, MASKED)
            products = tl.dot(q, k.T, input_precision=PRECISION)
            k_tail = k
            if D_TAIL:
                if TMA and not MASKED:
                    k_tail = load_block(k_tail_desc, plane, key + n0, kv_head, D_MAIN, BLOCK_N, D_TAIL)
                else:
                    k_tail = load_rows(k_ptr + D_MAIN, n0, n, tail, k_t, keys, D - D_MAIN, MASKED)
                products = tl.dot(q_tail, k_tail.T, products, input_precision=PRECISION)
            weights, derivative = recall(products, lse2, scale, softcap, slope, i, j, SOFTCAP, SLOPES)
            if TMA and not MASKED:
                v = load_block(v_desc, plane, key + n0, kv_head, 0, BLOCK_N, E_MAIN)
            else:
                v = load_rows(v_ptr, n0, n, e, v_t, keys, E, MASKED)
            dp = tl.dot(dout, v.T, input_precision=PRECISION)
            if DROPOUT:
                keep = kept(seed, threshold, m0 + m, n0 // 4, head, sequence, BLOCK_N // 4, BLOCK_M)
                dp = tl.where(keep, dp * dropout_scale, 0.0)
            ds = weights * (dp - delta)
            if MASKED:
                seen = visible(i, j, start, end, left, right, prefix, LEFT, RIGHT, PREFIX)
                ds = tl.where(seen & (i < keys), ds, 0.0)
            if SLOPES:
                dslope -= tl.sum(ds * tl.abs(i - j).to(tl.float32), 1)
            ds *= derivative
            if MASKED:
                if SOFTCAP:  # whose derivative of a hidden product may be NaN
                    ds = tl.where(seen & (i < keys), ds, 0.0)
                # Before both products: between two that read ds from registers, ptxas (up to 13.2) may reuse these.
                k, broken = finite_part(k)
                stained |= broken
                if D_TAIL:
                    k_tail, broken = finite_part(k_tail)
                    stained |= broken
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
            if D_TAIL:
                dq_tail = tl.dot(ds.to(k_tail.dtype), k_tail, dq_tail, input_precision=PRECISION)

    store_rows(dq_ptr, dq * scale, m0, m, d, dq_s, rows, D)
    if D_TAIL:
        store_rows(dq_ptr + D_MAIN, dq_tail * scale, m0, m, tail, dq_s, rows, D - D_MAIN)
    if SLOPES:
        slot = (m0 // BLOCK_M).to(tl.int64)
        if VARLEN:
            slot += row // BLOCK_M + sequence
        tl.store(dslopes_ptr + sequence * dslopes_b + head * dslopes_h + slot, tl.sum(dslope, 0))
    if stained:  # only the queries that see what was left out of the products become NaN
        tl.debug_barrier()
        for block in range(masked):
            n0 = block_at(block, first, before, clear, True) * BLOCK_N
            seen = visible(i, (n0 + n)[None, :], start, end, left, right, prefix, LEFT, RIGHT, PREFIX)
            stain(seen, k_ptr, n0, k_t, keys, dq_ptr, m0, dq_s, rows, D)
