"""The backward of wide heads on Hopper, whose gradients of keys and values fill the registers of a consumer each.

64 keys a program: one consumer makes the probabilities and dv, the other the gradient of scores and dk, and either half
of the channels of dq. Else as :mod:`.backward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..band import Band, bounds, origin_of, query_range, visible
from ..scores import Modifiers, load_slope, modify, unit_of
from ..tile import COUNTS, locate
from .backward_parts import (
    CONSUMERS,
    FREED,
    KEYS,
    Problem,
    Results,
    Shared,
    Sizes,
    add_dq,
    barriers,
    clear_keys,
    clear_queries,
    job_of,
    produce,
    put,
    ring,
    spread,
)
from .primitives import FIRST, barrier_arrive, barrier_sync, opaque

P_FULL: gl.constexpr = gl.constexpr(FIRST)
P_EMPTY: gl.constexpr = gl.constexpr(FIRST + 1)
DS_FULL: gl.constexpr = gl.constexpr(FIRST + 2)  # and the next, by turns


@gluon.jit
def issue_product(a, a_tail, b, b_tail, start, sizes):
    """Begin ``start + a @ b.T``."""
    s = warpgroup_mma(a, b.permute((1, 0)), start, is_async=True)
    if sizes.D_TAIL:
        s = warpgroup_mma(a_tail, b_tail.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def issue_share(number: gl.constexpr, ds, k):
    """Begin half of the channels of ``ds.T @ k``, for a block of channels."""
    COLUMNS: gl.constexpr = k.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(
        ds.permute((1, 0)), k.slice(number * COLUMNS, COLUMNS, 1), dq, use_acc=False, is_async=True
    )


@gluon.jit
def issue_shares(number: gl.constexpr, parity, shared, sizes):
    """Begin half of the channels of ``ds.T @ k``. Without a second block, that is the first again and goes unread."""
    ds = shared.ds.index(parity)
    dq = issue_share(number, ds, shared.k.index(0))
    return dq, issue_share(number, ds, shared.k_tail.index(0)) if sizes.D_TAIL else dq


@gluon.jit
def wait_for_shares(dq, dq_tail, sizes):
    """Both blocks, once they are there."""
    if sizes.D_TAIL:
        dq, dq_tail = warpgroup_mma_wait(0, deps=[dq, dq_tail])
    else:
        dq = warpgroup_mma_wait(0, deps=[dq])
        dq_tail = dq
    return dq, dq_tail


@gluon.jit
def add_shares(dq, dq_tail, number: gl.constexpr, tile, results, shared, sizes):
    """Add half of the channels to the sums of all programs."""
    add_dq(dq, number, tile, 0, results, shared, sizes)
    if sizes.D_TAIL:
        add_dq(dq_tail, number, tile, sizes.D, results, shared, sizes)


@gluon.jit
def next_tile(tile, head, first_dq, job, call):
    """The next tile of queries: of the same head, or the first of the next; and where its sums of dq begin."""
    tile += 1
    if tile == job.tiles:
        tile, head, first_dq = 0, head + 1, first_dq + call.dq_tiles
    return tile, head, first_dq


@gluon.jit
def clear_if_outside(m0, n, slot, job, shared, sizes):
    """Zero what of a tile of queries is another's, once all of it is there."""
    if (m0 < job.low) | (m0 + sizes.BLOCK_M > job.high):
        mbarrier.wait(shared.q_full.index(slot), (n // sizes.SLOTS) & 1)
        mbarrier.wait(shared.dout_full.index(slot), (n // sizes.SLOTS) & 1)
        clear_queries(m0, slot, job, shared, sizes)


@gluon.jit
def consume_values(job, band, call, results, shared, sizes):
    """Probabilities, the gradient of values, and half of dq, one step late."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    IN_SUMS: gl.constexpr = call.softcap is None and call.slopes_ptr is None
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OF_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OF_V, k_width=2)
    zero, dv = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES), gl.zeros([KEYS, sizes.E], gl.float32, OF_V)
    j0, j1 = gl.maximum(job.start, band.start), gl.minimum(job.start + KEYS, band.end)
    _, _, all_low, all_high = query_range(j0, j1, job.ahead, job.ahead + job.queries, band)
    if j1 - j0 < KEYS:
        all_high = all_low * 0
    j = (job.start + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES)))[:, None]
    mbarrier.wait(shared.keys_full.index(0), 0)
    if sizes.HOLES:
        clear_keys(job, band, shared, sizes)
    k, k_tail = shared.k.index(0), shared.k_tail.index(0)
    tile, head, first_dq, before = 0, job.kv_head * call.group, job.first_dq, job.first_dq
    for n in range(0, job.steps):
        slot, phase = n % sizes.SLOTS, (n // sizes.SLOTS) & 1
        m0 = job.first + tile * BLOCK_M
        clear_if_outside(m0, n, slot, job, shared, sizes)
        mbarrier.wait(shared.q_full.index(slot), phase)
        start = spread(shared.lse.index(slot), zero) if IN_SUMS else zero
        s = issue_product(k, k_tail, shared.q.index(slot), shared.q_tail.index(slot), start, sizes)
        if sizes.EARLY:
            barrier_sync(DS_FULL + ((n & 1) ^ 1), CONSUMERS)
            dq, dq_tail = issue_shares(0, (n & 1) ^ 1, shared, sizes)
            s = warpgroup_mma_wait(2 if sizes.D_TAIL else 1, deps=[s])
        else:
            s = warpgroup_mma_wait(0, deps=[s])
        i = (job.ahead + m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES)))[None, :]
        slope = None
        if call.slopes_ptr is not None:
            slope = load_slope(call.slopes_ptr, call.stride_slopes, job.sequence, head, call.batch)
        modifiers = Modifiers(call.scale, call.softcap, slope)
        s, derivative = modify(s, modifiers, i + band.apart, j)
        s *= unit_of(modifiers)
        if not IN_SUMS:
            s -= spread(shared.lse.index(slot), zero)
        p = gl.exp2(s)
        if (job.ahead + m0 < all_low) | (job.ahead + m0 + BLOCK_M > all_high):
            p = opaque(gl.where(visible(i, j, band), p, 0.0))
        mbarrier.wait(shared.dout_full.index(slot), phase)
        dout = shared.dout.index(slot)
        p16 = gl.convert_layout(p.to(dout.dtype), P)
        barrier_sync(P_EMPTY, CONSUMERS)
        shared.p.index(0).store((p * derivative).to(dout.dtype))
        barrier_arrive(P_FULL, CONSUMERS)
        if sizes.EARLY:
            dq, dq_tail = wait_for_shares(dq, dq_tail, sizes)
            dv = warpgroup_mma(p16, dout, dv, is_async=True)
            add_shares(dq, dq_tail, 0, before, results, shared, sizes)
            dv, p16 = warpgroup_mma_wait(0, deps=[dv, p16])
        else:
            dv = warpgroup_mma(p16, dout, dv, is_async=True)
            barrier_sync(DS_FULL + ((n & 1) ^ 1), CONSUMERS)
            dq, dq_tail = issue_shares(0, (n & 1) ^ 1, shared, sizes)
            dv, p16 = warpgroup_mma_wait(2 if sizes.D_TAIL else 1, deps=[dv, p16])
            dq, dq_tail = wait_for_shares(dq, dq_tail, sizes)
            add_shares(dq, dq_tail, 0, before, results, shared, sizes)
        barrier_arrive(FREED + slot, CONSUMERS + 32)
        before = first_dq + tile
        tile, head, first_dq = next_tile(tile, head, first_dq, job, call)
    last = (job.steps & 1) ^ 1
    barrier_sync(P_EMPTY, CONSUMERS)
    barrier_sync(DS_FULL + last, CONSUMERS)
    if job.steps > 0:
        dq, dq_tail = issue_shares(0, last, shared, sizes)
        dq, dq_tail = wait_for_shares(dq, dq_tail, sizes)
        add_shares(dq, dq_tail, 0, before, results, shared, sizes)
    barrier_sync(FIRST + 4, CONSUMERS)  # nobody reads keys and values any more
    j = job.start + gl.arange(0, KEYS, gl.SliceLayout(1, OF_V))
    dv = gl.where(((j >= band.start) & (j < band.end))[:, None], dv, 0.0)
    put(
        dv, shared.v.index(0), results.dv_desc, results.dv_ptr, results.stride_dvt, results.stride_dvg, 0, sizes.E_ALL,
        job.rows - job.start, job, sizes,
    )  # fmt: skip


@gluon.jit
def put_keys(dk, out, desc, first: gl.constexpr, job, band, call, results, sizes):
    """Write a block of channels of the gradients of keys."""
    j = job.start + gl.arange(0, KEYS, gl.SliceLayout(1, dk.type.layout))
    dk = gl.where(((j >= band.start) & (j < band.end))[:, None], dk * call.scale, 0.0)
    left = job.rows - job.start
    put(dk, out, desc, results.dk_ptr, results.stride_dkt, results.stride_dkg, first, sizes.D_ALL, left, job, sizes)


@gluon.jit
def consume_keys(job, band, call, results, shared, sizes):
    """The gradient of scores, that of keys, and half of dq."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D, 16])
    DS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OF_K, k_width=2)
    zero, dk = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES), gl.zeros([KEYS, sizes.D], gl.float32, OF_K)
    dk_tail = dk
    if sizes.D_TAIL:
        OF_TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D_TAIL, 16])
        dk_tail = gl.zeros([KEYS, sizes.D_TAIL], gl.float32, OF_TAIL)
    mbarrier.wait(shared.keys_full.index(0), 0)
    if sizes.HOLES:
        clear_keys(job, band, shared, sizes)
    v = shared.v.index(0)
    shared.ds.index(1).store(zero.to(v.dtype))  # the step before the first, which adds nothing
    fence_async_shared()
    barrier_arrive(DS_FULL + 1, CONSUMERS)
    barrier_arrive(P_EMPTY, CONSUMERS)
    tile, head, first_dq, before = 0, job.kv_head * call.group, job.first_dq, job.first_dq
    for n in range(0, job.steps):
        slot, phase = n % sizes.SLOTS, (n // sizes.SLOTS) & 1
        m0 = job.first + tile * BLOCK_M
        clear_if_outside(m0, n, slot, job, shared, sizes)
        mbarrier.wait(shared.q_full.index(slot), phase)
        mbarrier.wait(shared.dout_full.index(slot), phase)
        start = spread(shared.delta.index(slot), zero)
        dp = warpgroup_mma(v, shared.dout.index(slot).permute((1, 0)), start, is_async=True)
        if sizes.EARLY:
            dq, dq_tail = issue_shares(1, (n & 1) ^ 1, shared, sizes)
            dp = warpgroup_mma_wait(2 if sizes.D_TAIL else 1, deps=[dp])
        else:
            dp = warpgroup_mma_wait(0, deps=[dp])
        barrier_sync(P_FULL, CONSUMERS)
        p = shared.p.index(0).load(SCORES)
        barrier_arrive(P_EMPTY, CONSUMERS)
        ds = (p.to(gl.float32) * dp).to(v.dtype)
        mine = shared.ds.index(n & 1)
        mine.store(ds)
        fence_async_shared()
        barrier_arrive(DS_FULL + (n & 1), CONSUMERS)
        if sizes.EARLY:
            dq, dq_tail = wait_for_shares(dq, dq_tail, sizes)
        ds16 = gl.convert_layout(ds, DS)
        dk = warpgroup_mma(ds16, shared.q.index(slot), dk, is_async=True)
        if sizes.D_TAIL:
            dk_tail = warpgroup_mma(ds16, shared.q_tail.index(slot), dk_tail, is_async=True)
        if sizes.EARLY:
            add_shares(dq, dq_tail, 1, before, results, shared, sizes)
        else:
            dq, dq_tail = issue_shares(1, (n & 1) ^ 1, shared, sizes)
        if sizes.D_TAIL:
            dk, dk_tail, ds16 = warpgroup_mma_wait(0 if sizes.EARLY else 2, deps=[dk, dk_tail, ds16])
        else:
            dk, ds16 = warpgroup_mma_wait(0 if sizes.EARLY else 1, deps=[dk, ds16])
        if not sizes.EARLY:
            dq, dq_tail = wait_for_shares(dq, dq_tail, sizes)
            add_shares(dq, dq_tail, 1, before, results, shared, sizes)
        barrier_arrive(FREED + slot, CONSUMERS + 32)
        before = first_dq + tile
        tile, head, first_dq = next_tile(tile, head, first_dq, job, call)
    if job.steps > 0:
        dq, dq_tail = issue_shares(1, (job.steps & 1) ^ 1, shared, sizes)
        dq, dq_tail = wait_for_shares(dq, dq_tail, sizes)
        add_shares(dq, dq_tail, 1, before, results, shared, sizes)
    barrier_sync(FIRST + 4, CONSUMERS)
    put_keys(dk, shared.k.index(0), results.dk_desc, 0, job, band, call, results, sizes)
    if sizes.D_TAIL:
        put_keys(dk_tail, shared.k_tail.index(0), results.dk_tail_desc, sizes.D, job, band, call, results, sizes)


@gluon.jit(do_not_specialize=[*COUNTS, "dq_tiles"])
def backward_wide(
    lse2_ptr, delta_ptr, dk_ptr, dv_ptr, dq_sums_ptr, alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr,
    q_desc, q_tail_desc, dout_desc, k_desc, k_tail_desc, v_desc, dk_desc, dk_tail_desc, dv_desc,
    dq_sums_desc, dq_sums_tail_desc,
    stride_dkt, stride_dkg, stride_dvt, stride_dvg, stride_lb, stride_lh, stride_slopes,
    batch, heads, kv_heads, group, s, t, heads_per_wave, dq_tiles, left, right, prefix, scale, softcap,
    D: gl.constexpr, D_MAIN: gl.constexpr, D_TAIL: gl.constexpr, E: gl.constexpr, E_MAIN: gl.constexpr,
    BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, BY_ROWS: gl.constexpr, EARLY: gl.constexpr, BY_TMA: gl.constexpr,
    P16: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes dk ``[b, t, g, d]`` and dv ``[b, t, g, e]``, and adds to the sums of dq: a program for each 64 keys."""
    HOLES: gl.constexpr = cu_seqlens_k_ptr is not None or key_starts_ptr is not None or key_ends_ptr is not None
    PACKED: gl.constexpr = cu_seqlens_q_ptr is not None
    sizes: gl.constexpr = Sizes(
        D_MAIN, D_TAIL, E_MAIN, D, E, 1, BLOCK_M, SLOTS, BY_ROWS, EARLY, BY_TMA, P16, HOLES, PACKED,
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q, k, v = ring(dtype, SLOTS, BLOCK_M, D_MAIN), ring(dtype, 1, KEYS, D_MAIN), ring(dtype, 1, KEYS, E_MAIN)
    q_tail, k_tail = q, k
    if D_TAIL:
        q_tail, k_tail = ring(dtype, SLOTS, BLOCK_M, D_TAIL), ring(dtype, 1, KEYS, D_TAIL)
    dout, ds, p = ring(dtype, SLOTS, BLOCK_M, E_MAIN), ring(dtype, 2, KEYS, BLOCK_M), ring(dtype, 1, KEYS, BLOCK_M)
    staged = ds
    if BY_TMA:
        staged = ring(gl.float32, 2, BLOCK_M * D_MAIN // 64, 32)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], VECTOR)
    delta = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], VECTOR)
    shared = Shared(
        q, q_tail, dout, k, k_tail, v, p, ds, staged, lse, delta, barriers(1, 1), barriers(SLOTS, 2), barriers(SLOTS, 1)
    )
    fence_async_shared()
    work = locate(gl.program_id(0), cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, kv_heads, t, s, heads_per_wave, KEYS, False)
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
            (consume_values, (job, band, call, results, shared, sizes)),
            (consume_keys, (job, band, call, results, shared, sizes)),
            (produce, (q_desc, q_tail_desc, dout_desc, k_desc, k_tail_desc, v_desc, job, call, shared, sizes)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )
