"""Consumers of the Hopper backward for head dimensions above 192: two that own the same 64 keys.

One computes the probabilities and dv, the other the gradient of the scores and dk. Each adds half of the
channels of dq, one step late.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...band import visible
from ...scores import Modifiers, load_slope, modify, unit_of
from ..primitives import FIRST, barrier_arrive, barrier_sync, opaque
from .results import add_dq, put, put_keys
from .shared import (
    CONSUMERS,
    DONE,
    FREED,
    KEYS,
    clear_queries,
    first_step,
    full_queries,
    next_step,
    spread,
    start_of,
    wait_for_keys,
)
from .turns import mark_added, wait_to_add

P_FULL: gl.constexpr = gl.constexpr(FIRST)
P_EMPTY: gl.constexpr = gl.constexpr(FIRST + 1)
DS_FULL: gl.constexpr = gl.constexpr(FIRST + 2)  # even steps use this barrier, odd steps the next one


@gluon.jit
def issue_share(number: gl.constexpr, parity, shared, sizes):
    """Start ``ds.T @ k``, the program's part of dq, for a consumer's half of the channels."""
    COLUMNS: gl.constexpr = sizes.D // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    zero = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    ds, k = shared.ds.index(parity), shared.k.index(0).slice(number * COLUMNS, COLUMNS, 1)
    return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def finish_dq(number: gl.constexpr, tile, job, results, shared, sizes):
    """Add the last step's part of dq to the sums, then wait for the other consumer at a barrier."""
    if job.steps > 0:
        dq = warpgroup_mma_wait(0, deps=[issue_share(number, (job.steps & 1) ^ 1, shared, sizes)])
        wait_to_add(job.steps - 1, shared, sizes)
        add_dq(dq, number, tile, 0, results, shared, sizes)
        mark_added(job.steps - 1, sizes)
    barrier_sync(DONE, CONSUMERS)


@gluon.jit
def consume_values(job, band, call, results, shared, sizes):
    """Run the first consumer: compute the probabilities, dv, and half of the channels of dq."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    IN_SUMS: gl.constexpr = call.softcap is None and call.slopes_ptr is None
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OF_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OF_V, k_width=2)
    zero, dv = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES), gl.zeros([KEYS, sizes.E], gl.float32, OF_V)
    all_low, all_high = full_queries(job.start, job, band)
    j = (job.start + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES)))[:, None]
    wait_for_keys(job, band, shared, sizes)
    step = first_step(job, call, sizes)
    for n in range(job.steps):
        slot, phase, before = n % sizes.SLOTS, (n // sizes.SLOTS) & 1, (n & 1) ^ 1
        m0, dout = start_of(step, job, sizes), shared.dout.index(slot)
        i0 = job.ahead + m0
        clear_queries(m0, slot, phase, job, shared, sizes)
        mbarrier.wait(shared.q_full.index(slot), phase)
        s = spread(shared.lse.index(slot), zero) if IN_SUMS else zero
        s = warpgroup_mma(shared.k.index(0), shared.q.index(slot).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        i = (i0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES)))[None, :]
        slope = None
        if call.slopes_ptr is not None:
            slope = load_slope(call.slopes_ptr, call.stride_slopes, job.sequence, step.head, call.batch)
        modifiers = Modifiers(call.scale, call.softcap, slope)
        # With slopes, short instructions would spill more: 34 stack accesses per step instead of 17 (Triton
        # 3.6, 2026-11).
        s, derivative = modify(s, modifiers, i + band.offset, j, call.slopes_ptr is None)
        s *= unit_of(modifiers)
        if not IN_SUMS:
            s -= spread(shared.lse.index(slot), zero)
        p = gl.exp2(s)
        if (i0 < all_low) | (i0 + BLOCK_M > all_high):
            p = opaque(gl.where(visible(i, j, band), p, 0.0))
        mbarrier.wait(shared.dout_full.index(slot), phase)
        p16 = gl.convert_layout(p.to(dout.dtype), P)
        barrier_sync(P_EMPTY, CONSUMERS)
        shared.p.index(0).store((p * derivative).to(dout.dtype))
        barrier_arrive(P_FULL, CONSUMERS)
        # Start dq only now: the registers cannot hold it together with the fp32 probabilities.
        dv = warpgroup_mma(p16, dout, dv, is_async=True)
        barrier_sync(DS_FULL + before, CONSUMERS)
        dq = issue_share(0, before, shared, sizes)
        wait_to_add(n - 1, shared, sizes)
        dv, p16 = warpgroup_mma_wait(1, deps=[dv, p16])
        dq = warpgroup_mma_wait(0, deps=[dq])
        add_dq(dq, 0, step.dq_before, 0, results, shared, sizes)
        mark_added(n - 1, sizes)
        barrier_arrive(FREED + slot, CONSUMERS + 32)
        step = next_step(step, job, call, sizes)
    barrier_sync(P_EMPTY, CONSUMERS)
    barrier_sync(DS_FULL + ((job.steps & 1) ^ 1), CONSUMERS)
    finish_dq(0, step.dq_before, job, results, shared, sizes)
    put(dv, 1.0, 0, shared.v.index(0), results.dv.desc, results.dv, 0, sizes.E_ALL, job, band, sizes)
    tma.store_wait(0)


@gluon.jit
def consume_keys(job, band, call, results, shared, sizes):
    """Run the second consumer: compute the gradient of the scores, dk, and half of the channels of dq."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.BLOCK_M, 16])
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D, 16])
    DS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OF_K, k_width=2)
    zero, dk = (
        gl.zeros([KEYS, sizes.BLOCK_M], gl.float32, SCORES),
        gl.zeros([KEYS, sizes.D], gl.float32, OF_K),
    )
    v = shared.v.index(0)
    wait_for_keys(job, band, shared, sizes)
    shared.ds.index(1).store(zero.to(v.dtype))  # dq is added one step late; the first step adds zeros
    fence_async_shared()
    barrier_arrive(DS_FULL + 1, CONSUMERS)
    barrier_arrive(P_EMPTY, CONSUMERS)
    step = first_step(job, call, sizes)
    for n in range(job.steps):
        slot, phase, before = n % sizes.SLOTS, (n // sizes.SLOTS) & 1, (n & 1) ^ 1
        clear_queries(start_of(step, job, sizes), slot, phase, job, shared, sizes)
        mbarrier.wait(shared.q_full.index(slot), phase)
        mbarrier.wait(shared.dout_full.index(slot), phase)
        dp = spread(shared.delta.index(slot), zero)
        dp = warpgroup_mma(v, shared.dout.index(slot).permute((1, 0)), dp, is_async=True)
        dp = warpgroup_mma_wait(0, deps=[dp])
        barrier_sync(P_FULL, CONSUMERS)
        p = shared.p.index(0).load(SCORES)
        barrier_arrive(P_EMPTY, CONSUMERS)
        ds = (p.to(gl.float32) * dp).to(v.dtype)
        shared.ds.index(n & 1).store(ds)
        fence_async_shared()
        barrier_arrive(DS_FULL + (n & 1), CONSUMERS)
        ds16 = gl.convert_layout(ds, DS)
        dk = warpgroup_mma(ds16, shared.q.index(slot), dk, is_async=True)
        dq = issue_share(1, before, shared, sizes)
        dk, ds16 = warpgroup_mma_wait(1, deps=[dk, ds16])
        dq = warpgroup_mma_wait(0, deps=[dq])
        wait_to_add(n - 1, shared, sizes)
        add_dq(dq, 1, step.dq_before, 0, results, shared, sizes)
        mark_added(n - 1, sizes)
        barrier_arrive(FREED + slot, CONSUMERS + 32)
        step = next_step(step, job, call, sizes)
    finish_dq(1, step.dq_before, job, results, shared, sizes)
    put_keys(dk, dk, 0, job, band, call, results, shared, sizes)
    tma.store_wait(0)
