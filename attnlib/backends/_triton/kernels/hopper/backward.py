"""FlashAttention-3's backward (Shah et al., 2024, arXiv 2407.08608) for Hopper, in Gluon: one pass, five products a tile.

A producer warp loads queries, and two consumers own 64 keys each, whose gradients stay in registers. Tiles are transposed,
``[keys, queries]``. With probabilities ``P = exp(S - lse)`` and ``dP = v @ dout.T``, scores have the gradient
``dS = P * (dP - delta)``; products start from ``-lse`` and ``-delta``, which so cost no registers. The gradient of queries
is added up in fp32 over all programs, in tiles as threads hold them, which :mod:`.queries` puts in order.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..band import Band, bounds, origin_of, query_range, visible
from ..scores import Modifiers, load_slope, modify, unit_of
from ..tile import COUNTS, locate
from .backward_parts import (
    CONSUMERS,
    FREED,
    KEYS,
    Problem,
    Results,
    Shared,
    Sizes,
    add_dq,
    barriers,
    clear_keys,
    clear_queries,
    job_of,
    produce,
    put,
    ring,
    spread,
)
from .primitives import FIRST, barrier_arrive, barrier_sync, opaque, opaque_halves

class Sums(NamedTuple):
    """The gradients of a consumer's keys. Without a second block, ``dk_tail`` is any tile and goes unread."""

    dk: gl.tensor
    dk_tail: gl.tensor
    dv: gl.tensor


class Now(NamedTuple):
    """A step: its slot and phase; its queries from ``m0`` on, of ``head``; the tile of dq of the step before, or -1."""

    slot: gl.tensor
    phase: gl.tensor
    parity: gl.tensor
    m0: gl.tensor
    head: gl.tensor
    tile_before: gl.tensor
    masked: gl.tensor
    more: gl.tensor


@gluon.jit
def issue_scores(number: gl.constexpr, slot, start, shared, sizes):
    """Begin ``start + k @ q.T``."""
    k = shared.k.index(number)
    s = warpgroup_mma(k, shared.q.index(slot).permute((1, 0)), start, is_async=True)
    if sizes.D_TAIL:
        k = shared.k_tail.index(number)
        s = warpgroup_mma(k, shared.q_tail.index(slot).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def issue_dq(number: gl.constexpr, parity, k, shared, sizes):
    """Begin this consumer's share of ``ds.T @ k``, for a block of channels."""
    WIDTH: gl.constexpr = k.shape[2]
    COLUMNS: gl.constexpr = WIDTH if sizes.BY_ROWS else WIDTH // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    for c in gl.static_range(2):
        ds, keys = shared.ds.index(parity * 2 + c), k.index(c)
        if sizes.BY_ROWS:
            ds = ds.slice(number * 64, 64, 1)
        else:
            keys = keys.slice(number * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), keys, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def step(sums, number: gl.constexpr, now, job, band, call, results, shared, sizes):
    """The sums with one tile of queries more. What it adds to dq is multiplied in the next step, which need not wait."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    IN_SUMS: gl.constexpr = call.softcap is None and call.slopes_ptr is None
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums.dv.type.layout, k_width=2)
    zero = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES)
    slot, m0 = now.slot, now.m0
    if now.masked:
        if (m0 < job.low) | (m0 + BLOCK_M > job.high):
            mbarrier.wait(shared.dout_full.index(slot), now.phase)
            clear_queries(m0, slot, job, shared, sizes)
    s = issue_scores(number, slot, spread(shared.lse.index(slot), zero) if IN_SUMS else zero, shared, sizes)
    if not sizes.EARLY:
        s = warpgroup_mma_wait(0, deps=[s])
    v, dout = shared.v.index(number), shared.dout.index(slot)
    if not sizes.D_TAIL:
        mbarrier.wait(shared.dout_full.index(slot), now.phase)
        dp = warpgroup_mma(v, dout.permute((1, 0)), spread(shared.delta.index(slot), zero), is_async=True)
    if sizes.EARLY:
        s = warpgroup_mma_wait(1, deps=[s])

    i = (job.ahead + m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES)))[None, :]
    j = (job.start + number * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES)))[:, None]
    slope = None
    if call.slopes_ptr is not None:
        slope = load_slope(call.slopes_ptr, call.stride_slopes, job.sequence, now.head, call.batch)
    modifiers = Modifiers(call.scale, call.softcap, slope)
    s, derivative = modify(s, modifiers, i + band.apart, j)
    s *= unit_of(modifiers)
    if not IN_SUMS:
        s -= spread(shared.lse.index(slot), zero)
    p = gl.exp2(s)
    if now.masked:
        p = opaque(gl.where(visible(i, j, band), p, 0.0))
    next_slot = (slot + 1) % sizes.SLOTS
    next_phase = gl.where(next_slot == 0, now.phase ^ 1, now.phase)
    mbarrier.wait(shared.q_full.index(next_slot), next_phase, pred=now.more)  # ptxas moves no wait above this one
    if sizes.D_TAIL:  # registers are left for dp once the scores are gone, and for p in 16 bits
        mbarrier.wait(shared.dout_full.index(slot), now.phase)
        p16 = gl.convert_layout(p.to(dout.dtype), P)
        dv = warpgroup_mma(p16, dout, sums.dv, is_async=True)
        dp = warpgroup_mma(v, dout.permute((1, 0)), spread(shared.delta.index(slot), zero), is_async=True)
        dp, dv, p16 = warpgroup_mma_wait(0, deps=[dp, dv, p16])
        p = gl.convert_layout(opaque_halves(p16), SCORES).to(gl.float32)
    else:
        p16 = gl.convert_layout(p.to(dout.dtype), P)
        dp = warpgroup_mma_wait(0, deps=[dp])
        dv = warpgroup_mma(p16, dout, sums.dv, is_async=True)
        if sizes.P16:
            p = gl.convert_layout(opaque_halves(p16), SCORES).to(gl.float32)
    ds = (p * dp * derivative).to(dout.dtype)
    barrier_sync(FIRST + number * 2 + now.parity, CONSUMERS)  # the other's ds of the step before is there, and its dq done
    if sizes.D_TAIL:  # registers are left for one product at a time
        ds16 = gl.convert_layout(ds, P)
        dk = warpgroup_mma(ds16, shared.q.index(slot), sums.dk, is_async=True)
        dk_tail = warpgroup_mma(ds16, shared.q_tail.index(slot), sums.dk_tail, is_async=True)
        shared.ds.index((now.parity ^ 1) * 2 + number).store(ds)
        fence_async_shared()
        dq = issue_dq(number, now.parity, shared.k, shared, sizes)
        dk, dk_tail, _ = warpgroup_mma_wait(2, deps=[dk, dk_tail, ds16])
        dq_tail = issue_dq(number, now.parity, shared.k_tail, shared, sizes)
        dq = warpgroup_mma_wait(2, deps=[dq])
        add_dq(dq, number, now.tile_before, 0, results, shared, sizes)
        dq_tail = warpgroup_mma_wait(0, deps=[dq_tail])
        add_dq(dq_tail, number, now.tile_before, sizes.D, results, shared, sizes)
    else:
        dq = issue_dq(number, now.parity, shared.k, shared, sizes)
        ds16 = gl.convert_layout(ds, P)
        dk = warpgroup_mma(ds16, shared.q.index(slot), sums.dk, is_async=True)
        shared.ds.index((now.parity ^ 1) * 2 + number).store(ds)
        fence_async_shared()
        dv, dq, _ = warpgroup_mma_wait(1, deps=[dv, dq, p16])
        add_dq(dq, number, now.tile_before, 0, results, shared, sizes)
        dk, _ = warpgroup_mma_wait(0, deps=[dk, ds16])
        dk_tail = dk
    barrier_arrive(FREED + slot, CONSUMERS + 32)
    barrier_arrive(FIRST + (1 - number) * 2 + (now.parity ^ 1), CONSUMERS)
    return Sums(dk, dk_tail, dv)


@gluon.jit
def consume(number: gl.constexpr, job, band, call, results, shared, sizes):
    """The gradients of a consumer's keys, and what they add to those of queries."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D, 16])
    OF_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E, 16])
    dk, dv = gl.zeros([KEYS, sizes.D], gl.float32, OF_K), gl.zeros([KEYS, sizes.E], gl.float32, OF_V)
    dk_tail = dk
    if sizes.D_TAIL:
        OF_TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D_TAIL, 16])
        dk_tail = gl.zeros([KEYS, sizes.D_TAIL], gl.float32, OF_TAIL)
    sums = Sums(dk, dk_tail, dv)

    first_key = job.start + number * KEYS
    j0, j1 = gl.maximum(first_key, band.start), gl.minimum(first_key + KEYS, band.end)
    _, _, all_low, all_high = query_range(j0, j1, job.ahead, job.ahead + job.queries, band)
    if j1 - j0 < KEYS:
        all_high = all_low * 0
    mbarrier.wait(shared.keys_full.index(0), 0)
    if sizes.HOLES:
        clear_keys(job, band, shared, sizes)
    tile, head, before = 0, job.kv_head * call.group, job.first_dq
    shared.ds.index(number).store(gl.zeros([KEYS, BLOCK_M], shared.q.dtype, OF_K))  # the step before the first
    fence_async_shared()
    barrier_arrive(FIRST + (1 - number) * 2, CONSUMERS)
    of_head = job.first_dq
    mbarrier.wait(shared.q_full.index(0), 0, pred=job.steps > 0)
    for n in range(0, job.steps):
        m0 = job.first + tile * BLOCK_M
        i0 = job.ahead + m0
        masked = (i0 < all_low) | (i0 + BLOCK_M > all_high)
        now = Now(n % sizes.SLOTS, (n // sizes.SLOTS) & 1, n & 1, m0, head, before, masked, n + 1 < job.steps)
        sums = step(sums, number, now, job, band, call, results, shared, sizes)
        before = of_head + tile
        tile += 1
        if tile == job.tiles:
            tile, head, of_head = 0, head + 1, of_head + call.dq_tiles
    parity = job.steps & 1
    barrier_sync(FIRST + number * 2 + parity, CONSUMERS)
    if job.steps > 0:
        dq = warpgroup_mma_wait(0, deps=[issue_dq(number, parity, shared.k, shared, sizes)])
        add_dq(dq, number, before, 0, results, shared, sizes)
        if sizes.D_TAIL:
            dq = warpgroup_mma_wait(0, deps=[issue_dq(number, parity, shared.k_tail, shared, sizes)])
            add_dq(dq, number, before, sizes.D, results, shared, sizes)
    barrier_sync(FIRST + 4, CONSUMERS)  # nobody reads keys any more

    out = shared.v.index(number)
    j = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, OF_V))
    left = job.rows - first_key
    dv = gl.where(((j >= band.start) & (j < band.end))[:, None], sums.dv, 0.0)
    put(dv, out, results.dv_desc, results.dv_ptr, results.stride_dvt, results.stride_dvg, 0, sizes.E_ALL, left, job, sizes)
    j = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, OF_K))
    bounded = ((j >= band.start) & (j < band.end))[:, None]
    dk = gl.where(bounded, sums.dk * call.scale, 0.0)
    out = shared.k.index(number)
    put(dk, out, results.dk_desc, results.dk_ptr, results.stride_dkt, results.stride_dkg, 0, sizes.D_ALL, left, job, sizes)
    if sizes.D_TAIL:
        j = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, OF_TAIL))
        dk = gl.where(((j >= band.start) & (j < band.end))[:, None], sums.dk_tail * call.scale, 0.0)
        out = shared.k_tail.index(number)
        desc = results.dk_tail_desc
        put(dk, out, desc, results.dk_ptr, results.stride_dkt, results.stride_dkg, sizes.D, sizes.D_ALL, left, job, sizes)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*COUNTS, "dq_tiles"])
def backward(
    lse2_ptr, delta_ptr, dk_ptr, dv_ptr, dq_sums_ptr, alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr,
    q_desc, q_tail_desc, dout_desc, k_desc, k_tail_desc, v_desc, dk_desc, dk_tail_desc, dv_desc,
    dq_sums_desc, dq_sums_tail_desc,
    stride_dkt, stride_dkg, stride_dvt, stride_dvg, stride_lb, stride_lh, stride_slopes,
    batch, heads, kv_heads, group, s, t, heads_per_wave, dq_tiles, left, right, prefix, scale, softcap,
    D: gl.constexpr, D_MAIN: gl.constexpr, D_TAIL: gl.constexpr, E: gl.constexpr, E_MAIN: gl.constexpr,
    BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, BY_ROWS: gl.constexpr, EARLY: gl.constexpr, BY_TMA: gl.constexpr, P16: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes dk ``[b, t, g, d]`` and dv ``[b, t, g, e]``, and adds to the sums of dq: a program for each 128 keys."""
    HOLES: gl.constexpr = cu_seqlens_k_ptr is not None or key_starts_ptr is not None or key_ends_ptr is not None
    PACKED: gl.constexpr = cu_seqlens_q_ptr is not None
    sizes: gl.constexpr = Sizes(
        D_MAIN, D_TAIL, E_MAIN, D, E, 2, BLOCK_M, SLOTS, BY_ROWS, EARLY, BY_TMA, P16, HOLES, PACKED,
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q, k, v = ring(dtype, SLOTS, BLOCK_M, D_MAIN), ring(dtype, 2, KEYS, D_MAIN), ring(dtype, 2, KEYS, E_MAIN)
    q_tail, k_tail = q, k
    if D_TAIL:
        q_tail, k_tail = ring(dtype, SLOTS, BLOCK_M, D_TAIL), ring(dtype, 2, KEYS, D_TAIL)
    dout, ds = ring(dtype, SLOTS, BLOCK_M, E_MAIN), ring(dtype, 4, KEYS, BLOCK_M)
    staged = ds
    if BY_TMA:
        staged = ring(gl.float32, 2, BLOCK_M * D_MAIN // 64, 32)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], VECTOR)
    delta = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], VECTOR)
    shared = Shared(
        q, q_tail, dout, k, k_tail, v, ds, ds, staged, lse, delta, barriers(1, 1), barriers(SLOTS, 2), barriers(SLOTS, 1)
    )
    fence_async_shared()
    work = locate(
        gl.program_id(0), cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, kv_heads, t, s, heads_per_wave, 2 * KEYS, False
    )
    start, end = bounds(key_starts_ptr, key_ends_ptr, work.sequence, work.rows)
    origin = origin_of(origin_ptr, work.sequence, batch)
    band = Band(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    call = Problem(
        lse2_ptr, delta_ptr, alibi_slopes_ptr, stride_lb, stride_lh, stride_slopes, batch, heads, group, dq_tiles,
        scale, softcap,
    )  # fmt: skip
    job = job_of(work, band, call, sizes)
    results = Results(
        dk_desc, dk_tail_desc, dv_desc, dq_sums_desc, dq_sums_tail_desc, dk_ptr, dv_ptr, dq_sums_ptr, stride_dkt,
        stride_dkg, stride_dvt, stride_dvg,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (0, job, band, call, results, shared, sizes)),
            (consume, (1, job, band, call, results, shared, sizes)),
            (produce, (q_desc, q_tail_desc, dout_desc, k_desc, k_tail_desc, v_desc, job, call, shared, sizes)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )
