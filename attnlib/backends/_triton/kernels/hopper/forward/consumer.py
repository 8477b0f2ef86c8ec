"""The consumers of the Hopper forward: warpgroups of 64 queries each, which overlap softmax with products.

Without a sparse list, key blocks are visited from the last to the first. The softmax of a block overlaps the
product of the previous block's probabilities and values. The softmax reuses the running maximum of earlier
blocks, because the search for a new one took a fifth of its instructions. If sums become too large, the block
is recomputed with new maxima. Full attention, d = 64:

    with the search       482 TFLOP/s
    without the search    582 TFLOP/s
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...band import KeyBand, visible
from ...scores import PairIndices, changed, modify, unit_behind
from ..primitives import (
    FIRST,
    anew,
    barrier_arrive,
    is_raised,
    opaque,
    opaque_halves,
    raise_flag_above,
    scale_rows,
)
from .partner import hand_over
from .shared import ROWS, advance, clear_others

# If a thread's sum of probabilities in one block, relative to the maximum of earlier blocks, exceeds this
# bound, the block is recomputed. fp16 can represent any probability up to the bound.
LIMIT: gl.constexpr = gl.constexpr(4096.0)


class RingSlots(NamedTuple):
    """The slots that come next in the rings of keys and values, and the phases of their mbarriers."""

    k: gl.tensor
    k_phase: gl.tensor
    v: gl.tensor
    v_phase: gl.tensor


class PendingSums(NamedTuple):
    """The running sums of a consumer, and the last block's probabilities, not yet multiplied by values."""

    acc: gl.tensor
    p: gl.tensor
    m_i: gl.tensor
    l_i: gl.tensor  # [ROWS, 8]: partial sums, which are added across lanes once per tile


@gluon.jit
def issue_scores(q, q_slot, slot, shared, zero, sizes):
    """Start ``q @ k.T`` for the keys in a ring slot."""
    if sizes.D + sizes.D_TAIL > 128:  # registers cannot hold all query descriptors
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
    """Sum each row over the registers of one thread only, and return the partial sums ``[ROWS, 8]``."""
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
    """Turn products q·k, for keys from ``n`` on, into scores; if ``masked``, hidden keys get -inf."""
    at = i[:, None]
    i = (i - n)[:, None]  # indices relative to the block's first key take fewer registers
    j = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
    band = KeyBand(
        band.start - n, band.end - n, band.left, band.right, band.prefix, band.offset, band.key + n
    )
    s, _ = modify(s, modifiers, i + band.offset, j, True)
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
def softmax(s, m_i, moves, unit):
    """Return probabilities, the maximum subtracted from scores, and the factor that rescales earlier sums.

    Only rows in ``moves`` get a new maximum. The other rows keep their maximum, and their sums stay exact.
    """
    m_new = gl.where(moves, gl.maximum(m_i, gl.max(s, 1) * unit), m_i)
    # A row that has seen no key keeps -inf as its maximum; subtracting -inf would give NaN.
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    return gl.exp2(s * unit - safe[:, None]), m_new, gl.exp2(m_i - safe)


@gluon.jit
def hand_back(slots, count, shared, sizes):
    """Release ``count`` key blocks that this consumer does not need, and return the next ring slots.

    Each block is released only after it has been loaded. Otherwise this consumer could arrive at a named
    barrier twice before another consumer has arrived once.
    """
    k, k_phase, v, v_phase = slots.k, slots.k_phase, slots.v, slots.v_phase
    for _ in range(count):
        mbarrier.wait(shared.k_full.index(k), k_phase)
        barrier_arrive(FIRST + k, sizes.K_THREADS)
        k, k_phase = advance(k, k_phase, sizes.K_SLOTS)
        mbarrier.wait(shared.v_full.index(v), v_phase)
        barrier_arrive(FIRST + sizes.K_SLOTS + v, sizes.V_THREADS)
        v, v_phase = advance(v, v_phase, sizes.V_SLOTS)
    return RingSlots(k, k_phase, v, v_phase)


@gluon.jit
def step(
    state, slots, visit, queries, modifiers, band, given, shared, sizes,
    number: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Add one key block to a consumer's running sums; return the sums and the next ring slots.

    The softmax of the block overlaps the product of the previous block's probabilities and values.
    """
    q, q_slot, i, zero = queries
    n, unit, m_i = visit.block * sizes.BLOCK_N, unit_behind(modifiers, SCORE), state.m_i
    p_before = opaque_halves(state.p)  # otherwise, one of three consumers would swap all 16-bit halves
    s = issue_scores(q, q_slot, slots.k, shared, zero, sizes)
    mbarrier.wait(shared.v_full.index(slots.v), slots.v_phase)
    if sizes.HOLES:
        clear_others(shared.v.index(slots.v), visit.before * sizes.BLOCK_N, band, sizes)
    acc = warpgroup_mma(p_before, shared.v.index(slots.v), state.acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    s = scores(s, modifiers, i, n, band, sizes, visit.masked, given, MASK, SCORE)
    p = gl.exp2(s * unit - m_i[:, None])
    sums, factor = sum_by_place(p, sizes.BLOCK_N), gl.full([ROWS], 1.0, gl.float32, m_i.type.layout)
    raise_flag_above(sums, LIMIT, number)
    k, k_phase = advance(slots.k, slots.k_phase, sizes.K_SLOTS)
    # This wait for an mbarrier also keeps ptxas from waiting for the wgmma earlier.
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=visit.more)
    if is_raised(number):
        above = gl.max(gl.where(sums <= LIMIT, 0, 1), 1)
        s = issue_scores(q, q_slot, anew(slots.k), shared, zero, sizes)
        s = warpgroup_mma_wait(0, deps=[s])
        s = scores(s, modifiers, i, anew(n), band, sizes, True, given, MASK, SCORE)
        p, m_i, factor = softmax(s, m_i, gl.convert_layout(above, m_i.type.layout) > 0, unit)
        sums = sum_by_place(p, sizes.BLOCK_N)
    barrier_arrive(FIRST + slots.k, sizes.K_THREADS)  # release the key slot
    l_i = state.l_i * gl.convert_layout(factor, gl.SliceLayout(1, state.l_i.type.layout))[:, None] + sums
    acc, _ = warpgroup_mma_wait(0, deps=[acc, p_before])
    barrier_arrive(FIRST + sizes.K_SLOTS + slots.v, sizes.V_THREADS)  # release the value slot
    acc = scale_rows(acc, gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout)), sizes.E // 2)
    # Convert p only here, after the product has freed the registers of the previous p.
    p = p.to(shared.v.dtype)
    if sizes.E_TAIL:
        hand_over(p, factor, shared)
    p = gl.convert_layout(p, state.p.type.layout)
    v, v_phase = advance(slots.v, slots.v_phase, sizes.V_SLOTS)
    return PendingSums(acc, p, m_i, l_i), RingSlots(k, k_phase, v, v_phase)


@gluon.jit
def first_step(
    slots, visit, queries, modifiers, band, given, shared, sizes,
    SUMS: gl.constexpr, P: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Begin a consumer's running sums with the first key block; return the sums and the next ring slots.

    The probabilities of the block are multiplied by its values later.
    """
    q, q_slot, i, zero = queries
    mbarrier.wait(shared.k_full.index(slots.k), slots.k_phase)
    s = issue_scores(q, q_slot, slots.k, shared, zero, sizes)
    s = warpgroup_mma_wait(0, deps=[s])
    barrier_arrive(FIRST + slots.k, sizes.K_THREADS)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s.type.layout))
    s = scores(s, modifiers, i, visit.block * sizes.BLOCK_N, band, sizes, True, given, MASK, SCORE)
    p, m_i, _ = softmax(s, m_i, True, unit_behind(modifiers, SCORE))
    l_i = sum_by_place(p, sizes.BLOCK_N)
    p = p.to(shared.v.dtype)
    if sizes.E_TAIL:
        hand_over(p, gl.full([ROWS], 1.0, gl.float32, m_i.type.layout), shared)
    p = gl.convert_layout(p, P)
    k, k_phase = advance(slots.k, slots.k_phase, sizes.K_SLOTS)
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=visit.more)
    acc = gl.zeros([ROWS, sizes.E], gl.float32, SUMS)
    return PendingSums(acc, p, m_i, l_i), RingSlots(k, k_phase, slots.v, slots.v_phase)
