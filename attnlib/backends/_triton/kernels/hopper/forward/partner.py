"""The partner of a consumer in the Hopper forward: with heads of 257 to 512 channels, two share 64 queries.

The output sums of 64 queries then take half of all registers, so each of the two holds half of the channels.
The consumer computes probabilities as for other heads, and passes them to its partner in shared memory.
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

from ...band import KeyBand, bounds, origin_of
from ..primitives import FIRST, barrier_arrive, barrier_sync, opaque, scale_rows_in_place
from .results import put_out
from .shared import ROWS, advance, clear_others, read, visited, visits_of, wait_for_work

# Named barriers: the partner may read what was passed, and has read it.
PASSED: gl.constexpr = gl.constexpr(FIRST + 6)
TAKEN: gl.constexpr = gl.constexpr(FIRST + 7)
BOTH: gl.constexpr = gl.constexpr(256)  # threads


@gluon.jit
def hand_over(p, factor, shared):
    """Pass a block's probabilities to the partner, and the factors that rescale earlier sums."""
    barrier_sync(TAKEN, BOTH)
    shared.p.index(0).store(p)
    shared.factors.index(0).store(factor)
    fence_async_shared()
    barrier_arrive(PASSED, BOTH)


@gluon.jit
def hand_over_share(share, shared):
    """Pass the factors that normalize the sums to the partner, after the last block of a tile."""
    barrier_sync(TAKEN, BOTH)
    shared.factors.index(0).store(share)
    barrier_arrive(PASSED, BOTH)


@gluon.jit
def finish_partner():
    """Wait until the partner has read the last factors.

    A named barrier at which only some of the threads have arrived would hang the next program.
    """
    barrier_sync(TAKEN, BOTH)


@gluon.jit
def add_tail(call, results, shared, sizes):
    """Run the partner: sum the second block of value channels in every tile, and write it to the output."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E_TAIL, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    slot, phase, count = 0, 0, 0
    barrier_arrive(TAKEN, BOTH)
    tile = wait_for_work(count, shared)
    while tile < call.tiles:
        work = read(count, shared, sizes)
        start, end = bounds(call.starts_ptr, call.ends_ptr, work.sequence, work.others)
        origin = origin_of(call.origin_ptr, work.sequence, call.batch)
        band = KeyBand(start, end, call.left, call.right, call.prefix, origin.query - origin.key, origin.key)
        every = visits_of(work, band, call, sizes)
        acc = gl.zeros([ROWS, sizes.E_TAIL], gl.float32, SUMS)
        for n in range(every.count):
            barrier_sync(PASSED, BOTH)
            acc = scale_rows_in_place(acc, shared.factors.index(0).load(ROW), sizes.E_TAIL // 2)
            mbarrier.wait(shared.v_full.index(slot), phase)
            values = shared.v_tail.index(slot)
            if sizes.HOLES:
                clear_others(values, visited(every, n, sizes) * sizes.BLOCK_N, band, sizes)
            acc = warpgroup_mma(shared.p.index(0), values, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier_arrive(FIRST + sizes.K_SLOTS + slot, sizes.V_THREADS)
            barrier_arrive(TAKEN, BOTH)
            slot, phase = advance(slot, phase, sizes.V_SLOTS)
        barrier_sync(PASSED, BOTH)
        share = shared.factors.index(0).load(ROW)[:, None]
        barrier_arrive(TAKEN, BOTH)
        acc = opaque(gl.where(share == 0.0, 0.0, acc * share))  # rows that see no key may hold anything
        # The consumer has read all queries of the tile, whose memory the output takes.
        out = shared.q_tail.index(count % sizes.Q_SLOTS)
        out.store(acc.to(shared.v.dtype))
        put_out(out, work, work.start, sizes.E, results, sizes)
        tma.store_wait(0)  # the output must leave the slot before new queries arrive
        mbarrier.arrive(shared.q_empty.index(count % sizes.Q_SLOTS), count=1)
        count += 1
        tile = wait_for_work(count, shared)
