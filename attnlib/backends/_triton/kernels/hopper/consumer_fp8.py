"""The steps of a Hopper forward's consumers of 8 bits, whose softmax runs under the products of one another.

Products with values are added up in fp32, block after block: the tensor cores add those of 8 bits in about 13 bits, and
lose 14 % of a channel's mean over 8k keys, half over 64k (now 0.2 % over any). A softmax under this consumer's own
products: 715 TFLOP/s at d128 full, 764 like this, 721 where consumers take turns.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..scores import unit_of
from .consumer import Turn, advance, issue_scores, scores, sum_by_place
from .primitives import FIRST, barrier_arrive, e4m3_in_fours, fours_of
from .shared import ROWS

RAISED: gl.constexpr = gl.constexpr(8.0)  # powers of two that lift probabilities in e4m3, whose largest is 448


class State(NamedTuple):
    """The sums of a consumer, and what waits for its product: probabilities, and the factor of the sums before them."""

    acc: gl.tuple  # the channels' sums in pieces
    p: gl.tensor  # four in a word
    factor: gl.tensor
    m_i: gl.tensor
    l_i: gl.tensor  # [ROWS, 8], by place


@gluon.jit
def issue_product(p, slot, piece: gl.constexpr, shared, SUMS: gl.constexpr, sizes):
    """Begin ``p @ v`` for a piece of the channels of values."""
    WIDTH: gl.constexpr = sizes.E // sizes.PIECES
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=4)
    zero = gl.zeros([ROWS, WIDTH], gl.float32, SUMS)
    v = shared.v.index(slot)
    if sizes.PIECES > 1:
        v = v.slice(piece * WIDTH, WIDTH, 0)
    return warpgroup_mma(fours_of(p, LAYOUT), v.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def packed(p, BLOCK_N: gl.constexpr):
    """Probabilities in e4m3, four in a word.

    A thread has two neighbours of each eight keys, where the product wants four: in the order in which values are
    transposed, they are neighbours.
    """
    p = p.reshape([ROWS, BLOCK_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    return e4m3_in_fours(p.reshape([ROWS, BLOCK_N // 4, 2, 2]))


@gluon.jit
def add(acc, product, factor):
    """``acc * factor[:, None] + product``, and at once: LLVM would first wait for all products."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [acc, factor[:, None], product],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def softmax_fp8(s, m_i, modifiers, i, n, band, sizes, masked):
    """Probabilities that fill the range of e4m3, the maximum that they are relative to, what sums are scaled by."""
    unit = unit_of(modifiers)
    s = scores(s, modifiers, i, n, band, sizes, masked)
    parts = gl.max(s.reshape([ROWS, 2, sizes.BLOCK_N // 16, 8]), 2)  # in a thread, whose one maximum would take long
    highest = gl.convert_layout(gl.max(gl.max(parts, 1), 1), m_i.type.layout) * unit
    m_new = gl.maximum(m_i, highest - RAISED)
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet
    return gl.exp2(s * unit - safe[:, None]), m_new, gl.exp2(m_i - safe)


@gluon.jit
def begin(turn, block, queries, modifiers, band, shared, sizes, SUMS: gl.constexpr, more):
    """The state after the first block, whose probabilities wait for their product."""
    q, q_slot, i, zero = queries
    mbarrier.wait(shared.k_full.index(turn.k), turn.k_phase)
    s = issue_scores(q, q_slot, turn.k, shared, zero, sizes)
    s = warpgroup_mma_wait(0, deps=[s])
    barrier_arrive(FIRST + turn.k, sizes.THREADS)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s.type.layout))
    p, m_i, _ = softmax_fp8(s, m_i, modifiers, i, block * sizes.BLOCK_N, band, sizes, True)
    k, k_phase = advance(turn.k, turn.k_phase, sizes.K_SLOTS)
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=more)
    zeros = gl.zeros([ROWS, sizes.E // sizes.PIECES], gl.float32, SUMS)
    acc = (zeros,) * sizes.PIECES
    factor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, s.type.layout))
    l_i = sum_by_place(p, sizes.BLOCK_N)
    return State(acc, packed(p, sizes.BLOCK_N), factor, m_i, l_i), Turn(k, k_phase, turn.v, turn.v_phase)


@gluon.jit
def add_pieces(state, product, slot, shared, SUMS: gl.constexpr, sizes):
    """The sums of all pieces but the last, whose product is under way; ``product`` is that of the first."""
    acc = ()
    for n in gl.static_range(1, sizes.PIECES):
        after = issue_product(state.p, slot, n, shared, SUMS, sizes)
        product = warpgroup_mma_wait(1, deps=[product])
        acc += (add(state.acc[n - 1], product, state.factor),)
        product = after
    return acc, product


@gluon.jit
def step_fp8(state, turn, block, queries, modifiers, band, shared, sizes, masked, more):
    """The state with one block more: the product of the block before, then scores, and their softmax."""
    q, q_slot, i, zero = queries
    SUMS: gl.constexpr = state.acc[0].type.layout
    of_sums: gl.constexpr = gl.SliceLayout(1, state.l_i.type.layout)
    mbarrier.wait(shared.v_full.index(turn.v), turn.v_phase)
    product = issue_product(state.p, turn.v, 0, shared, SUMS, sizes)
    acc, product = add_pieces(state, product, turn.v, shared, SUMS, sizes)
    s = issue_scores(q, q_slot, turn.k, shared, zero, sizes)
    product, _ = warpgroup_mma_wait(1, deps=[product, state.p])
    barrier_arrive(FIRST + sizes.K_SLOTS + turn.v, sizes.THREADS)  # the values' slot is free
    acc += (add(state.acc[sizes.PIECES - 1], product, state.factor),)
    s = warpgroup_mma_wait(0, deps=[s])
    barrier_arrive(FIRST + turn.k, sizes.THREADS)  # and the keys'
    p, m_i, factor = softmax_fp8(s, state.m_i, modifiers, i, block * sizes.BLOCK_N, band, sizes, masked)
    l_i = state.l_i * gl.convert_layout(factor, of_sums)[:, None] + sum_by_place(p, sizes.BLOCK_N)
    k, k_phase = advance(turn.k, turn.k_phase, sizes.K_SLOTS)
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=more)
    v, v_phase = advance(turn.v, turn.v_phase, sizes.V_SLOTS)
    return State(acc, packed(p, sizes.BLOCK_N), factor, m_i, l_i), Turn(k, k_phase, v, v_phase)
