"""Consumers of the Hopper backward for head dimensions up to 128: each of the two owns 64 keys.

A third warpgroup computes dq, so that neither consumer waits for the other. Each stores its ``ds``, the
gradient of the scores, in one of two slots, from which the third warpgroup reads it. TFLOP/s, kernel only,
if dq is computed by:

                      third warpgroup             the consumers
    d = 128, full 8k              654                      587
    d = 128, causal 8k            661                      609
    d = 64, full 8k               521                      489
    d = 64, causal 8k             508                      463

A thread of a consumer has 216 registers. At d = 128 the accumulated gradients take 128 of them; at d = 64 a
tile of scores takes 64. To save registers, probabilities are kept in 16 bits, and the accumulators of scores
start from zeros, not from ``-lse``.
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

from ...band import visible
from ...scores import Modifiers, PairIndices, changed, load_slope, modify, unchanged, unit_behind
from ..primitives import (
    FIRST,
    add_fours,
    anew,
    barrier_arrive,
    barrier_sync,
    floats_of,
    halves_of,
    opaque,
    reinterpret,
)
from .results import as_held, put, put_keys
from .shared import (
    CONSUMERS,
    FREED,
    KEYS,
    clear_queries,
    first_step,
    full_queries,
    next_step,
    sparse_step,
    spread,
    start_of,
    wait_for_keys,
)
from .turns import mark_added, wait_to_add

# One named barrier per slot of ds signals that both consumers have stored their ds.
FULL: gl.constexpr = FIRST
# One named barrier per consumer and slot of ds signals that dq has been computed from the slot.
TAKEN: gl.constexpr = gl.constexpr(FIRST + 2)
ALL: gl.constexpr = gl.constexpr(CONSUMERS + 128)  # threads of the consumers and the third warpgroup


class KeyGradients(NamedTuple):
    """The accumulators of dk and dv for a consumer's keys."""

    dk: gl.tensor
    dv: gl.tensor


class Now(NamedTuple):
    """The places in shared memory that one step of a consumer uses.

    ``number``: number of the step.
    ``slot``, ``phase``: ring slot of the query tile, and phase of the slot's mbarriers.
    ``parity``: slot, 0 or 1, of the gradient of scores ``ds``.
    ``masked``: the query tile needs a mask.
    """

    number: gl.tensor
    slot: gl.tensor
    phase: gl.tensor
    parity: gl.tensor
    masked: gl.tensor


@gluon.jit
def read_step(step, now, job, call, sizes):
    """Return the step of a consumer; with a sparse list, read its entry.

    Consumers read an entry only where they need it, which is in few steps: each read delays a step.
    """
    if sizes.SPARSE:
        return sparse_step(now.number, job, call)
    else:
        return step


@gluon.jit
def pairs_of(step, number: gl.constexpr, job, sizes, SCORES: gl.constexpr):
    """Return the indices of the pairs in the tile of scores of a consumer's keys."""
    i = job.ahead + start_of(step, job, sizes) + gl.arange(0, sizes.BLOCK_M, gl.SliceLayout(0, SCORES))
    j = job.start + number * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    return PairIndices(job.sequence.to(gl.int32), step.head.to(gl.int32), i[None, :], j[:, None], job.ahead)


@gluon.jit
def advance(
    sums, number: gl.constexpr, step, now, job, band, call, shared, sizes,
    MASK: gl.constexpr, SCORE: gl.constexpr, DERIVATIVE: gl.constexpr,
):  # fmt: skip
    """Add one query tile to the gradients of a consumer's keys, and return them."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums.dv.type.layout, k_width=2)
    zero = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES)
    slot = now.slot
    q, dout = shared.q.index(slot), shared.dout.index(slot)
    if now.masked:
        m0 = start_of(read_step(step, now, job, call, sizes), job, sizes)
        clear_queries(m0, anew(slot), now.phase, job, shared, sizes)
    s = warpgroup_mma(shared.k.index(anew(number)), q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse2 = spread(shared.lse.index(slot), zero)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.wait(shared.dout_full.index(slot), now.phase)
    place, slope, rows, columns = None, None, None, None
    if SCORE is not None or call.slopes_ptr is not None:
        place = pairs_of(read_step(step, now, job, call, sizes), number, job, sizes, SCORES)
    if call.slopes_ptr is not None:
        first = job.ahead + start_of(read_step(step, now, job, call, sizes), job, sizes) + band.offset
        rows, columns = place.j - first, gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))[None, :]
        slope = load_slope(call.slopes_ptr, call.stride_slopes, job.sequence, place.h, call.batch)
    modifiers = Modifiers(call.scale, call.softcap, slope)
    s, derivative = modify(s, modifiers, rows, columns, True)
    score = changed(s, modifiers, place, call.score_tensors, SCORE)
    KEPT: gl.constexpr = sizes.NEEDS_SCORE or call.softcap is not None
    if sizes.NEEDS_SCORE:
        one = gl.full([KEYS, BLOCK_M], 1.0, gl.float32, SCORES)
        derivative *= unchanged(one, s, modifiers, True, place, call.score_tensors, None, DERIVATIVE, None)
    if KEPT:
        derivative = halves_of(derivative, dout)
    p = gl.exp2(score * unit_behind(modifiers, SCORE) - lse2)
    if now.masked:
        at = pairs_of(read_step(step, now, job, call, sizes), number, job, sizes, SCORES)
        seen = visible(at.i, at.j, band)
        if SCORE is not None:  # hides queries past the last, whose scores may be anything
            seen = seen & (at.i < job.rows)
        if MASK is not None:
            seen = seen & MASK(at.b, at.h, at.i, at.j, at.first, call.mask_tensors)
        p = opaque(gl.where(seen, p, 0.0))
    p16 = halves_of(p, dout)
    p_as_factor = gl.convert_layout(p16, P)
    dp = spread(shared.delta.index(slot), zero)
    dp = warpgroup_mma(shared.v.index(anew(number)), dout.permute((1, 0)), dp, is_async=True)
    dv = warpgroup_mma(p_as_factor, dout, sums.dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    p = floats_of(p16)
    ds = p * dp
    if not sizes.NEEDS_SCORE:
        ds = unchanged(ds, s, modifiers, p != 0.0, place, call.score_tensors, None, DERIVATIVE, None)
    if KEPT:
        derivative = floats_of(derivative)
    ds *= derivative
    if sizes.NEEDS_SCORE:  # the derivative of a hidden pair may be infinite
        ds = gl.where(p != 0.0, ds, 0.0)
    ds = halves_of(ds, dout)
    ds16 = gl.convert_layout(ds, P)
    dk = warpgroup_mma(ds16, q, sums.dk, is_async=True)
    barrier_sync(TAKEN + number * 2 + now.parity, CONSUMERS)
    shared.ds.index(now.parity * 2 + number).store(ds)
    fence_async_shared()
    barrier_arrive(FULL + now.parity, ALL)
    dk, dv, _, _ = warpgroup_mma_wait(0, deps=[dk, dv, p_as_factor, ds16])
    barrier_arrive(FREED + slot, CONSUMERS + 32)
    return KeyGradients(dk, dv)


@gluon.jit
def consume_upto_128(
    number: gl.constexpr, job, band, call, results, shared, sizes,
    MASK: gl.constexpr, SCORE: gl.constexpr, DERIVATIVE: gl.constexpr,
):  # fmt: skip
    """Run one consumer: compute and write dk and dv of its keys."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.D, 16])
    OF_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.E, 16])
    sums = KeyGradients(
        gl.zeros([KEYS, sizes.D], gl.float32, OF_K), gl.zeros([KEYS, sizes.E], gl.float32, OF_V)
    )
    first_key = job.start + number * KEYS
    all_low, all_high = full_queries(first_key, job, band)
    ends = (first_key < band.start) | (first_key + KEYS > band.end)  # mask these keys even in full tiles
    wait_for_keys(job, band, shared, sizes)
    step = first_step(job, call, sizes)
    for n in range(job.steps):
        if sizes.SPARSE:
            masked = (n < job.cut) | ends
        else:
            i0 = job.ahead + start_of(step, job, sizes)
            masked = (i0 < all_low) | (i0 + BLOCK_M > all_high)
        now = Now(n, n % sizes.SLOTS, (n // sizes.SLOTS) & 1, n & 1, masked)
        mbarrier.wait(shared.q_full.index(now.slot), now.phase)
        sums = advance(
            sums, number, step, now, job, band, call, shared, sizes,
            MASK, SCORE, DERIVATIVE,
        )  # fmt: skip
        if not sizes.SPARSE:
            step = next_step(step, job, call, sizes)
    for parity in gl.static_range(2):  # wait until the third warpgroup no longer reads these keys
        barrier_sync(TAKEN + number * 2 + parity, CONSUMERS)
    put(
        sums.dv, 1.0, number, shared.v.index(number), results.dv.desc, results.dv, 0, sizes.E_ALL, job, band,
        sizes,
    )  # fmt: skip
    put_keys(sums.dk, sums.dk, number, job, band, call, results, shared, sizes)
    tma.store_wait(0)


@gluon.jit
def multiply_queries(job, call, results, shared, sizes):
    """Run the third warpgroup: add ``ds.T @ k`` to the sums of dq, in two halves of a tile.

    A half has half of the queries if ``BY_ROWS``, otherwise half of the channels.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 64], shared.k.dtype)
    SIZE: gl.constexpr = 64 * 64
    ds, k = shared.ds, shared.k
    if sizes.BY_ROWS:
        ds = reinterpret(ds, ds.dtype, [8, KEYS, 64], HALF)
    else:
        k = reinterpret(k, k.dtype, [4, KEYS, 64], HALF)
    for c in gl.static_range(4):
        barrier_arrive(TAKEN + c, CONSUMERS)
    step = first_step(job, call, sizes)
    for n in range(2 * job.steps):
        half, parity = n & 1, (n >> 1) & 1
        if half == 0:
            barrier_sync(FULL + parity, ALL)
        dq = gl.zeros([64, 64], gl.float32, LAYOUT)
        for c in gl.static_range(2):
            slot = parity * 2 + c
            of_queries, of_keys = (slot * 2 + half, c) if sizes.BY_ROWS else (slot, c * 2 + half)
            factor = ds.index(of_queries).permute((1, 0))
            dq = warpgroup_mma(factor, k.index(of_keys), dq, use_acc=c > 0, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        if half == 1:
            for c in gl.static_range(2):
                barrier_arrive(TAKEN + c * 2 + parity, CONSUMERS)
        held = as_held(dq)
        sums_ptr = results.dq_sums_ptr + (step.dq.to(gl.int64) * 2 + half) * SIZE
        if half == 0:
            wait_to_add(n >> 1, shared, sizes)
        add_fours(sums_ptr + gl.arange(0, SIZE, held.type.layout), held)
        if half == 1:
            mark_added(n >> 1, sizes)
            step = next_step(step, job, call, sizes)
