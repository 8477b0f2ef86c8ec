"""The consumers of the Hopper forward for fp8 inputs.

Tensor cores accumulate 8-bit products with about 13 bits. Products with values are therefore added to fp32
sums: usually after four key blocks, and at most five, if all value channels are multiplied at once; after
every block if they are multiplied in several pieces. Without this, half of a channel's mean is lost over 64k
keys. Loss over 8k keys, for values of mean 0.5 and standard deviation 1 (H200, 2026-11-28, commit 9632b7f6):

    never                         14 %
    every eighth block          0.48 %
    every fourth block          0.22 %
    every second block          0.12 %

With 64 channels, exponentials take longer than products. The scores of a key block are then computed in two
parts, so that the exponentials of the first part overlap the products of the second.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ...band import key_range
from ...scores import unit_of
from ..primitives import (
    FIRST,
    anew,
    barrier_arrive,
    barrier_sync,
    e4m3_in_fours,
    fours_of,
    is_raised,
    opaque_words,
    raise_flag_above,
)
from .consumer import RingSlots, issue_scores, scores, sum_by_place
from .shared import ROWS, advance

# Probabilities are multiplied by 2 ** RAISED before they become e4m3. If a thread's sum of sixteen of them
# exceeds LIMIT, the largest e4m3 number, the block is recomputed with a new maximum. Sixteen probabilities at
# the running maximum add up to 256.
RAISED: gl.constexpr = gl.constexpr(4.0)
LIMIT: gl.constexpr = gl.constexpr(448.0)
# The most by which the first maximum of a row is raised in addition, as a power of 2. With 3, a row whose
# first key stays its largest has errors of 2.7 %, as rows of similar scores have; without, of 0.8 %.
MOST_HIGHER: gl.constexpr = gl.constexpr(3.0)
EVERY: gl.constexpr = gl.constexpr(4)  # key blocks from one addition to the sums in fp32 to the next


class PendingSumsFp8(NamedTuple):
    """The running sums of a consumer, and the last block's probabilities, not yet multiplied by values."""

    acc: gl.tuple  # output sums: one tensor per piece of the channels
    product: gl.tuple  # products not yet added to acc; empty if there are several pieces
    p: gl.tensor  # e4m3 numbers, four to an int32 word
    m_i: gl.tensor
    l_i: gl.tensor  # [ROWS, 8]: partial sums, not yet added across lanes


@gluon.jit
def issue_product(p, piece: gl.constexpr, product, use_acc, slot, shared, sizes):
    """Start ``p @ v`` for one piece of the value channels, and add it to ``product`` if ``use_acc``."""
    WIDTH: gl.constexpr = sizes.E // sizes.PIECES
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product.type.layout, k_width=4)
    v = shared.v.index(slot)
    if sizes.PIECES > 1:
        v = v.slice(piece * WIDTH, WIDTH, 0)
    return warpgroup_mma(fours_of(p, LAYOUT), v.permute((1, 0)), product, use_acc=use_acc, is_async=True)


@gluon.jit
def packed(p, BLOCK_N: gl.constexpr):
    """Convert probabilities to e4m3, packed four to an int32 word.

    Of every eight keys, a thread holds two neighbours, but an 8-bit wgmma operand takes four neighbours. The
    transposed values are therefore stored in an order in which a thread's four keys are neighbours.
    """
    p = p.reshape([ROWS, BLOCK_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    return e4m3_in_fours(p.reshape([ROWS, BLOCK_N // 4, 2, 2]))


@gluon.jit
def add(acc, product):
    """Return ``acc + product``, computed by inline assembly.

    With an ordinary addition, LLVM would first wait for all matrix products in flight.
    """
    return gl.inline_asm_elementwise(
        "add.f32 $0, $1, $2;", "=f,f,f", [acc, product], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def scaled(pieces, factor):
    """Multiply the output sums, one tensor per piece of channels, by a factor per row."""
    made = ()
    for n in gl.static_range(len(pieces)):
        made += (pieces[n] * gl.convert_layout(factor, gl.SliceLayout(1, pieces[n].type.layout))[:, None],)
    return made


@gluon.jit
def issue_part(queries, slot, part: gl.constexpr, shared, sizes):
    """Start ``q @ k.T`` for one part of the keys in a ring slot."""
    q, q_slot, _, zero = queries
    if sizes.PARTS == 1:
        return issue_scores(q, q_slot, slot, shared, zero, sizes)
    else:
        WIDTH: gl.constexpr = sizes.BLOCK_N // sizes.PARTS
        keys = shared.k.index(slot).slice(part * WIDTH, WIDTH, 0)
        return warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def scores_of_parts(queries, slot, n, modifiers, band, shared, sizes):
    """Compute the masked scores of a key block at once, as a tuple of one or two parts."""
    WIDTH: gl.constexpr = sizes.BLOCK_N // sizes.PARTS
    i = queries[2]
    s = issue_part(queries, slot, 0, shared, sizes)
    if sizes.PARTS == 1:
        s = warpgroup_mma_wait(0, deps=[s])
        return (scores(s, modifiers, i, n, band, sizes, True),)
    else:
        after = issue_part(queries, slot, 1, shared, sizes)
        s, after = warpgroup_mma_wait(0, deps=[s, after])
        s = scores(s, modifiers, i, n, band, sizes, True)
        return s, scores(after, modifiers, i, n + WIDTH, band, sizes, True)


@gluon.jit
def joined(words, after):
    """Join the words of the two parts of a key block."""
    return gl.join(words, after).permute((0, 2, 1)).reshape([ROWS, 2 * words.shape[1]])


@gluon.jit
def summed_and_packed(s, m_i, unit):
    """Return the probabilities of scores, summed by place, and packed four to an int32 word."""
    p = gl.exp2(s * unit - m_i[:, None])
    return sum_by_place(p, p.shape[1]), packed(p, p.shape[1])


@gluon.jit
def headroom(i, n, band, BLOCK_N: gl.constexpr):
    """Return by how much to raise the first maximum of rows that see few of the keys from ``n`` on.

    The maximum of few scores is often far below those of later blocks, which would then be recomputed: 3.3
    times per causal tile of random scores, 0.2 times with this addition.
    """
    low, high, _, _ = key_range(i, i + 1, band)
    seen = gl.minimum(high, n + BLOCK_N) - gl.maximum(low, n)
    octaves = 6.0 - gl.log2(gl.maximum(seen, 1).to(gl.float32))  # none for rows that see 64 keys
    return gl.minimum(gl.maximum(octaves, 0.0), MOST_HIGHER)


@gluon.jit
def softmax_fp8(parts, m_i, moves, unit, higher):
    """Return sums and words of probabilities, new maxima, and the factor that rescales earlier sums.

    Only rows in ``moves`` get a new maximum; their probabilities are then at most ``2 ** (RAISED - higher)``.
    """
    top = gl.max(parts[0], 1)
    if len(parts) == 2:
        top = gl.maximum(top, gl.max(parts[1], 1))
    m_new = gl.where(moves, gl.maximum(m_i, top * unit - RAISED + higher), m_i)
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)  # avoids NaN in rows that have seen no key
    sums, words = summed_and_packed(parts[0], safe, unit)
    if len(parts) == 2:
        more_sums, more_words = summed_and_packed(parts[1], safe, unit)
        sums, words = sums + more_sums, joined(words, more_words)
    return sums, words, m_new, gl.exp2(m_i - safe)


@gluon.jit
def await_turn(number: gl.constexpr, sizes):
    """Wait until the other consumer has issued its products, if consumers take turns.

    Each of the two then computes exponentials while the other one multiplies.
    """
    if sizes.TURNS:
        barrier_sync(FIRST + sizes.K_SLOTS + sizes.V_SLOTS + number, 256)


@gluon.jit
def pass_turn(number: gl.constexpr, sizes):
    """Let the other consumer issue its products, if consumers take turns."""
    if sizes.TURNS:
        barrier_arrive(FIRST + sizes.K_SLOTS + sizes.V_SLOTS + 1 - number, 256)


@gluon.jit
def begin(slots, block, queries, modifiers, band, shared, sizes, SUMS: gl.constexpr, more):
    """Begin a consumer's running sums with the first key block; return the sums and the next ring slots.

    The probabilities of the block are multiplied by its values later.
    """
    i, n = queries[2], block * sizes.BLOCK_N
    mbarrier.wait(shared.k_full.index(slots.k), slots.k_phase)
    parts = scores_of_parts(queries, slots.k, n, modifiers, band, shared, sizes)
    barrier_arrive(FIRST + slots.k, sizes.K_THREADS)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, parts[0].type.layout))
    higher = headroom(i, n, band, sizes.BLOCK_N)
    l_i, words, m_i, _ = softmax_fp8(parts, m_i, True, unit_of(modifiers), higher)
    k, k_phase = advance(slots.k, slots.k_phase, sizes.K_SLOTS)
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=more)
    zeros = gl.zeros([ROWS, sizes.E // sizes.PIECES], gl.float32, SUMS)
    product = (zeros,) if sizes.PIECES == 1 else ()
    state = PendingSumsFp8((zeros,) * sizes.PIECES, product, words, m_i, l_i)
    return state, RingSlots(k, k_phase, slots.v, slots.v_phase)


@gluon.jit
def add_products(state, slot, shared, sizes):
    """Add the last block's product to the output sums, release its value slot, and return the sums."""
    zeros = gl.zeros_like(state.acc[0])
    if sizes.PIECES == 1:
        product = issue_product(state.p, 0, state.product[0], True, slot, shared, sizes)
    else:
        product = issue_product(state.p, 0, zeros, False, slot, shared, sizes)
    acc = ()
    for n in gl.static_range(1, sizes.PIECES):
        after = issue_product(state.p, n, zeros, False, slot, shared, sizes)
        product = warpgroup_mma_wait(1, deps=[product])
        acc += (add(state.acc[n - 1], product),)
        product = after
    product, _ = warpgroup_mma_wait(0, deps=[product, state.p])
    barrier_arrive(FIRST + sizes.K_SLOTS + slot, sizes.V_THREADS)
    acc += (add(state.acc[sizes.PIECES - 1], product),)
    return acc


@gluon.jit
def step_fp8(
    state, slots, block, queries, modifiers, band, shared, sizes, masked, more, number: gl.constexpr
):
    """Add one key block to a consumer's running sums; return the sums and the next ring slots.

    If all value channels are multiplied at once, the softmax of the block, or of its second part, overlaps
    the previous block's product with values.
    """
    WIDTH: gl.constexpr = sizes.BLOCK_N // sizes.PARTS
    acc, product, m_i, l_i = state.acc, state.product, state.m_i, state.l_i
    i, n, unit = queries[2], block * sizes.BLOCK_N, unit_of(modifiers)
    if sizes.PIECES == 1:
        await_turn(number, sizes)
        s = issue_part(queries, slots.k, 0, shared, sizes)
        if sizes.PARTS == 2:
            first = s
            s = issue_part(queries, slots.k, 1, shared, sizes)
            first = warpgroup_mma_wait(1, deps=[first])
            first = scores(first, modifiers, i, n, band, sizes, masked)
            first_sums, first_words = summed_and_packed(first, m_i, unit)
        mbarrier.wait(shared.v_full.index(slots.v), slots.v_phase)
        adds = (block & (EVERY - 1)) == 0
        if adds:
            acc = (add(acc[0], product[0]),)
        product = (issue_product(state.p, 0, product[0], ~adds, slots.v, shared, sizes),)
        pass_turn(number, sizes)
        s = warpgroup_mma_wait(1, deps=[s])
    else:  # registers cannot hold scores and products at the same time
        mbarrier.wait(shared.v_full.index(slots.v), slots.v_phase)
        acc = add_products(state, slots.v, shared, sizes)
        s = issue_part(queries, slots.k, 0, shared, sizes)
        s = warpgroup_mma_wait(0, deps=[s])
    s = scores(s, modifiers, i, n + (sizes.PARTS - 1) * WIDTH, band, sizes, masked)
    sums, words = summed_and_packed(s, m_i, unit)
    if sizes.PARTS == 2:
        sums, words = first_sums + sums, joined(first_words, words)
    raise_flag_above(sums, LIMIT, number)
    if sizes.PIECES == 1:
        done, _ = warpgroup_mma_wait(0, deps=[product[0], state.p])
        barrier_arrive(FIRST + sizes.K_SLOTS + slots.v, sizes.V_THREADS)  # release the value slot
        product, words = (done,), opaque_words(words)
    k, k_phase = advance(slots.k, slots.k_phase, sizes.K_SLOTS)
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=more)
    if is_raised(number):
        above = gl.convert_layout(gl.max(gl.where(sums <= LIMIT, 0, 1), 1), m_i.type.layout) > 0
        parts = scores_of_parts(queries, anew(slots.k), anew(n), modifiers, band, shared, sizes)
        sums, words, m_i, factor = softmax_fp8(parts, m_i, above, unit, 0.0)
        l_i *= gl.convert_layout(factor, gl.SliceLayout(1, l_i.type.layout))[:, None]
        acc, product = scaled(acc, factor), scaled(product, factor)
    barrier_arrive(FIRST + slots.k, sizes.K_THREADS)  # release the key slot
    v, v_phase = advance(slots.v, slots.v_phase, sizes.V_SLOTS)
    return PendingSumsFp8(acc, product, words, m_i, l_i + sums), RingSlots(k, k_phase, v, v_phase)
