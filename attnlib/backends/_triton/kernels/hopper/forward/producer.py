"""The producer warp of the Hopper forward: it schedules tiles, and loads data as ring slots become free."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...band import KeyBand, bounds, origin_of
from ...tile import Work
from ..primitives import FIRST, async_load, barrier_sync
from .shared import ROWS, post, visited, visits_of, work_of
from .transpose_values import block_of


@gluon.jit
def next_tile(tile, counter_ptr, tiles):
    """Return the next tile of this program, from a counter in global memory that all programs increment.

    This balances tiles of different lengths. Each program draws numbers until it gets one past the last tile,
    so all programs together draw ``tiles`` numbers. The last of these draws resets the counter to 0.
    """
    step = gl.num_programs(0)
    if counter_ptr is None:
        return tile + step
    else:
        claimed = gl.atomic_add(counter_ptr, 1)
        if claimed == tiles - 1:
            gl.atomic_xchg(counter_ptr, 0)
        return claimed + step


@gluon.jit
def load(desc, tail_desc, tiles, tails, slot, full, at, D: gl.constexpr, D_TAIL: gl.constexpr):
    """Start to load a tile, from row ``at[1]`` of head ``at[2]`` on, into a slot of a ring.

    If channels are divided into two blocks, both are loaded.
    """
    plane, row, head = at
    ready = full.index(slot)
    mbarrier.expect(ready, tiles.shape[1] * (D + D_TAIL) * (tiles.dtype.primitive_bitwidth // 8))
    async_load(desc, [plane, row, head, 0], ready, tiles.index(slot))
    if D_TAIL:
        async_load(tail_desc, [plane, row, head, D], ready, tails.index(slot))


@gluon.jit
def load_transposed(desc, tiles, slot, full, at):
    """Load a tile of transposed values: all channels of the keys from ``at[1]`` on."""
    plane, key, head = at
    ready = full.index(slot)
    mbarrier.expect(ready, tiles.shape[1] * tiles.shape[2])
    async_load(desc, [plane, 0, head, key], ready, tiles.index(slot))


@gluon.jit
def load_queries(q_desc, q_tail_desc, number, work, shared, sizes):
    """Load the queries of all consumers for the ``number``-th tile of this program."""
    slot = number % sizes.Q_SLOTS * sizes.CONSUMERS
    plane, first, head = work.plane.to(gl.int32), work.row.to(gl.int32) + work.start, work.head.to(gl.int32)
    for c in gl.static_range(sizes.CONSUMERS):
        at = (plane, first + c * ROWS, head)
        load(q_desc, q_tail_desc, shared.q, shared.q_tail, slot + c, shared.q_full, at, sizes.D, sizes.D_TAIL)


@gluon.jit
def drain(loaded, SLOTS: gl.constexpr, NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Wait until consumers have released the last tiles of a ring.

    A named barrier at which only some of the threads have arrived would hang the next program.
    """
    slot = gl.where(loaded < SLOTS, 0, loaded % SLOTS)
    for _ in range(gl.minimum(loaded, SLOTS)):
        barrier_sync(NUMBER + slot, THREADS)
        slot = gl.where(slot + 1 == SLOTS, 0, slot + 1)


@gluon.jit
def produce(q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, counter_ptr, call, shared, sizes):
    """Run the producer warp: load queries, keys and values of every tile as ring slots become free."""
    V_NUMBER: gl.constexpr = FIRST + sizes.K_SLOTS
    tile, number, loaded = gl.program_id(0), 0, 0
    k_slot, v_slot = 0, 0
    while tile < call.tiles:
        work = work_of(tile, call, sizes)
        start, end = bounds(call.starts_ptr, call.ends_ptr, work.sequence, work.others)
        origin = origin_of(call.origin_ptr, work.sequence, call.batch)
        band = KeyBand(start, end, call.left, call.right, call.prefix, origin.query - origin.key, origin.key)
        visits = visits_of(work, band, call, sizes)
        plane, kv_head = work.plane.to(gl.int32), (work.head // call.group).to(gl.int32)
        first_key = work.other.to(gl.int32)
        first_transposed = 0
        if sizes.TRANSPOSED and sizes.PACKED:
            first_transposed = block_of(first_key, work.sequence.to(gl.int32), sizes.BLOCK_N) * sizes.BLOCK_N
        for step in range(visits.count):
            n = visited(visits, step, sizes) * sizes.BLOCK_N
            at = (plane, first_key + n, kv_head)
            if loaded >= sizes.K_SLOTS:
                barrier_sync(FIRST + k_slot, sizes.K_THREADS)
            load(
                k_desc, k_tail_desc, shared.k, shared.k_tail, k_slot, shared.k_full, at, sizes.D, sizes.D_TAIL
            )
            if step == 0:  # load the first keys before waiting for a free query slot
                post(work, tile, number, call, shared, sizes)
                load_queries(q_desc, q_tail_desc, number, work, shared, sizes)
            if loaded >= sizes.V_SLOTS:
                barrier_sync(V_NUMBER + v_slot, sizes.V_THREADS)
            if sizes.TRANSPOSED:
                load_transposed(
                    v_desc, shared.v, v_slot, shared.v_full, (plane, first_transposed + n, kv_head)
                )
            else:
                load(
                    v_desc, v_desc, shared.v, shared.v_tail, v_slot, shared.v_full, at, sizes.E, sizes.E_TAIL
                )
            k_slot = gl.where(k_slot + 1 == sizes.K_SLOTS, 0, k_slot + 1)
            v_slot = gl.where(v_slot + 1 == sizes.V_SLOTS, 0, v_slot + 1)
            loaded += 1
        number += 1
        tile = next_tile(tile, counter_ptr, call.tiles)
    zero = (tile * 0).to(gl.int64)
    # A tile number past the last tile tells the consumers to stop.
    post(Work(zero, zero, zero, tile, zero, tile, zero, tile), tile, number, call, shared, sizes)
    drain(loaded, sizes.K_SLOTS, FIRST, sizes.K_THREADS)
    drain(loaded, sizes.V_SLOTS, V_NUMBER, sizes.V_THREADS)
