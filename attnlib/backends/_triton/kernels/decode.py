"""Attention over a paged cache: the generic decode kernel (FlashDecoding; Dao et al., 2023).

One program computes one split (a range of tokens) of one sequence and KV head. Its rows are all query heads
that share the KV head, for all query tokens of the sequence, so each stored token is read once.
``split_kv.py`` cuts sequences into splits and merges the results.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .band import KeyBand, key_range, origin_of, sees_any, tiles_of
from .decode_tiles import DecodeSizes, RunningSums, Scoring, Stored, load_queries, sweep
from .paged import claimed, tokens_of_split
from .runs import BlockSizes, SplitTokens, States, list_runs, run_at
from .scores import LN2, LOG2E, Modifiers, descaled, load_slope, unit_behind
from .split_kv import join, shares
from .stored_bytes import pairs_at
from .tile import COUNTS, Rows


@triton.jit
def sums_of_splits(
    low, high, unit, empty, queries, scoring, stored, sizes,
    MASK: tl.constexpr, SCORE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return the output, sum and maximum over the tokens ``[low, high)``, computed in sets of ``SIZE``.

    Each set of ``SIZE`` tokens starts from ``empty`` sums. The results of the sets are merged in order.
    """
    acc, m_i = empty.acc, empty.m_i
    l_i = tl.zeros([m_i.shape[0]], tl.float32)
    BY_PLACE: tl.constexpr = len(empty.l_i.shape) == 2
    for split in range(low // SIZE, tl.cdiv(high, SIZE)):
        split_low, split_high = tl.maximum(low, split * SIZE), tl.minimum(high, (split + 1) * SIZE)
        tiles = tiles_of(split_low, split_high, 0, 0, 0, sizes.EDGE)
        part = sweep(empty, tiles, queries, scoring, stored, sizes, MASK, SCORE, True)
        part_l = tl.sum(part.l_i, 1) if BY_PLACE else part.l_i
        divisor = tl.where(part_l == 0.0, 1.0, part_l)
        lse2 = tl.where(part_l == 0.0, float("-inf"), tl.fma(part.m_i, unit, tl.log2(divisor)))
        acc, l_i, m_i = join(acc, l_i, m_i, part.acc * (1.0 / divisor)[:, None], lse2)
    return acc, l_i, m_i


@triton.jit
def sums_of_runs(runs, sums, queries, scoring, stored, sizes, MASK: tl.constexpr, SCORE: tl.constexpr):
    """Add all runs of visible tiles to the running sums; fully visible tiles skip the mask."""
    for r in range(runs.count):
        for MASKED in tl.static_range(2):
            tiles = run_at(r, runs, sizes.FULL, sizes.EDGE)
            sums = sweep(sums, tiles, queries, scoring, stored, sizes, MASK, SCORE, MASKED)
    return sums


@triton.jit(do_not_specialize=COUNTS)
def decode(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, starts_ptr, lengths_ptr,
    cu_seqlens_q_ptr, alibi_slopes_ptr, sinks_ptr, origin_ptr, q_descale_ptr, schedule_ptr, states_ptr,
    runs_ptr, out_ptr, lse_ptr, split_ptr, k_desc, tail_desc, mask_tensors, score_tensors, stride_qb,
    stride_qs, stride_qh, stride_kp, stride_kt, stride_kg, stride_tp, stride_tt, stride_tg, stride_vp,
    stride_vt, stride_vg, stride_ksp, stride_kst, stride_ksg, stride_vsp, stride_vst, stride_vsg,
    stride_table, stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_slopes, pages, batch, group,
    s, slots, long, long_splits, lines, schedule_offset, limit, planes, columns, room, left, right, prefix,
    scale, softcap, D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, TAIL: tl.constexpr,
    E: tl.constexpr, E_MAIN: tl.constexpr, LATENT: tl.constexpr, ONE: tl.constexpr, SCHEDULED: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, FULL: tl.constexpr, PAGE: tl.constexpr, NATIVE: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr, STAGES: tl.constexpr, TF32: tl.constexpr, PAIRS: tl.constexpr, EARLY: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr, GRAIN_M: tl.constexpr, GRAIN: tl.constexpr,
):  # fmt: skip
    """Write the output ``[b, s, h, e]`` and the LSE ``[b, h, s]``, or partial results of splits.

    For packed sequences, the shapes are ``[t, h, e]`` and ``[h, t]``. ``FULL``: skip the mask in tiles
    that all rows see completely. ``SPLIT_SIZE``: sum this many tokens at a time and merge the sums as if they
    were splits, so that real splits of this size give the same bits. Tiles that ``states`` marks as hidden
    are not read.
    """
    if EARLY:
        gdc_wait()
    schedule_ptr += schedule_offset
    work, splits, n = claimed(
        schedule_ptr, cu_seqlens_q_ptr, slots, batch, group, s, long, long_splits, SCHEDULED, KV_HEADS,
        BLOCKS, BLOCK_M,
    )  # fmt: skip
    sequence, plane, kv_head, row, count = work.sequence, work.plane, work.head, work.row, work.rows
    if SCHEDULED and sequence < 0:
        return
    past = sequence >= batch  # the tokens after the last packed sequence
    known = tl.where(past, 0, sequence)
    length = tl.where(past, 0, tl.maximum(tl.minimum(tl.load(lengths_ptr + known), limit), 0))
    begin = tl.minimum(tl.maximum(work.other, tl.load(starts_ptr + known)), length)
    end = tl.minimum(work.other + work.others, length)
    origin = origin_of(origin_ptr, known, batch)
    band = KeyBand(begin, end, left, right, prefix, origin.query - origin.key, origin.key)

    r, rows = work.start + tl.arange(0, BLOCK_M), count * group
    valid = r < rows
    token, head = r // group, kv_head * group + r % group
    i = length - count + token
    first, last = work.start // group, tl.minimum((work.start + BLOCK_M - 1) // group + 1, count)
    low, high, all_low, all_high = key_range(length - count + first, length - count + last, band)
    high = tl.where(first < last, high, low)
    if not SPLIT_SIZE and n >= 0:  # a long sequence, which is not split if SPLIT_SIZE is set
        low, high = tokens_of_split(low, high, n, splits, BLOCK_N)

    PER: tl.constexpr = 2 if PAIRS else 1  # channels in each loaded element
    k_ptr, v_ptr = k_ptr + kv_head * stride_kg, v_ptr + kv_head * stride_vg
    keys, values = (pairs_at(k_ptr), pairs_at(v_ptr)) if PAIRS else (k_ptr, v_ptr)
    k_rows = Rows(keys, stride_kp // PER, stride_kt // PER, stride_kg, k_desc)
    tail_rows = Rows(k_rope_ptr + TAIL + kv_head * stride_tg, stride_tp, stride_tt, stride_tg, tail_desc)
    v_rows = Rows(None if LATENT else values, stride_vp // PER, stride_vt // PER, stride_vg)
    SCALED: tl.constexpr = k_scale_ptr is not None
    k_scale = Rows(k_scale_ptr + kv_head * stride_ksg if SCALED else None, stride_ksp, stride_kst, stride_ksg)
    v_scale = Rows(v_scale_ptr + kv_head * stride_vsg if SCALED else None, stride_vsp, stride_vst, stride_vsg)
    table_ptr += known.to(tl.int64) * stride_table
    stored = Stored(k_rows, tail_rows, v_rows, k_scale, v_scale, table_ptr, pages, low, high)
    BY_PLACE: tl.constexpr = EDGE == BLOCK_N and BLOCK_M == 16  # registers can hold one sum per tile element
    WHOLE: tl.constexpr = BLOCK_N if FULL else 0
    PRECISION: tl.constexpr = "tf32" if TF32 else "ieee"
    sizes: tl.constexpr = DecodeSizes(
        D, D_TAIL, E, PAGE, WHOLE, EDGE, ONE, NATIVE, STAGES, PAIRS, k_ptr.dtype.element_ty, PRECISION
    )

    at = plane * stride_qb + (row + token).to(tl.int64) * stride_qs + head * stride_qh
    queries, gain = load_queries(q_ptr, at, valid, stored, sizes, D_MAIN)
    if SCALED and q_ptr.dtype.element_ty != tl.float32:
        scale *= descaled(gain, q_descale_ptr, known * (KV_HEADS * group) + head, sequence, batch)[:, None]
    slope = (
        None
        if alibi_slopes_ptr is None
        else load_slope(alibi_slopes_ptr, stride_slopes, known, head, batch)[:, None]
    )
    modifiers = Modifiers(scale, softcap, slope)
    scoring = Scoring(i, head, known, length - count, origin, band, modifiers, mask_tensors, score_tensors)
    unit = 1.0 if SCALED else unit_behind(modifiers, SCORE)

    m_i, l_i = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, E_MAIN // 2 if PAIRS else E_MAIN], tl.float32)
    sums = RunningSums(acc, acc, m_i, tl.zeros([BLOCK_M, BLOCK_N], tl.float32) if BY_PLACE else l_i)
    if SPLIT_SIZE:  # masks all tiles, even if FULL is True
        acc, l_i, m_i = sums_of_splits(
            low, high, unit, sums, queries, scoring, stored, sizes, MASK, SCORE, SPLIT_SIZE
        )
    else:
        if states_ptr is not None:
            blocks: tl.constexpr = BlockSizes(
                BLOCK_M, BLOCK_N, GRAIN_M, GRAIN, KV_HEADS, cu_seqlens_q_ptr is not None
            )
            states = States(states_ptr, runs_ptr, planes, columns, room, batch, s, group)
            runs = list_runs(states, blocks, work, first, last, SplitTokens(low, high, all_low, all_high))
            sums = sums_of_runs(runs, sums, queries, scoring, stored, sizes, MASK, SCORE)
        else:
            tiles = tiles_of(low, high, all_low, all_high, WHOLE, EDGE)
            for MASKED in tl.static_range(0 if FULL else 1, 2):
                sums = sweep(sums, tiles, queries, scoring, stored, sizes, MASK, SCORE, MASKED)
        acc, l_i = sums.acc, tl.sum(sums.l_i, 1) if BY_PLACE else sums.l_i
        acc = tl.join(acc, sums.odd).reshape(BLOCK_M, E_MAIN) if PAIRS else acc
        m_i = tl.where(l_i == 0.0, float("-inf"), sums.m_i * unit)

    if EARLY:  # if launched earlier, the next kernel would crowd the idle SMs
        gdc_launch_dependents()
    acc = tl.where(sees_any(i, band)[:, None], acc, 0.0)  # clears rows without keys
    is_whole = not SCHEDULED or splits == 1
    if sinks_ptr is not None:  # `combine` adds the sink to split sequences
        sink = tl.load(
            sinks_ptr + head, mask=r < tl.where(is_whole & (not past), rows, 0), other=float("-inf")
        )
        share, _, l_i, m_i = shares(l_i, m_i, sink.to(tl.float32) * LOG2E)
        acc *= share[:, None]
    l_i = tl.where(l_i == 0.0, 1.0, l_i)
    acc, lse2 = acc / l_i[:, None], m_i + tl.log2(l_i)
    e = tl.arange(0, E_MAIN)
    if is_whole:
        into = plane * stride_ob + (row + token).to(tl.int64) * stride_os + head * stride_oh
        mine = valid[:, None] & (e < E)[None, :]
        tl.store(out_ptr + into[:, None] + e[None, :], acc.to(out_ptr.dtype.element_ty), mask=mine)
        tl.store(lse_ptr + plane * stride_lb + head * stride_lh + row + token, lse2 * LN2, mask=valid)
    else:
        line = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(
            split_ptr + line[:, None] * E_MAIN + e[None, :], acc, mask=valid[:, None] & (e >= 0)[None, :]
        )
        tl.store(split_ptr + lines.to(tl.int64) * E_MAIN + line, lse2, mask=valid)
