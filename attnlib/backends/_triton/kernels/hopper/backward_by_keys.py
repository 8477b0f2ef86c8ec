"""Consumers of a backward that own 64 keys each: both gradients of those stay in registers, for heads of up to 128."""

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
from .primitives import FIRST, barrier_arrive, barrier_sync, opaque, opaque_halves


class Sums(NamedTuple):
    """The gradients of a consumer's keys."""

    dk: gl.tensor
    dv: gl.tensor


class Now(NamedTuple):
    """Where a step finds things: the slot of its queries, its phase, and which of two slots holds the last ``ds``."""

    slot: gl.tensor
    phase: gl.tensor
    parity: gl.tensor
    masked: gl.tensor
    more: gl.tensor


@gluon.jit
def issue_dq(number: gl.constexpr, parity, shared, sizes):
    """Begin this consumer's share of ``ds.T @ k``."""
    COLUMNS: gl.constexpr = sizes.D if sizes.BY_ROWS else sizes.D // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    for c in gl.static_range(2):
        ds, k = shared.ds.index(parity * 2 + c), shared.k.index(c)
        if sizes.BY_ROWS:
            ds = ds.slice(number * 64, 64, 1)
        else:
            k = k.slice(number * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def advance(sums, number: gl.constexpr, step, now, job, band, call, results, shared, sizes):
    """The sums with one tile of queries more. What it adds to dq is multiplied in the next step, so none need wait."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    IN_SUMS: gl.constexpr = call.softcap is None and call.slopes_ptr is None
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums.dv.type.layout, k_width=2)
    zero = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES)
    slot, m0 = now.slot, job.first + step.tile * BLOCK_M
    q, dout = shared.q.index(slot), shared.dout.index(slot)
    if now.masked:
        clear_queries(m0, slot, now.phase, job, shared, sizes)
    s = spread(shared.lse.index(slot), zero) if IN_SUMS else zero
    s = warpgroup_mma(shared.k.index(number), q.permute((1, 0)), s, is_async=True)
    if not sizes.EARLY:
        s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.wait(shared.dout_full.index(slot), now.phase)
    dp = spread(shared.delta.index(slot), zero)
    dp = warpgroup_mma(shared.v.index(number), dout.permute((1, 0)), dp, is_async=True)
    if sizes.EARLY:
        s = warpgroup_mma_wait(1, deps=[s])

    i = (job.ahead + m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES)))[None, :]
    j = (job.start + number * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES)))[:, None]
    slope = None
    if call.slopes_ptr is not None:
        slope = load_slope(call.slopes_ptr, call.stride_slopes, job.sequence, step.head, call.batch)
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
    # What branches stand between is kept as 16-bit halves, in registers of their own: so not before here.
    p16 = gl.convert_layout(p.to(dout.dtype), P)
    dp = warpgroup_mma_wait(0, deps=[dp])
    dv = warpgroup_mma(p16, dout, sums.dv, is_async=True)
    if sizes.HALVES:  # there are no registers for more
        p = gl.convert_layout(opaque_halves(p16), SCORES).to(gl.float32)
    ds = (p * dp * derivative).to(dout.dtype)
    ds16 = gl.convert_layout(ds, P)
    barrier_sync(FIRST + number * 2 + now.parity, CONSUMERS)  # the other's last ds is there, the one before read
    dq = issue_dq(number, now.parity, shared, sizes)
    dk = warpgroup_mma(ds16, q, sums.dk, is_async=True)
    shared.ds.index((now.parity ^ 1) * 2 + number).store(ds)
    fence_async_shared()
    dv, dq, _ = warpgroup_mma_wait(1, deps=[dv, dq, p16])
    add_dq(dq, number, step.dq_before, 0, results, shared, sizes)
    dk, _ = warpgroup_mma_wait(0, deps=[dk, ds16])
    barrier_arrive(FREED + slot, CONSUMERS + 32)
    barrier_arrive(FIRST + (1 - number) * 2 + (now.parity ^ 1), CONSUMERS)
    return Sums(dk, dv)


@gluon.jit
def consume(number: gl.constexpr, job, band, call, results, shared, sizes):
    """The gradients of a consumer's keys, and what they add to those of queries."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D, 16])
    OF_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E, 16])
    sums = Sums(gl.zeros([KEYS, sizes.D], gl.float32, OF_K), gl.zeros([KEYS, sizes.E], gl.float32, OF_V))
    all_low, all_high = full_queries(job.start + number * KEYS, job, band)
    wait_for_keys(job, band, shared, sizes)
    shared.ds.index(number).store(gl.zeros([KEYS, BLOCK_M], shared.q.dtype, OF_K))  # of the step before the first
    fence_async_shared()
    barrier_arrive(FIRST + (1 - number) * 2, CONSUMERS)
    mbarrier.wait(shared.q_full.index(0), 0, pred=job.steps > 0)
    step = first_step(job, call)
    for n in range(job.steps):
        i0 = job.ahead + job.first + step.tile * BLOCK_M
        masked = (i0 < all_low) | (i0 + BLOCK_M > all_high)
        now = Now(n % sizes.SLOTS, (n // sizes.SLOTS) & 1, n & 1, masked, n + 1 < job.steps)
        sums = advance(sums, number, step, now, job, band, call, results, shared, sizes)
        step = next_step(step, job, call)
    parity = job.steps & 1
    barrier_sync(FIRST + number * 2 + parity, CONSUMERS)
    if job.steps > 0:
        dq = warpgroup_mma_wait(0, deps=[issue_dq(number, parity, shared, sizes)])
        add_dq(dq, number, step.dq_before, 0, results, shared, sizes)
    barrier_sync(DONE, CONSUMERS)
    put(sums.dv, 1.0, number, shared.v.index(number), results.dv.desc, results.dv, 0, sizes.E_ALL, job, band, sizes)
    put_keys(sums.dk, sums.dk, number, job, band, call, results, shared, sizes)
    tma.store_wait(0)
