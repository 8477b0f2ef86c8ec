"""FlashAttention-3's forward (Shah et al., 2024, arXiv 2407.08608) for Hopper, in Gluon: one program an SM.

A producer warp loads by descriptors, and consumers of 64 queries each multiply. Keys are walked from the last block down:
the softmax of a block runs under the product of the probabilities before it with their values. Blocks that need a mask
at the end of what is visible come first, outside the steady loop.
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

from ..band import Band, bounds, key_range, origin_of, sees_any, visible
from ..scores import LN2, LOG2E, Modifiers, load_slope, modify, unit_of
from ..tile import COUNTS, Work, locate
from .primitives import FIRST, arrive_after, barrier_arrive, barrier_sync, opaque, scale_rows

ROWS: gl.constexpr = gl.constexpr(64)  # queries of a consumer
MOVED: gl.constexpr = gl.constexpr(8.0)  # powers of two by which a maximum grows before sums are scaled again


class Sizes(NamedTuple):
    """What a kernel is compiled for: channels of blocks, keys of a block, consumers, and the slots of each ring.

    ``HOLES``: rows beyond a sequence's keys may be another's. ``HIDES_FIRST``: so may the mask hide its first keys.
    """

    D: gl.constexpr
    D_TAIL: gl.constexpr
    E: gl.constexpr
    BLOCK_N: gl.constexpr
    CONSUMERS: gl.constexpr
    Q_SLOTS: gl.constexpr
    K_SLOTS: gl.constexpr
    V_SLOTS: gl.constexpr
    Q_IN_REGISTERS: gl.constexpr
    OUT_IN_Q: gl.constexpr
    HOLES: gl.constexpr
    HIDES_FIRST: gl.constexpr
    PACKED: gl.constexpr
    THREADS: gl.constexpr


class Problem(NamedTuple):
    """The call, by the parameters of the kernel; ``tiles`` are its blocks of queries, of all heads and sequences."""

    cu_q_ptr: gl.tensor
    cu_k_ptr: gl.tensor
    starts_ptr: gl.tensor
    ends_ptr: gl.tensor
    slopes_ptr: gl.tensor
    sinks_ptr: gl.tensor
    origin_ptr: gl.tensor
    stride_slopes: gl.tensor
    batch: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    s: gl.tensor
    t: gl.tensor
    heads_per_wave: gl.tensor
    left: gl.tensor
    right: gl.tensor
    prefix: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor
    tiles: gl.tensor


class Results(NamedTuple):
    """Where out and the LSE go."""

    out_desc: gl.tensor
    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    stride_ob: gl.tensor
    stride_os: gl.tensor
    stride_oh: gl.tensor
    stride_lb: gl.tensor
    stride_lh: gl.tensor
    e: gl.tensor


class Shared(NamedTuple):
    """Shared memory: rings of tiles, the work that the producer posts, and the barriers that say when each is there."""

    q: gl.shared_memory_descriptor
    q_tail: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    work: gl.shared_memory_descriptor
    work_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor


class Turn(NamedTuple):
    """Which slots of the rings of keys and of values come next, and their phases."""

    k: gl.tensor
    k_phase: gl.tensor
    v: gl.tensor
    v_phase: gl.tensor


class Blocks(NamedTuple):
    """Numbers of blocks of keys: those seen, ``[bottom, top)``, and among them those that all rows see whole."""

    bottom: gl.tensor
    top: gl.tensor
    full_bottom: gl.tensor
    full_top: gl.tensor


class State(NamedTuple):
    """The sums of a consumer, and the probabilities of the last block, which wait for their product."""

    acc: gl.tensor
    p: gl.tensor
    m_i: gl.tensor
    l_i: gl.tensor  # [ROWS, 8], by place: lanes are added once a tile


@gluon.jit
def advance(slot, phase, SLOTS: gl.constexpr):
    """The next slot of a ring, and its phase."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


# ---- what a tile is


@gluon.jit
def work_of(tile, call, sizes):
    """The head of a sequence and the block of its queries that a tile is."""
    REVERSED: gl.constexpr = call.right is not None
    heads, ahead = call.heads, call.heads_per_wave
    BLOCK_M: gl.constexpr = ROWS * sizes.CONSUMERS
    return locate(tile, call.cu_q_ptr, call.cu_k_ptr, call.batch, heads, call.s, call.t, ahead, BLOCK_M, REVERSED)


@gluon.jit
def blocks_of(work, band, sizes, FIRST_ROW: gl.constexpr, COUNT: gl.constexpr):
    """The blocks that ``COUNT`` rows of the work from ``FIRST_ROW`` on see; one at least, and be it hidden."""
    i = work.others - work.rows + work.start + FIRST_ROW
    low, high, all_low, all_high = key_range(i, gl.minimum(i + COUNT, work.others), band)
    bottom = gl.maximum(low, 0) // sizes.BLOCK_N
    top = gl.maximum(gl.cdiv(high, sizes.BLOCK_N), bottom + 1)
    return Blocks(bottom, top, gl.cdiv(all_low, sizes.BLOCK_N), all_high // sizes.BLOCK_N)


@gluon.jit
def post(work, tile, number, call, shared, sizes):
    """Tell the consumers the work of the ``number``-th tile, once they have left the queries of the one before.

    The divisions that find it take 600 cycles, which the producer has.
    """
    slot = number % sizes.Q_SLOTS * sizes.CONSUMERS
    for c in gl.static_range(sizes.CONSUMERS):
        mbarrier.wait(shared.q_empty.index(slot + c), ((number // sizes.Q_SLOTS) & 1) ^ 1)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero, at = gl.full([1], 0, gl.int32, LAYOUT), (number & 1) * 9
    shared.work.index(at).store(zero + tile)
    shared.work.index(at + 1).store(zero + work.sequence.to(gl.int32))
    shared.work.index(at + 2).store(zero + work.plane.to(gl.int32))
    shared.work.index(at + 3).store(zero + work.head.to(gl.int32))
    shared.work.index(at + 4).store(zero + work.start)
    shared.work.index(at + 5).store(zero + work.row.to(gl.int32))
    shared.work.index(at + 6).store(zero + work.rows)
    shared.work.index(at + 7).store(zero + work.other.to(gl.int32))
    shared.work.index(at + 8).store(zero + work.others)
    mbarrier.arrive(shared.work_full.index(number & 1), count=1)


@gluon.jit
def posted(number, at, shared):
    """One number of the work that was posted."""
    return gl.max(shared.work.index((number & 1) * 9 + at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def read(number, shared):
    """The ``number``-th tile of this program, and its work."""
    mbarrier.wait(shared.work_full.index(number & 1), (number >> 1) & 1)
    sequence, plane, head = posted(number, 1, shared), posted(number, 2, shared), posted(number, 3, shared)
    start, row, rows = posted(number, 4, shared), posted(number, 5, shared), posted(number, 6, shared)
    other, others = posted(number, 7, shared), posted(number, 8, shared)
    work = Work(sequence, plane, head, start, row.to(gl.int64), rows, other.to(gl.int64), others)
    return posted(number, 0, shared), work


@gluon.jit
def next_tile(tile, counter_ptr, tiles):
    """The next tile of this program: tiles that differ in length are handed out by a counter.

    Each program draws until it is refused, ``tiles`` numbers in all; who draws the last one sets the counter back to 0.
    """
    step = gl.num_programs(0)
    if counter_ptr is None:
        return tile + step
    else:
        drawn = gl.atomic_add(counter_ptr, 1)
        if drawn == tiles - 1:
            gl.atomic_xchg(counter_ptr, 0)
        return drawn + step


# ---- the producer


@gluon.jit
def load(desc, tail_desc, tiles, tails, slot, full, at, D: gl.constexpr, D_TAIL: gl.constexpr):
    """Load a tile, and its second block if it has one, into a slot of a ring, from row ``at[1]`` of head ``at[2]``."""
    plane, row, head = at
    ready = full.index(slot)
    mbarrier.expect(ready, tiles.shape[1] * (D + D_TAIL) * 2)
    tma.async_copy_global_to_shared(desc, [plane, row, head, 0], ready, tiles.index(slot))
    if D_TAIL:
        tma.async_copy_global_to_shared(tail_desc, [plane, row, head, D], ready, tails.index(slot))


@gluon.jit
def drain(loaded, SLOTS: gl.constexpr, NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Take the last messages of a ring: a barrier that is left half full would hang the next program."""
    slot = gl.where(loaded < SLOTS, 0, loaded % SLOTS)
    for _ in range(0, gl.minimum(loaded, SLOTS)):
        barrier_sync(NUMBER + slot, THREADS)
        slot = gl.where(slot + 1 == SLOTS, 0, slot + 1)


@gluon.jit
def produce(q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, counter_ptr, call, shared, sizes):
    """Load what all tiles of this program need, into slots as they become free."""
    THREADS: gl.constexpr = sizes.THREADS
    V_NUMBER: gl.constexpr = FIRST + sizes.K_SLOTS
    tile, number, loaded = gl.program_id(0), 0, 0
    k_slot, v_slot = 0, 0
    while tile < call.tiles:
        work = work_of(tile, call, sizes)
        start, end = bounds(call.starts_ptr, call.ends_ptr, work.sequence, work.others)
        origin = origin_of(call.origin_ptr, work.sequence, call.batch)
        band = Band(start, end, call.left, call.right, call.prefix, origin.query - origin.key, origin.key)
        blocks = blocks_of(work, band, sizes, 0, ROWS * sizes.CONSUMERS)
        plane, head, kv_head = work.plane.to(gl.int32), work.head.to(gl.int32), (work.head // call.group).to(gl.int32)
        first, first_key = work.row.to(gl.int32) + work.start, work.other.to(gl.int32)
        for step in range(0, blocks.top - blocks.bottom):
            at = (plane, first_key + (blocks.top - 1 - step) * sizes.BLOCK_N, kv_head)
            if loaded >= sizes.K_SLOTS:
                barrier_sync(FIRST + k_slot, THREADS)
            load(k_desc, k_tail_desc, shared.k, shared.k_tail, k_slot, shared.k_full, at, sizes.D, sizes.D_TAIL)
            if step == 0:  # the first keys are on their way before there is room for queries
                post(work, tile, number, call, shared, sizes)
                slot = number % sizes.Q_SLOTS * sizes.CONSUMERS
                for c in gl.static_range(sizes.CONSUMERS):
                    rows = (plane, first + c * ROWS, head)
                    q_slot = slot + c
                    load(q_desc, q_tail_desc, shared.q, shared.q_tail, q_slot, shared.q_full, rows, sizes.D, sizes.D_TAIL)
            if loaded >= sizes.V_SLOTS:
                barrier_sync(V_NUMBER + v_slot, THREADS)
            load(v_desc, v_desc, shared.v, shared.v, v_slot, shared.v_full, at, sizes.E, 0)
            k_slot = gl.where(k_slot + 1 == sizes.K_SLOTS, 0, k_slot + 1)
            v_slot = gl.where(v_slot + 1 == sizes.V_SLOTS, 0, v_slot + 1)
            loaded += 1
        number += 1
        tile = next_tile(tile, counter_ptr, call.tiles)
    zero = (tile * 0).to(gl.int64)
    post(Work(zero, zero, zero, tile, zero, tile, zero, tile), tile, number, call, shared, sizes)  # no more
    drain(loaded, sizes.K_SLOTS, FIRST, THREADS)
    drain(loaded, sizes.V_SLOTS, V_NUMBER, THREADS)


# ---- a consumer


@gluon.jit
def issue_scores(q, q_slot, slot, shared, zero, D_TAIL: gl.constexpr):
    """Begin ``q @ k.T`` for the keys of a slot."""
    s = warpgroup_mma(q, shared.k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    if D_TAIL:
        s = warpgroup_mma(
            shared.q_tail.index(q_slot), shared.k_tail.index(slot).permute((1, 0)), s, is_async=True
        )
    return s


@gluon.jit
def clear_others(values, n, band, sizes):
    """Zero the rows of a tile of values, from key ``n`` on, that no key of this sequence has: they may hold anything."""
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    if (n < band.start) | (n + BLOCK_N > band.end):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        for first in gl.static_range(0, BLOCK_N, 16):
            rows = values.slice(first, 16, 0)
            j = n + first + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
            x = rows.load(LAYOUT)
            rows.store(gl.where(((j >= band.start) & (j < band.end))[:, None], x, gl.zeros_like(x)))
        fence_async_shared()


@gluon.jit
def sum_by_place(p, BLOCK_N: gl.constexpr):
    """Row sums over the registers of a thread alone, ``[ROWS, 8]``."""
    return gl.sum(p.reshape([ROWS, BLOCK_N // 8, 8]), 1)


@gluon.jit
def softmax(s, m_i, modifiers, i, n, band, sizes, masked):
    """Probabilities of scores from key ``n`` on, the maximum that they are relative to, what sums so far are scaled by.

    The maximum stays while no row's grows by more than ``MOVED`` powers of two; sums are exact all the same.
    """
    j = (n + gl.arange(0, sizes.BLOCK_N, gl.SliceLayout(0, s.type.layout)))[None, :]
    unit = unit_of(modifiers)
    s, _ = modify(s, modifiers, (i + band.apart)[:, None], j)
    if masked:
        s = opaque(gl.where(visible(i[:, None], j, band), s, float("-inf")))
    highest = gl.max(s, 1) * unit
    m_new = gl.where(highest > m_i + MOVED, highest, m_i)
    # A row that has seen nothing keeps -inf as its maximum; subtracting it would give NaN.
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    return gl.exp2(s * unit - safe[:, None]), m_new, gl.exp2(m_i - safe)


@gluon.jit
def hand_back(turn, count, shared, sizes):
    """The turn after ``count`` blocks that this consumer does not need, each handed back once it has come.

    Before, this consumer could arrive twice where another has not arrived once.
    """
    k, k_phase, v, v_phase = turn.k, turn.k_phase, turn.v, turn.v_phase
    for _ in range(0, count):
        mbarrier.wait(shared.k_full.index(k), k_phase)
        barrier_arrive(FIRST + k, sizes.THREADS)
        k, k_phase = advance(k, k_phase, sizes.K_SLOTS)
        mbarrier.wait(shared.v_full.index(v), v_phase)
        barrier_arrive(FIRST + sizes.K_SLOTS + v, sizes.THREADS)
        v, v_phase = advance(v, v_phase, sizes.V_SLOTS)
    return Turn(k, k_phase, v, v_phase)


@gluon.jit
def step(state, turn, block, queries, modifiers, band, shared, sizes, masked, more):
    """The state with one block more: its softmax runs under the product of the block before with its values."""
    q, q_slot, i, zero = queries
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    s = issue_scores(q, q_slot, turn.k, shared, zero, sizes.D_TAIL)
    mbarrier.wait(shared.v_full.index(turn.v), turn.v_phase)
    if sizes.HOLES:
        clear_others(shared.v.index(turn.v), (block + 1) * BLOCK_N, band, sizes)
    acc = warpgroup_mma(state.p, shared.v.index(turn.v), state.acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p, m_i, factor = softmax(s, state.m_i, modifiers, i, block * BLOCK_N, band, sizes, masked)
    of_sums: gl.constexpr = gl.SliceLayout(1, state.l_i.type.layout)
    l_i = state.l_i * gl.convert_layout(factor, of_sums)[:, None] + sum_by_place(p, BLOCK_N)
    l_i = arrive_after(l_i, FIRST + turn.k, sizes.THREADS)  # the keys' slot is free
    k, k_phase = advance(turn.k, turn.k_phase, sizes.K_SLOTS)
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=more)  # ptxas moves no wait for a product above this one
    acc, _ = warpgroup_mma_wait(0, deps=[acc, state.p])
    barrier_arrive(FIRST + sizes.K_SLOTS + turn.v, sizes.THREADS)  # and the values'
    acc = scale_rows(acc, gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout)), sizes.E // 2)
    p = gl.convert_layout(p.to(shared.v.dtype), state.p.type.layout)  # the registers of the last p were in use till now
    v, v_phase = advance(turn.v, turn.v_phase, sizes.V_SLOTS)
    return State(acc, p, m_i, l_i), Turn(k, k_phase, v, v_phase)


@gluon.jit
def first_step(turn, block, queries, modifiers, band, shared, sizes, SUMS: gl.constexpr, P: gl.constexpr, more):
    """The state after the first block, whose probabilities wait for their product."""
    q, q_slot, i, zero = queries
    mbarrier.wait(shared.k_full.index(turn.k), turn.k_phase)
    s = issue_scores(q, q_slot, turn.k, shared, zero, sizes.D_TAIL)
    s = warpgroup_mma_wait(0, deps=[s])
    barrier_arrive(FIRST + turn.k, sizes.THREADS)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s.type.layout))
    p, m_i, _ = softmax(s, m_i, modifiers, i, block * sizes.BLOCK_N, band, sizes, True)
    l_i = sum_by_place(p, sizes.BLOCK_N)
    p = gl.convert_layout(p.to(shared.v.dtype), P)
    k, k_phase = advance(turn.k, turn.k_phase, sizes.K_SLOTS)
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=more)
    acc = gl.zeros([ROWS, sizes.E], gl.float32, SUMS)
    return State(acc, p, m_i, l_i), Turn(k, k_phase, turn.v, turn.v_phase)


@gluon.jit
def put(tile, out, work, first_row, results, sizes):
    """Write a tile that is in shared memory to its rows of out; those that follow the last row are another's."""
    fence_async_shared()
    first, left = work.start + first_row, work.rows - work.start - first_row
    if not sizes.PACKED:
        plane, head = work.plane.to(gl.int32), work.head.to(gl.int32)
        tma.async_copy_shared_to_global(results.out_desc, [plane, first, head, 0], out)
    elif left >= ROWS:
        row = work.row.to(gl.int32) + first
        tma.async_copy_shared_to_global(results.out_desc, [0, row, work.head.to(gl.int32), 0], out)
    elif left > 0:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        m, e = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, sizes.E, gl.SliceLayout(0, LAYOUT))
        at = (work.row + first + m) * results.stride_os
        at = at[:, None] + (work.head * results.stride_oh + e)[None, :]
        gl.store(results.out_ptr + at, out.load(LAYOUT), mask=(m < left)[:, None] & (e < results.e)[None, :])


@gluon.jit
def consume(number: gl.constexpr, call, results, shared, sizes):
    """Attention of the queries of one consumer, tile after tile."""
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    FIRST_ROW: gl.constexpr = number * ROWS
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    m = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    out = shared.out.index(number)
    turn, count = Turn(0, 0, 0, 0), 0
    tile, work = read(count, shared)
    while tile < call.tiles:
        start, end = bounds(call.starts_ptr, call.ends_ptr, work.sequence, work.others)
        origin = origin_of(call.origin_ptr, work.sequence, call.batch)
        band = Band(start, end, call.left, call.right, call.prefix, origin.query - origin.key, origin.key)
        every = blocks_of(work, band, sizes, 0, ROWS * sizes.CONSUMERS)
        mine = blocks_of(work, band, sizes, FIRST_ROW, ROWS)
        bottom = gl.minimum(gl.maximum(mine.bottom, every.bottom), every.top - 1)
        top = gl.minimum(gl.maximum(mine.top, bottom + 1), every.top)
        turn = hand_back(turn, every.top - top, shared, sizes)

        slope = None
        if call.slopes_ptr is not None:
            slope = load_slope(call.slopes_ptr, call.stride_slopes, work.sequence, work.head, call.batch)
        modifiers = Modifiers(call.scale, call.softcap, slope)
        i = work.others - work.rows + work.start + FIRST_ROW + m
        q_slot = count % sizes.Q_SLOTS * sizes.CONSUMERS + number
        mbarrier.wait(shared.q_full.index(q_slot), (count // sizes.Q_SLOTS) & 1)
        q = shared.q.index(q_slot)
        if sizes.Q_IN_REGISTERS:  # a third less to read of shared memory
            q = q.load(gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2))
            if not sizes.OUT_IN_Q:
                mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
        queries = (q, q_slot, i, zero)

        block = top - 1
        state, turn = first_step(turn, block, queries, modifiers, band, shared, sizes, SUMS, P, block > bottom)
        full_top = gl.maximum(gl.minimum(mine.full_top, block), bottom)
        full_bottom = full_top
        if sizes.HIDES_FIRST:
            full_bottom = gl.maximum(gl.minimum(mine.full_bottom, full_top), bottom)
        else:
            full_bottom = bottom
        for n in range(1, top - bottom):
            b = block - n
            masked = (b >= full_top) | (b < full_bottom)
            state, turn = step(state, turn, b, queries, modifiers, band, shared, sizes, masked, b > bottom)

        if not (sizes.OUT_IN_Q or sizes.Q_IN_REGISTERS):
            mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
        mbarrier.wait(shared.v_full.index(turn.v), turn.v_phase)
        if sizes.HOLES:
            clear_others(shared.v.index(turn.v), bottom * BLOCK_N, band, sizes)
        acc = warpgroup_mma(state.p, shared.v.index(turn.v), state.acc, is_async=True)
        l_i, m_i = gl.convert_layout(gl.sum(state.l_i, 1), gl.SliceLayout(1, SCORES)), state.m_i
        gain = 1.0
        if call.sinks_ptr is not None:  # a key whose value is 0
            sink = gl.load(call.sinks_ptr + work.head).to(gl.float32) * LOG2E
            sink = gl.where(work.sequence < call.batch, sink, float("-inf"))
            m_new = gl.maximum(m_i, sink)
            safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            gain = gl.exp2(m_i - safe)
            l_i, m_i = l_i * gain + gl.exp2(sink - safe), m_new
        nothing = l_i == 0.0
        l_i = gl.where(nothing, 1.0, l_i)
        lse = gl.where(nothing, float("-inf"), (m_i + gl.log2(l_i)) * LN2)
        at = work.plane.to(gl.int64) * results.stride_lb + work.row + work.head.to(gl.int64) * results.stride_lh
        first = work.start + FIRST_ROW
        gl.store(results.lse_ptr + at + (first + m), lse, mask=first + m < work.rows)
        share = gl.convert_layout(gain / l_i, gl.SliceLayout(1, SUMS))
        sees = gl.convert_layout(sees_any(i, band), gl.SliceLayout(1, SUMS))
        if not sizes.OUT_IN_Q:
            tma.store_wait(0)  # the last tile has left the buffer
        acc, _ = warpgroup_mma_wait(0, deps=[acc, state.p])
        barrier_arrive(FIRST + sizes.K_SLOTS + turn.v, sizes.THREADS)
        v, v_phase = advance(turn.v, turn.v_phase, sizes.V_SLOTS)
        turn = hand_back(Turn(turn.k, turn.k_phase, v, v_phase), bottom - every.bottom, shared, sizes)
        # A row that sees nothing has met whatever its blocks hold.
        out.store(gl.where(sees[:, None], acc * share[:, None], 0.0).to(shared.v.dtype))
        put(tile, out, work, FIRST_ROW, results, sizes)
        if sizes.OUT_IN_Q:  # the next queries may come when out has left
            tma.store_wait(0)
            mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
        count += 1
        tile, work = read(count, shared)
    tma.store_wait(0)


# ---- the kernel


@gluon.jit
def ring(tile_type: gl.constexpr, SLOTS: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Room for ``SLOTS`` tiles, as matrix products read them."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], tile_type)
    return gl.allocate_shared_memory(tile_type, [SLOTS, HEIGHT, WIDTH], LAYOUT)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """As many barriers, each for one arrival."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(made.index(n), 1)
    return made


@gluon.jit(do_not_specialize=[*COUNTS, "tiles"])
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, alibi_slopes_ptr, sinks_ptr, key_starts_ptr, key_ends_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, counter_ptr,
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, out_desc,
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_slopes,
    batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale, softcap, tiles,
    D: gl.constexpr, D_TAIL: gl.constexpr, E: gl.constexpr, E_MAIN: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, Q_SLOTS: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, OUT_IN_Q: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    D_MAIN: gl.constexpr,
):  # fmt: skip
    """Writes out ``[b, s, h, e]`` and the natural-log LSE ``[b, h, s]``; packed, ``[t, h, e]`` and ``[h, t]``."""
    HOLES: gl.constexpr = cu_seqlens_k_ptr is not None or key_starts_ptr is not None or key_ends_ptr is not None
    HIDES_FIRST: gl.constexpr = left is not None or key_starts_ptr is not None
    PACKED: gl.constexpr = cu_seqlens_q_ptr is not None
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    sizes: gl.constexpr = Sizes(
        D_MAIN, D_TAIL, E_MAIN, BLOCK_N, CONSUMERS, Q_SLOTS, K_SLOTS, V_SLOTS, Q_IN_REGISTERS, OUT_IN_Q, HOLES,
        HIDES_FIRST, PACKED, THREADS,
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q = ring(dtype, Q_SLOTS * CONSUMERS, ROWS, D_MAIN)
    k, v = ring(dtype, K_SLOTS, BLOCK_N, D_MAIN), ring(dtype, V_SLOTS, BLOCK_N, E_MAIN)
    q_tail, k_tail, out = q, k, q
    if D_TAIL:
        q_tail, k_tail = ring(dtype, Q_SLOTS * CONSUMERS, ROWS, D_TAIL), ring(dtype, K_SLOTS, BLOCK_N, D_TAIL)
    if not OUT_IN_Q:
        out = ring(dtype, CONSUMERS, ROWS, E_MAIN)
    work = gl.allocate_shared_memory(gl.int32, [18, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared = Shared(
        q, q_tail, k, k_tail, v, out, work, barriers(2), barriers(Q_SLOTS * CONSUMERS), barriers(Q_SLOTS * CONSUMERS),
        barriers(K_SLOTS), barriers(V_SLOTS),
    )  # fmt: skip
    fence_async_shared()
    call = Problem(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_starts_ptr, key_ends_ptr, alibi_slopes_ptr, sinks_ptr, origin_ptr,
        stride_slopes, batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale, softcap, tiles,
    )  # fmt: skip
    results = Results(out_desc, out_ptr, lse_ptr, stride_ob, stride_os, stride_oh, stride_lb, stride_lh, E)
    loads = (q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, counter_ptr, call, shared, sizes)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, call, results, shared, sizes)),
                (consume, (1, call, results, shared, sizes)),
                (produce, loads),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, call, results, shared, sizes)),
                (consume, (1, call, results, shared, sizes)),
                (consume, (2, call, results, shared, sizes)),
                (produce, loads),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
