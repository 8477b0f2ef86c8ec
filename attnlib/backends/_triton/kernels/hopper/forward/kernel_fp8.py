"""The Hopper forward for fp8 inputs, in Gluon: a persistent kernel with one program per SM.

The structure is the same as in ``kernel.py``, but values are read by channel. A kernel that runs before this
one, in ``transpose_values.py``, transposes them. The consumers' device functions are in ``consumer_fp8.py``.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...band import KeyBand, bounds, origin_of, sees_any
from ...scores import Modifiers, descaled, load_slope
from ...tile import COUNTS
from ..primitives import barriers, make_flag, opaque, ring
from .consumer import RingSlots, hand_back
from .consumer_fp8 import add_products, await_turn, begin, pass_turn, step_fp8
from .producer import produce
from .results import ForwardOutputs, put_lse, put_out
from .shared import (
    POSTS,
    ROWS,
    WORDS,
    ForwardCall,
    ForwardShared,
    ForwardSizes,
    advance,
    blocks_of,
    read,
    wait_for_work,
)


class HeadDescales(NamedTuple):
    """Descales of q, k and v, per sequence and head: an fp8 number times its descale is the real value."""

    q_ptr: gl.tensor
    k_ptr: gl.tensor
    v_ptr: gl.tensor


@gluon.jit
def put_piece(acc, share, sees, n: gl.constexpr, out, sizes):
    """Normalize one piece of the output channels of a tile, and write it to shared memory."""
    WIDTH: gl.constexpr = sizes.E // sizes.PIECES
    # Zero rows that see no key, since they may have summed arbitrary data. opaque() makes the compiler do
    # this in fp32; otherwise it would zero 16-bit halves one by one.
    acc = opaque(gl.where(sees[:, None], acc * share[:, None], 0.0))
    if sizes.PIECES > 1:
        out = out.slice(n * WIDTH, WIDTH, 1)
    out.store(acc.to(out.dtype))


@gluon.jit
def consume(number: gl.constexpr, call, descales, results, shared, sizes):
    """Run one consumer: compute attention for its queries in every tile of this program."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.BLOCK_N // sizes.PARTS, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E // sizes.PIECES, 32])
    FIRST_ROW: gl.constexpr = number * ROWS
    zero = gl.zeros([ROWS, sizes.BLOCK_N // sizes.PARTS], gl.float32, SCORES)
    out = shared.out.index(number)
    slots, count = RingSlots(0, 0, 0, 0), 0
    make_flag(number)
    if number == 1:
        pass_turn(number, sizes)
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
        tma.store_wait(0)  # wait until the previous output tile has left the buffer
        for n in gl.static_range(sizes.PIECES):
            put_piece(acc[n], share, sees, n, out, sizes)
        put_out(out, work, first, 0, results, sizes)
        count += 1
        tile = wait_for_work(count, shared)
    if number == 0:
        await_turn(number, sizes)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*COUNTS, "tiles"])
def forward_fp8(
    out_ptr, lse_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr,
    alibi_slopes_ptr, sinks_ptr, key_starts_ptr, key_ends_ptr,  # the pointers from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, counter_ptr,
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, out_desc,
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_slopes,
    batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale, softcap, tiles,
    E: gl.constexpr, D_MAIN: gl.constexpr, D_TAIL: gl.constexpr, E_MAIN: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, K_SLOTS: gl.constexpr,
    V_SLOTS: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write the output ``[b, s, h, e]`` and the natural-log LSE ``[b, h, s]`` for fp8 inputs.

    For packed sequences the shapes are ``[t, h, e]`` and ``[h, t]``. ``v_desc`` describes the transposed
    values. The kernel has two or three consumers.
    """
    HOLES: gl.constexpr = (
        cu_seqlens_k_ptr is not None or key_starts_ptr is not None or key_ends_ptr is not None
    )
    HIDES_FIRST: gl.constexpr = left is not None or key_starts_ptr is not None
    PACKED: gl.constexpr = cu_seqlens_q_ptr is not None
    PIECES: gl.constexpr = E_MAIN // 64 if E_MAIN > 128 else 1
    PARTS: gl.constexpr = 2 if max(D_MAIN + D_TAIL, E_MAIN) <= 64 else 1
    # Without bounds that depend on the query, both consumers see the same key blocks.
    TURNS: gl.constexpr = CONSUMERS == 2 and PARTS == PIECES and left is None and right is None
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    sizes: gl.constexpr = ForwardSizes(
        D_MAIN, D_TAIL, E_MAIN, BLOCK_N, CONSUMERS, 1, K_SLOTS, V_SLOTS, Q_IN_REGISTERS, False, HOLES,
        HIDES_FIRST, PACKED, PIECES, THREADS, THREADS, True, PARTS=PARTS, TURNS=TURNS,
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q, out = ring(dtype, CONSUMERS, ROWS, D_MAIN), ring(out_desc.dtype, CONSUMERS, ROWS, E_MAIN)
    k, v = ring(dtype, K_SLOTS, BLOCK_N, D_MAIN), ring(dtype, V_SLOTS, E_MAIN, BLOCK_N)
    q_tail, k_tail = q, k
    if D_TAIL:
        q_tail, k_tail = ring(dtype, CONSUMERS, ROWS, D_TAIL), ring(dtype, K_SLOTS, BLOCK_N, D_TAIL)
    work = gl.allocate_shared_memory(gl.int32, [POSTS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work_full, q_full, q_empty = barriers(POSTS), barriers(CONSUMERS), barriers(CONSUMERS)
    k_full, v_full = barriers(K_SLOTS), barriers(V_SLOTS)
    shared = ForwardShared(q, q_tail, k, k_tail, v, out, work, work_full, q_full, q_empty, k_full, v_full)
    fence_async_shared()
    call = ForwardCall(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_starts_ptr, key_ends_ptr, alibi_slopes_ptr, sinks_ptr,
        origin_ptr, stride_slopes, batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale,
        softcap, tiles,
    )  # fmt: skip
    descales = HeadDescales(q_descale_ptr, k_descale_ptr, v_descale_ptr)
    results = ForwardOutputs(
        out_desc, out_ptr, lse_ptr, stride_ob, stride_os, stride_oh, stride_lb, stride_lh, E
    )
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, call, descales, results, shared, sizes)),
                (consume, (1, call, descales, results, shared, sizes)),
                (
                    produce,
                    (q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, counter_ptr, call, shared, sizes),
                ),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, call, descales, results, shared, sizes)),
                (consume, (1, call, descales, results, shared, sizes)),
                (consume, (2, call, descales, results, shared, sizes)),
                (
                    produce,
                    (q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, counter_ptr, call, shared, sizes),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
