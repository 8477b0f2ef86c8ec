"""Attention over the keys of a cache that lists select; lists may be split, and the results merged."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..band import KeyBand, bounds, key_range, origin_of
from ..decode_tiles import DecodeSizes, RunningSums, Scoring, Stored, add_tile, load_queries
from ..paged import entries_at, page_in, tokens_of_split
from ..scores import LN2, LOG2E, Modifiers, descaled, load_slope, unit_behind
from ..split_kv import joined
from ..stored_bytes import pairs_at
from ..tile import COUNTS, Rows
from .lists import locate_query


@triton.jit
def entries_of(list_ptr, at, count, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, IN_BLOCK: tl.constexpr):
    """Load the entries of a list for its selected keys from ``at`` on, as two halves of 16 bits.

    If a tile lies in one block (``IN_BLOCK``), it has one entry; otherwise every key has its own. Keys after
    the ``count`` blocks of the list get any entry. :func:`~attnlib.backends._triton.kernels.paged.entry_of`
    says why entries are halved.
    """
    n = at if IN_BLOCK else at + tl.arange(0, BLOCK_N)
    half = list_ptr.to(tl.pointer_type(tl.uint16), bitcast=True) + 2 * tl.minimum(1 + n // BLOCK_SIZE, count)
    return tl.load(half), tl.load(half + 1)


@triton.jit
def selected_tokens(
    entries, at, end, key, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, IN_BLOCK: tl.constexpr
):
    """Return the first token of a tile that lies in one block, otherwise all of its tokens.

    Tokens count from index ``key``. Those of selected keys from ``end`` on are -1, which no query sees.
    """
    low, high = entries
    block = (low.to(tl.uint32) | (high.to(tl.uint32) << 16)).to(tl.int32)
    n = at if IN_BLOCK else at + tl.arange(0, BLOCK_N)
    return tl.where(n < end, block * BLOCK_SIZE + n % BLOCK_SIZE - key, -1)


@triton.jit(do_not_specialize=COUNTS)
def selected_decode(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lists_ptr, starts_ptr, lengths_ptr,
    cu_seqlens_q_ptr, alibi_slopes_ptr, sinks_ptr, origin_ptr, q_descale_ptr, out_ptr, lse_ptr, split_ptr,
    mask_tensors, score_tensors, stride_qb, stride_qs, stride_qh, stride_kp, stride_kt, stride_kg, stride_tp,
    stride_tt, stride_tg, stride_vp, stride_vt, stride_vg, stride_ksp, stride_kst, stride_ksg, stride_vsp,
    stride_vst, stride_vsg, stride_table, stride_ob, stride_os, stride_oh, stride_lb, stride_lh,
    stride_slopes, pages, batch, heads, group, rows, planes, slots, splits, lines, s, limit, left, right,
    prefix, scale, softcap, D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, TAIL: tl.constexpr,
    E: tl.constexpr, E_MAIN: tl.constexpr, LATENT: tl.constexpr, PAGE: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    TF32: tl.constexpr, PAIRS: tl.constexpr, EARLY: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """Write the output ``[b, s, h, e]`` and the LSE ``[b, h, s]``, or partial results of splits.

    ``rows`` adjacent query heads share a list and a KV head. One program computes ``BLOCK_M`` of them for one
    query, over one of the ``splits`` of its list. A split has ``lines`` rows, those of all queries and heads.
    A sink acts like a key of the first split whose value is 0.
    """
    if EARLY:
        gdc_wait()
    parts = tl.cdiv(rows, BLOCK_M)
    units = heads // rows * parts  # of one query and split; they run side by side, since they may share keys
    pid = tl.program_id(0)
    split = pid // units % splits
    work = locate_query(pid // (units * splits), cu_seqlens_q_ptr, None, lengths_ptr, batch, s, limit)
    if work.start >= work.rows:
        return
    known = tl.where(work.sequence < batch, work.sequence, 0)
    origin = origin_of(origin_ptr, known, batch)
    start, end = bounds(starts_ptr, None, known, work.others)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    i = work.others - work.rows + work.start
    low, high, _, _ = key_range(i, i + 1, band)
    first, part = pid % units // parts * rows, pid % parts * BLOCK_M
    m = part + tl.arange(0, BLOCK_M)
    valid = m < rows
    head, token = tl.where(valid, first + m, 0), work.row + work.start

    kv_head = (first // group).to(tl.int64)
    PER: tl.constexpr = 2 if PAIRS else 1  # channels in each loaded element
    k_ptr, v_ptr = k_ptr + kv_head * stride_kg, v_ptr + kv_head * stride_vg
    keys, values = (pairs_at(k_ptr), pairs_at(v_ptr)) if PAIRS else (k_ptr, v_ptr)
    k_rows = Rows(keys, stride_kp // PER, stride_kt // PER, stride_kg)
    tail_rows = Rows(k_rope_ptr + TAIL + kv_head * stride_tg, stride_tp, stride_tt, stride_tg)
    v_rows = Rows(None if LATENT else values, stride_vp // PER, stride_vt // PER, stride_vg)
    SCALED: tl.constexpr = k_scale_ptr is not None
    k_scale = Rows(k_scale_ptr + kv_head * stride_ksg if SCALED else None, stride_ksp, stride_kst, stride_ksg)
    v_scale = Rows(v_scale_ptr + kv_head * stride_vsg if SCALED else None, stride_vsp, stride_vst, stride_vsg)
    table_ptr += known.to(tl.int64) * stride_table
    stored = Stored(k_rows, tail_rows, v_rows, k_scale, v_scale, table_ptr, pages, low, high)
    PRECISION: tl.constexpr = "tf32" if TF32 else "ieee"
    # All rows of a tile are of one query, so they see the same keys.
    sizes: tl.constexpr = DecodeSizes(
        D, D_TAIL, E, PAGE, 0, BLOCK_N, True, NATIVE, STAGES, PAIRS, k_ptr.dtype.element_ty, PRECISION
    )
    at = work.plane * stride_qb + token * stride_qs + head.to(tl.int64) * stride_qh
    queries, gain = load_queries(q_ptr, at, valid, stored, sizes, D_MAIN)
    if SCALED and q_ptr.dtype.element_ty != tl.float32:
        scale *= descaled(gain, q_descale_ptr, known * heads + head, work.sequence, batch)[:, None]
    slope = None
    if alibi_slopes_ptr is not None:
        slope = load_slope(alibi_slopes_ptr, stride_slopes, known, head, batch)[:, None]
    modifiers = Modifiers(scale, softcap, slope)
    i += tl.zeros([BLOCK_M], tl.int32)
    scoring = Scoring(
        i, head, known, work.others - work.rows, origin, band, modifiers, mask_tensors, score_tensors
    )
    unit = 1.0 if SCALED else unit_behind(modifiers, SCORE)

    m_i, l_i = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        here = valid & (work.sequence < batch) & (split == 0)
        m_i = tl.load(sinks_ptr + head, mask=here, other=float("-inf")).to(tl.float32) * (LOG2E / unit)
        l_i = tl.where(m_i > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, E_MAIN // 2 if PAIRS else E_MAIN], tl.float32)
    sums = RunningSums(acc, acc, m_i, l_i)
    IN_BLOCK: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0 and origin_ptr is None
    list_ptr = lists_ptr + ((work.plane * s + token) * planes + first * planes // heads) * (slots + 1)
    count = tl.load(list_ptr)
    begin, end = tokens_of_split(0, count * BLOCK_SIZE, split, splits, BLOCK_N)
    # Load entries two tiles ahead, and page numbers one tile, so that loads of keys wait for neither.
    entries = entries_of(list_ptr, begin, count, BLOCK_SIZE, BLOCK_N, IN_BLOCK)
    n = selected_tokens(entries, begin, end, origin.key, BLOCK_SIZE, BLOCK_N, IN_BLOCK)
    named = entries_at(stored.table_ptr, n, high, PAGE, BLOCK_N)
    entries = entries_of(list_ptr, begin + BLOCK_N, count, BLOCK_SIZE, BLOCK_N, IN_BLOCK)
    for at in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        page = page_in(named, n, pages, PAGE, BLOCK_N)
        sums = add_tile(sums, page, n, queries, scoring, stored, sizes, MASK, SCORE, True, BLOCK_N)
        n = selected_tokens(entries, at + BLOCK_N, end, origin.key, BLOCK_SIZE, BLOCK_N, IN_BLOCK)
        named = entries_at(stored.table_ptr, n, high, PAGE, BLOCK_N)
        entries = entries_of(list_ptr, at + 2 * BLOCK_N, count, BLOCK_SIZE, BLOCK_N, IN_BLOCK)

    if EARLY:
        gdc_launch_dependents()
    acc = tl.join(sums.acc, sums.odd).reshape(BLOCK_M, E_MAIN) if PAIRS else sums.acc
    l_i = tl.where(sums.l_i == 0.0, 1.0, sums.l_i)
    acc, lse2 = acc / l_i[:, None], tl.where(sums.l_i == 0.0, float("-inf"), sums.m_i * unit + tl.log2(l_i))
    e = tl.arange(0, E_MAIN)
    if splits == 1:
        into = work.plane * stride_ob + token * stride_os + head * stride_oh
        mine = valid[:, None] & (e < E)[None, :]
        tl.store(out_ptr + into[:, None] + e[None, :], acc.to(out_ptr.dtype.element_ty), mask=mine)
        tl.store(lse_ptr + work.plane * stride_lb + head * stride_lh + token, lse2 * LN2, mask=valid)
    else:
        line = split.to(tl.int64) * lines + (work.plane * s + token) * heads + head
        tl.store(
            split_ptr + line[:, None] * E_MAIN + e[None, :], acc, mask=valid[:, None] & (e >= 0)[None, :]
        )
        tl.store(split_ptr + tl.cast(lines, tl.int64) * splits * E_MAIN + line, lse2, mask=valid)


@triton.jit(do_not_specialize=COUNTS)
def merge_splits(
    split_ptr, out_ptr, lse_ptr, lines, splits, heads, s,
    E: tl.constexpr, E_MAIN: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    TOGETHER: tl.constexpr, EARLY: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of ``splits``; a program merges ``TOGETHER`` rows and ``WIDTH`` channels.

    The ``lines`` rows are the query heads of all tokens. LSEs of splits are in log2 units, or ``NATURAL``.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    TILES: tl.constexpr = E_MAIN // WIDTH
    tile = tl.program_id(0) % TILES
    r, c = tl.program_id(0) // TILES * TOGETHER + tl.arange(0, TOGETHER), tile * WIDTH + tl.arange(0, WIDTH)
    valid, row, lines = r < lines, r.to(tl.int64), tl.cast(lines, tl.int64)
    of_lse = split_ptr + lines * splits * E_MAIN
    acc, l_i, m_i = joined(split_ptr, of_lse, row, lines, splits, valid, c, E_MAIN, AT_ONCE, NATURAL)
    l_i = tl.where(l_i == 0.0, 1.0, l_i)
    acc = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * E + c[None, :], acc, mask=valid[:, None] & (c < E)[None, :])
    token, head = row // heads, row % heads
    at = (token // s * heads + head) * s + token % s
    tl.store(lse_ptr + at, (m_i + tl.log2(l_i)) * LN2, mask=valid & (tile == 0))
