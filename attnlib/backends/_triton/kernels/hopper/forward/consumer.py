"""The consumers of the Hopper forward: warpgroups of 64 queries each, which overlap softmax with products.

Without a sparse list, key blocks are visited from the last to the first. The softmax of a block overlaps the
product of the previous block's probabilities and values. It reuses the running maximum, because the search
for a new one took a fifth of its instructions (d = 64, full attention: 482 TFLOP/s with the search, 582
without). If the sums become too large, the block is recomputed with new maxima.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...band import KeyBand, bounds, origin_of, sees_any, visible
from ...scores import Modifiers, PairIndices, changed, load_slope, modify, unit_behind
from ..primitives import (
    FIRST,
    anew,
    barrier_arrive,
    clear_edges,
    is_raised,
    make_flag,
    opaque,
    opaque_halves,
    raise_flag_above,
    scale_rows,
)
from .results import put_lse, put_out
from .shared import ROWS, Visit, blocks_of, read, visited, visits_of, wait_for_work

# Upper bound on a thread's sum of probabilities in one block, relative to the maximum of earlier blocks.
# Above it, the block is recomputed. fp16 can represent any probability up to this bound.
LIMIT: gl.constexpr = gl.constexpr(4096.0)


class RingSlots(NamedTuple):
    """The next slots in the rings of keys and values, and the phases of their mbarriers."""

    k: gl.tensor
    k_phase: gl.tensor
    v: gl.tensor
    v_phase: gl.tensor


class PendingSums(NamedTuple):
    """The running sums of a consumer, and the last block's probabilities, which await their product."""

    acc: gl.tensor
    p: gl.tensor
    m_i: gl.tensor
    l_i: gl.tensor  # [ROWS, 8] per thread; added across lanes once per tile


@gluon.jit
def advance(slot, phase, SLOTS: gl.constexpr):
    """Return the next slot of a ring, and its phase."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def issue_scores(q, q_slot, slot, shared, zero, sizes):
    """Start ``q @ k.T`` for the keys in a ring slot."""
    if sizes.D + sizes.D_TAIL > 128:  # too many query descriptors to keep in registers
        q_slot = anew(q_slot)
        if not sizes.Q_IN_REGISTERS:
            q = shared.q.index(q_slot)
    s = warpgroup_mma(q, shared.k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    if sizes.D_TAIL:
        s = warpgroup_mma(
            shared.q_tail.index(q_slot), shared.k_tail.index(slot).permute((1, 0)), s, is_async=True
        )
    return s


@gluon.jit
def sum_by_place(p, BLOCK_N: gl.constexpr):
    """Return row sums over each thread's own registers, ``[ROWS, 8]``, without adding across threads."""
    return gl.sum(p.reshape([ROWS, BLOCK_N // 8, 8]), 1)


class FunctionArguments(NamedTuple):
    """The arguments of mask and score functions, apart from the indices of query and key.

    ``mask_tensors`` and ``score_tensors`` are the tensors that the functions read.
    """

    b: gl.tensor
    h: gl.tensor
    first: gl.tensor
    mask_tensors: gl.tuple
    score_tensors: gl.tuple


@gluon.jit
def scores(
    s, modifiers, i, n, band, sizes, masked, given=None, MASK: gl.constexpr = None, SCORE: gl.constexpr = None
):
    """Convert products with the keys from ``n`` on to scores; hidden keys get -inf if ``masked``."""
    at = i[:, None]
    i = (i - n)[:, None]  # relative to the block's first key: takes fewer registers
    j = gl.arange(0, sizes.BLOCK_N, gl.SliceLayout(0, s.type.layout))[None, :]
    band = KeyBand(
        band.start - n, band.end - n, band.left, band.right, band.prefix, band.offset, band.key + n
    )
    s, _ = modify(s, modifiers, i + band.offset, j)
    if SCORE is not None:
        place = PairIndices(given.b, given.h, at, j + n, given.first)
        s = changed(s, modifiers, place, given.score_tensors, SCORE)
    if masked:
        seen = visible(i, j, band)
        if MASK is not None:
            seen = seen & MASK(given.b, given.h, at, j + n, given.first, given.mask_tensors)
        s = opaque(gl.where(seen, s, float("-inf")))
    return s


@gluon.jit
def softmax(s, m_i, moves, unit, RAISED: gl.constexpr = 0.0):
    """Return probabilities, the maximum that they are relative to, and the factor for all earlier sums.

    Only rows in ``moves`` get a new maximum; the other rows keep theirs, and their sums are still exact. With
    a new maximum, probabilities are at most 2 ** ``RAISED``.
    """
    m_new = gl.where(moves, gl.maximum(m_i, gl.max(s, 1) * unit - RAISED), m_i)
    # A row that has seen nothing keeps -inf as its maximum; subtracting it would give NaN.
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    return gl.exp2(s * unit - safe[:, None]), m_new, gl.exp2(m_i - safe)


@gluon.jit
def hand_back(slots, count, shared, sizes):
    """Release ``count`` blocks that this consumer does not need, and return the ring slots that follow.

    Each block is released only after it has been loaded. Otherwise this consumer could arrive twice at a
    named barrier where another one has not arrived once.
    """
    k, k_phase, v, v_phase = slots.k, slots.k_phase, slots.v, slots.v_phase
    for _ in range(count):
        mbarrier.wait(shared.k_full.index(k), k_phase)
        barrier_arrive(FIRST + k, sizes.THREADS)
        k, k_phase = advance(k, k_phase, sizes.K_SLOTS)
        mbarrier.wait(shared.v_full.index(v), v_phase)
        barrier_arrive(FIRST + sizes.K_SLOTS + v, sizes.THREADS)
        v, v_phase = advance(v, v_phase, sizes.V_SLOTS)
    return RingSlots(k, k_phase, v, v_phase)


@gluon.jit
def step(
    state, slots, visit, queries, modifiers, band, given, shared, sizes,
    number: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Return the state and the ring slots after one more key block.

    Its softmax overlaps the product of the previous block's probabilities and values.
    """
    q, q_slot, i, zero = queries
    n, unit, m_i = visit.block * sizes.BLOCK_N, unit_behind(modifiers, SCORE), state.m_i
    p_before = opaque_halves(state.p)  # otherwise one of three consumers swaps all 16-bit halves
    s = issue_scores(q, q_slot, slots.k, shared, zero, sizes)
    mbarrier.wait(shared.v_full.index(slots.v), slots.v_phase)
    if sizes.HOLES:
        clear_edges(shared.v.index(slots.v), visit.before * sizes.BLOCK_N, band.start, band.end)
    acc = warpgroup_mma(p_before, shared.v.index(slots.v), state.acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    s = scores(s, modifiers, i, n, band, sizes, visit.masked, given, MASK, SCORE)
    p = gl.exp2(s * unit - m_i[:, None])
    sums, factor = sum_by_place(p, sizes.BLOCK_N), gl.full([ROWS], 1.0, gl.float32, m_i.type.layout)
    raise_flag_above(sums, LIMIT, number)
    k, k_phase = advance(slots.k, slots.k_phase, sizes.K_SLOTS)
    # ptxas moves no wgmma wait above this mbarrier wait.
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=visit.more)
    if is_raised(number):
        above = gl.max(gl.where(sums <= LIMIT, 0, 1), 1)
        s = issue_scores(q, q_slot, anew(slots.k), shared, zero, sizes)
        s = warpgroup_mma_wait(0, deps=[s])
        s = scores(s, modifiers, i, anew(n), band, sizes, True, given, MASK, SCORE)
        p, m_i, factor = softmax(s, m_i, gl.convert_layout(above, m_i.type.layout) > 0, unit)
        sums = sum_by_place(p, sizes.BLOCK_N)
    barrier_arrive(FIRST + slots.k, sizes.THREADS)  # release the key slot
    l_i = state.l_i * gl.convert_layout(factor, gl.SliceLayout(1, state.l_i.type.layout))[:, None] + sums
    acc, _ = warpgroup_mma_wait(0, deps=[acc, p_before])
    barrier_arrive(FIRST + sizes.K_SLOTS + slots.v, sizes.THREADS)  # release the value slot
    acc = scale_rows(acc, gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout)), sizes.E // 2)
    # Convert p only here, after the product has freed the registers of the previous p.
    p = gl.convert_layout(p.to(shared.v.dtype), state.p.type.layout)
    v, v_phase = advance(slots.v, slots.v_phase, sizes.V_SLOTS)
    return PendingSums(acc, p, m_i, l_i), RingSlots(k, k_phase, v, v_phase)


@gluon.jit
def first_scores(
    slots, block, queries, modifiers, band, shared, sizes,
    given=None, MASK: gl.constexpr = None, SCORE: gl.constexpr = None,
):  # fmt: skip
    """Return the scores of the first key block, and the running maximum before it, which is -inf."""
    q, q_slot, i, zero = queries
    mbarrier.wait(shared.k_full.index(slots.k), slots.k_phase)
    s = issue_scores(q, q_slot, slots.k, shared, zero, sizes)
    s = warpgroup_mma_wait(0, deps=[s])
    barrier_arrive(FIRST + slots.k, sizes.THREADS)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s.type.layout))
    return scores(s, modifiers, i, block * sizes.BLOCK_N, band, sizes, True, given, MASK, SCORE), m_i


@gluon.jit
def first_step(
    slots, visit, queries, modifiers, band, given, shared, sizes,
    SUMS: gl.constexpr, P: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Return the state and the ring slots after the first key block.

    Its probabilities still await their product with the values.
    """
    s, m_i = first_scores(slots, visit.block, queries, modifiers, band, shared, sizes, given, MASK, SCORE)
    p, m_i, _ = softmax(s, m_i, True, unit_behind(modifiers, SCORE))
    l_i = sum_by_place(p, sizes.BLOCK_N)
    p = gl.convert_layout(p.to(shared.v.dtype), P)
    k, k_phase = advance(slots.k, slots.k_phase, sizes.K_SLOTS)
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=visit.more)
    acc = gl.zeros([ROWS, sizes.E], gl.float32, SUMS)
    return PendingSums(acc, p, m_i, l_i), RingSlots(k, k_phase, slots.v, slots.v_phase)


@gluon.jit
def consume(
    number: gl.constexpr, call, mask_tensors, score_tensors, results, shared, sizes,
    MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Compute attention for one consumer's queries, tile after tile."""
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    FIRST_ROW: gl.constexpr = number * ROWS
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    out = shared.out.index(number)
    slots, count = RingSlots(0, 0, 0, 0), 0
    make_flag(number)
    tile = wait_for_work(count, shared)
    while tile < call.tiles:
        work = read(count, shared, sizes)
        start, end = bounds(call.starts_ptr, call.ends_ptr, work.sequence, work.others)
        origin = origin_of(call.origin_ptr, work.sequence, call.batch)
        band = KeyBand(start, end, call.left, call.right, call.prefix, origin.query - origin.key, origin.key)
        every = visits_of(work, band, call, sizes)
        if sizes.SPARSE:
            bottom, top = 0, every.count
        else:
            mine, all_bottom = blocks_of(work, band, sizes, FIRST_ROW, ROWS), every.top - every.count
            bottom = gl.minimum(gl.maximum(mine.bottom, all_bottom), every.top - 1)
            top = gl.minimum(gl.maximum(mine.top, bottom + 1), every.top)
            slots = hand_back(slots, every.top - top, shared, sizes)

        slope = None
        if call.slopes_ptr is not None:
            slope = load_slope(call.slopes_ptr, call.stride_slopes, work.sequence, work.head, call.batch)
        modifiers = Modifiers(call.scale, call.softcap, slope)
        i = work.others - work.rows + work.start + FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        q_slot = count % sizes.Q_SLOTS * sizes.CONSUMERS + number
        mbarrier.wait(shared.q_full.index(q_slot), (count // sizes.Q_SLOTS) & 1)
        q = shared.q.index(q_slot)
        if sizes.Q_IN_REGISTERS:  # reads a third less from shared memory
            q = q.load(gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2))
            if not sizes.OUT_IN_Q:
                mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
        queries = (q, q_slot, i, zero)

        given = FunctionArguments(
            work.sequence, work.head, work.others - work.rows, mask_tensors, score_tensors
        )
        block = visited(every, 0, sizes) if sizes.SPARSE else top - 1
        visit = Visit(block, block, True, top - bottom > 1)
        state, slots = first_step(
            slots, visit, queries, modifiers, band, given, shared, sizes, SUMS, P, MASK, SCORE
        )
        if not sizes.SPARSE:
            full_top = gl.maximum(gl.minimum(mine.full_top, block), bottom)
            full_bottom = bottom
            if sizes.HIDES_FIRST:
                full_bottom = gl.maximum(gl.minimum(mine.full_bottom, full_top), bottom)
        for n in range(1, top - bottom):
            if sizes.SPARSE:
                before, block = block, visited(every, n, sizes)
                visit = Visit(block, before, n < every.cut, n + 1 < top)
            else:  # b is not carried by the loop
                b = block - n
                visit = Visit(b, b + 1, (b >= full_top) | (b < full_bottom), b > bottom)
            state, slots = step(
                state, slots, visit, queries, modifiers, band, given, shared, sizes, number, MASK, SCORE
            )

        p = opaque_halves(state.p)
        if not (sizes.OUT_IN_Q or sizes.Q_IN_REGISTERS):
            mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
        mbarrier.wait(shared.v_full.index(slots.v), slots.v_phase)
        if sizes.HOLES:
            last = block if sizes.SPARSE else bottom
            clear_edges(shared.v.index(slots.v), last * BLOCK_N, band.start, band.end)
        acc = warpgroup_mma(p, shared.v.index(slots.v), state.acc, is_async=True)
        first = work.start + FIRST_ROW
        l_i = gl.convert_layout(gl.sum(state.l_i, 1), gl.SliceLayout(1, SCORES))
        share = gl.convert_layout(
            put_lse(state.m_i, l_i, work, first, call, results), gl.SliceLayout(1, SUMS)
        )
        sees = gl.convert_layout(sees_any(i, band), gl.SliceLayout(1, SUMS))
        if not sizes.OUT_IN_Q:
            tma.store_wait(0)  # the previous output tile has left the buffer
        acc, _ = warpgroup_mma_wait(0, deps=[acc, p])
        barrier_arrive(FIRST + sizes.K_SLOTS + slots.v, sizes.THREADS)
        v, v_phase = advance(slots.v, slots.v_phase, sizes.V_SLOTS)
        slots = RingSlots(slots.k, slots.k_phase, v, v_phase)
        if not sizes.SPARSE:
            slots = hand_back(slots, bottom - all_bottom, shared, sizes)
        # A row that sees no key may have summed arbitrary data, so zero it. Without opaque(), the compiler
        # would select between 16-bit halves instead of fp32 numbers.
        acc = opaque(gl.where(sees[:, None], acc * share[:, None], 0.0))
        out.store(acc.to(shared.v.dtype))
        put_out(out, work, first, results, sizes)
        if sizes.OUT_IN_Q:  # the output must leave the slot before new queries arrive
            tma.store_wait(0)
            mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
        count += 1
        tile = wait_for_work(count, shared)
    tma.store_wait(0)
