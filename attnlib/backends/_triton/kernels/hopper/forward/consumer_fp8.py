"""The consumers of the Hopper forward for fp8 inputs.

Tensor cores accumulate 8-bit products with about 13 bits, so products with values are accumulated in fp32:
every second block if the value channels are one piece, every block if they are several. The loss in a
channel's mean:

    accumulated in fp32   over 8k keys   over 64k keys
    never                         14 %            half
    every second block           0.3 %           0.3 %
    every block                  0.2 %           0.2 %
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ...band import KeyBand, bounds, origin_of, sees_any
from ...scores import Modifiers, descaled, load_slope, unit_of
from ..primitives import (
    FIRST,
    anew,
    barrier_arrive,
    e4m3_in_fours,
    fours_of,
    is_raised,
    make_flag,
    opaque,
    opaque_words,
    raise_flag_above,
)
from .consumer import RingSlots, advance, first_scores, hand_back, issue_scores, scores, softmax, sum_by_place
from .results import put_lse, put_out
from .shared import ROWS, blocks_of, read, wait_for_work

# Probabilities are multiplied by 2 ** RAISED. LIMIT, the largest e4m3 number, bounds a thread's sum of
# sixteen probabilities; above it, the block is recomputed. Sixteen probabilities at the running maximum add
# up to 256.
RAISED: gl.constexpr = gl.constexpr(4.0)
LIMIT: gl.constexpr = gl.constexpr(448.0)


class HeadDescales(NamedTuple):
    """Descale factors for each head of each sequence: an fp8 number times its descale is the real value."""

    q_ptr: gl.tensor
    k_ptr: gl.tensor
    v_ptr: gl.tensor


class PendingSumsFp8(NamedTuple):
    """The running sums of a consumer, and the last block's probabilities, which await their product."""

    acc: gl.tuple  # output sums, one tensor per piece of channels
    product: gl.tuple  # products not yet added to acc, if there is one piece
    p: gl.tensor  # e4m3, four to an int32 word
    m_i: gl.tensor
    l_i: gl.tensor  # [ROWS, 8] per thread, not yet added across lanes


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

    Of every eight keys, a thread holds two neighbours, but an 8-bit wgmma operand takes four. The order of
    keys in the transposed values makes a thread's four keys neighbours.
    """
    p = p.reshape([ROWS, BLOCK_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    return e4m3_in_fours(p.reshape([ROWS, BLOCK_N // 4, 2, 2]))


@gluon.jit
def add(acc, product):
    """Return ``acc + product``, added by inline assembly.

    Before a plain addition, LLVM would wait for all products in flight.
    """
    return gl.inline_asm_elementwise(
        "add.f32 $0, $1, $2;", "=f,f,f", [acc, product], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def scaled(pieces, factor):
    """Return each piece of the sums times ``factor[:, None]``."""
    made = ()
    for n in gl.static_range(len(pieces)):
        made += (pieces[n] * gl.convert_layout(factor, gl.SliceLayout(1, pieces[n].type.layout))[:, None],)
    return made


@gluon.jit
def begin(slots, block, queries, modifiers, band, shared, sizes, SUMS: gl.constexpr, more):
    """Return the state and the ring slots after the first key block.

    Its probabilities still await their product with the values.
    """
    s, m_i = first_scores(slots, block, queries, modifiers, band, shared, sizes)
    p, m_i, _ = softmax(s, m_i, True, unit_of(modifiers), RAISED)
    k, k_phase = advance(slots.k, slots.k_phase, sizes.K_SLOTS)
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=more)
    zeros = gl.zeros([ROWS, sizes.E // sizes.PIECES], gl.float32, SUMS)
    product = (zeros,) if sizes.PIECES == 1 else ()
    l_i = sum_by_place(p, sizes.BLOCK_N)
    state = PendingSumsFp8((zeros,) * sizes.PIECES, product, packed(p, sizes.BLOCK_N), m_i, l_i)
    return state, RingSlots(k, k_phase, slots.v, slots.v_phase)


@gluon.jit
def add_products(state, slot, shared, sizes):
    """Return the output sums with the last block's products added, and release the slot of its values."""
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
    barrier_arrive(FIRST + sizes.K_SLOTS + slot, sizes.THREADS)
    acc += (add(state.acc[sizes.PIECES - 1], product),)
    return acc


@gluon.jit
def step_fp8(
    state, slots, block, queries, modifiers, band, shared, sizes, masked, more, number: gl.constexpr
):
    """Return the state and the ring slots after one more key block.

    If the value channels are one piece, the block's softmax overlaps the product of the previous block.
    """
    q, q_slot, i, zero = queries
    acc, product, m_i, l_i = state.acc, state.product, state.m_i, state.l_i
    n, unit = block * sizes.BLOCK_N, unit_of(modifiers)
    if sizes.PIECES == 1:
        s = issue_scores(q, q_slot, slots.k, shared, zero, sizes)
        mbarrier.wait(shared.v_full.index(slots.v), slots.v_phase)
        adds = (block & 1) == 0
        if adds:
            acc = (add(acc[0], product[0]),)
        product = (issue_product(state.p, 0, product[0], ~adds, slots.v, shared, sizes),)
        s = warpgroup_mma_wait(1, deps=[s])
    else:  # not enough registers for scores and products at once
        mbarrier.wait(shared.v_full.index(slots.v), slots.v_phase)
        acc = add_products(state, slots.v, shared, sizes)
        s = issue_scores(q, q_slot, slots.k, shared, zero, sizes)
        s = warpgroup_mma_wait(0, deps=[s])
    p = gl.exp2(scores(s, modifiers, i, n, band, sizes, masked) * unit - m_i[:, None])
    sums, words = sum_by_place(p, sizes.BLOCK_N), packed(p, sizes.BLOCK_N)
    raise_flag_above(sums, LIMIT, number)
    if sizes.PIECES == 1:
        done, _ = warpgroup_mma_wait(0, deps=[product[0], state.p])
        barrier_arrive(FIRST + sizes.K_SLOTS + slots.v, sizes.THREADS)  # release the value slot
        product, words = (done,), opaque_words(words)
    k, k_phase = advance(slots.k, slots.k_phase, sizes.K_SLOTS)
    mbarrier.wait(shared.k_full.index(k), k_phase, pred=more)
    if is_raised(number):
        above = gl.max(gl.where(sums <= LIMIT, 0, 1), 1)
        s = issue_scores(q, q_slot, anew(slots.k), shared, zero, sizes)
        s = warpgroup_mma_wait(0, deps=[s])
        s = scores(s, modifiers, i, anew(n), band, sizes, True)
        p, m_i, factor = softmax(s, m_i, gl.convert_layout(above, m_i.type.layout) > 0, unit, RAISED)
        sums, words = sum_by_place(p, sizes.BLOCK_N), packed(p, sizes.BLOCK_N)
        l_i *= gl.convert_layout(factor, gl.SliceLayout(1, l_i.type.layout))[:, None]
        acc, product = scaled(acc, factor), scaled(product, factor)
    barrier_arrive(FIRST + slots.k, sizes.THREADS)  # release the key slot
    v, v_phase = advance(slots.v, slots.v_phase, sizes.V_SLOTS)
    return PendingSumsFp8(acc, product, words, m_i, l_i + sums), RingSlots(k, k_phase, v, v_phase)


@gluon.jit
def put_piece(acc, share, sees, n: gl.constexpr, out, sizes):
    """Normalize one piece of the output channels, and write it to shared memory."""
    WIDTH: gl.constexpr = sizes.E // sizes.PIECES
    # A row that sees no key may have summed arbitrary data, so zero it. Without opaque(), the compiler would
    # select between 16-bit halves instead of fp32 numbers.
    acc = opaque(gl.where(sees[:, None], acc * share[:, None], 0.0))
    if sizes.PIECES > 1:
        out = out.slice(n * WIDTH, WIDTH, 1)
    out.store(acc.to(out.dtype))


@gluon.jit
def consume_fp8(number: gl.constexpr, call, descales, results, shared, sizes):
    """Compute attention for one consumer's queries, tile after tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.BLOCK_N, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E // sizes.PIECES, 32])
    FIRST_ROW: gl.constexpr = number * ROWS
    zero = gl.zeros([ROWS, sizes.BLOCK_N], gl.float32, SCORES)
    out = shared.out.index(number)
    slots, count = RingSlots(0, 0, 0, 0), 0
    make_flag(number)
    tile = wait_for_work(count, shared)
    while tile < call.tiles:
        work = read(count, shared, sizes)
        start, end = bounds(call.starts_ptr, call.ends_ptr, work.sequence, work.others)
        origin = origin_of(call.origin_ptr, work.sequence, call.batch)
        band = KeyBand(start, end, call.left, call.right, call.prefix, origin.query - origin.key, origin.key)
        every = blocks_of(work, band, sizes, 0, ROWS * sizes.CONSUMERS)
        mine = blocks_of(work, band, sizes, FIRST_ROW, ROWS)
        bottom = gl.minimum(gl.maximum(mine.bottom, every.bottom), every.top - 1)
        top = gl.minimum(gl.maximum(mine.top, bottom + 1), every.top)
        slots = hand_back(slots, every.top - top, shared, sizes)

        slope = None
        if call.slopes_ptr is not None:
            slope = load_slope(call.slopes_ptr, call.stride_slopes, work.sequence, work.head, call.batch)
        of_kv = work.sequence * (call.heads // call.group) + work.head // call.group
        scale = descaled(
            call.scale, descales.q_ptr, work.sequence * call.heads + work.head, work.sequence, call.batch
        )
        scale = descaled(scale, descales.k_ptr, of_kv, work.sequence, call.batch)
        v_descale = descaled(1.0, descales.v_ptr, of_kv, work.sequence, call.batch)
        modifiers = Modifiers(scale, call.softcap, slope)
        i = work.others - work.rows + work.start + FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        mbarrier.wait(shared.q_full.index(number), count & 1)
        q = shared.q.index(number)
        if sizes.Q_IN_REGISTERS:
            q = q.load(gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=4))
            if not sizes.D_TAIL:
                mbarrier.arrive(shared.q_empty.index(number), count=1)
        queries = (q, number, i, zero)

        block = top - 1
        state, slots = begin(slots, block, queries, modifiers, band, shared, sizes, SUMS, block > bottom)
        full_top = gl.maximum(gl.minimum(mine.full_top, block), bottom)
        full_bottom = bottom
        if sizes.HIDES_FIRST:
            full_bottom = gl.maximum(gl.minimum(mine.full_bottom, full_top), bottom)
        for n in range(1, top - bottom):
            b = block - n
            masked = (b >= full_top) | (b < full_bottom)
            state, slots = step_fp8(
                state, slots, b, queries, modifiers, band, shared, sizes, masked, b > bottom, number
            )

        if sizes.D_TAIL or not sizes.Q_IN_REGISTERS:
            mbarrier.arrive(shared.q_empty.index(number), count=1)
        mbarrier.wait(shared.v_full.index(slots.v), slots.v_phase)
        acc = add_products(state, slots.v, shared, sizes)
        v, v_phase = advance(slots.v, slots.v_phase, sizes.V_SLOTS)
        slots = hand_back(RingSlots(slots.k, slots.k_phase, v, v_phase), bottom - every.bottom, shared, sizes)
        first = work.start + FIRST_ROW
        l_i = gl.convert_layout(gl.sum(state.l_i, 1), gl.SliceLayout(1, SCORES))
        share = put_lse(state.m_i, l_i, work, first, call, results) * v_descale
        share = gl.convert_layout(share, gl.SliceLayout(1, SUMS))
        sees = gl.convert_layout(sees_any(i, band), gl.SliceLayout(1, SUMS))
        tma.store_wait(0)  # the previous output tile has left the buffer
        for n in gl.static_range(sizes.PIECES):
            put_piece(acc[n], share, sees, n, out, sizes)
        put_out(out, work, first, results, sizes)
        count += 1
        tile = wait_for_work(count, shared)
    tma.store_wait(0)
