"""FlashAttention-2's forward (Dao, 2023, arXiv 2307.08691): a program for each block of queries, head and sequence."""

import triton
import triton.language as tl

from .tile import (
    COUNTS,
    LN2,
    LOG2E,
    finite_part,
    kept,
    key_range,
    load_block,
    load_rows,
    locate,
    modify,
    stain,
    store_rows,
    visible,
)


@triton.jit(do_not_specialize=COUNTS)
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, slopes_ptr, sinks_ptr, starts_ptr, ends_ptr, cu_q_ptr, cu_k_ptr, seed_ptr,
    k_desc, k_tail_desc, v_desc,
    q_b, q_s, q_h, k_b, k_t, k_g, v_b, v_t, v_g, out_b, out_s, out_h, lse_b, lse_h, slopes_b,
    batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale, softcap, threshold, dropout_scale,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, STARTS: tl.constexpr, ENDS: tl.constexpr,
    VARLEN: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes out ``[b, s, h, e]`` and the natural-log LSE ``[b, h, s]``; packed, ``[t, h, e]`` and ``[h, t]``."""
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
    out_ptr += sequence * out_b + row * out_s + head * out_h
    lse_ptr += sequence * lse_b + row + head * lse_h
    plane = sequence * 0 if VARLEN else sequence  # of the descriptors

    m, d, e = tl.arange(0, BLOCK_M), tl.arange(0, D_MAIN), tl.arange(0, E_MAIN)
    q = load_rows(q_ptr, m0, m, d, q_s, rows, D, True)
    q_tail = q
    if D_TAIL:
        q_tail = load_rows(q_ptr + D_MAIN, m0, m, tl.arange(0, D_TAIL), q_s, rows, D - D_MAIN, True)
    # Plain scores stay as they leave the product; others are in log2 units from the start.
    PLAIN: tl.constexpr = not (SOFTCAP or SLOPES)
    unit = scale * LOG2E if PLAIN else 1.0
    slope, seed = 0.0, 0
    if SLOPES:
        slope = tl.load(slopes_ptr + sequence * slopes_b + head, mask=sequence < batch, other=0).to(tl.float32) * LOG2E
    if DROPOUT:
        seed = tl.load(seed_ptr)
    i0 = keys - rows + m0
    low, high, all_low, all_high = key_range(
        i0, tl.minimum(i0 + BLOCK_M, keys), start, end, left, right, prefix, LEFT, RIGHT, PREFIX
    )
    low = low // BLOCK_N * BLOCK_N
    all_low = tl.cdiv(all_low, BLOCK_N) * BLOCK_N if LEFT or STARTS else low
    all_high = tl.maximum(all_high // BLOCK_N * BLOCK_N, all_low)

    # A hidden value that is not finite makes NaN of its product with 0. That is rare: only if there is a NaN in the end
    # does the work begin again, with care for what is hidden.
    HIDES: tl.constexpr = LEFT or RIGHT or STARTS or ENDS or VARLEN
    spoiled = tl.cast(1, tl.int32)
    for CAREFUL in tl.static_range(2 if HIDES else 1):
        for _ in range(spoiled):
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            if SINKS:  # as a key whose value is 0
                sink = tl.load(sinks_ptr + head, mask=sequence < batch, other=float("-inf")).to(tl.float32)
                top = tl.zeros([BLOCK_M], tl.float32) + sink * (LOG2E / unit)
                total = tl.where(top > float("-inf"), 1.0, 0.0)
            acc = tl.zeros([BLOCK_M, E_MAIN], tl.float32)
            stained = False
            for phase in tl.static_range(0 if LEFT or STARTS else 1, 3):  # masked, seen by all, masked
                begin = low if phase == 0 else (all_low if phase == 1 else all_high)
                stop = tl.minimum(all_low, high) if phase == 0 else (all_high if phase == 1 else high)
                for n in tl.range(begin, stop, BLOCK_N, num_stages=1 if CAREFUL else STAGES):
                    j = tl.arange(0, BLOCK_N)
                    if TMA and not CAREFUL:
                        k = load_block(k_desc, plane, key + n, kv_head, 0, BLOCK_N, D_MAIN)
                    else:
                        k = load_rows(k_ptr, n, j, d, k_t, keys, D, phase != 1)
                    scores = tl.dot(q, k.T, input_precision=PRECISION)
                    if D_TAIL:
                        if TMA and not CAREFUL:
                            k = load_block(k_tail_desc, plane, key + n, kv_head, D_MAIN, BLOCK_N, D_TAIL)
                        else:
                            k = load_rows(k_ptr + D_MAIN, n, j, tl.arange(0, D_TAIL), k_t, keys, D - D_MAIN, phase != 1)
                        scores = tl.dot(q_tail, k.T, scores, input_precision=PRECISION)
                    if not PLAIN:
                        scores = modify(
                            scores, scale, softcap, slope, (i0 + m)[:, None], (n + j)[None, :], SOFTCAP, SLOPES
                        )
                    if phase != 1:
                        seen = visible(
                            (i0 + m)[:, None], (n + j)[None, :], start, end, left, right, prefix, LEFT, RIGHT, PREFIX
                        )
                        scores = tl.where(seen, scores, float("-inf"))
                    new_top = tl.maximum(top, tl.max(scores, 1))
                    # A row that has seen nothing keeps -inf as its maximum; subtracting it would give NaN.
                    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
                    correction = tl.exp2((top - safe) * unit)  # 1 if the maximum stays: as one fused sum it drifts
                    weights = tl.exp2(scores * unit - (safe * unit)[:, None])
                    total = total * correction + tl.sum(weights, 1)
                    acc *= correction[:, None]
                    if DROPOUT:
                        keep = kept(seed, threshold, m0 + m, n // 4, head, sequence, BLOCK_N // 4, BLOCK_M)
                        weights = tl.where(keep, weights, 0.0)
                    if TMA and not CAREFUL:
                        v = load_block(v_desc, plane, key + n, kv_head, 0, BLOCK_N, E_MAIN)
                    else:
                        v = load_rows(v_ptr, n, j, e, v_t, keys, E, phase != 1)
                    if CAREFUL and phase != 1:
                        v, broken = finite_part(v)
                        stained |= broken
                    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
                    top = new_top

            nothing = total == 0.0
            total = tl.where(nothing, 1.0, total)
            lse = tl.where(nothing, float("-inf"), top * (unit * LN2) + tl.log2(total) * LN2)
            tl.store(lse_ptr + m0 + m, lse, mask=m0 + m < rows)
            acc *= (dropout_scale / total)[:, None]
            store_rows(out_ptr, acc, m0, m, e, out_s, rows, E)
            spoiled = tl.max((acc != acc).to(tl.int32))
            if stained:  # only the queries that see what was left out of the products become NaN
                tl.debug_barrier()
                for phase in tl.static_range(0 if LEFT or STARTS else 2, 3, 2):
                    begin = low if phase == 0 else all_high
                    for n in range(begin, tl.minimum(all_low, high) if phase == 0 else high, BLOCK_N):
                        seen = visible(
                            (i0 + m)[:, None], (n + tl.arange(0, BLOCK_N))[None, :],
                            start, end, left, right, prefix, LEFT, RIGHT, PREFIX,
                        )  # fmt: skip
                        stain(seen, v_ptr, n, v_t, keys, out_ptr, m0, out_s, rows, E)
