"""The backward over the keys that lists select, without atomics for dq, dk and dv.

A pass over queries writes dq. Gradients of keys are sums over the queries whose lists select them: a pass
over keys writes partial sums in fp32, and a third kernel adds them in a fixed order.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..band import KeyBand, bounds, origin_of, visible
from ..scores import Modifiers, changed, load_slope, modify, placed, unchanged, unit_behind
from ..tile import (
    COUNTS,
    ChannelBlocks,
    Channels,
    Rows,
    TilePlace,
    add_products,
    first_block,
    gathered_tile,
    locate,
    owner,
    products,
    scatter_tile,
    tokens_of,
    zeros,
)

# Counts of entries and blocks, which Triton must not specialize on either.
INVERTED = (*COUNTS, "entries", "blocks", "first")
NO_RESERVE: tl.constexpr = tl.constexpr(
    1 << 30
)  # for `owner`: no numbers between sequences, so it takes tokens


@triton.jit(do_not_specialize=COUNTS)
def selected_backward_queries(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr,
    lists_ptr,  # as list_blocks writes them
    dslopes_ptr, alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, mask_tensors, score_tensors, grad_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_dob, stride_dos, stride_doh, stride_dqb, stride_dqs, stride_dqh,
    stride_lb, stride_lh, stride_slopes, stride_sb, stride_sh,
    batch, heads, group, rows, planes, slots, s, t, left, right, prefix, scale, softcap,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, DERIVATIVE: tl.constexpr,
    GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of queries, dq ``[b, s, h, d]``, by the programs of ``selected_forward``.

    If slopes of ALiBi need gradients, each program writes those of its query and heads, ``[b, h, s]``
    (packed: ``[h, s + b + 1]``). Gradients of tensors that a score function captures are accumulated with
    atomics, in no fixed order.
    """
    head_tiles = tl.cdiv(rows, BLOCK_M)
    units = heads // rows * head_tiles
    pid = tl.program_id(0)
    work = locate(pid // units, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, 1, False)
    if work.start >= work.rows:
        return
    first = pid % units // head_tiles * rows
    m = pid % head_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = m < rows
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
    q = gathered_tile(Rows(q_ptr, stride_qb, stride_qs, stride_qh), of_q, head, stride_qh, valid, d)
    dout_rows = Rows(dout_ptr, stride_dob, stride_dos, stride_doh)
    dout = gathered_tile(dout_rows, of_q, head, stride_doh, valid, e)
    at = work.plane * stride_lb + token + head * stride_lh
    lse2 = tl.load(lse2_ptr + at, mask=valid, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + at, mask=valid, other=0.0)[:, None]
    dq, dslope = zeros(d, BLOCK_M), tl.zeros([BLOCK_M], tl.float32)

    i = tl.zeros([1, 1], tl.int32) + (keys - work.rows + work.start)
    list_ptr = lists_ptr + ((work.plane * s + token) * planes + first * planes // heads) * (slots + 1)
    total = tl.load(list_ptr) * BLOCK_SIZE
    for x in tl.range(0, total, BLOCK_N, num_stages=STAGES):
        n = x + tl.arange(0, BLOCK_N)
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(list_ptr + 1 + x // BLOCK_SIZE) + tl.zeros([BLOCK_N], tl.int32)
        else:
            block = tl.load(list_ptr + 1 + n // BLOCK_SIZE, mask=n < total, other=0)
        key = block * BLOCK_SIZE + n % BLOCK_SIZE - origin.key
        j = key[None, :]
        seen = visible(i, j, band) & (n < total)[None, :]
        loaded = tl.max(seen.to(tl.int32), 0) > 0  # all rows are of one query, as in the forward
        k = gathered_tile(k_rows, of_k, key, stride_kt, loaded, d)
        place = placed(origin, sequence, head[:, None], i, j, keys - work.rows)
        if MASK is not None:
            seen = seen & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
        seen = seen & valid[:, None]
        s_ij, derivative = modify(products(q, k, d, PRECISION), modifiers, i + band.offset, j)
        score = changed(s_ij, modifiers, place, score_tensors, SCORE)
        p = tl.exp2(score * unit_behind(modifiers, SCORE) - lse2)
        v = gathered_tile(v_rows, of_k, key, stride_vt, loaded, e)
        ds = tl.where(seen, p * (products(dout, v, e, PRECISION) - delta), 0.0)
        ds = unchanged(ds, s_ij, modifiers, seen, place, score_tensors, grad_tensors, DERIVATIVE, GRADIENTS)
        if dslopes_ptr is not None:
            dslope -= tl.sum(ds * tl.abs(i + band.offset - j).to(tl.float32), 1)
        ds = tl.where(seen, ds * derivative, 0.0)
        dq = add_products(dq, ds, k, d, PRECISION)

    dq_rows = Rows(dq_ptr, stride_dqb, stride_dqs, stride_dqh)
    scatter_tile(dq_rows, of_q, head, stride_dqh, valid, dq, scale, d)
    if dslopes_ptr is not None:  # packed sequences share a row, and each has one more number at its end
        at = sequence * stride_sb + head * stride_sh + token
        tl.store(dslopes_ptr + at, dslope, mask=valid)


class KeyWork(NamedTuple):
    """Keys ``j`` of a KV head, and the lists from ``low`` to ``high`` that select them.

    The lists are in the order of ``choosers``; without it, ``low`` is the number of a single list. Keys of
    the sequence begin at token ``key_row``, and queries at token ``query_row`` of batch entry ``plane``.
    Partial sums go to the rows ``part``.
    """

    sequence: tl.tensor
    plane: tl.tensor
    kv_head: tl.tensor
    key_row: tl.tensor
    keys: tl.tensor
    query_row: tl.tensor
    queries: tl.tensor
    j: tl.tensor
    valid: tl.tensor
    low: tl.tensor
    high: tl.tensor
    part: tl.tensor


@triton.jit
def keys_of_block(
    pid, edges_ptr, cu_q_ptr, cu_k_ptr, batch, kv_heads, planes, s, t, entries, blocks,
    BLOCK_SIZE: tl.constexpr, ITEM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the work of a program that takes keys of one block, and up to ``ITEM`` lists with this block.

    Lists are inverted: block ``n`` is in the lists from ``edges[n]`` to ``edges[n + 1]``.
    """
    owners = tl.minimum(planes, kv_heads)  # of blocks: lists, or KV heads if those have several lists
    shared, tiles = kv_heads // owners, tl.cdiv(BLOCK_SIZE, BLOCK_N)
    item, head = pid // (shared * tiles), pid // tiles % shared
    block, nth = owner(edges_ptr, item, blocks, entries, 1, ITEM, 0)
    low, count = tokens_of(edges_ptr, block, blocks, entries)
    count = tl.where(block < blocks, count, 0)  # entries after the last edge select nothing
    pairs, block = owners if cu_k_ptr is not None else batch * owners, tl.minimum(block, blocks - 1)
    work = locate(block, cu_k_ptr, cu_q_ptr, batch, owners, t, s, pairs, BLOCK_SIZE, False)
    n = pid % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    part = (tl.cast(item, tl.int64) * shared + head) * BLOCK_SIZE + n
    return KeyWork(
        work.sequence, work.plane, work.head * shared + head, work.row, work.rows, work.other, work.others,
        work.start + n, n < BLOCK_SIZE, low + nth * ITEM, low + tl.minimum(nth * ITEM + ITEM, count), part,
    )  # fmt: skip


@triton.jit
def keys_of_list(
    pid, lists_ptr, cu_q_ptr, cu_k_ptr, batch, kv_heads, planes, slots, s, t, first,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the work of a program that takes ``BLOCK_N`` keys of one list, from token ``first`` on."""
    tiles = tl.cdiv(slots * BLOCK_SIZE, BLOCK_N)
    kv_head, token = (pid // tiles % kv_heads).to(tl.int64), first + (pid // (tiles * kv_heads)).to(tl.int64)
    if cu_q_ptr is not None:
        sequence, _ = owner(cu_q_ptr, token.to(tl.int32), batch, s, 1, 1, NO_RESERVE)
        plane = token * 0
        query_row, queries = tokens_of(cu_q_ptr, sequence, batch, s)
        key_row, keys = tokens_of(cu_k_ptr, sequence, batch, t)
        sequence, key_row, query_row = sequence.to(tl.int64), key_row.to(tl.int64), query_row.to(tl.int64)
        keys = tl.where(sequence < batch, keys, 0)
    else:
        plane = token // s
        sequence, query_row, queries, key_row, keys = plane, token * 0, s, token * 0, t
    lists = token * planes + kv_head * planes // kv_heads
    n = pid % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.load(lists_ptr + lists * (slots + 1)) * BLOCK_SIZE
    slot, shared = n // BLOCK_SIZE, kv_heads // planes
    block = tl.load(lists_ptr + lists * (slots + 1) + 1 + slot, mask=n < total, other=0)
    part = (((lists - first * planes) * slots + slot) * shared + kv_head % shared) * BLOCK_SIZE
    return KeyWork(
        sequence, plane, kv_head, key_row, keys, query_row, queries, block * BLOCK_SIZE + n % BLOCK_SIZE,
        n < total, lists, lists + (pid % tiles * BLOCK_N < total).to(tl.int64), part + n % BLOCK_SIZE,
    )  # fmt: skip


@triton.jit(do_not_specialize=INVERTED)
def selected_backward_keys(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, lists_ptr, parts_ptr,
    choosers_ptr, edges_ptr,  # lists by block; None if each program takes the keys of one list
    alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, mask_tensors, score_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_dob, stride_dos, stride_doh, stride_lb, stride_lh, stride_slopes,
    batch, heads, kv_heads, slots, s, t, entries, blocks, first, left, right, prefix, scale, softcap,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    GROUP: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr, ITEM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """Write partial sums of dk and dv: fp32 rows of ``D`` and ``E`` numbers.

    A program computes them for ``BLOCK_N`` keys of a KV head. Its rows are the ``ROWS`` query heads of each
    list that selects the keys, ``BLOCK_M`` of them at a time. Score tiles are transposed,
    ``[BLOCK_N, BLOCK_M]``, so that the gradients of each key stay in registers.
    """
    if choosers_ptr is None:
        work = keys_of_list(
            tl.program_id(0), lists_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, kv_heads, PLANES, slots,
            s, t, first, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
    else:
        work = keys_of_block(
            tl.program_id(0), edges_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, kv_heads, PLANES, s, t,
            entries, blocks, BLOCK_SIZE, ITEM, BLOCK_N,
        )  # fmt: skip
    if work.low >= work.high:
        return
    sequence, keys = work.sequence, work.keys
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    of_q, of_k = TilePlace(work.plane, 0, 0), TilePlace(work.plane, work.key_row, work.kv_head)
    q_rows = Rows(q_ptr, stride_qb, stride_qs, stride_qh)
    dout_rows = Rows(dout_ptr, stride_dob, stride_dos, stride_doh)
    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)
    e: tl.constexpr = Channels(E, E_MAIN, 0)
    lse2_ptr += work.plane * stride_lb
    delta_ptr += work.plane * stride_lb

    loaded = work.valid & (work.j >= start) & (work.j < end)
    k = gathered_tile(Rows(k_ptr, stride_kb, stride_kt, stride_kg), of_k, work.j, stride_kt, loaded, d)
    v = gathered_tile(Rows(v_ptr, stride_vb, stride_vt, stride_vg), of_k, work.j, stride_vt, loaded, e)
    dk, dv = zeros(d, BLOCK_N), zeros(e, BLOCK_N)
    j, m = work.j[:, None], tl.arange(0, BLOCK_M)
    count = (work.high - work.low).to(tl.int32) * ROWS
    i0 = keys - work.queries - work.query_row
    # The lists of the next step are loaded one step ahead, since the addresses of its queries depend on them.
    lists = chooser(choosers_ptr, work.low, m // ROWS, m < count)
    for x in tl.range(0, count, BLOCK_M, num_stages=STAGES):
        valid = x + m < count
        token = tl.where(valid, lists // PLANES - work.plane * s, 0)  # int64
        if ROWS < GROUP:  # each query head has a list
            head = tl.where(valid, lists % PLANES, 0)
        else:
            head = tl.where(valid, work.kv_head * GROUP + (x + m) % ROWS, 0)
        lists = chooser(choosers_ptr, work.low, (x + BLOCK_M + m) // ROWS, x + BLOCK_M + m < count)
        q = gathered_tile(q_rows, of_q, token * stride_qs + head * stride_qh, 1, valid, d)
        rows_at = token + head * stride_lh
        lse2 = tl.load(lse2_ptr + rows_at, mask=valid, other=0.0)
        i = (i0 + token).to(tl.int32)[None, :]
        slope = None
        if alibi_slopes_ptr is not None:
            slope = load_slope(alibi_slopes_ptr, stride_slopes, sequence, head, batch)[None, :]
        modifiers = Modifiers(scale, softcap, slope)
        s_ij, derivative = modify(products(k, q, d, PRECISION), modifiers, i + band.offset, j)
        place = placed(origin, sequence, head[None, :], i, j, keys - work.queries)
        score = changed(s_ij, modifiers, place, score_tensors, SCORE)
        p = tl.exp2(score * unit_behind(modifiers, SCORE) - lse2[None, :])
        seen = visible(i, j, band) & work.valid[:, None] & valid[None, :]
        if MASK is not None:
            seen = seen & MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
        p = tl.where(seen, p, 0.0)
        dout = gathered_tile(dout_rows, of_q, token * stride_dos + head * stride_doh, 1, valid, e)
        delta = tl.load(delta_ptr + rows_at, mask=valid, other=0.0)
        ds = p * (products(v, dout, e, PRECISION) - delta[None, :])
        ds = unchanged(ds, s_ij, modifiers, seen, place, score_tensors, None, DERIVATIVE, None) * derivative
        ds = tl.where(seen, ds, 0.0)
        dv = add_products(dv, p, dout, e, PRECISION)
        dk = add_products(dk, ds, q, d, PRECISION)

    first_part = TilePlace(0, 0, 0)
    scatter_tile(Rows(parts_ptr, 0, 0, 0), first_part, work.part, D + E, work.valid, dk, scale, d)
    scatter_tile(Rows(parts_ptr + D, 0, 0, 0), first_part, work.part, D + E, work.valid, dv, 1.0, e)


@triton.jit
def chooser(choosers_ptr, low, n, valid):
    """Return the number of the ``n``-th list from ``low`` on; 0 if it is not ``valid``."""
    if choosers_ptr is None:
        return tl.where(valid, low.to(tl.int32), 0)
    else:
        return tl.load(choosers_ptr + low + n, mask=valid, other=0)


@triton.jit(do_not_specialize=INVERTED)
def selected_backward_sums(
    parts_ptr, edges_ptr, dk_ptr, dv_ptr,
    order_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,  # any of these may be None
    stride_dkb, stride_dkt, stride_dkg, stride_dvb, stride_dvt, stride_dvg,
    batch, kv_heads, planes, s, t, entries, blocks,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    ITEM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write dk ``[b, t, g, d]`` and dv ``[b, t, g, e]``: the sums of partial sums, in a fixed order.

    One program adds ``BLOCK_N`` keys of one block. A block has one partial sum for each ``ITEM`` lists or,
    with ``order``, for each entry of a list. ``ADD``: add to the values of dk and dv.
    """
    owners, tiles = tl.minimum(planes, kv_heads), tl.cdiv(BLOCK_SIZE, BLOCK_N)
    shared, pid = kv_heads // owners, tl.program_id(0)
    block, head = pid // (shared * tiles), pid // tiles % shared
    pairs = owners if cu_seqlens_k_ptr is not None else batch * owners
    work = locate(block, cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, owners, t, s, pairs, BLOCK_SIZE, False)
    if work.start >= work.rows:
        return
    low, count = tokens_of(edges_ptr, block, blocks, entries)
    if order_ptr is None:
        low, count = first_block(edges_ptr, block, entries, 1, ITEM, 0), tl.cdiv(count, ITEM)
    n = pid % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = (n < BLOCK_SIZE) & (work.start + n < work.rows)
    place = TilePlace(work.plane, work.row, work.head * shared + head)
    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)
    e: tl.constexpr = Channels(E, E_MAIN, 0)
    dk_rows = Rows(dk_ptr, stride_dkb, stride_dkt, stride_dkg)
    dv_rows = Rows(dv_ptr, stride_dvb, stride_dvt, stride_dvg)
    dk, dv = zeros(d, BLOCK_N), zeros(e, BLOCK_N)
    if ADD:
        dk = gathered_tile(dk_rows, place, work.start + n, stride_dkt, valid, d)
        dv = gathered_tile(dv_rows, place, work.start + n, stride_dvt, valid, e)
    for x in range(low, low + count):
        part = tl.cast(x, tl.int64) if order_ptr is None else tl.load(order_ptr + x)
        rows, first_part = (part * shared + head) * BLOCK_SIZE + n, TilePlace(0, 0, 0)
        more = gathered_tile(Rows(parts_ptr, 0, 0, 0), first_part, rows, D + E, valid, d)
        dk = ChannelBlocks(dk.main + more.main, dk.tail + more.tail)
        more = gathered_tile(Rows(parts_ptr + D, 0, 0, 0), first_part, rows, D + E, valid, e)
        dv = ChannelBlocks(dv.main + more.main, dv.tail + more.tail)
    scatter_tile(dk_rows, place, work.start + n, stride_dkt, valid, dk, 1.0, d)
    scatter_tile(dv_rows, place, work.start + n, stride_dvt, valid, dv, 1.0, e)
