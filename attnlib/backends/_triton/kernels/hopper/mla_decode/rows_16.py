"""MLA decoding with 16 query rows for Hopper, in Gluon: one program per SM, bound by memory bandwidth.

Matrix products are transposed: tokens or channels are the 64 rows of a wgmma and queries its 16 columns, so
no row is padding. Two consumer warpgroups process alternate tiles, so that one waits for its tile while the
other multiplies. Each keeps its own sums over all channels, which are joined at the end. A producer warp
loads tiles by TMA.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from ...band import KeyBand
from ...scores import Modifiers
from ..primitives import FIRST, anew, barrier_arrive, barrier_sync, barriers, ring
from ..splits import TOKENS, BothHalvesSums, entry_of
from .results import in_fp32, join_and_store
from .shared import (
    HALF,
    TAIL,
    Scoring,
    clear_others,
    first_entry,
    indices_of,
    is_cut,
    load_half,
    load_last_half,
    load_queries,
    numbers,
    row_of,
    slope_of,
    softmax,
    tiles_of,
)
from .states import visible_tile

ROWS: gl.constexpr = gl.constexpr(16)
# The register layout of scores and output sums.
SUMS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
# Named barriers: FIRST and FIRST + 1 signal that ring slot 0 or 1 is free; the two consumers meet at BOTH.
BOTH: gl.constexpr = gl.constexpr(FIRST + 2)
WITH_PRODUCER: gl.constexpr = gl.constexpr(160)  # threads: 128 of one consumer, 32 of the producer
CONSUMERS: gl.constexpr = gl.constexpr(256)


class Rows16Shared(NamedTuple):
    """The shared memory of one program of the kernel.

    ``q`` holds the queries' latent channels in two halves. ``left`` and ``right`` hold the same halves of two
    tiles of keys. ``q_tail`` and ``tail`` hold the rotary channels, ``p`` probabilities, and ``joined`` the
    maxima and sums that the consumers join at the end. The mbarriers ``left_full`` and ``right_full`` signal
    that a half has been loaded.
    """

    q: gl.shared_memory_descriptor
    q_tail: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    tail: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    joined: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor


@gluon.jit
def produce(k_desc, tail_desc, split, states, call, shared, PAGE: gl.constexpr):
    """Run the producer warp: load each tile of the split as soon as a ring slot becomes free."""
    tile, tiles = tiles_of(split, states)
    entry = first_entry(tile, split, call, PAGE)
    for t in range(tiles):
        slot = t % 2
        row = row_of(entry, tile * TOKENS, split, call, PAGE)
        tile = visible_tile(tile + 1, states)
        entry = entry_of(tile * TOKENS, split, call, PAGE)
        if t >= 2:
            barrier_sync(FIRST + slot, WITH_PRODUCER)
        left, right, tail = shared.left.index(slot), shared.right.index(slot), shared.tail.index(slot)
        load_half(k_desc, row, 0, left, shared.left_full.index(slot))
        load_last_half(k_desc, tail_desc, row, right, tail, shared.right_full.index(slot))
    for slot in range(gl.minimum(tiles, 2)):  # a barrier left incomplete would hang the next program
        barrier_sync(FIRST + slot, WITH_PRODUCER)


@gluon.jit
def scores(number: gl.constexpr, zero, shared, phase):
    """Compute ``k @ q.T`` for this consumer's next tile of keys."""
    slot, q = anew(number), anew(0)
    mbarrier.wait(shared.left_full.index(slot), phase)
    s = warpgroup_mma(
        shared.left.index(slot), shared.q.index(q).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    mbarrier.wait(shared.right_full.index(slot), phase)
    s = warpgroup_mma(shared.right.index(slot), shared.q.index(q + 1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(shared.tail.index(slot), shared.q_tail.index(q).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def add_tile(number: gl.constexpr, state, softmaxed, n, split, shared):
    """Add the tile that begins at token ``n`` to the running sums, given the results of its softmax."""
    p, m_i, factor = softmaxed
    weights, factor = shared.p.index(number), factor[None, :]
    weights.store(p.to(shared.p.dtype))
    fence_async_shared()
    slot = anew(number)
    left, right = shared.left.index(slot), shared.right.index(slot)
    clear_others(left, n, split)
    clear_others(right, n, split)
    acc_left = warpgroup_mma(left.permute((1, 0)), weights, state.left * factor, is_async=True)
    acc_right = warpgroup_mma(right.permute((1, 0)), weights, state.right * factor, is_async=True)
    l_i = state.l_i * factor + p
    acc_left, acc_right = warpgroup_mma_wait(0, deps=[acc_left, acc_right])
    return BothHalvesSums(acc_left, acc_right, l_i, m_i)


@gluon.jit
def consume(
    number: gl.constexpr, queries, split, states, call, results, shared,
    MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Run consumer ``number``: compute attention over every other tile, beginning with tile ``number``.

    At the end, the two consumers join their sums, and each writes half of the channels.
    """
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    TAILS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    half = load_queries(queries, split, call, number * HALF, ROWS, HALF, Q)
    if number == 0:
        shared.q_tail.index(0).store(load_queries(queries, split, call, 2 * HALF, ROWS, TAIL, TAILS))
    shared.q.index(number).store(half)
    fence_async_shared()
    barrier_sync(BOTH, CONSUMERS)

    r = split.start + gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
    rows = indices_of(r, split, call)
    offset = rows.origin.query - rows.origin.key
    band = KeyBand(split.begin, split.end, call.left, call.right, call.prefix, offset, rows.origin.key)
    slope = None if call.slopes_ptr is None else slope_of(rows, call, 0)
    scoring = Scoring(rows, band, Modifiers(call.scale, call.softcap, slope))
    zero, nothing = gl.zeros([TOKENS, ROWS], gl.float32, SUMS), gl.zeros([HALF, ROWS], gl.float32, SUMS)
    least = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, SUMS))
    state = BothHalvesSums(nothing, nothing, zero, least)
    tile, tiles = tiles_of(split, states)
    if number == 1:
        tile = visible_tile(tile + 1, states)
    for t in range(number, tiles, 2):
        n, cut = tile * TOKENS, is_cut(tile * TOKENS, split, states)
        s = scores(number, zero, shared, (t // 2) & 1)
        softmaxed = softmax(s, state.m_i, n, cut, scoring, call, 0, MASK, SCORE)
        state = add_tile(number, state, softmaxed, n, split, shared)
        barrier_arrive(FIRST + number, WITH_PRODUCER)
        tile = visible_tile(visible_tile(tile + 1, states) + 1, states)

    gdc_launch_dependents()  # if started earlier, the next kernel would crowd SMs that have no work
    # Each consumer gives away half of its own ring slot, which no load will overwrite.
    given = in_fp32(shared.right.index(0) if number == 0 else shared.left.index(1), ROWS)
    taken = in_fp32(shared.left.index(1) if number == 0 else shared.right.index(0), ROWS)
    sums = BothHalvesSums(state.left, state.right, gl.sum(state.l_i, 0), state.m_i)
    join_and_store(number, sums, given, taken, shared.joined, band, split, call, results, BOTH, CONSUMERS)


@gluon.jit
def allocate_rows_16(dtype: gl.constexpr):
    """Allocate the shared memory of a program."""
    return Rows16Shared(
        ring(dtype, 2, ROWS, HALF), ring(dtype, 1, ROWS, TAIL), ring(dtype, 2, TOKENS, HALF),
        ring(dtype, 2, TOKENS, HALF), ring(dtype, 2, TOKENS, TAIL), ring(dtype, 2, TOKENS, ROWS),
        numbers(4, ROWS), barriers(2), barriers(2),
    )  # fmt: skip


@gluon.jit
def decode_rows_16(
    k_desc, tail_desc, queries, split, states, call, results, shared,
    PAGE: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Run two consumer warpgroups and a producer warp (warp specialization)."""
    gl.warp_specialize(
        [
            (consume, (0, queries, split, states, call, results, shared, MASK, SCORE)),
            (consume, (1, queries, split, states, call, results, shared, MASK, SCORE)),
            (produce, (k_desc, tail_desc, split, states, call, shared, PAGE)),
        ],
        [4, 1],
        [240, 24],
    )
