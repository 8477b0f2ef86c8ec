"""The Hopper backward for heads of 257 to 512 channels: three passes, which write dv, dk and dq.

The fp32 gradient of 64 keys or queries, 64 x 512, takes half of all registers. So a program computes one
gradient, and each of two consumers sums half of its channels. A program keeps 64 rows in shared memory (the
resident rows) and streams tiles of 32 other rows through rings. With the scores ``S`` and the gradient of
probabilities ``dP``, in ``[resident rows, streamed rows]``:

    gradient  resident   streamed   weights of a tile        sums
    dv        k          q, dout    P                        P @ dout
    dk        k, v       q, dout    dS = P * (dP - delta)    dS @ q
    dq        q, dout    k, v       dS                       dS @ k

The first consumer (the leader) computes the weights and passes them to the second (the partner).
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...band import KeyBand, bounds, key_range, origin_of, sees_any, visible
from ...scores import Modifiers, modify, unit_of
from ...tile import COUNTS, locate
from ..primitives import FIRST, anew, async_load, barrier_arrive, barrier_sync, barriers, opaque, ring
from .results import Gradient, put_rows
from .shared import KEYS, clear_outside, full_queries_of, spread, tiles_of, vectors

HALF: gl.constexpr = gl.constexpr(256)  # channels per consumer
# Named barriers: the first of those that release the slots of a ring; the partner may read what was passed,
# and has read it.
FIRST_FREED: gl.constexpr = gl.constexpr(FIRST)
LEFT_FREED: gl.constexpr = gl.constexpr(FIRST + 2)
RIGHT_FREED: gl.constexpr = gl.constexpr(FIRST + 4)
PASSED: gl.constexpr = gl.constexpr(FIRST + 6)
TAKEN: gl.constexpr = gl.constexpr(FIRST + 7)
BOTH: gl.constexpr = gl.constexpr(256)  # threads of both consumers
WITH_PRODUCER: gl.constexpr = gl.constexpr(160)  # threads of one consumer and the producer
SCORES: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
SUMS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


class WideSizes(NamedTuple):
    """Compile-time constants of a pass.

    ``OF``: the gradient, "dv", "dk" or "dq".
    ``BLOCK_M``: streamed rows per tile; ``TILES``: tiles of 64 resident rows, always 1.
    ``SLOTS``, ``LEFT_SLOTS``, ``RIGHT_SLOTS``: ring slots of the first streamed tensor, and of the left and
        right halves of the second, whose rows are summed.
    ``HOLES``: rows before or after a sequence's keys may hold padding or another sequence.
    """

    OF: gl.constexpr
    BLOCK_M: gl.constexpr
    TILES: gl.constexpr
    SLOTS: gl.constexpr
    LEFT_SLOTS: gl.constexpr
    RIGHT_SLOTS: gl.constexpr
    HOLES: gl.constexpr
    PACKED: gl.constexpr


class WideShared(NamedTuple):
    """The shared memory of a program; all channels are in two halves.

    ``scored``, ``other``: resident rows that give scores with streamed rows, and those that give dP.
    ``first``: ring of the first streamed tensor, two entries per slot; ``left``, ``right``: rings of the
    second.
    """

    scored: gl.shared_memory_descriptor
    other: gl.shared_memory_descriptor
    first: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    first_full: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor


class WideCall(NamedTuple):
    """The parameters of a pass that its warps read."""

    lse2_ptr: gl.tensor
    delta_ptr: gl.tensor
    stride_lb: gl.tensor
    stride_lh: gl.tensor
    group: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor


class Stream(NamedTuple):
    """The rows that a program streams: ``tiles`` tiles of each head, from row ``first`` of the sequence on.

    ``steps``: tiles of all heads, from ``head`` on.
    ``low``, ``high``: rows outside of ``[low, high)`` may hold arbitrary data.
    ``all_low``, ``all_high``: tiles within ``[all_low, all_high)`` need no mask.
    """

    head: gl.tensor
    first: gl.tensor
    tiles: gl.tensor
    steps: gl.tensor
    low: gl.tensor
    high: gl.tensor
    all_low: gl.tensor
    all_high: gl.tensor


@gluon.jit
def stream_of(work, band, call, sizes):
    """Return the rows that a program streams."""
    if sizes.OF == "dq":
        i = work.others - work.rows + work.start
        low, high, all_low, all_high = key_range(i, gl.minimum(i + KEYS, work.others), band)
        first = gl.maximum(low, 0) // sizes.BLOCK_M
        tiles = gl.maximum(gl.cdiv(high, sizes.BLOCK_M) - first, 0)
        tiles = gl.where(work.start < work.rows, tiles, 0)
        head = (work.head // call.group).to(gl.int32)
        return Stream(head, first * sizes.BLOCK_M, tiles, tiles, band.start, band.end, all_low, all_high)
    else:
        ahead = work.rows - work.others
        low, high, first, tiles = tiles_of(work.start, work, band, sizes)
        all_low, all_high = full_queries_of(work.start, ahead, work.others, band)
        head = (work.head * call.group).to(gl.int32)
        return Stream(
            head, first * sizes.BLOCK_M, tiles, tiles * call.group, low, high, all_low - ahead,
            all_high - ahead,
        )  # fmt: skip


@gluon.jit
def start_at(n, stream, sizes):
    """Return the first row of the tile of step ``n``, and the tile's head."""
    return stream.first + n % stream.tiles * sizes.BLOCK_M, stream.head + n // stream.tiles


# ---- the producer


@gluon.jit
def load_halves(desc, tiles, entry, full, at):
    """Start to load both halves of the channels of a tile."""
    plane, row, head = at
    mbarrier.expect(full, 2 * tiles.shape[1] * HALF * 2)
    async_load(desc, [plane, row, head, 0], full, tiles.index(entry))
    async_load(desc, [plane, row, head, HALF], full, tiles.index(entry + 1))


@gluon.jit
def load_half(desc, tiles, slot, full, at, channel: gl.constexpr):
    """Start to load one half of the channels of a tile."""
    plane, row, head = at
    ready = full.index(slot)
    mbarrier.expect(ready, tiles.shape[1] * HALF * 2)
    async_load(desc, [plane, row, head, channel], ready, tiles.index(slot))


@gluon.jit
def load_numbers(start, head, slot, work, stream, call, shared, sizes):
    """Copy the LSE and delta of a tile of queries to shared memory.

    Queries that see none of the keys get an LSE of +inf, so that their probabilities are 0.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    m = start + gl.arange(0, sizes.BLOCK_M, LAYOUT)
    at = work.plane * call.stride_lb + work.other + head.to(gl.int64) * call.stride_lh
    valid = (m >= stream.low) & (m < stream.high)
    shared.lse.index(slot).store(gl.load(call.lse2_ptr + at + m, mask=valid, other=float("inf")))
    if sizes.OF != "dv":
        shared.delta.index(slot).store(gl.load(call.delta_ptr + at + m, mask=valid, other=0.0))


@gluon.jit
def drain(steps, SLOTS: gl.constexpr, NUMBER: gl.constexpr):
    """Wait until the last tiles of a ring are released.

    A named barrier at which only some of the threads have arrived would hang the next program.
    """
    for n in range(gl.maximum(steps - SLOTS, 0), steps):
        barrier_sync(NUMBER + n % SLOTS, WITH_PRODUCER)


@gluon.jit
def produce_wide(scored_desc, other_desc, first_desc, second_desc, work, stream, call, shared, sizes):
    """Run the producer warp: load the resident rows, then tile after tile as ring slots become free."""
    plane, head = work.plane.to(gl.int32), work.head.to(gl.int32)
    at = (plane, work.row.to(gl.int32) + work.start, head)
    load_halves(scored_desc, shared.scored, 0, shared.rows_full.index(0), at)
    if sizes.OF != "dv":
        load_halves(other_desc, shared.other, 0, shared.rows_full.index(1), at)
    for n in range(stream.steps):
        start, head = start_at(n, stream, sizes)
        at = (plane, work.other.to(gl.int32) + start, head)
        slot = n % sizes.SLOTS
        if n >= sizes.SLOTS:
            barrier_sync(FIRST_FREED + slot, WITH_PRODUCER)
        load_halves(first_desc, shared.first, 2 * slot, shared.first_full.index(slot), at)
        if sizes.OF != "dq":
            load_numbers(start, head, slot, work, stream, call, shared, sizes)
            mbarrier.arrive(shared.first_full.index(slot), count=1)
        slot = n % sizes.LEFT_SLOTS
        if n >= sizes.LEFT_SLOTS:
            barrier_sync(LEFT_FREED + slot, WITH_PRODUCER)
        load_half(second_desc, shared.left, slot, shared.left_full, at, 0)
        slot = n % sizes.RIGHT_SLOTS
        if n >= sizes.RIGHT_SLOTS:
            barrier_sync(RIGHT_FREED + slot, WITH_PRODUCER)
        load_half(second_desc, shared.right, slot, shared.right_full, at, HALF)
    drain(stream.steps, sizes.SLOTS, FIRST_FREED)
    drain(stream.steps, sizes.LEFT_SLOTS, LEFT_FREED)
    drain(stream.steps, sizes.RIGHT_SLOTS, RIGHT_FREED)


# ---- the consumers


@gluon.jit
def issue_half(rows, half, tile, sums, ADDS: gl.constexpr):
    """Start the product of one half of the resident rows' channels with those of a streamed tile."""
    return warpgroup_mma(rows.index(half), tile.permute((1, 0)), sums, use_acc=ADDS, is_async=True)


@gluon.jit
def issue(rows, left, right, zero):
    """Start the product of resident rows with the two halves of a streamed tile."""
    return issue_half(rows, anew(1), right, issue_half(rows, anew(0), left, zero, False), True)


@gluon.jit
def clear_streamed(start, n, stream, shared, sizes):
    """Zero the rows of the streamed tiles that may hold arbitrary data, since 0 times NaN is NaN."""
    if (start < stream.low) | (start + sizes.BLOCK_M > stream.high):
        first = n % sizes.SLOTS * 2
        left, right = n % sizes.LEFT_SLOTS, n % sizes.RIGHT_SLOTS
        mbarrier.wait(shared.left_full.index(left), (n // sizes.LEFT_SLOTS) & 1)
        mbarrier.wait(shared.right_full.index(right), (n // sizes.RIGHT_SLOTS) & 1)
        clear_outside(shared.first.index(first), start, stream.low, stream.high)
        clear_outside(shared.first.index(first + 1), start, stream.low, stream.high)
        clear_outside(shared.left.index(left), start, stream.low, stream.high)
        clear_outside(shared.right.index(right), start, stream.low, stream.high)
        fence_async_shared()
        tl.debug_barrier()  # otherwise Triton adds a barrier after the branch, to every step


@gluon.jit
def weigh(s, dp, lse2, delta, i, j, band, masked, call, sizes):
    """Return the weights of a tile: probabilities, or the gradient of the scores."""
    modifiers = Modifiers(call.scale, call.softcap, None)
    s, derivative = modify(s, modifiers, i, j, True)
    x = gl.exp2(s * unit_of(modifiers) - lse2)
    if sizes.OF != "dv":
        x = x * (dp - delta) * derivative
    if masked:
        x = opaque(gl.where(visible(i, j, band), x, 0.0))
    return x


@gluon.jit
def lead(work, band, stream, call, to, shared, sizes, WIDTH: gl.constexpr):
    """Run the leader: compute the weights of all tiles, and sum the left half of the channels."""
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    zero, acc = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES), gl.zeros([KEYS, HALF], gl.float32, SUMS)
    row = work.start + gl.arange(0, KEYS, ROW)
    lse2, delta = zero, zero
    if sizes.OF == "dq":
        row_valid = row < work.rows
        at = work.plane * call.stride_lb + work.row + work.head * call.stride_lh + row
        lse2 = gl.load(call.lse2_ptr + at, mask=row_valid, other=float("inf"))[:, None]
        delta = gl.load(call.delta_ptr + at, mask=row_valid, other=0.0)[:, None]
    mbarrier.wait(shared.rows_full.index(0), 0)
    if sizes.OF != "dv":
        mbarrier.wait(shared.rows_full.index(1), 0)
    for n in range(stream.steps):
        start, _ = start_at(n, stream, sizes)
        slot, left_slot, right_slot = n % sizes.SLOTS, n % sizes.LEFT_SLOTS, n % sizes.RIGHT_SLOTS
        left = shared.left.index(left_slot)
        mbarrier.wait(shared.first_full.index(slot), (n // sizes.SLOTS) & 1)
        if sizes.HOLES or sizes.OF != "dq":
            clear_streamed(start, n, stream, shared, sizes)
        first_left, first_right = shared.first.index(2 * slot), shared.first.index(2 * slot + 1)
        if sizes.OF == "dv":
            s = issue(shared.scored, first_left, first_right, zero)
            s, dp = warpgroup_mma_wait(0, deps=[s]), zero
        else:
            dp = issue(shared.other, first_left, first_right, zero)
            mbarrier.wait(shared.left_full.index(left_slot), (n // sizes.LEFT_SLOTS) & 1)
            s = issue_half(shared.scored, anew(0), left, zero, False)
            mbarrier.wait(shared.right_full.index(right_slot), (n // sizes.RIGHT_SLOTS) & 1)
            s = issue_half(shared.scored, anew(1), shared.right.index(right_slot), s, True)
            dp, s = warpgroup_mma_wait(0, deps=[dp, s])
        other = start + gl.arange(0, BLOCK_M, COLUMN)
        if sizes.OF == "dq":
            i, j = (work.others - work.rows + row)[:, None], other[None, :]
        else:
            i, j = (work.rows - work.others + other)[None, :], row[:, None]
            lse2 = spread(shared.lse.index(slot), zero)
            if sizes.OF == "dk":
                delta = spread(shared.delta.index(slot), zero)
        masked = (start < stream.all_low) | (start + BLOCK_M > stream.all_high)
        weights = weigh(s, dp, lse2, delta, i, j, band, masked, call, sizes).to(left.dtype)
        barrier_arrive(FIRST_FREED + slot, WITH_PRODUCER)
        barrier_sync(TAKEN, BOTH)
        shared.weights.index(0).store(weights)
        fence_async_shared()
        barrier_arrive(PASSED, BOTH)
        weights = gl.convert_layout(weights, WEIGHTS)
        if sizes.OF == "dv":
            mbarrier.wait(shared.left_full.index(left_slot), (n // sizes.LEFT_SLOTS) & 1)
        acc = warpgroup_mma(weights, left, acc, is_async=True)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        barrier_arrive(LEFT_FREED + left_slot, WITH_PRODUCER)
    barrier_sync(TAKEN, BOTH)
    finish(acc, 0, work, band, call, to, shared, sizes, WIDTH)


@gluon.jit
def follow(work, band, stream, call, to, shared, sizes, WIDTH: gl.constexpr):
    """Run the partner: sum the right half of the channels."""
    acc = gl.zeros([KEYS, HALF], gl.float32, SUMS)
    barrier_arrive(TAKEN, BOTH)
    mbarrier.wait(shared.rows_full.index(0), 0)
    for n in range(stream.steps):
        slot = n % sizes.RIGHT_SLOTS
        mbarrier.wait(shared.right_full.index(slot), (n // sizes.RIGHT_SLOTS) & 1)
        barrier_sync(PASSED, BOTH)
        acc = warpgroup_mma(shared.weights.index(0), shared.right.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier_arrive(RIGHT_FREED + slot, WITH_PRODUCER)
        barrier_arrive(TAKEN, BOTH)
    finish(acc, 1, work, band, call, to, shared, sizes, WIDTH)


@gluon.jit
def finish(acc, number: gl.constexpr, work, band, call, to, shared, sizes, WIDTH: gl.constexpr):
    """Write one half of the gradient, through the memory of resident rows, which nobody reads any more."""
    row = work.start + gl.arange(0, KEYS, gl.SliceLayout(1, SUMS))
    if sizes.OF == "dq":
        kept = sees_any(work.others - work.rows + row, band)
    else:
        kept = (row >= band.start) & (row < band.end)
    acc = gl.where(kept[:, None], acc * (1.0 if sizes.OF == "dv" else call.scale), 0.0)
    put_rows(
        acc, shared.scored.index(number), to.desc, to, number * HALF, WIDTH, work.plane, work.head, work.row,
        work.start, work.rows, sizes,
    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=COUNTS)
def backward_upto_512(
    lse2_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, key_starts_ptr, key_ends_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, origin_ptr,
    scored_desc, other_desc, first_desc, second_desc, grad_desc,
    stride_dqs, stride_dqh, stride_dkt, stride_dkg, stride_dvt, stride_dvg, stride_lb, stride_lh,
    batch, heads, kv_heads, group, s, t, heads_per_wave, left, right, prefix, scale, softcap,
    D: gl.constexpr, E: gl.constexpr, OF: gl.constexpr, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr,
    LEFT_SLOTS: gl.constexpr, RIGHT_SLOTS: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write one gradient (``OF``): dq ``[b, s, h, d]``, dk ``[b, t, g, d]`` or dv ``[b, t, g, e]``."""
    HOLES: gl.constexpr = (
        cu_seqlens_k_ptr is not None or key_starts_ptr is not None or key_ends_ptr is not None
    )
    PACKED: gl.constexpr = cu_seqlens_q_ptr is not None
    sizes: gl.constexpr = WideSizes(OF, BLOCK_M, 1, SLOTS, LEFT_SLOTS, RIGHT_SLOTS, HOLES, PACKED)
    dtype: gl.constexpr = scored_desc.dtype
    scored = ring(dtype, 2, KEYS, HALF)
    other = scored
    if OF != "dv":
        other = ring(dtype, 2, KEYS, HALF)
    shared = WideShared(
        scored, other, ring(dtype, 2 * SLOTS, BLOCK_M, HALF), ring(dtype, LEFT_SLOTS, BLOCK_M, HALF),
        ring(dtype, RIGHT_SLOTS, BLOCK_M, HALF), ring(dtype, 1, KEYS, BLOCK_M), vectors(SLOTS, BLOCK_M),
        vectors(SLOTS, BLOCK_M), barriers(2), barriers(SLOTS, 1 if OF == "dq" else 2), barriers(LEFT_SLOTS),
        barriers(RIGHT_SLOTS),
    )  # fmt: skip
    fence_async_shared()
    if OF == "dq":
        work = locate(
            gl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, s, t, heads_per_wave, KEYS,
            right is not None,
        )  # fmt: skip
        keys, to, WIDTH = work.others, Gradient(grad_desc, None, dq_ptr, stride_dqs, stride_dqh), D
    else:
        work = locate(
            gl.program_id(0), cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, kv_heads, t, s, heads_per_wave, KEYS,
            False,
        )  # fmt: skip
        keys = work.rows
        if OF == "dk":
            to, WIDTH = Gradient(grad_desc, None, dk_ptr, stride_dkt, stride_dkg), D
        else:
            to, WIDTH = Gradient(grad_desc, None, dv_ptr, stride_dvt, stride_dvg), E
    start, end = bounds(key_starts_ptr, key_ends_ptr, work.sequence, keys)
    origin = origin_of(origin_ptr, work.sequence, batch)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    call = WideCall(lse2_ptr, delta_ptr, stride_lb, stride_lh, group, scale, softcap)
    stream = stream_of(work, band, call, sizes)
    gl.warp_specialize(
        [
            (lead, (work, band, stream, call, to, shared, sizes, WIDTH)),
            (follow, (work, band, stream, call, to, shared, sizes, WIDTH)),
            (
                produce_wide,
                (scored_desc, other_desc, first_desc, second_desc, work, stream, call, shared, sizes),
            ),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )
