"""Attention over a paged cache (FlashDecoding; Dao et al., 2023): a program for each part of a sequence and KV head.

The query heads of a group, times the query tokens of a sequence, are the rows of a tile, so that what is stored is read
once. What the parts are, and their sum, is parts.py.
"""

import triton
import triton.language as tl

from .decode_tiles import clear_range, sweep, tile_at
from .paged import claimed, entries_at, page_in, place
from .parts import join, join_sink
from .stored_bytes import power_below
from .tile import LN2, LOG2E, key_range, sees_broken, visible

# Parameters whose divisibility decides nothing, and must not compile a kernel again.
COUNTS = (
    "pages", "table_b", "slopes_b", "batch", "group", "s", "slots", "level", "limit", "left", "right", "prefix",
)  # fmt: skip


@triton.jit
def load_queries(ptr, at, columns, some, WIDTH: tl.constexpr):
    """Rows of q that begin at ``at``; zeros but for ``some`` of them."""
    return tl.load(ptr + at[:, None] + columns[None, :], mask=some[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def strike(
    into, some, i, origin, before, clear_low, clear_high, high, begin, end,
    v_ptr, v_scale_ptr, table_ptr, v_p, v_t, vs_p, vs_t, pages, left, right, prefix,
    E: tl.constexpr, SCALED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
    PAGE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Overwrite with NaN the rows ``into`` that see a value which is not finite, and was left out of the products."""
    for t in range(before + tl.cdiv(tl.maximum(high - clear_high, 0), EDGE)):
        n = tile_at(t, origin, before, clear_low, clear_high, EDGE, True)
        j = n + tl.arange(0, EDGE)
        stored = (j >= begin) & (j < end)
        seen = visible(i[:, None], j[None, :], begin, end, left, right, prefix, LEFT, RIGHT, PREFIX)
        low_half, high_half = entries_at(table_ptr, n, end, PAGE, EDGE)
        page = page_in(low_half, high_half, n, pages, PAGE, EDGE)
        for c in range(0, E, 16):  # few columns at a time: these registers would be spilled elsewhere
            columns = c + tl.arange(0, 16)
            mine = (columns < E)[None, :]
            at = place(page, n, v_p, v_t, PAGE, EDGE)[:, None] + columns[None, :]
            v = tl.load(v_ptr + at, mask=stored[:, None] & mine, other=0.0).to(tl.float32)
            if SCALED:
                v *= tl.load(v_scale_ptr + place(page, n, vs_p, vs_t, PAGE, EDGE), mask=stored, other=0.0)[:, None]
            tl.store(into[:, None] + columns[None, :], float("nan"), mask=sees_broken(seen, v) & some[:, None] & mine)


@triton.jit
def in_range(q, q_tail, D_TAIL: tl.constexpr, LATENT: tl.constexpr):
    """Queries as fp16, which meets 8-bit keys, rows scaled by powers of two to be in its range; what undoes the scale.

    The tail of a latent key is no such key, and that of its query keeps its dtype.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), 1)
    if D_TAIL:
        largest = tl.maximum(largest, tl.max(tl.abs(q_tail.to(tl.float32)), 1))
    power, gain = power_below(largest)
    if D_TAIL:
        q_tail = (q_tail.to(tl.float32) * power[:, None]).to(q.dtype if LATENT else tl.float16)
    return (q.to(tl.float32) * power[:, None]).to(tl.float16), q_tail, gain


@triton.jit(do_not_specialize=COUNTS)
def decode(
    q_ptr, k_ptr, tail_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, starts_ptr, lengths_ptr, cu_q_ptr,
    slopes_ptr, sinks_ptr, schedule_ptr, out_ptr, lse_ptr, part_ptr,
    k_desc, tail_desc,
    q_b, q_s, q_h, k_p, k_t, k_g, tail_p, tail_t, tail_g, v_p, v_t, v_g, ks_p, ks_t, ks_g, vs_p, vs_t, vs_g,
    pages, table_b, out_b, out_s, out_h, lse_b, lse_h, slopes_b,
    batch, group, s, slots, level, limit, left, right, prefix, scale, softcap,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, TAIL: tl.constexpr, E: tl.constexpr,
    E_MAIN: tl.constexpr, LATENT: tl.constexpr, SCALED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PREFIX: tl.constexpr, VARLEN: tl.constexpr, ONE: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr,
    SINKS: tl.constexpr, SCHEDULED: tl.constexpr, SPLIT_SIZE: tl.constexpr, CLEAR: tl.constexpr, PAGE: tl.constexpr,
    TMA: tl.constexpr, NATIVE: tl.constexpr, KV_HEADS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EDGE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes out ``[b, s, h, e]`` and the LSE ``[b, h, s]``, or packed ``[t, h, e]`` and ``[h, t]``, or parts of them.

    ``CLEAR``: tiles that all rows see whole need no mask; without it, all have one. ``SPLIT_SIZE``: so many tokens are
    added up at a time, and joined as parts are, so that parts of a split_size each make no difference to any bit.
    """
    pid = tl.program_id(0)
    kv_head = (pid // BLOCKS % KV_HEADS).to(tl.int64)
    sequence, block, begin, end, parts, row, count = claimed(
        pid, schedule_ptr + level, cu_q_ptr, slots, batch, group, s, SCHEDULED, VARLEN, KV_HEADS, BLOCKS, BLOCK_M
    )
    if SCHEDULED:
        if sequence < 0:
            return
    past = sequence >= batch  # what follows the last packed sequence
    known = tl.where(past, 0, sequence)
    length = tl.where(past, 0, tl.maximum(tl.minimum(tl.load(lengths_ptr + known), limit), 0))
    begin = tl.minimum(tl.maximum(begin, tl.load(starts_ptr + known)), length)
    end = tl.minimum(end, length)
    plane = 0
    if not VARLEN:
        plane = sequence
    wide = tl.cast(plane, tl.int64)
    table_ptr += known.to(tl.int64) * table_b
    k_ptr += kv_head * k_g
    v_ptr += kv_head * v_g
    tail_ptr += kv_head * tail_g
    if SCALED:
        k_scale_ptr += kv_head * ks_g
        v_scale_ptr += kv_head * vs_g
    d, e = tl.arange(0, D_MAIN), tl.arange(0, E_MAIN)
    MAIN: tl.constexpr = E if LATENT else D_MAIN  # channels of a query before its tail
    PLAIN: tl.constexpr = not (SOFTCAP or SLOPES)
    APART: tl.constexpr = EDGE == BLOCK_N and BLOCK_M == 16  # there are registers for sums by place
    unit = scale * LOG2E if PLAIN else 1.0

    first_row = block * BLOCK_M
    r = first_row + tl.arange(0, BLOCK_M)
    some = r < count * group
    token, head = r // group, kv_head * group + r % group
    i = length - count + token
    at_q = wide * q_b + (row + token).to(tl.int64) * q_s + head * q_h
    q = load_queries(q_ptr, at_q, d, some, E if LATENT else D)
    q_tail = q
    if D_TAIL:
        q_tail = load_queries(q_ptr + MAIN, at_q, tl.arange(0, D_TAIL), some, D - MAIN)
    gain = tl.full([BLOCK_M], 1.0, tl.float32)
    if SCALED and q.dtype != tl.float32:
        q, q_tail, gain = in_range(q, q_tail, D_TAIL, LATENT)
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes_ptr + known * slopes_b + head, mask=some, other=0).to(tl.float32) * LOG2E
        slope = slope[:, None]

    first, last = first_row // group, tl.minimum((first_row + BLOCK_M - 1) // group + 1, count)
    i0, i1 = length - count + first, length - count + last
    low, high, all_low, all_high = key_range(i0, i1, begin, end, left, right, prefix, LEFT, RIGHT, PREFIX)
    high = tl.where(first < last, high, low)
    origin, before, clear_low, clear_high = clear_range(low, high, all_low, all_high, BLOCK_N, EDGE, CLEAR)
    stained = False
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    sums = total
    if APART:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, E_MAIN], tl.float32)
    sections = 1
    if SPLIT_SIZE:
        sections, all_acc, all_total, all_top = tl.cdiv(high, SPLIT_SIZE) - low // SPLIT_SIZE, acc, total, top
    for split_size in range(sections):
        here, stop, clear_from, clear_to = origin, high, clear_low, clear_high
        if SPLIT_SIZE:  # not CLEAR
            begins = (low // SPLIT_SIZE + split_size) * SPLIT_SIZE
            here, stop = tl.maximum(low, begins) // EDGE * EDGE, tl.minimum(high, begins + SPLIT_SIZE)
            clear_from, clear_to = here, here
        for MASKED in tl.static_range(0 if CLEAR else 1, 2):
            tiles = (clear_to - clear_from) // BLOCK_N
            if MASKED:
                tiles = before + tl.cdiv(tl.maximum(stop - clear_to, 0), EDGE)
            acc, top, sums, stained = sweep(
                acc, top, sums, stained, tiles, here, before, clear_from, clear_to, table_ptr, pages,
                q, q_tail, gain, i, slope, low, high, begin, end,
                k_ptr, tail_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_desc, tail_desc,
                k_p, k_t, tail_p, tail_t, v_p, v_t, ks_p, ks_t, vs_p, vs_t,
                left, right, prefix, scale, softcap, unit,
                D, D_MAIN, D_TAIL, TAIL, E, E_MAIN, LATENT, SCALED, LEFT, RIGHT, PREFIX, ONE, SOFTCAP, SLOPES,
                PAGE, TMA and not MASKED, NATIVE, APART, MASKED, EDGE if MASKED else BLOCK_N, STAGES, PRECISION,
            )  # fmt: skip
        total = tl.sum(sums, 1) if APART else sums
        if SPLIT_SIZE:
            divisor = tl.where(total == 0.0, 1.0, total)
            lse2 = tl.fma(top, 1.0 if SCALED else unit, tl.log2(divisor))
            lse2 = tl.where(total == 0.0, float("-inf"), lse2)
            share = (1.0 / divisor)[:, None]
            all_acc, all_total, all_top = join(all_acc, all_total, all_top, acc * share, lse2)
            acc, sums, top = acc * 0, sums * 0, tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SPLIT_SIZE:
        acc, total, top = all_acc, all_total, all_top
    else:
        top = tl.where(total == 0.0, float("-inf"), top if SCALED else top * unit)

    whole = not SCHEDULED or parts == 1
    if SINKS:  # into parts it goes when they have been joined
        sink = tl.load(sinks_ptr + head, mask=some & whole & (not past), other=float("-inf")).to(tl.float32)
        share, total, top = join_sink(total, top, sink * LOG2E)
        acc *= share[:, None]
    total = tl.where(total == 0.0, 1.0, total)
    acc, lse2 = acc / total[:, None], top + tl.log2(total)
    if whole:
        into = wide * out_b + (row + token).to(tl.int64) * out_s + head * out_h
        mine = some[:, None] & (e < E)[None, :]
        tl.store(out_ptr + into[:, None] + e[None, :], acc.to(out_ptr.dtype.element_ty), mask=mine)
        tl.store(lse_ptr + wide * lse_b + head * lse_h + row + token, lse2 * LN2, mask=some)
    else:
        line = pid.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        part = part_ptr + line[:, None] * E_MAIN + e[None, :]
        tl.store(part, acc, mask=some[:, None] & (e >= 0)[None, :])
        lines = (slots + VARLEN).to(tl.int64) * (KV_HEADS * BLOCKS * BLOCK_M)
        tl.store(part_ptr + lines * E_MAIN + line, lse2, mask=some)
    if not ONE and stained:
        tl.debug_barrier()
        if whole:
            rows_of = out_ptr + wide * out_b + (row + token).to(tl.int64) * out_s + head * out_h
            strike(
                rows_of, some, i, origin, before, clear_low, clear_high, high, begin, end,
                v_ptr, v_scale_ptr, table_ptr, v_p, v_t, vs_p, vs_t, pages, left, right, prefix,
                E, SCALED, LEFT, RIGHT, PREFIX, PAGE, EDGE,
            )  # fmt: skip
        else:
            lines_of = part_ptr + (pid.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)) * E_MAIN
            strike(
                lines_of, some, i, origin, before, clear_low, clear_high, high, begin, end,
                v_ptr, v_scale_ptr, table_ptr, v_p, v_t, vs_p, vs_t, pages, left, right, prefix,
                E, SCALED, LEFT, RIGHT, PREFIX, PAGE, EDGE,
            )  # fmt: skip
