"""The forward over the keys that lists select."""

import triton
import triton.language as tl

from ..band import KeyBand, bounds, key_range, origin_of, visible
from ..scores import LN2, LOG2E, Modifiers, changed, load_slope, modify, online_softmax, placed, unit_behind
from ..tile import COUNTS, Channels, Rows, TilePlace, gathered_tile, load_tile, locate, products


@triton.jit
def blocks_at(entries_ptr, at, total, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the blocks of ``BLOCK_N`` of the ``total`` selected keys, from number ``at`` on.

    It is one block if ``BLOCK_N`` divides the size of blocks, otherwise one for each key.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(entries_ptr + at // BLOCK_SIZE, mask=at < total, other=0)
    else:
        n = at + tl.arange(0, BLOCK_N)
        return tl.load(entries_ptr + n // BLOCK_SIZE, mask=n < total, other=0)


@triton.jit
def selected_tile(x, place, first, j, valid, channels, ADJACENT: tl.constexpr):
    """Load the valid ones of keys ``j``, which follow key ``first`` if they are ``ADJACENT``."""
    if ADJACENT:
        return load_tile(x, place, first, valid, channels, True)
    else:
        return gathered_tile(x, place, j, x.stride_t, valid, channels)


@triton.jit
def inside(j, low, high, LOW: tl.constexpr):
    """True if key ``j`` is in ``[low, high)``; without ``LOW``, ``low`` is 0, and so is the least ``j``."""
    return (j >= low) & (j < high) if LOW else j < high


@triton.jit(do_not_specialize=COUNTS)
def selected_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    lists_ptr,  # as list_blocks writes them, or list_unions if QUERIES > 1
    alibi_slopes_ptr, sinks_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, mask_tensors, score_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_slopes,
    batch, heads, group, rows, planes, slots, s, t, left, right, prefix, scale, softcap,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    QUERIES: tl.constexpr, OWN_VALUES: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """Write the output of attention ``[b, s, h, e]`` and the natural-log LSE ``[b, h, s]``.

    ``rows`` adjacent query heads share a list and a KV head. The values are the first channels of the keys
    unless ``OWN_VALUES``. One program computes ``BLOCK_M // QUERIES`` of the heads for ``QUERIES``
    neighbouring queries, over ``BLOCK_N`` keys at a time that some of the queries select. These keys lie in
    one block if ``BLOCK_N`` divides its size, which it does if ``QUERIES > 1``.
    """
    # Programs of a KV head run together, because the L2 cache may hold its keys but not those of all heads.
    HEADS: tl.constexpr = BLOCK_M // QUERIES
    parts = tl.cdiv(rows, HEADS)
    units = tl.maximum(group // rows, 1) * parts  # programs for a query and a KV head
    tiles = tl.num_programs(0) // (heads // group * units)
    pid, unit = tl.program_id(0) // units, tl.program_id(0) % units
    work = locate(pid % tiles, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, QUERIES, False)
    if work.start >= work.rows:
        return
    first, part = pid // tiles * group + unit // parts * rows, unit % parts * HEADS
    query, m = tl.arange(0, BLOCK_M) // HEADS, part + tl.arange(0, BLOCK_M) % HEADS
    valid, head = (m < rows) & (query < work.rows - work.start), first + m
    sequence, keys, token = work.sequence, work.others, work.row + work.start
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    slope = None
    if alibi_slopes_ptr is not None:
        slope = load_slope(alibi_slopes_ptr, stride_slopes, sequence, tl.where(valid, head, 0), batch)[
            :, None
        ]
    modifiers = Modifiers(scale, softcap, slope)
    factor = unit_behind(modifiers, SCORE)

    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)
    e: tl.constexpr = Channels(E, E_MAIN, 0)
    of_q, of_k = TilePlace(work.plane, token, 0), TilePlace(work.plane, work.other, first // group)
    k_rows = Rows(k_ptr, stride_kb, stride_kt, stride_kg)
    v_rows = Rows(v_ptr, stride_vb, stride_vt, stride_vg)
    q_at = query * stride_qs + head.to(tl.int64) * stride_qh
    q = gathered_tile(Rows(q_ptr, stride_qb, stride_qs, stride_qh), of_q, q_at, 1, valid, d)
    m_i, l_i = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # a sink acts like a key whose value is 0
        known = valid & (sequence + head * 0 < batch)
        m_i = tl.load(sinks_ptr + head, mask=known, other=float("-inf")).to(tl.float32) * (LOG2E / factor)
        l_i = tl.where(m_i > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, E_MAIN], tl.float32)

    i, of_list = tl.zeros([1, 1], tl.int32) + (keys - work.rows + work.start), work.plane * s + token
    if QUERIES > 1:
        last = keys - tl.maximum(work.rows - work.start - QUERIES, 0)
        of_tile = key_range(keys - work.rows + work.start, last, band)
        i, of_list = i + query[:, None], (pid % tiles).to(tl.int64)
        of_row = key_range(i, i + 1, band)  # all that `visible` shows to a query, in fewer instructions
    LOW: tl.constexpr = not (left is None and key_starts_ptr is None and origin_ptr is None)
    list_ptr = lists_ptr + (of_list * planes + first * planes // heads) * (QUERIES * slots + 1)
    total = tl.load(list_ptr) * BLOCK_SIZE
    following = blocks_at(list_ptr + 1, 0, total, BLOCK_SIZE, BLOCK_N)
    for at in tl.range(0, total, BLOCK_N, num_stages=STAGES):
        # Blocks are read one tile ahead, so that the loads of keys do not wait for them.
        n, block = at + tl.arange(0, BLOCK_N), following
        following = blocks_at(list_ptr + 1, at + BLOCK_N, total, BLOCK_SIZE, BLOCK_N)
        first_key = (block >> QUERIES) * BLOCK_SIZE + at % BLOCK_SIZE - origin.key
        if QUERIES > 1:
            j, is_chosen = first_key + tl.arange(0, BLOCK_N), ((block >> query) & 1) > 0
            seen = inside(j[None, :], of_row[0], tl.where(is_chosen[:, None], of_row[1], 0), LOW)
            there = inside(j, of_tile[0], of_tile[1], LOW)
        else:  # all rows are of one query, so keys that it does not see need not be loaded
            j = block * BLOCK_SIZE + n % BLOCK_SIZE - origin.key
            seen = visible(i, j[None, :], band) & (n < total)[None, :]
            there = tl.max(seen.to(tl.int32), 0) > 0
        k = selected_tile(k_rows, of_k, first_key, j, there, d, QUERIES > 1)
        place = placed(origin, sequence, head[:, None], i, j[None, :], keys - work.rows)
        if MASK is not None:
            seen = seen & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
        p, _ = modify(products(q, k, d, PRECISION), modifiers, i + band.offset, j[None, :])
        p = changed(p, modifiers, place, score_tensors, SCORE)
        p = tl.where(seen, p, float("-inf"))
        m_i, p, correction = online_softmax(m_i, p, factor)
        l_i = l_i * correction + tl.sum(p, 1)
        if OWN_VALUES or D_MAIN != E_MAIN:
            v = selected_tile(v_rows, of_k, first_key, j, there, e, QUERIES > 1).main
        else:
            v = k.main
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)

    nothing = l_i == 0.0
    l_i = tl.where(nothing, 1.0, l_i)
    lse = tl.where(nothing, float("-inf"), m_i * (factor * LN2) + tl.log2(l_i) * LN2)
    tl.store(lse_ptr + (work.plane * stride_lb + token) + head * stride_lh + query, lse, mask=valid)
    columns = tl.arange(0, E_MAIN)
    out_at = out_ptr + (work.plane * stride_ob + token * stride_os)
    out_at += query[:, None] * stride_os + head[:, None] * stride_oh
    out = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at + columns[None, :], out, mask=valid[:, None] & (columns < E)[None, :])
