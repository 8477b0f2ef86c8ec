"""What the backward kernels for Hopper share: what they are launched with, their producer, and where gradients go."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..band import query_range
from ..scores import Modifiers, unit_of
from .primitives import FIRST, add_fours, barrier_sync, tma_add

KEYS: gl.constexpr = gl.constexpr(64)  # of a tile
CONSUMERS: gl.constexpr = gl.constexpr(256)  # threads of both
FREED: gl.constexpr = gl.constexpr(FIRST + 5)  # the first barrier of those that hand a slot back


class Sizes(NamedTuple):
    """What a kernel is compiled for: channels of blocks, queries of a tile, slots, and which consumer adds what to dq.

    ``BY_ROWS``: each adds half of a tile's queries, otherwise half of the channels. ``HOLES``: rows beyond a sequence's
    may be another's.
    """

    D: gl.constexpr
    D_TAIL: gl.constexpr
    E: gl.constexpr
    D_ALL: gl.constexpr
    E_ALL: gl.constexpr
    TILES: gl.constexpr
    BLOCK_M: gl.constexpr
    SLOTS: gl.constexpr
    BY_ROWS: gl.constexpr
    EARLY: gl.constexpr
    BY_TMA: gl.constexpr
    P16: gl.constexpr
    HOLES: gl.constexpr
    PACKED: gl.constexpr


class Problem(NamedTuple):
    """The call, by the parameters of the kernel."""

    lse2_ptr: gl.tensor
    delta_ptr: gl.tensor
    slopes_ptr: gl.tensor
    stride_lb: gl.tensor
    stride_lh: gl.tensor
    stride_slopes: gl.tensor
    batch: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    dq_tiles: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor


class Job(NamedTuple):
    """The keys ``[start, start + 64 TILES)`` of a head, and the tiles of queries that see them, of all heads of its group.

    Queries ``[low, high)`` do, ``[all_low, all_high)`` of them every key that there is. The first tile of a head begins
    at query ``first``; ``tiles`` follow each other, ``steps`` in all heads.
    """

    sequence: gl.tensor
    plane: gl.tensor
    kv_head: gl.tensor
    start: gl.tensor
    row: gl.tensor
    rows: gl.tensor
    other: gl.tensor
    queries: gl.tensor
    ahead: gl.tensor
    low: gl.tensor
    high: gl.tensor
    first: gl.tensor
    first_dq: gl.tensor
    tiles: gl.tensor
    steps: gl.tensor


class Shared(NamedTuple):
    """Shared memory: the keys and values of a program, rings for what queries bring, and barriers that say it is there."""

    q: gl.shared_memory_descriptor
    q_tail: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor


class Results(NamedTuple):
    """Where gradients go."""

    dk_desc: gl.tensor
    dk_tail_desc: gl.tensor
    dv_desc: gl.tensor
    dq_desc: gl.tensor
    dq_tail_desc: gl.tensor
    dk_ptr: gl.tensor
    dv_ptr: gl.tensor
    dq_ptr: gl.tensor
    stride_dkt: gl.tensor
    stride_dkg: gl.tensor
    stride_dvt: gl.tensor
    stride_dvg: gl.tensor


# ---- the producer


@gluon.jit
def produce(q_desc, q_tail_desc, dout_desc, k_desc, k_tail_desc, v_desc, job, call, shared, sizes):
    """Load the keys and values of a program, and then tile after tile of queries, into slots as they become free."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    plane, key, kv_head = job.plane.to(gl.int32), job.row.to(gl.int32) + job.start, job.kv_head.to(gl.int32)
    full = shared.keys_full.index(0)
    mbarrier.expect(full, sizes.TILES * KEYS * (sizes.D + sizes.D_TAIL + sizes.E) * 2)
    for c in gl.static_range(sizes.TILES):
        at = [plane, key + c * KEYS, kv_head, 0]
        tma.async_copy_global_to_shared(k_desc, at, full, shared.k.index(c))
        if sizes.D_TAIL:
            tma.async_copy_global_to_shared(k_tail_desc, [plane, at[1], kv_head, sizes.D], full, shared.k_tail.index(c))
        tma.async_copy_global_to_shared(v_desc, at, full, shared.v.index(c))

    unit = -1.0 / unit_of(Modifiers(call.scale, call.softcap, call.slopes_ptr))
    IN_SUMS: gl.constexpr = call.softcap is None and call.slopes_ptr is None
    m, tile, head = gl.arange(0, BLOCK_M, LAYOUT), 0, kv_head * call.group
    for step in range(0, job.steps):
        start = job.first + tile * BLOCK_M
        at = job.plane * call.stride_lb + job.other + head * call.stride_lh
        valid = (start + m >= job.low) & (start + m < job.high)
        lse2 = gl.load(call.lse2_ptr + at + (start + m), mask=valid, other=float("inf"))
        delta = gl.load(call.delta_ptr + at + (start + m), mask=valid, other=0.0)
        slot = step % sizes.SLOTS
        if step >= sizes.SLOTS:
            barrier_sync(FREED + slot, CONSUMERS + 32)
        at = [plane, job.other.to(gl.int32) + start, head, 0]
        full = shared.q_full.index(slot)
        mbarrier.expect(full, BLOCK_M * (sizes.D + sizes.D_TAIL) * 2)
        tma.async_copy_global_to_shared(q_desc, at, full, shared.q.index(slot))
        if sizes.D_TAIL:
            tma.async_copy_global_to_shared(q_tail_desc, [at[0], at[1], head, sizes.D], full, shared.q_tail.index(slot))
        full = shared.dout_full.index(slot)
        mbarrier.expect(full, BLOCK_M * sizes.E * 2)
        tma.async_copy_global_to_shared(dout_desc, at, full, shared.dout.index(slot))
        shared.lse.index(slot).store(lse2 * unit if IN_SUMS else lse2)
        shared.delta.index(slot).store(-delta)
        mbarrier.arrive(shared.q_full.index(slot), count=1)
        tile += 1
        if tile == job.tiles:
            tile, head = 0, head + 1
    for step in range(gl.maximum(job.steps - sizes.SLOTS, 0), job.steps):  # a barrier left half full hangs the next program
        barrier_sync(FREED + step % sizes.SLOTS, CONSUMERS + 32)


@gluon.jit
def clear_outside(tile, n, low, high):
    """Zero the rows of a tile, from row ``n`` on, outside ``[low, high)``: they may hold anything."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HEIGHT: gl.constexpr = tile.shape[0]
    for first in gl.static_range(0, HEIGHT, 16):
        rows = tile.slice(first, 16, 0)
        i = n + first + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        x = rows.load(LAYOUT)
        rows.store(gl.where(((i >= low) & (i < high))[:, None], x, gl.zeros_like(x)))


@gluon.jit
def clear_keys(job, band, shared, sizes):
    """Zero the keys and values that are no keys of this sequence: 0 times what they hold may be NaN."""
    low, high = band.start - job.start, band.end - job.start
    if (low > 0) | (high < sizes.TILES * KEYS):
        for c in gl.static_range(sizes.TILES):  # each consumer all of them, and so none waits for the other
            clear_outside(shared.k.index(c), c * KEYS, low, high)
            if sizes.D_TAIL:
                clear_outside(shared.k_tail.index(c), c * KEYS, low, high)
            clear_outside(shared.v.index(c), c * KEYS, low, high)
        fence_async_shared()


@gluon.jit
def clear_queries(m0, slot, job, shared, sizes):
    """Zero the queries of a tile that see none of these keys: they may be another sequence's."""
    clear_outside(shared.q.index(slot), m0, job.low, job.high)
    if sizes.D_TAIL:
        clear_outside(shared.q_tail.index(slot), m0, job.low, job.high)
    clear_outside(shared.dout.index(slot), m0, job.low, job.high)
    fence_async_shared()


@gluon.jit
def spread(vector, zero):
    """A number for each query as a tile ``[keys, queries]``."""
    tile, _ = gl.broadcast(gl.expand_dims(vector.load(gl.SliceLayout(0, zero.type.layout)), 0), zero)
    return tile


@gluon.jit
def as_held(x):
    """A product ``[64, n]`` as its threads hold it: 16 bytes of each of 128 threads, and then the next 16."""
    COUNT: gl.constexpr = x.shape[1] // 8
    x = x.reshape([4, 2, 8, COUNT, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return x.reshape([COUNT * 512])


@gluon.jit
def add_dq(dq, number: gl.constexpr, tile, first: gl.constexpr, results, shared, sizes):
    """Add a consumer's share of a block of channels to the sums of all programs; ``first`` is where the block begins."""
    SIZE: gl.constexpr = dq.shape[0] * dq.shape[1]
    held = as_held(dq)
    if sizes.BY_TMA:
        ROWS: gl.constexpr = SIZE // 32
        EACH: gl.constexpr = sizes.BLOCK_M * (sizes.D + sizes.D_TAIL) // 32
        staged = shared.dq.index(number)
        if first:
            staged = staged.slice(0, ROWS, 0)
        tma.store_wait(0)
        staged.store(held.reshape([ROWS, 32]))
        fence_async_shared()
        desc = results.dq_tail_desc if first else results.dq_desc
        tma_add(desc, [tile * EACH + (first * sizes.BLOCK_M // 32 + number * ROWS), 0], staged)
    else:
        EACH: gl.constexpr = sizes.BLOCK_M * (sizes.D + sizes.D_TAIL)
        at = results.dq_ptr + tile.to(gl.int64) * EACH + (first * sizes.BLOCK_M + number * SIZE)
        add_fours(at + gl.arange(0, SIZE, held.type.layout), held)


@gluon.jit
def put(tile, out, desc, ptr, stride_t, stride_h, first: gl.constexpr, WIDTH: gl.constexpr, left, job, sizes):
    """Write a consumer's gradients by way of shared memory, ``left`` rows of them; those that follow may be another's."""
    out.store(tile.to(out.dtype))
    fence_async_shared()
    row, head = job.row + job.start + job.rows - job.start - left, job.kv_head
    if not sizes.PACKED:
        tma.async_copy_shared_to_global(desc, [job.plane.to(gl.int32), row.to(gl.int32), head.to(gl.int32), first], out)
    elif left >= KEYS:
        tma.async_copy_shared_to_global(desc, [job.plane.to(gl.int32), row.to(gl.int32), head.to(gl.int32), first], out)
    elif left > 0:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        n, d = gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, out.shape[1], gl.SliceLayout(0, LAYOUT))
        at = ((row + n) * stride_t)[:, None] + (head * stride_h + first + d)[None, :]
        gl.store(ptr + at, out.load(LAYOUT), mask=(n < left)[:, None] & (first + d < WIDTH)[None, :])


@gluon.jit
def ring(tile_type: gl.constexpr, SLOTS: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Room for ``SLOTS`` tiles, as matrix products read them."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], tile_type)
    return gl.allocate_shared_memory(tile_type, [SLOTS, HEIGHT, WIDTH], LAYOUT)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """As many barriers, each for so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(made.index(n), ARRIVALS)
    return made


@gluon.jit
def job_of(work, band, call, sizes):
    """What a program does for its block of keys."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    ahead, kv_head = work.rows - work.others, work.head
    j0, j1 = gl.maximum(work.start, band.start), gl.minimum(work.start + sizes.TILES * KEYS, band.end)
    low, high, _, _ = query_range(j0, j1, ahead, work.rows, band)
    low, high = low - ahead, high - ahead
    first = low // BLOCK_M
    tiles = gl.where(work.start < work.rows, gl.maximum(gl.cdiv(high, BLOCK_M) - first, 0), 0)
    first_dq = (work.plane.to(gl.int32) * call.heads + kv_head.to(gl.int32) * call.group) * call.dq_tiles + first
    if sizes.PACKED:
        first_dq += work.other.to(gl.int32) // BLOCK_M + work.sequence.to(gl.int32)
    return Job(
        work.sequence, work.plane, kv_head, work.start, work.row, work.rows, work.other, work.others, ahead, low, high,
        first * BLOCK_M, first_dq, tiles, tiles * call.group,
    )  # fmt: skip
