"""Products of weights with keys, queries and gradients of outputs, and the sums of such products.

``selected_weights`` computes the weights of all listed keys once. From them, ``selected_queries`` computes
dq, and ``selected_parts`` the share of each query in dk and dv, which ``selected_sums`` adds in a fixed
order. ``selected_backward_sums`` adds the partial sums of blocks.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..tile import (
    COUNTS,
    ChannelBlocks,
    Channels,
    Rows,
    TilePlace,
    first_block,
    gathered_tile,
    locate,
    scatter_tile,
    tokens_of,
    zeros,
)

# Triton must not specialize on the counts of inverted lists either.
INVERTED = (*COUNTS, "owners", "shared", "entries", "blocks", "first")


class SelectedCall(NamedTuple):
    """The offsets and counts of a call with lists; ``list_blocks`` explains owners.

    Each owner's blocks belong to ``shared`` KV heads.
    """

    cu_q_ptr: tl.tensor | None
    cu_k_ptr: tl.tensor | None
    batch: tl.tensor
    s: tl.tensor
    t: tl.tensor
    owners: tl.tensor
    shared: tl.tensor


@triton.jit
def keys_of(block, call, BLOCK_SIZE: tl.constexpr):
    """Return the work of a block of keys, with the number of its owner in place of a head."""
    sizes = call.owners, call.t, call.s, 1  # blocks of an owner follow each other, and share queries in L2
    return locate(block, call.cu_k_ptr, call.cu_q_ptr, call.batch, *sizes, BLOCK_SIZE, False)


@triton.jit
def load_part(at, c, rows, ALL: tl.constexpr, WIDTH: tl.constexpr):
    """Load ``WIDTH`` channels from channel ``c`` on; zeros where ``rows`` is False, and from ``ALL`` on."""
    columns = c + tl.arange(0, WIDTH)
    inside = rows[:, None] if ALL % WIDTH == 0 else rows[:, None] & (columns < ALL)[None, :]
    return tl.load(at[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=(*COUNTS, "first"))
def selected_queries(
    k_ptr, lists_ptr, weights_ptr, at_ptr, dq_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,  # either may be None
    stride_kb, stride_kt, stride_kg, stride_dqb, stride_dqs, stride_dqh,
    batch, heads, group, rows, planes, slots, s, t, first, width, scale,
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
    k_ptr += plane * stride_kb + work.other * stride_kt + of_list // group * stride_kg
    ds_at = weights_ptr + ((tl.cast(number, tl.int64) * 2 + 1) * heads + head) * width
    dq = tl.zeros([BLOCK_M, CHANNELS], tl.float32)
    n = tl.arange(0, BLOCK_N)
    at_ptr += (tl.cast(number, tl.int64) * (heads // rows) + unit // head_tiles) * width
    following = tl.load(at_ptr + n, mask=n < total, other=-1)
    for x in tl.range(0, total, BLOCK_N, num_stages=STAGES):
        # Keys are read one tile ahead, so that the loads of their rows do not wait for them.
        n, key = x + tl.arange(0, BLOCK_N), following
        following = tl.load(at_ptr + (n + BLOCK_N), mask=n + BLOCK_N < total, other=-1)
        loaded = key >= 0  # a gradient of 0 must not meet a hidden NaN
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

    One program computes dk or dv of ``BLOCK_N`` listed keys, from all ``group`` query heads of a KV head.
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
    valid, exists = m < group, n < total
    head = (kv_head * group + tl.where(valid, m, 0)).to(tl.int64)
    weights_at = weights_ptr + (number * 2 * heads + head)[:, None] * width + n[None, :]
    row = (number * planes + plane) * slots + n // BLOCK_SIZE
    row = (row * shared + kv_head % shared) * BLOCK_SIZE + n % BLOCK_SIZE
    at = parts_ptr + row * (D + E)
    if of_values == 0:
        ds = tl.load(weights_at + heads * width, mask=valid[:, None] & exists[None, :], other=0.0)
        q_at = q_ptr + (work.plane * stride_qb + token * stride_qs) + head * stride_qh
        for c in tl.range(0, D, CHANNELS, num_stages=STAGES):
            dk = tl.dot(ds.T, load_part(q_at, c, valid, D, CHANNELS), input_precision=PRECISION) * scale
            store_shares(at, dk, c, exists, D)
    else:
        p = tl.load(weights_at, mask=valid[:, None] & exists[None, :], other=0.0)
        dout_at = dout_ptr + (work.plane * stride_dob + token * stride_dos) + head * stride_doh
        for c in tl.range(0, E, CHANNELS, num_stages=STAGES):
            dv = tl.dot(p.T, load_part(dout_at, c, valid, E, CHANNELS), input_precision=PRECISION)
            store_shares(at + D, dv, c, exists, E)


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


@triton.jit(do_not_specialize=INVERTED)
def selected_backward_sums(
    parts_ptr, edges_ptr, dk_ptr, dv_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr,  # either may be None
    stride_dkb, stride_dkt, stride_dkg, stride_dvb, stride_dvt, stride_dvg,
    batch, owners, shared, s, t, entries, blocks,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    ITEM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dk ``[b, t, g, d]`` and dv ``[b, t, g, e]``: the sums of partial sums, in a fixed order.

    One program adds ``BLOCK_N`` keys of one block, which has a partial sum for each ``ITEM`` lists.
    """
    tiles, pid = tl.cdiv(BLOCK_SIZE, BLOCK_N), tl.program_id(0)
    block, head = pid // (shared * tiles), pid // tiles % shared
    call = SelectedCall(cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, s, t, owners, shared)
    work = keys_of(block, call, BLOCK_SIZE)
    if work.start >= work.rows:
        return
    _, count = tokens_of(edges_ptr, block, blocks, entries)
    low = first_block(edges_ptr, block, entries, 1, ITEM, 0)
    n = pid % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    j, valid = work.start + n, (n < BLOCK_SIZE) & (work.start + n < work.rows)
    of_k, of_part = TilePlace(work.plane, work.row, work.head * shared + head), TilePlace(0, 0, 0)
    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)
    e: tl.constexpr = Channels(E, E_MAIN, 0)
    dk_rows = Rows(dk_ptr, stride_dkb, stride_dkt, stride_dkg)
    dv_rows = Rows(dv_ptr, stride_dvb, stride_dvt, stride_dvg)
    dk, dv = zeros(d, BLOCK_N), zeros(e, BLOCK_N)
    for x in range(low, low + tl.cdiv(count, ITEM)):
        rows = (tl.cast(x, tl.int64) * shared + head) * BLOCK_SIZE + n
        more = gathered_tile(Rows(parts_ptr, 0, 0, 0), of_part, rows, D + E, valid, d)
        dk = ChannelBlocks(dk.main + more.main, dk.tail + more.tail)
        more = gathered_tile(Rows(parts_ptr + D, 0, 0, 0), of_part, rows, D + E, valid, e)
        dv = ChannelBlocks(dv.main + more.main, dv.tail + more.tail)
    scatter_tile(dk_rows, of_k, j, stride_dkt, valid, dk, 1.0, d)
    scatter_tile(dv_rows, of_k, j, stride_dvt, valid, dv, 1.0, e)
