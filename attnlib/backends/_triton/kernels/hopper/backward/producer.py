"""The producer warp of the Hopper backward: it loads keys and values, then the queries that see them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...scores import Modifiers, unit_of
from ..primitives import async_load, barrier_sync
from .shared import CONSUMERS, FREED, KEYS, first_step, next_step, start_of


@gluon.jit
def produce(q_desc, q_tail_desc, dout_desc, k_desc, k_tail_desc, v_desc, job, call, shared, sizes):
    """Load the keys and values of a program, then one query tile after another, as ring slots become free.

    Queries that see none of the keys get an LSE of +inf, so that their probabilities are 0.
    """
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    IN_SUMS: gl.constexpr = call.softcap is None and call.slopes_ptr is None and sizes.TILES == 1
    plane, key, kv_head = job.plane.to(gl.int32), job.row.to(gl.int32) + job.start, job.kv_head.to(gl.int32)
    full = shared.keys_full.index(0)
    mbarrier.expect(full, sizes.TILES * KEYS * (sizes.D + sizes.D_TAIL + sizes.E) * 2)
    for c in gl.static_range(sizes.TILES):
        at = [plane, key + c * KEYS, kv_head, 0]
        async_load(k_desc, at, full, shared.k.index(c))
        async_load(v_desc, at, full, shared.v.index(c))
        if sizes.D_TAIL:
            at = [plane, key + c * KEYS, kv_head, sizes.D]
            async_load(k_tail_desc, at, full, shared.k_tail.index(c))

    unit = -1.0 / unit_of(Modifiers(call.scale, call.softcap, call.slopes_ptr))
    m, step = gl.arange(0, BLOCK_M, LAYOUT), first_step(job, call, sizes)
    for n in range(job.steps):
        start, head = start_of(step, job, sizes), step.head.to(gl.int32)
        at = job.plane * call.stride_lb + job.other + head * call.stride_lh
        valid = (start + m >= job.low) & (start + m < job.high)
        lse2 = gl.load(call.lse2_ptr + at + (start + m), mask=valid, other=float("inf"))
        delta = gl.load(call.delta_ptr + at + (start + m), mask=valid, other=0.0)
        slot = n % sizes.SLOTS
        if n >= sizes.SLOTS:
            barrier_sync(FREED + slot, CONSUMERS + 32)
        at = [plane, job.other.to(gl.int32) + start, head, 0]
        q_full, dout_full = shared.q_full.index(slot), shared.dout_full.index(slot)
        mbarrier.expect(q_full, BLOCK_M * (sizes.D + sizes.D_TAIL) * 2)
        async_load(q_desc, at, q_full, shared.q.index(slot))
        if sizes.D_TAIL:
            at_tail = [plane, job.other.to(gl.int32) + start, head, sizes.D]
            async_load(q_tail_desc, at_tail, q_full, shared.q_tail.index(slot))
        mbarrier.expect(dout_full, BLOCK_M * sizes.E * 2)
        async_load(dout_desc, at, dout_full, shared.dout.index(slot))
        shared.lse.index(slot).store(lse2 * unit if IN_SUMS else lse2)
        shared.delta.index(slot).store(-delta)
        mbarrier.arrive(q_full, count=1)
        step = next_step(step, job, call, sizes)
    # Wait until the last slots are released. A named barrier at which some threads have not arrived
    # would hang the next program.
    for n in range(gl.maximum(job.steps - sizes.SLOTS, 0), job.steps):
        barrier_sync(FREED + n % sizes.SLOTS, CONSUMERS + 32)
