"""Consumers of the Hopper backward for head dimensions up to 192: each of the two owns 64 keys.

The accumulated gradients of the keys take 160 registers per thread, and the remaining registers can hold only
one fp32 tile. Therefore:

- Probabilities are kept in 16 bits until the gradient of the scores needs them.
- The product for dk reads ``ds``, the gradient of the scores, from shared memory.
- dq is added in two blocks of channels, each while a product with queries runs. Adds fill a warp's memory
  queue, and its reads of shared memory wait in the same queue.

Programs with half as many keys would together add twice as much to dq. This would be 2.9 TB/s, at which the
L2 cache is 92 % busy.
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

from ...band import visible
from ...scores import Modifiers, unit_of
from ..primitives import FIRST, anew, barrier_arrive, barrier_sync, floats_of, opaque
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
    wait_for_keys,
)


class KeyGradients192(NamedTuple):
    """The accumulators of dk and dv for a consumer's keys; dk has two blocks of channels."""

    dk: gl.tensor
    dk_tail: gl.tensor
    dv: gl.tensor


@gluon.jit
def issue_share(number: gl.constexpr, parity, keys, shared):
    """Start ``ds.T @ k``, a consumer's part of dq, for its half of a block of channels."""
    COLUMNS: gl.constexpr = keys.shape[2] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    for c in gl.static_range(2):
        ds, k = shared.ds.index(anew(parity) * 2 + c), keys.index(anew(c))
        k = k.slice(number * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def advance(sums, number: gl.constexpr, n, step, masked, job, band, call, results, shared, sizes):
    """Add one query tile to the gradients of a consumer's keys, and return them.

    The part of dq from this tile is computed in the next step, so no consumer waits for the other.
    """
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums.dv.type.layout, k_width=2)
    zero = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES)
    slot, phase, before, m0 = n % sizes.SLOTS, (n // sizes.SLOTS) & 1, n & 1, job.first + step.tile * BLOCK_M
    q, q_tail, dout = (
        shared.q.index(anew(slot)),
        shared.q_tail.index(anew(slot)),
        shared.dout.index(anew(slot)),
    )
    mbarrier.wait(shared.q_full.index(slot), phase)
    if masked:
        clear_queries(m0, slot, phase, job, shared, sizes)
    s = warpgroup_mma(shared.k.index(anew(number)), q.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(shared.k_tail.index(anew(number)), q_tail.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    p = gl.exp2(s * unit_of(Modifiers(call.scale, None, None)) - spread(shared.lse.index(slot), zero))
    if masked:
        i = (job.ahead + m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES)))[None, :]
        j = (job.start + number * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES)))[:, None]
        p = opaque(gl.where(visible(i, j, band), p, 0.0))
    mbarrier.wait(shared.dout_full.index(slot), phase)  # ptxas moves no wait for a wgmma across this
    p16 = gl.convert_layout(p.to(dout.dtype), P)
    dp = spread(shared.delta.index(slot), zero)
    dp = warpgroup_mma(shared.v.index(anew(number)), dout.permute((1, 0)), dp, is_async=True)
    dv = warpgroup_mma(p16, dout, sums.dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = (gl.convert_layout(floats_of(p16), SCORES) * dp).to(dout.dtype)
    # Wait until the other consumer has stored its ds of the previous step, and no longer reads older ones.
    barrier_sync(FIRST + number * 2 + before, CONSUMERS)
    own = shared.ds.index((before ^ 1) * 2 + number)
    own.store(ds)
    fence_async_shared()
    dv, _ = warpgroup_mma_wait(0, deps=[dv, p16])
    dq = issue_share(number, before, shared.k, shared)
    dk = warpgroup_mma(own, q, sums.dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    add_dq(dq, number, step.dq_before, 0, results, shared, sizes)
    dq_tail = issue_share(number, before, shared.k_tail, shared)
    dk_tail = warpgroup_mma(own, q_tail, sums.dk_tail, is_async=True)
    dk, dq_tail = warpgroup_mma_wait(1, deps=[dk, dq_tail])
    barrier_arrive(FIRST + (1 - number) * 2 + (before ^ 1), CONSUMERS)
    add_dq(dq_tail, number, step.dq_before, sizes.D, results, shared, sizes)
    dk_tail = warpgroup_mma_wait(0, deps=[dk_tail])
    barrier_arrive(FREED + slot, CONSUMERS + 32)
    return KeyGradients192(dk, dk_tail, dv)


@gluon.jit
def consume_upto_192(number: gl.constexpr, job, band, call, results, shared, sizes):
    """Run one consumer: compute and write dk and dv of its keys, and add to the sums of dq."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D, 16])
    OF_TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D_TAIL, 16])
    OF_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E, 16])
    dk, dk_tail = (
        gl.zeros([KEYS, sizes.D], gl.float32, OF_K),
        gl.zeros([KEYS, sizes.D_TAIL], gl.float32, OF_TAIL),
    )
    sums = KeyGradients192(dk, dk_tail, gl.zeros([KEYS, sizes.E], gl.float32, OF_V))
    all_low, all_high = full_queries(job.start + number * KEYS, job, band)
    wait_for_keys(job, band, shared, sizes)
    # dq is added one step late, so the first step multiplies a ds of zeros.
    shared.ds.index(number).store(gl.zeros([KEYS, BLOCK_M], shared.q.dtype, OF_K))
    fence_async_shared()
    barrier_arrive(FIRST + (1 - number) * 2, CONSUMERS)
    step = first_step(job, call, sizes)
    for n in range(job.steps):
        i0 = job.ahead + job.first + step.tile * BLOCK_M
        masked = (i0 < all_low) | (i0 + BLOCK_M > all_high)
        sums = advance(sums, number, n, step, masked, job, band, call, results, shared, sizes)
        step = next_step(step, job, call, sizes)
    before = job.steps & 1
    barrier_sync(FIRST + number * 2 + before, CONSUMERS)
    if job.steps > 0:
        dq = warpgroup_mma_wait(0, deps=[issue_share(number, before, shared.k, shared)])
        add_dq(dq, number, step.dq_before, 0, results, shared, sizes)
        dq_tail = warpgroup_mma_wait(0, deps=[issue_share(number, before, shared.k_tail, shared)])
        add_dq(dq_tail, number, step.dq_before, sizes.D, results, shared, sizes)
    barrier_sync(DONE, CONSUMERS)
    put(
        sums.dv, 1.0, number, shared.v.index(number), results.dv.desc, results.dv, 0, sizes.E_ALL, job, band,
        sizes,
    )  # fmt: skip
    put_keys(sums.dk, sums.dk_tail, number, job, band, call, results, shared, sizes)
    tma.store_wait(0)
