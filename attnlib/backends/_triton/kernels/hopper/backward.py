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
from .primitives import FIRST, barrier_arrive, barrier_sync, opaque, tma_add

KEYS: gl.constexpr = gl.constexpr(64)  # of a consumer
BLOCK_N: gl.constexpr = gl.constexpr(128)
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
    """The keys ``[start, start + BLOCK_N)`` of a head, and the tiles of queries that see them, of all heads of its group.

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


# ---- the producer


@gluon.jit
def produce(q_desc, q_tail_desc, dout_desc, k_desc, k_tail_desc, v_desc, job, call, shared, sizes):
    """Load the keys and values of a program, and then tile after tile of queries, into slots as they become free."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    plane, key, kv_head = job.plane.to(gl.int32), job.row.to(gl.int32) + job.start, job.kv_head.to(gl.int32)
    full = shared.keys_full.index(0)
    mbarrier.expect(full, BLOCK_N * (sizes.D + sizes.D_TAIL + sizes.E) * 2)
    for c in gl.static_range(2):
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


# ---- a consumer


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
def clear_keys(number: gl.constexpr, job, band, shared, sizes):
    """Zero the keys and values that are no keys of this sequence: 0 times what they hold may be NaN."""
    low, high = band.start - job.start, band.end - job.start
    if (low > 0) | (high < BLOCK_N):
        for c in gl.static_range(2):  # each consumer all of them, and so none waits for the other
            clear_outside(shared.k.index(c), c * KEYS, low, high)
            if sizes.D_TAIL:
                clear_outside(shared.k_tail.index(c), c * KEYS, low, high)
        clear_outside(shared.v.index(number), number * KEYS, low, high)
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
        ROWS: gl.constexpr = SIZE // 256
        EACH: gl.constexpr = sizes.BLOCK_M * (sizes.D + sizes.D_TAIL) // 256
        staged = shared.dq.index(number)
        if first:
            staged = staged.slice(0, ROWS, 0)
        tma.store_wait(0)
        staged.store(held.reshape([ROWS, 256]))
        fence_async_shared()
        desc = results.dq_tail_desc if first else results.dq_desc
        tma_add(desc, [tile * EACH + (first * sizes.BLOCK_M // 256 + number * ROWS), 0], staged)
    else:
        EACH: gl.constexpr = sizes.BLOCK_M * (sizes.D + sizes.D_TAIL)
        at = results.dq_ptr + tile.to(gl.int64) * EACH + (first * sizes.BLOCK_M + number * SIZE)
        gl.atomic_add(at + gl.arange(0, SIZE, held.type.layout), held, sem="relaxed")


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
    mbarrier.wait(shared.dout_full.index(slot), now.phase)
    v = shared.v.index(number)
    dout = shared.dout.index(slot)
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
    p16 = gl.convert_layout(p.to(dout.dtype), P)
    next_slot = (slot + 1) % sizes.SLOTS
    next_phase = gl.where(next_slot == 0, now.phase ^ 1, now.phase)
    mbarrier.wait(shared.q_full.index(next_slot), next_phase, pred=now.more)  # ptxas moves no wait above this one
    dp = warpgroup_mma_wait(0, deps=[dp])
    dv = warpgroup_mma(p16, dout, sums.dv, is_async=True)
    if sizes.P16:  # no registers are left for p
        p = gl.convert_layout(p16, SCORES).to(gl.float32)
    ds = (p * dp * derivative).to(dout.dtype)
    ds16 = gl.convert_layout(ds, P)
    barrier_sync(FIRST + number * 2 + now.parity, CONSUMERS)  # the other's ds of the step before is there, and its dq done
    dq = issue_dq(number, now.parity, shared.k, shared, sizes)
    dk = warpgroup_mma(ds16, shared.q.index(slot), sums.dk, is_async=True)
    dk_tail = sums.dk_tail
    if sizes.D_TAIL:
        dk_tail = warpgroup_mma(ds16, shared.q_tail.index(slot), sums.dk_tail, is_async=True)
    shared.ds.index((now.parity ^ 1) * 2 + number).store(ds)
    fence_async_shared()
    if sizes.D_TAIL:
        dv, dq, _ = warpgroup_mma_wait(2, deps=[dv, dq, p16])
        add_dq(dq, number, now.tile_before, 0, results, shared, sizes)
        dq = issue_dq(number, now.parity, shared.k_tail, shared, sizes)
        dk, dk_tail, dq, _ = warpgroup_mma_wait(0, deps=[dk, dk_tail, dq, ds16])
        add_dq(dq, number, now.tile_before, sizes.D, results, shared, sizes)
    else:
        dv, dq, _ = warpgroup_mma_wait(1, deps=[dv, dq, p16])
        add_dq(dq, number, now.tile_before, 0, results, shared, sizes)
        dk, _ = warpgroup_mma_wait(0, deps=[dk, ds16])
        dk_tail = dk
    barrier_arrive(FREED + slot, CONSUMERS + 32)
    barrier_arrive(FIRST + (1 - number) * 2 + (now.parity ^ 1), CONSUMERS)
    return Sums(dk, dk_tail, dv)


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
        clear_keys(number, job, band, shared, sizes)
    barrier_arrive(FIRST + (1 - number) * 2, CONSUMERS)
    tile, head, before = 0, job.kv_head * call.group, -1
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


# ---- the kernel


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
    j0, j1 = gl.maximum(work.start, band.start), gl.minimum(work.start + BLOCK_N, band.end)
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
        D_MAIN, D_TAIL, E_MAIN, D, E, BLOCK_M, SLOTS, BY_ROWS, EARLY, BY_TMA, P16, HOLES, PACKED,
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q, k, v = ring(dtype, SLOTS, BLOCK_M, D_MAIN), ring(dtype, 2, KEYS, D_MAIN), ring(dtype, 2, KEYS, E_MAIN)
    q_tail, k_tail = q, k
    if D_TAIL:
        q_tail, k_tail = ring(dtype, SLOTS, BLOCK_M, D_TAIL), ring(dtype, 2, KEYS, D_TAIL)
    dout, ds = ring(dtype, SLOTS, BLOCK_M, E_MAIN), ring(dtype, 4, KEYS, BLOCK_M)
    staged = ds
    if BY_TMA:
        FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
        staged = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M * D_MAIN // 512, 256], FLAT)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], VECTOR)
    delta = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], VECTOR)
    shared = Shared(
        q, q_tail, dout, k, k_tail, v, ds, staged, lse, delta, barriers(1, 1), barriers(SLOTS, 2), barriers(SLOTS, 1)
    )
    fence_async_shared()
    work = locate(
        gl.program_id(0), cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, kv_heads, t, s, heads_per_wave, BLOCK_N, False
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
