"""The backward over lists of which each entry has partial sums of dk and dv: lists of many heads.

Three matrix products follow each other. ``selected_weights`` writes the probabilities of the listed keys and
the gradients of their scores. ``selected_queries`` multiplies these with keys, which is dq, and
``selected_parts`` with queries and with the gradients of outputs, which are the shares of one query in dk and
dv. ``selected_sums`` adds the shares of all queries in the order of lists, without atomics.
"""

import triton
import triton.language as tl

from ..band import KeyBand, bounds, origin_of, visible
from ..scores import Modifiers, changed, load_slope, modify, placed, unchanged, unit_behind
from ..tile import COUNTS, locate, tokens_of
from .backward import INVERTED, SelectedCall, keys_of
from .forward import blocks_at


@triton.jit
def load_part(at, c, rows, ALL: tl.constexpr, WIDTH: tl.constexpr):
    """Load ``WIDTH`` channels of ``rows``, from channel ``c`` on; zeros where there is none."""
    columns = c + tl.arange(0, WIDTH)
    inside = rows[:, None] if ALL % WIDTH == 0 else rows[:, None] & (columns < ALL)[None, :]
    return tl.load(at[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=(*COUNTS, "first", "parts"))
def selected_weights(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, lists_ptr, weights_ptr,
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

    They belong to listed keys, from query ``first`` on. One program has ``BLOCK_M`` of the ``rows``
    heads that share a list and a KV head, and one of ``parts`` parts of the list. It multiplies ``CHANNELS``
    channels at a time. Gradients of slopes are those of ``selected_backward_queries``; they need one part.
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
    if dslopes_ptr is not None:  # packed sequences share a row, and each has one more number at its end
        tl.store(dslopes_ptr + sequence * stride_sb + head * stride_sh + token, dslope, mask=valid)


@triton.jit(do_not_specialize=(*COUNTS, "first"))
def selected_queries(
    k_ptr, lists_ptr, weights_ptr, dq_ptr,
    key_starts_ptr, key_ends_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr,  # any of these may be None
    stride_kb, stride_kt, stride_kg, stride_dqb, stride_dqs, stride_dqh,
    batch, heads, group, rows, planes, slots, s, t, left, right, prefix, first, width, scale,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHANNELS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq ``[b, s, h, d]`` from query ``first`` on: ``CHANNELS`` channels in each program."""
    head_tiles, parts = tl.cdiv(rows, BLOCK_M), tl.cdiv(D, CHANNELS)
    units = heads // rows * head_tiles * parts
    pid, number = tl.program_id(0), tl.program_id(0) // units
    work = locate(first + number, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, 1, False)
    if work.start >= work.rows:
        return
    unit = pid // parts % (heads // rows * head_tiles)
    of_list, m = unit // head_tiles * rows, unit % head_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = m < rows
    head = tl.where(valid, of_list + m, of_list).to(tl.int64)
    plane, token, c = work.plane, work.row + work.start, pid % parts * CHANNELS
    list_ptr = lists_ptr + ((plane * s + token) * planes + of_list * planes // heads) * (slots + 1)
    total = tl.load(list_ptr) * BLOCK_SIZE
    origin = origin_of(origin_ptr, work.sequence, batch)
    low, high = bounds(key_starts_ptr, key_ends_ptr, work.sequence, work.others)
    band = KeyBand(low, high, left, right, prefix, origin.query - origin.key, origin.key)
    i = work.others - work.rows + work.start
    k_ptr += plane * stride_kb + work.other * stride_kt + of_list // group * stride_kg
    ds_at = weights_ptr + ((tl.cast(number, tl.int64) * 2 + 1) * heads + head) * width
    dq = tl.zeros([BLOCK_M, CHANNELS], tl.float32)
    following = blocks_at(list_ptr + 1, 0, total, BLOCK_SIZE, BLOCK_N)
    for x in tl.range(0, total, BLOCK_N, num_stages=STAGES):
        n = x + tl.arange(0, BLOCK_N)
        key = following * BLOCK_SIZE + n % BLOCK_SIZE - origin.key
        following = blocks_at(list_ptr + 1, x + BLOCK_N, total, BLOCK_SIZE, BLOCK_N)
        loaded = (n < total) & visible(i, key, band)  # a gradient of 0 must not meet a hidden NaN
        k = load_part(k_ptr + tl.where(loaded, key, 0).to(tl.int64) * stride_kt, c, loaded, D, CHANNELS)
        ds = tl.load(ds_at[:, None] + n[None, :], mask=valid[:, None] & (n < total)[None, :], other=0.0)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    columns = c + tl.arange(0, CHANNELS)
    dq_at = dq_ptr + (plane * stride_dqb + token * stride_dqs) + head * stride_dqh
    stored = valid[:, None] & (columns < D)[None, :]
    tl.store(dq_at[:, None] + columns[None, :], (dq * scale).to(dq_ptr.dtype.element_ty), mask=stored)


@triton.jit
def store_shares(at, tile, c, valid, ALL: tl.constexpr):
    """Write channels of shares to the ``valid`` rows ``at``, from channel ``c`` of ``ALL`` on."""
    columns = c + tl.arange(0, tile.shape[1])
    stored = valid[:, None] & (columns < ALL)[None, :]
    tl.store(at[:, None] + columns[None, :], tile.to(at.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=(*INVERTED, "first"))
def selected_parts(
    q_ptr, dout_ptr, lists_ptr, weights_ptr, parts_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,  # either may be None
    stride_qb, stride_qs, stride_qh, stride_dob, stride_dos, stride_doh,
    batch, heads, group, planes, slots, shared, s, t, first, width, scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHANNELS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the shares of queries in dk and dv: a row of ``D + E`` numbers for each listed key and KV head.

    One program has ``BLOCK_N`` keys of a list, all of the ``group`` heads of a KV head, and dk or dv.
    """
    tiles, kv_heads = tl.cdiv(slots * BLOCK_SIZE, BLOCK_N), heads // group
    of_values, pid = tl.program_id(0) % 2, tl.program_id(0) // 2
    number = pid // (kv_heads * tiles)
    work = locate(first + number, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, 1, False)
    if work.start >= work.rows:
        return
    kv_head, token, number = pid // tiles % kv_heads, work.row + work.start, tl.cast(number, tl.int64)
    plane, n, m = kv_head // shared, pid % tiles * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    total = tl.load(lists_ptr + ((work.plane * s + token) * planes + plane) * (slots + 1)) * BLOCK_SIZE
    if pid % tiles * BLOCK_N >= total:
        return
    valid, listed = m < group, n < total
    head = (kv_head * group + tl.where(valid, m, 0)).to(tl.int64)
    weights_at = weights_ptr + (number * 2 * heads + head)[:, None] * width + n[None, :]
    row = (number * planes + plane) * slots + n // BLOCK_SIZE
    row = (row * shared + kv_head % shared) * BLOCK_SIZE + n % BLOCK_SIZE
    at = parts_ptr + row * (D + E)
    if of_values == 0:
        ds = tl.load(weights_at + heads * width, mask=valid[:, None] & listed[None, :], other=0.0)
        q_at = q_ptr + (work.plane * stride_qb + token * stride_qs) + head * stride_qh
        for c in tl.range(0, D, CHANNELS, num_stages=STAGES):
            dk = tl.dot(ds.T, load_part(q_at, c, valid, D, CHANNELS), input_precision=PRECISION) * scale
            store_shares(at, dk, c, listed, D)
    else:
        p = tl.load(weights_at, mask=valid[:, None] & listed[None, :], other=0.0)
        dout_at = dout_ptr + (work.plane * stride_dob + token * stride_dos) + head * stride_doh
        for c in tl.range(0, E, CHANNELS, num_stages=STAGES):
            dv = tl.dot(p.T, load_part(dout_at, c, valid, E, CHANNELS), input_precision=PRECISION)
            store_shares(at + D, dv, c, listed, E)


@triton.jit
def add_row(sums, ptr, valid, ALL: tl.constexpr):
    """Return ``sums`` plus a row of ``ALL`` numbers, if it is ``valid``."""
    columns = tl.arange(0, sums.shape[0])
    return sums + tl.load(ptr + columns, mask=valid & (columns < ALL), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=INVERTED)
def selected_sums(
    parts_ptr, edges_ptr, order_ptr, dk_ptr, dv_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,  # either may be None
    stride_dkb, stride_dkt, stride_dkg, stride_dvb, stride_dvt, stride_dvg,
    batch, owners, shared, s, t, entries, blocks,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, AT_ONCE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write dk ``[b, t, g, d]`` and dv ``[b, t, g, e]``: the sums of shares, in the order of lists.

    One program adds those of a key: of entries ``order[edges[n]]`` to ``order[edges[n + 1] - 1]`` for block
    ``n``. It reads ``AT_ONCE`` of them before it adds. ``ADD``: add to the values of dk and dv.
    """
    n, pid = tl.program_id(0) % BLOCK_SIZE, tl.program_id(0) // BLOCK_SIZE
    block, head = pid // shared, pid % shared
    call = SelectedCall(cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, s, t, owners, shared)
    work = keys_of(block, call, BLOCK_SIZE)
    low, count = tokens_of(edges_ptr, block, blocks, entries)
    if work.start + n >= work.rows or (ADD and count == 0):
        return
    kv_head, key = work.head * shared + head, work.row + work.start + n
    dk_ptr += work.plane * stride_dkb + key * stride_dkt + kv_head * stride_dkg
    dv_ptr += work.plane * stride_dvb + key * stride_dvt + kv_head * stride_dvg
    dk, dv = tl.zeros([D_MAIN], tl.float32), tl.zeros([E_MAIN], tl.float32)
    tail = tl.zeros([D_TAIL], tl.float32) if D_TAIL else dk
    if ADD:
        dk, dv = add_row(dk, dk_ptr, True, D), add_row(dv, dv_ptr, True, E)
        tail = add_row(tail, dk_ptr + D_MAIN, True, D - D_MAIN) if D_TAIL else tail
    for x in range(low, low + count, AT_ONCE):
        for u in tl.static_range(AT_ONCE):
            valid = x + u < low + count
            part = tl.load(order_ptr + x + u, mask=valid, other=0).to(tl.int64)
            row = parts_ptr + ((part * shared + head) * BLOCK_SIZE + n) * (D + E)
            dk, dv = add_row(dk, row, valid, D), add_row(dv, row + D, valid, E)
            tail = add_row(tail, row + D_MAIN, valid, D - D_MAIN) if D_TAIL else tail
    store_row(dk_ptr, dk, D)
    store_row(dv_ptr, dv, E)
    if D_TAIL:
        store_row(dk_ptr + D_MAIN, tail, D - D_MAIN)


@triton.jit
def store_row(ptr, row, ALL: tl.constexpr):
    """Write the first ``ALL`` numbers of a row."""
    columns = tl.arange(0, row.shape[0])
    tl.store(ptr + columns, row.to(ptr.dtype.element_ty), mask=columns < ALL)
