"""The Hopper forward in Gluon, after FlashAttention-3: a persistent kernel with one program per SM.

A producer warp loads tiles by TMA, and each consumer warpgroup computes attention for 64 queries.

Paper: Shah et al., 2024, arXiv 2407.08608.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...band import KeyBand, bounds, origin_of, sees_any
from ...scores import Modifiers, load_slope
from ...tile import COUNTS
from ..primitives import FIRST, barrier_arrive, barriers, make_flag, opaque, opaque_halves, ring
from .consumer import FunctionArguments, RingSlots, first_step, hand_back, step
from .partner import add_tail, finish_partner, hand_over_share
from .producer import produce
from .results import ForwardOutputs, put_lse, put_out
from .shared import (
    POSTS,
    ROWS,
    WORDS,
    ForwardCall,
    ForwardShared,
    ForwardSizes,
    Visit,
    advance,
    blocks_of,
    clear_others,
    read,
    visited,
    visits_of,
    wait_for_work,
)


@gluon.jit
def consume(
    number: gl.constexpr, call, mask_tensors, score_tensors, results, shared, sizes,
    MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Run one consumer: compute attention for its queries in every tile of this program."""
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
        if sizes.Q_IN_REGISTERS:  # saves a third of the reads from shared memory
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
            else:  # b depends only on n, so the loop carries no block number
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
            clear_others(shared.v.index(slots.v), (block if sizes.SPARSE else bottom) * BLOCK_N, band, sizes)
        acc = warpgroup_mma(p, shared.v.index(slots.v), state.acc, is_async=True)
        first = work.start + FIRST_ROW
        l_i = gl.convert_layout(gl.sum(state.l_i, 1), gl.SliceLayout(1, SCORES))
        share = gl.convert_layout(
            put_lse(state.m_i, l_i, work, first, call, results), gl.SliceLayout(1, SUMS)
        )
        sees = gl.convert_layout(sees_any(i, band), gl.SliceLayout(1, SUMS))
        if sizes.E_TAIL:
            hand_over_share(gl.where(sees, share, 0.0), shared)
        if not sizes.OUT_IN_Q:
            tma.store_wait(0)  # wait until the previous output tile has left the buffer
        acc, _ = warpgroup_mma_wait(0, deps=[acc, p])
        barrier_arrive(FIRST + sizes.K_SLOTS + slots.v, sizes.V_THREADS)
        v, v_phase = advance(slots.v, slots.v_phase, sizes.V_SLOTS)
        slots = RingSlots(slots.k, slots.k_phase, v, v_phase)
        if not sizes.SPARSE:
            slots = hand_back(slots, bottom - all_bottom, shared, sizes)
        # Zero rows that see no key, since they may have summed arbitrary data. opaque() makes the compiler do
        # this in fp32; otherwise it would zero 16-bit halves one by one.
        acc = opaque(gl.where(sees[:, None], acc * share[:, None], 0.0))
        out.store(acc.to(shared.v.dtype))
        put_out(out, work, first, 0, results, sizes)
        if sizes.OUT_IN_Q:  # the output must leave the slot before new queries arrive
            tma.store_wait(0)
            mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
        count += 1
        tile = wait_for_work(count, shared)
    if sizes.E_TAIL:
        finish_partner()
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*COUNTS, "tiles"])
def forward(
    # The pointers after lse_ptr may be None.
    out_ptr, lse_ptr, alibi_slopes_ptr, sinks_ptr, key_starts_ptr, key_ends_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, counter_ptr, lists_ptr,
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, out_desc, mask_tensors, score_tensors,
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_slopes, stride_list_b, stride_list_h, room,
    batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale, softcap, tiles,
    D: gl.constexpr, D_TAIL: gl.constexpr, E: gl.constexpr, E_MAIN: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, Q_SLOTS: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, OUT_IN_Q: gl.constexpr, REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    D_MAIN: gl.constexpr, E_TAIL: gl.constexpr,
    MASK: gl.constexpr, SCORE: gl.constexpr,  # mask and score functions, or None
):  # fmt: skip
    """Write the output of attention ``[b, s, h, e]`` and the natural-log LSE ``[b, h, s]``.

    For packed sequences the shapes are ``[t, h, e]`` and ``[h, t]``.
    """
    HOLES: gl.constexpr = (
        cu_seqlens_k_ptr is not None or key_starts_ptr is not None or key_ends_ptr is not None
    )
    HIDES_FIRST: gl.constexpr = left is not None or key_starts_ptr is not None
    PACKED: gl.constexpr = cu_seqlens_q_ptr is not None
    K_THREADS: gl.constexpr = CONSUMERS * 128 + 32
    V_THREADS: gl.constexpr = K_THREADS + (128 if E_TAIL else 0)  # of values, the partner has a half
    sizes: gl.constexpr = ForwardSizes(
        D_MAIN, D_TAIL, E_MAIN, BLOCK_N, CONSUMERS, Q_SLOTS, K_SLOTS, V_SLOTS, Q_IN_REGISTERS, OUT_IN_Q,
        HOLES, HIDES_FIRST, PACKED, 1, K_THREADS, V_THREADS, SPARSE=MASK is not None,
        E_TAIL=E_TAIL,
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q = ring(dtype, Q_SLOTS * CONSUMERS, ROWS, D_MAIN)
    k, v = ring(dtype, K_SLOTS, BLOCK_N, D_MAIN), ring(dtype, V_SLOTS, BLOCK_N, E_MAIN)
    q_tail, k_tail, out = q, k, q
    if D_TAIL:
        q_tail, k_tail = ring(dtype, Q_SLOTS * CONSUMERS, ROWS, D_TAIL), ring(dtype, K_SLOTS, BLOCK_N, D_TAIL)
    if not OUT_IN_Q:
        out = ring(dtype, CONSUMERS, ROWS, E_MAIN)
    v_tail, p, factors = v, q, q
    if E_TAIL:
        v_tail, p = ring(dtype, V_SLOTS, BLOCK_N, E_TAIL), ring(dtype, 1, ROWS, BLOCK_N)
        factors = gl.allocate_shared_memory(gl.float32, [1, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work = gl.allocate_shared_memory(gl.int32, [POSTS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared = ForwardShared(
        q, q_tail, k, k_tail, v, out, work, barriers(POSTS), barriers(Q_SLOTS * CONSUMERS),
        barriers(Q_SLOTS * CONSUMERS, 2 if E_TAIL else 1), barriers(K_SLOTS), barriers(V_SLOTS), v_tail, p,
        factors,
    )  # fmt: skip
    fence_async_shared()
    call = ForwardCall(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_starts_ptr, key_ends_ptr, alibi_slopes_ptr, sinks_ptr,
        origin_ptr, stride_slopes, batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale,
        softcap, tiles, lists_ptr, stride_list_b, stride_list_h, room,
    )  # fmt: skip
    results = ForwardOutputs(
        out_desc, out_ptr, lse_ptr, stride_ob, stride_os, stride_oh, stride_lb, stride_lh, E
    )
    if E_TAIL:
        gl.warp_specialize(
            [
                (consume, (0, call, mask_tensors, score_tensors, results, shared, sizes, MASK, SCORE)),
                (add_tail, (call, results, shared, sizes)),
                (
                    produce,
                    (q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, counter_ptr, call, shared, sizes),
                ),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, call, mask_tensors, score_tensors, results, shared, sizes, MASK, SCORE)),
                (consume, (1, call, mask_tensors, score_tensors, results, shared, sizes, MASK, SCORE)),
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
                (consume, (0, call, mask_tensors, score_tensors, results, shared, sizes, MASK, SCORE)),
                (consume, (1, call, mask_tensors, score_tensors, results, shared, sizes, MASK, SCORE)),
                (consume, (2, call, mask_tensors, score_tensors, results, shared, sizes, MASK, SCORE)),
                (
                    produce,
                    (q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, counter_ptr, call, shared, sizes),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
