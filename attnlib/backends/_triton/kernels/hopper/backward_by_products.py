"""Consumers of a backward that own a gradient each, of the same 64 keys: of values or of keys, for heads beyond 128.

The one makes the probabilities, the other the gradient of scores, and either half of the channels of dq, one step late.
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

from ..band import visible
from ..scores import Modifiers, load_slope, modify, unit_of
from .backward_parts import (
    CONSUMERS,
    DONE,
    FREED,
    KEYS,
    clear_queries,
    first_step,
    full_queries,
    next_step,
    spread,
    wait_for_keys,
)
from .backward_results import add_dq, put, put_keys
from .primitives import FIRST, barrier_arrive, barrier_sync, opaque

P_FULL: gl.constexpr = gl.constexpr(FIRST)
P_EMPTY: gl.constexpr = gl.constexpr(FIRST + 1)
DS_FULL: gl.constexpr = gl.constexpr(FIRST + 2)  # and the next, by turns


@gluon.jit
def issue_share(number: gl.constexpr, ds, k):
    """Begin half of the channels of ``ds.T @ k``, for a block of channels."""
    COLUMNS: gl.constexpr = k.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    zero = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    k = k.slice(number * COLUMNS, COLUMNS, 1)
    return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def issue_shares(number: gl.constexpr, parity, shared, sizes):
    """Begin half of the channels of ``ds.T @ k``. Without a second block, that is the first again and goes unread."""
    ds = shared.ds.index(parity)
    dq = issue_share(number, ds, shared.k.index(0))
    return dq, issue_share(number, ds, shared.k_tail.index(0)) if sizes.D_TAIL else dq


@gluon.jit
def wait_for_shares(dq, dq_tail, sizes):
    """Both blocks, once they are there."""
    if sizes.D_TAIL:
        dq, dq_tail = warpgroup_mma_wait(0, deps=[dq, dq_tail])
    else:
        dq = warpgroup_mma_wait(0, deps=[dq])
        dq_tail = dq
    return dq, dq_tail


@gluon.jit
def add_shares(dq, dq_tail, number: gl.constexpr, tile, results, shared, sizes):
    """Add half of the channels to the sums of a tile."""
    add_dq(dq, number, tile, 0, results, shared, sizes)
    if sizes.D_TAIL:
        add_dq(dq_tail, number, tile, sizes.D, results, shared, sizes)


@gluon.jit
def finish_dq(number: gl.constexpr, tile, job, results, shared, sizes):
    """Add what the last step left."""
    if job.steps > 0:
        dq, dq_tail = issue_shares(number, (job.steps & 1) ^ 1, shared, sizes)
        dq, dq_tail = wait_for_shares(dq, dq_tail, sizes)
        add_shares(dq, dq_tail, number, tile, results, shared, sizes)
    barrier_sync(DONE, CONSUMERS)


@gluon.jit
def consume_values(job, band, call, results, shared, sizes):
    """Probabilities, and the gradient of values."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    IN_SUMS: gl.constexpr = call.softcap is None and call.slopes_ptr is None
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OF_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OF_V, k_width=2)
    SHARES: gl.constexpr = 2 if sizes.D_TAIL else 1
    zero, dv = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES), gl.zeros([KEYS, sizes.E], gl.float32, OF_V)
    all_low, all_high = full_queries(job.start, job, band)
    j = (job.start + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES)))[:, None]
    wait_for_keys(job, band, shared, sizes)
    step = first_step(job, call)
    for n in range(job.steps):
        slot, phase, before = n % sizes.SLOTS, (n // sizes.SLOTS) & 1, (n & 1) ^ 1
        m0, dout = job.first + step.tile * BLOCK_M, shared.dout.index(slot)
        i0 = job.ahead + m0
        clear_queries(m0, slot, phase, job, shared, sizes)
        mbarrier.wait(shared.q_full.index(slot), phase)
        s = spread(shared.lse.index(slot), zero) if IN_SUMS else zero
        s = warpgroup_mma(shared.k.index(0), shared.q.index(slot).permute((1, 0)), s, is_async=True)
        if sizes.D_TAIL:
            s = warpgroup_mma(shared.k_tail.index(0), shared.q_tail.index(slot).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        i = (i0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES)))[None, :]
        slope = None
        if call.slopes_ptr is not None:
            slope = load_slope(call.slopes_ptr, call.stride_slopes, job.sequence, step.head, call.batch)
        modifiers = Modifiers(call.scale, call.softcap, slope)
        s, derivative = modify(s, modifiers, i + band.apart, j)
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
        # There are no registers for dq beside p.
        dv = warpgroup_mma(p16, dout, dv, is_async=True)
        barrier_sync(DS_FULL + before, CONSUMERS)
        dq, dq_tail = issue_shares(0, before, shared, sizes)
        dv, p16 = warpgroup_mma_wait(SHARES, deps=[dv, p16])
        dq, dq_tail = wait_for_shares(dq, dq_tail, sizes)
        add_shares(dq, dq_tail, 0, step.dq_before, results, shared, sizes)
        barrier_arrive(FREED + slot, CONSUMERS + 32)
        step = next_step(step, job, call)
    barrier_sync(P_EMPTY, CONSUMERS)
    barrier_sync(DS_FULL + ((job.steps & 1) ^ 1), CONSUMERS)
    finish_dq(0, step.dq_before, job, results, shared, sizes)
    put(dv, 1.0, 0, shared.v.index(0), results.dv.desc, results.dv, 0, sizes.E_ALL, job, band, sizes)
    tma.store_wait(0)


@gluon.jit
def consume_keys(job, band, call, results, shared, sizes):
    """The gradient of scores, and that of keys."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.BLOCK_M, 16])
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D, 16])
    DS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OF_K, k_width=2)
    SHARES: gl.constexpr = 2 if sizes.D_TAIL else 1
    zero, dk = gl.zeros([KEYS, sizes.BLOCK_M], gl.float32, SCORES), gl.zeros([KEYS, sizes.D], gl.float32, OF_K)
    dk_tail, v = dk, shared.v.index(0)
    if sizes.D_TAIL:
        OF_TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D_TAIL, 16])
        dk_tail = gl.zeros([KEYS, sizes.D_TAIL], gl.float32, OF_TAIL)
    wait_for_keys(job, band, shared, sizes)
    shared.ds.index(1).store(zero.to(v.dtype))  # of the step before the first
    fence_async_shared()
    barrier_arrive(DS_FULL + 1, CONSUMERS)
    barrier_arrive(P_EMPTY, CONSUMERS)
    step = first_step(job, call)
    for n in range(job.steps):
        slot, phase, before = n % sizes.SLOTS, (n // sizes.SLOTS) & 1, (n & 1) ^ 1
        clear_queries(job.first + step.tile * sizes.BLOCK_M, slot, phase, job, shared, sizes)
        mbarrier.wait(shared.q_full.index(slot), phase)
        mbarrier.wait(shared.dout_full.index(slot), phase)
        dp = spread(shared.delta.index(slot), zero)
        dp = warpgroup_mma(v, shared.dout.index(slot).permute((1, 0)), dp, is_async=True)
        if sizes.EARLY:
            dq, dq_tail = issue_shares(1, before, shared, sizes)
        dp = warpgroup_mma_wait(SHARES if sizes.EARLY else 0, deps=[dp])
        barrier_sync(P_FULL, CONSUMERS)
        p = shared.p.index(0).load(SCORES)
        barrier_arrive(P_EMPTY, CONSUMERS)
        ds = (p.to(gl.float32) * dp).to(v.dtype)
        shared.ds.index(n & 1).store(ds)
        fence_async_shared()
        barrier_arrive(DS_FULL + (n & 1), CONSUMERS)
        if sizes.EARLY:
            dq, dq_tail = wait_for_shares(dq, dq_tail, sizes)
        ds16 = gl.convert_layout(ds, DS)
        dk = warpgroup_mma(ds16, shared.q.index(slot), dk, is_async=True)
        if sizes.D_TAIL:
            dk_tail = warpgroup_mma(ds16, shared.q_tail.index(slot), dk_tail, is_async=True)
        if sizes.EARLY:
            add_shares(dq, dq_tail, 1, step.dq_before, results, shared, sizes)
        else:
            dq, dq_tail = issue_shares(1, before, shared, sizes)
        if sizes.D_TAIL:
            dk, dk_tail, ds16 = warpgroup_mma_wait(0 if sizes.EARLY else SHARES, deps=[dk, dk_tail, ds16])
        else:
            dk, ds16 = warpgroup_mma_wait(0 if sizes.EARLY else SHARES, deps=[dk, ds16])
        if not sizes.EARLY:
            dq, dq_tail = wait_for_shares(dq, dq_tail, sizes)
            add_shares(dq, dq_tail, 1, step.dq_before, results, shared, sizes)
        barrier_arrive(FREED + slot, CONSUMERS + 32)
        step = next_step(step, job, call)
    finish_dq(1, step.dq_before, job, results, shared, sizes)
    put_keys(dk, dk_tail, 0, job, band, call, results, shared, sizes)
    tma.store_wait(0)
