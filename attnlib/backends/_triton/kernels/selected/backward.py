"""The backward over the keys that lists select, without atomics for dq, dk and dv.

A pass over queries writes dq. Gradients of keys are sums over the queries whose lists select them: a pass
over keys writes partial sums in fp32, and a third kernel adds them in a fixed order. If many heads share a
list, ``selected_weights`` computes its weights instead, and ``sums.py`` the gradients.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..band import KeyBand, bounds, key_range, origin_of, visible
from ..scores import Modifiers, changed, load_slope, modify, placed, unchanged, unit_behind
from ..tile import (
    COUNTS,
    Channels,
    Rows,
    TilePlace,
    Work,
    add_products,
    gathered_tile,
    locate,
    owner,
    products,
    scatter_tile,
    tokens_of,
    zeros,
)
from .forward import blocks_at, inside, selected_tile
from .sums import INVERTED, SelectedCall, keys_of, load_part


@triton.jit(do_not_specialize=COUNTS)
def selected_backward_queries(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr,
    lists_ptr,  # as list_blocks writes them, or list_unions if QUERIES > 1
    dslopes_ptr, alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, mask_tensors, score_tensors, grad_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_dob, stride_dos, stride_doh, stride_dqb, stride_dqs, stride_dqh,
    stride_lb, stride_lh, stride_slopes, stride_sb, stride_sh,
    batch, heads, group, rows, planes, slots, s, t, left, right, prefix, scale, softcap,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    QUERIES: tl.constexpr, OWN_VALUES: tl.constexpr, PRECISION: tl.constexpr, MASK: tl.constexpr,
    SCORE: tl.constexpr,
    DERIVATIVE: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of queries, dq ``[b, s, h, d]``, by the programs of ``selected_forward``.

    If slopes of ALiBi need gradients, each program writes those of its queries and heads, ``[b, h, s]``
    (packed: ``[h, s + b + 1]``). Gradients of tensors that a score function captures are accumulated with
    atomics, in no fixed order.
    """
    HEADS: tl.constexpr = BLOCK_M // QUERIES
    head_tiles = tl.cdiv(rows, HEADS)
    units = heads // rows * head_tiles
    pid, tile = tl.program_id(0), tl.program_id(0) // units
    work = locate(tile, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, QUERIES, False)
    if work.start >= work.rows:
        return
    first = pid % units // head_tiles * rows
    query, m = tl.arange(0, BLOCK_M) // HEADS, pid % head_tiles * HEADS + tl.arange(0, BLOCK_M) % HEADS
    valid = (m < rows) & (query < work.rows - work.start)
    head = tl.where(valid, first + m, first)
    sequence, keys, token = work.sequence, work.others, work.row + work.start
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    slope = None
    if alibi_slopes_ptr is not None:
        slope = load_slope(alibi_slopes_ptr, stride_slopes, sequence, head, batch)[:, None]
    modifiers = Modifiers(scale, softcap, slope)

    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)
    e: tl.constexpr = Channels(E, E_MAIN, 0)
    of_q, of_k = TilePlace(work.plane, token, 0), TilePlace(work.plane, work.other, first // group)
    k_rows = Rows(k_ptr, stride_kb, stride_kt, stride_kg)
    v_rows = Rows(v_ptr, stride_vb, stride_vt, stride_vg)
    of_head = head.to(tl.int64)
    q_at, dout_at = query * stride_qs + of_head * stride_qh, query * stride_dos + of_head * stride_doh
    q = gathered_tile(Rows(q_ptr, stride_qb, stride_qs, stride_qh), of_q, q_at, 1, valid, d)
    dout = gathered_tile(Rows(dout_ptr, stride_dob, stride_dos, stride_doh), of_q, dout_at, 1, valid, e)
    at = work.plane * stride_lb + token + query + head * stride_lh
    lse2 = tl.load(lse2_ptr + at, mask=valid, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + at, mask=valid, other=0.0)[:, None]
    dq, dslope = zeros(d, BLOCK_M), tl.zeros([BLOCK_M], tl.float32)

    i, of_list = tl.zeros([1, 1], tl.int32) + (keys - work.rows + work.start), work.plane * s + token
    if QUERIES > 1:  # as in the forward
        last = keys - tl.maximum(work.rows - work.start - QUERIES, 0)
        of_tile = key_range(keys - work.rows + work.start, last, band)
        i, of_list = i + query[:, None], tile.to(tl.int64)
        of_row = key_range(i, i + 1, band)
    LOW: tl.constexpr = not (left is None and key_starts_ptr is None and origin_ptr is None)
    list_ptr = lists_ptr + (of_list * planes + first * planes // heads) * (QUERIES * slots + 1)
    total = tl.load(list_ptr) * BLOCK_SIZE
    following = blocks_at(list_ptr + 1, 0, total, BLOCK_SIZE, BLOCK_N)
    for x in tl.range(0, total, BLOCK_N, num_stages=STAGES):
        # Blocks are read one tile ahead, as in the forward.
        n, block = x + tl.arange(0, BLOCK_N), following
        following = blocks_at(list_ptr + 1, x + BLOCK_N, total, BLOCK_SIZE, BLOCK_N)
        first_key = (block >> QUERIES) * BLOCK_SIZE + x % BLOCK_SIZE - origin.key
        if QUERIES > 1:
            key, is_chosen = first_key + tl.arange(0, BLOCK_N), ((block >> query) & 1) > 0
            j = key[None, :]
            seen = inside(j, of_row[0], tl.where(is_chosen[:, None], of_row[1], 0), LOW)
            loaded = inside(key, of_tile[0], of_tile[1], LOW)
        else:
            key = block * BLOCK_SIZE + n % BLOCK_SIZE - origin.key
            j = key[None, :]
            seen = visible(i, j, band) & (n < total)[None, :]
            loaded = tl.max(seen.to(tl.int32), 0) > 0  # all rows are of one query
        k = selected_tile(k_rows, of_k, first_key, key, loaded, d, QUERIES > 1)
        place = placed(origin, sequence, head[:, None], i, j, keys - work.rows)
        if MASK is not None:
            seen = seen & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
        seen = seen & valid[:, None]
        s_ij, derivative = modify(products(q, k, d, PRECISION), modifiers, i + band.offset, j)
        score = changed(s_ij, modifiers, place, score_tensors, SCORE)
        p = tl.exp2(score * unit_behind(modifiers, SCORE) - lse2)
        v = k
        if OWN_VALUES or D_MAIN != E_MAIN:
            v = selected_tile(v_rows, of_k, first_key, key, loaded, e, QUERIES > 1)
        ds = tl.where(seen, p * (products(dout, v, e, PRECISION) - delta), 0.0)
        ds = unchanged(ds, s_ij, modifiers, seen, place, score_tensors, grad_tensors, DERIVATIVE, GRADIENTS)
        if dslopes_ptr is not None:
            dslope -= tl.sum(ds * tl.abs(i + band.offset - j).to(tl.float32), 1)
        ds = tl.where(seen, ds * derivative, 0.0)
        dq = add_products(dq, ds, k, d, PRECISION)

    dq_rows, dq_at = (
        Rows(dq_ptr, stride_dqb, stride_dqs, stride_dqh),
        query * stride_dqs + of_head * stride_dqh,
    )
    scatter_tile(dq_rows, of_q, dq_at, 1, valid, dq, scale, d)
    if dslopes_ptr is not None:  # packed sequences share a row, and each has one more number at its end
        at = sequence * stride_sb + head * stride_sh + token + query
        tl.store(dslopes_ptr + at, dslope, mask=valid)


@triton.jit(do_not_specialize=(*COUNTS, "first", "parts"))
def selected_weights(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, lists_ptr, weights_ptr, at_ptr,
    dslopes_ptr, alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, mask_tensors, score_tensors, grad_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_dob, stride_dos, stride_doh, stride_lb, stride_lh, stride_slopes, stride_sb, stride_sh,
    batch, heads, group, rows, planes, slots, s, t, left, right, prefix, first, parts, width, scale, softcap,
    D: tl.constexpr, E: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHANNELS: tl.constexpr, STAGES: tl.constexpr, OWN_VALUES: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr, DERIVATIVE: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Write ``weights`` ``[queries, 2, h, width]``: probabilities, and gradients of scaled products.

    They belong to listed keys, from query ``first`` on, whose numbers are written to ``at`` ``[queries, g,
    width]``, -1 for those that the band hides. One program has ``BLOCK_M`` of the ``rows`` heads that share a
    list and a KV head, and one of ``parts`` parts of the list. It multiplies ``CHANNELS`` channels at a time.
    Gradients of slopes are those of ``selected_backward_queries``; they need one part.
    """
    head_tiles = tl.cdiv(rows, BLOCK_M)
    units = heads // rows * head_tiles * parts
    pid, number = tl.program_id(0), tl.program_id(0) // units
    work = locate(first + number, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, 1, False)
    if work.start >= work.rows:
        return
    unit = pid // parts % (heads // rows * head_tiles)
    of_list, m = unit // head_tiles * rows, unit % head_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = m < rows
    head = tl.where(valid, of_list + m, of_list).to(tl.int64)
    sequence, keys, plane, token = work.sequence, work.others, work.plane, work.row + work.start
    list_ptr = lists_ptr + ((plane * s + token) * planes + of_list * planes // heads) * (slots + 1)
    total = tl.load(list_ptr) * BLOCK_SIZE
    tiles = tl.cdiv(tl.cdiv(total, BLOCK_N), parts)
    begin = pid % parts * tiles * BLOCK_N
    end = tl.minimum(begin + tiles * BLOCK_N, total)
    if begin >= end:
        return
    origin = origin_of(origin_ptr, sequence, batch)
    low, high = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(low, high, left, right, prefix, origin.query - origin.key, origin.key)
    slope = None
    if alibi_slopes_ptr is not None:
        slope = load_slope(alibi_slopes_ptr, stride_slopes, sequence, head, batch)[:, None]
    modifiers = Modifiers(scale, softcap, slope)

    q_at = q_ptr + (plane * stride_qb + token * stride_qs) + head * stride_qh
    dout_at = dout_ptr + (plane * stride_dob + token * stride_dos) + head * stride_doh
    kv_head = of_list // group
    k_ptr += plane * stride_kb + work.other * stride_kt + kv_head * stride_kg
    v_ptr += plane * stride_vb + work.other * stride_vt + kv_head * stride_vg
    at = plane * stride_lb + token + head * stride_lh
    lse2 = tl.load(lse2_ptr + at, mask=valid, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + at, mask=valid, other=0.0)[:, None]
    p_at = weights_ptr + (tl.cast(number, tl.int64) * 2 * heads + head) * width
    i, dslope = tl.zeros([1, 1], tl.int32) + (keys - work.rows + work.start), tl.zeros([BLOCK_M], tl.float32)
    for x in range(begin, end, BLOCK_N):
        n = x + tl.arange(0, BLOCK_N)
        key = (
            blocks_at(list_ptr + 1, x, total, BLOCK_SIZE, BLOCK_N) * BLOCK_SIZE + n % BLOCK_SIZE - origin.key
        )
        j = key[None, :]
        seen = visible(i, j, band) & (n < end)[None, :]
        loaded = tl.max(seen.to(tl.int32), 0) > 0
        key = tl.where(loaded, key, 0).to(tl.int64)
        k_at, v_at = k_ptr + key * stride_kt, v_ptr + key * stride_vt
        s_ij, dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if OWN_VALUES or E % CHANNELS > 0:
            for c in tl.range(0, E, CHANNELS, num_stages=STAGES):
                v = load_part(v_at, c, loaded, E, CHANNELS)
                dp = tl.dot(load_part(dout_at, c, valid, E, CHANNELS), v.T, dp, input_precision=PRECISION)
            SHARED: tl.constexpr = 0
        else:  # the values are the first channels of the keys
            for c in tl.range(0, E, CHANNELS, num_stages=STAGES):
                k = load_part(k_at, c, loaded, E, CHANNELS).T
                dp = tl.dot(load_part(dout_at, c, valid, E, CHANNELS), k, dp, input_precision=PRECISION)
                s_ij = tl.dot(load_part(q_at, c, valid, E, CHANNELS), k, s_ij, input_precision=PRECISION)
            SHARED: tl.constexpr = E
        for c in tl.range(SHARED, D, CHANNELS, num_stages=STAGES):
            k = load_part(k_at, c, loaded, D, CHANNELS)
            s_ij = tl.dot(load_part(q_at, c, valid, D, CHANNELS), k.T, s_ij, input_precision=PRECISION)

        place = placed(origin, sequence, head[:, None].to(tl.int32), i, j, keys - work.rows)
        if MASK is not None:
            seen = seen & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
        seen = seen & valid[:, None]
        s_ij, derivative = modify(s_ij, modifiers, i + band.offset, j)
        score = changed(s_ij, modifiers, place, score_tensors, SCORE)
        p = tl.where(seen, tl.exp2(score * unit_behind(modifiers, SCORE) - lse2), 0.0)
        ds = tl.where(seen, p * (dp - delta), 0.0)
        ds = unchanged(ds, s_ij, modifiers, seen, place, score_tensors, grad_tensors, DERIVATIVE, GRADIENTS)
        if dslopes_ptr is not None:
            dslope -= tl.sum(ds * tl.abs(i + band.offset - j).to(tl.float32), 1)
        ds = tl.where(seen, ds * derivative, 0.0)
        stored = valid[:, None] & (n < width)[None, :]
        p_to = p_at[:, None] + n[None, :]
        tl.store(p_to, p.to(weights_ptr.dtype.element_ty), mask=stored)
        tl.store(p_to + heads * width, ds.to(weights_ptr.dtype.element_ty), mask=stored)
        if unit % head_tiles == 0:
            unit_at = at_ptr + (tl.cast(number, tl.int64) * (heads // rows) + unit // head_tiles) * width
            tl.store(unit_at + n, tl.where(loaded, key, -1).to(tl.int32), mask=n < width)
    if dslopes_ptr is not None:  # packed sequences share a row, and each has one more number at its end
        tl.store(dslopes_ptr + sequence * stride_sb + head * stride_sh + token, dslope, mask=valid)


class KeyWork(NamedTuple):
    """Some keys ``j`` of a KV head, and ``count`` lists that select them: from ``low`` on in ``choosers``.

    ``work`` has the head, and the tokens of the sequence. Partial sums go to the rows ``part``.
    """

    work: Work
    j: tl.tensor
    valid: tl.tensor
    low: tl.tensor
    count: tl.tensor
    part: tl.tensor


@triton.jit
def keys_of_block(
    call, edges_ptr, entries, blocks, BLOCK_SIZE: tl.constexpr, ITEM: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the work of a program that takes keys of one block, and up to ``ITEM`` lists with this block.

    Lists are inverted: block ``n`` is in the lists from ``edges[n]`` to ``edges[n + 1]``.
    """
    tiles, pid = tl.cdiv(BLOCK_SIZE, BLOCK_N), tl.program_id(0)
    item, head = pid // (call.shared * tiles), pid // tiles % call.shared
    block, nth = owner(edges_ptr, item, blocks, entries, 1, ITEM, 0)
    low, count = tokens_of(edges_ptr, block, blocks, entries)
    count = tl.where(block < blocks, count, 0)  # entries after the last edge select nothing
    work = keys_of(tl.minimum(block, blocks - 1), call, BLOCK_SIZE)
    n = pid % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    kv_head = work.head * call.shared + head
    of_head = Work(work.sequence, work.plane, kv_head, 0, work.row, work.rows, work.other, work.others)
    part = (tl.cast(item, tl.int64) * call.shared + head) * BLOCK_SIZE + n
    count = tl.minimum(count - nth * ITEM, ITEM)
    return KeyWork(of_head, work.start + n, n < BLOCK_SIZE, low + nth * ITEM, count, part)


@triton.jit(do_not_specialize=INVERTED)
def selected_backward_keys(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, parts_ptr, choosers_ptr, edges_ptr,
    alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, mask_tensors, score_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_dob, stride_dos, stride_doh, stride_lb, stride_lh, stride_slopes,
    batch, owners, shared, s, t, entries, blocks, left, right, prefix, scale, softcap,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    GROUP: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr, ITEM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """Write partial sums of dk and dv: fp32 rows of ``D`` and ``E`` numbers.

    A program computes them for ``BLOCK_N`` keys of a KV head, and up to ``ITEM`` lists that select their
    block. Its rows are the ``ROWS`` query heads of each list, ``BLOCK_M`` of them at a time. Score tiles are
    transposed, ``[BLOCK_N, BLOCK_M]``, so that the gradients of each key stay in registers.
    """
    call = SelectedCall(cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, s, t, owners, shared)
    found = keys_of_block(call, edges_ptr, entries, blocks, BLOCK_SIZE, ITEM, BLOCK_N)
    work, in_tile, count = found.work, found.valid, found.count * ROWS
    if count <= 0:
        return
    sequence, keys, queries = work.sequence, work.rows, work.others
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    of_q, of_k = TilePlace(work.plane, 0, 0), TilePlace(work.plane, work.row, work.head)
    q_rows = Rows(q_ptr, stride_qb, stride_qs, stride_qh)
    dout_rows = Rows(dout_ptr, stride_dob, stride_dos, stride_doh)
    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)
    e: tl.constexpr = Channels(E, E_MAIN, 0)
    lse2_ptr += work.plane * stride_lb
    delta_ptr += work.plane * stride_lb

    loaded = in_tile & (found.j >= start) & (found.j < end)
    k = gathered_tile(Rows(k_ptr, stride_kb, stride_kt, stride_kg), of_k, found.j, stride_kt, loaded, d)
    v = gathered_tile(Rows(v_ptr, stride_vb, stride_vt, stride_vg), of_k, found.j, stride_vt, loaded, e)
    dk, dv = zeros(d, BLOCK_N), zeros(e, BLOCK_N)
    j, m = found.j[:, None], tl.arange(0, BLOCK_M)
    # list_blocks counts one more query for each packed sequence.
    skipped = (sequence if cu_seqlens_q_ptr is not None else work.plane * s).to(tl.int32)
    first_query, kv_head = work.other.to(tl.int32), work.head.to(tl.int32)
    # The next step's lists are loaded one step ahead, since the addresses of its queries depend on them.
    lists = chooser(choosers_ptr, found.low, m // ROWS, m < count)
    for x in tl.range(0, count, BLOCK_M, num_stages=STAGES):
        valid = x + m < count
        token = tl.where(valid, lists // PLANES - skipped, first_query)
        if ROWS < GROUP:  # each query head has a list
            head = tl.where(valid, lists % PLANES, 0)
        else:
            head = tl.where(valid, kv_head * GROUP + (x + m) % ROWS, 0)
        lists = chooser(choosers_ptr, found.low, (x + BLOCK_M + m) // ROWS, x + BLOCK_M + m < count)
        q = gathered_tile(
            q_rows, of_q, token.to(tl.int64) * stride_qs + head.to(tl.int64) * stride_qh, 1, valid, d
        )
        rows_at = token + head * stride_lh
        lse2 = tl.load(lse2_ptr + rows_at, mask=valid, other=float("inf"))
        i = (keys - queries + token - first_query)[None, :]
        slope = None
        if alibi_slopes_ptr is not None:
            slope = load_slope(alibi_slopes_ptr, stride_slopes, sequence, head, batch)[None, :]
        modifiers = Modifiers(scale, softcap, slope)
        s_ij, derivative = modify(products(k, q, d, PRECISION), modifiers, i + band.offset, j)
        place = placed(origin, sequence, head[None, :], i, j, keys - queries)
        score = changed(s_ij, modifiers, place, score_tensors, SCORE)
        p = tl.exp2(score * unit_behind(modifiers, SCORE) - lse2[None, :])
        seen = visible(i, j, band)
        if SCORE is not None:  # the scores of rows that are not valid may be anything
            seen = seen & valid[None, :]
        if MASK is not None:
            seen = seen & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
        p = tl.where(seen, p, 0.0)
        dout = gathered_tile(
            dout_rows, of_q, token.to(tl.int64) * stride_dos + head * stride_doh, 1, valid, e
        )
        delta = tl.load(delta_ptr + rows_at, mask=valid, other=0.0)
        ds = p * (products(v, dout, e, PRECISION) - delta[None, :])
        ds = unchanged(ds, s_ij, modifiers, seen, place, score_tensors, None, DERIVATIVE, None) * derivative
        ds = tl.where(seen, ds, 0.0)
        dv = add_products(dv, p, dout, e, PRECISION)
        dk = add_products(dk, ds, q, d, PRECISION)

    of_part = TilePlace(0, 0, 0)
    scatter_tile(Rows(parts_ptr, 0, 0, 0), of_part, found.part, D + E, in_tile, dk, scale, d)
    scatter_tile(Rows(parts_ptr + D, 0, 0, 0), of_part, found.part, D + E, in_tile, dv, 1.0, e)


@triton.jit
def chooser(choosers_ptr, low, n, valid):
    """Return the number of the ``n``-th list from ``low`` on; 0 if it is not ``valid``."""
    return tl.load(choosers_ptr + low + n, mask=valid, other=0)
