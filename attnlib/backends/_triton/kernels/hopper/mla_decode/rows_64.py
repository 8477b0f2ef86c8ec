"""MLA decoding with 64 query rows for Hopper, in Gluon (FlashMLA; DeepSeek, 2025): one program per SM.

The 64 x 512 output sums take half of all registers, so each of two consumer warpgroups holds the sums of half
of the channels. One consumer computes the probabilities of even tiles, the other those of odd tiles, and each
passes its probabilities to the other, tile by tile. A producer warp loads halves of tiles by TMA.
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

from ...band import KeyBand, sees_any
from ...scores import Modifiers
from ..primitives import FIRST, anew, barrier_arrive, barrier_sync, barriers, ring, scale_rows_in_place
from ..splits import TOKENS, entry_of
from .results import in_fp32, share_of, store_half, store_lse, with_sink
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
from .states import next_loaded, visible_tile

ROWS: gl.constexpr = gl.constexpr(64)
SCORES: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
# Named barriers: LEFT + n and RIGHT + n signal that the left or right half of ring slot n is free, HANDED + n
# that consumer n has handed over probabilities. The two consumers meet at BOTH.
LEFT: gl.constexpr = gl.constexpr(FIRST)
RIGHT: gl.constexpr = gl.constexpr(FIRST + 2)
HANDED: gl.constexpr = gl.constexpr(FIRST + 4)
BOTH: gl.constexpr = gl.constexpr(FIRST + 6)
WITH_PRODUCER: gl.constexpr = gl.constexpr(160)  # threads: 128 of one consumer, 32 of the producer
WITH_LOADERS: gl.constexpr = gl.constexpr(256)
CONSUMERS: gl.constexpr = gl.constexpr(256)


class Rows64Shared(NamedTuple):
    """The shared memory of one program of the kernel.

    ``q`` holds the queries' latent channels in two halves. ``left`` and ``right`` hold the same halves of two
    tiles of keys, ``tail`` the rotary channels of the tiles. Consumers pass probabilities ``p`` and maxima
    ``m`` to each other. The mbarriers ``left_full`` and ``right_full`` signal that a half has been loaded.
    """

    q: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    tail: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    m: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor


class OneHalfSums(NamedTuple):
    """The running sums of a consumer, and its softmax state.

    ``acc`` covers half of the channels of all tiles; ``l_i`` sums the probabilities of the consumer's own
    tiles; ``m_i`` is the running maximum.
    """

    acc: gl.tensor
    l_i: gl.tensor
    m_i: gl.tensor


@gluon.jit
def produce(k_desc, tail_desc, split, states, call, shared, PAGE: gl.constexpr):
    """Run the producer warp: load tiles in pairs, each half of a tile as soon as its memory is free."""
    tile, tiles = tiles_of(split, states)
    tiles = gl.cdiv(tiles, 2) * 2  # make the number even; the last tile may be loaded twice
    entry = first_entry(tile, split, call, PAGE)
    for t in range(tiles):
        slot = t % 2
        row = row_of(entry, tile * TOKENS, split, call, PAGE)
        tile = next_loaded(tile, states)
        entry = entry_of(tile * TOKENS, split, call, PAGE)
        if t >= 2:
            barrier_sync(LEFT + slot, WITH_PRODUCER)
        load_half(k_desc, row, 0, shared.left.index(slot), shared.left_full.index(slot))
        if t >= 2:
            barrier_sync(RIGHT + slot, WITH_PRODUCER)
        right, tail = shared.right.index(slot), shared.tail.index(slot)
        load_last_half(k_desc, tail_desc, row, right, tail, shared.right_full.index(slot))
    if tiles > 0:  # a barrier left incomplete would hang the next program
        for slot in gl.static_range(2):
            barrier_sync(LEFT + slot, WITH_PRODUCER)
            barrier_sync(RIGHT + slot, WITH_PRODUCER)


@gluon.jit
def scores(number: gl.constexpr, tail, zero, shared, phase, GATHERED: gl.constexpr):
    """Start the product ``q @ k.T`` for this consumer's next tile; the caller waits for the result."""
    mbarrier.wait(shared.left_full.index(number), phase)
    if GATHERED:
        fence_async_shared()
    slot, q = anew(number), anew(0)
    left, right = shared.left.index(slot), shared.right.index(slot)
    s = warpgroup_mma(shared.q.index(q), left.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.right_full.index(number), phase)
    if GATHERED:
        fence_async_shared()
    s = warpgroup_mma(tail, shared.tail.index(slot).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(shared.q.index(q + 1), right.permute((1, 0)), s, is_async=True)


@gluon.jit
def rescale(state, factor):
    """Multiply the running sums by a factor per row."""
    of_sums = gl.convert_layout(factor, gl.SliceLayout(1, SUMS))
    return scale_rows_in_place(state.acc, of_sums, HALF // 2), state.l_i * factor


@gluon.jit
def hand_over(number: gl.constexpr, p, m_i, shared):
    """Pass probabilities, and the maximum that was subtracted from scores, to the other consumer."""
    shared.p.index(number).store(p)
    shared.m.index(number).store(m_i)
    fence_async_shared()
    barrier_arrive(HANDED + number, CONSUMERS)


@gluon.jit
def add_own(number: gl.constexpr, state, p, m_i, factor, n, split, shared):
    """Add a tile of this consumer to the running sums, with the probabilities ``p`` from registers."""
    acc, l_i = rescale(state, factor)
    l_i += gl.sum(p, 1)
    values = shared.left.index(0) if number == 0 else shared.right.index(1)
    clear_others(values, n, split)
    p = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2))
    acc = warpgroup_mma(p, values, acc, is_async=True)
    acc, _ = warpgroup_mma_wait(0, deps=[acc, p])
    return OneHalfSums(acc, l_i, m_i)


@gluon.jit
def begin_other(number: gl.constexpr, state, n, split, shared):
    """Wait for the other consumer's probabilities, and start to add its tile to the running sums."""
    OTHER: gl.constexpr = 1 - number
    barrier_sync(HANDED + OTHER, CONSUMERS)
    m_i = shared.m.index(OTHER).load(gl.SliceLayout(1, SCORES))
    acc, l_i = rescale(state, gl.exp2(state.m_i - gl.where(m_i == float("-inf"), 0.0, m_i)))
    values = shared.left.index(1) if number == 0 else shared.right.index(0)
    clear_others(values, n, split)
    return OneHalfSums(warpgroup_mma(shared.p.index(OTHER), values, acc, is_async=True), l_i, m_i)


@gluon.jit
def consume(
    number: gl.constexpr, queries, split, states, call, results, shared,
    THREADS: gl.constexpr, GATHERED: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Run consumer ``number``: compute attention for half of the channels, and write the results.

    Consumer 0 computes the probabilities of even tiles, consumer 1 those of odd tiles. If tiles were
    ``GATHERED`` row by row (cp.async), only a fence behind each wait makes them visible to wgmma.
    """
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    TAILS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2)
    tail = load_queries(queries, split, call, 2 * HALF, ROWS, TAIL, TAILS)
    shared.q.index(number).store(load_queries(queries, split, call, number * HALF, ROWS, HALF, Q))
    fence_async_shared()
    barrier_sync(BOTH, CONSUMERS)

    r = split.start + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    rows = indices_of(r, split, call)
    offset = rows.origin.query - rows.origin.key
    band = KeyBand(split.begin, split.end, call.left, call.right, call.prefix, offset, rows.origin.key)
    slope = None if call.slopes_ptr is None else slope_of(rows, call, 1)
    scoring = Scoring(rows, band, Modifiers(call.scale, call.softcap, slope))
    zero = gl.zeros([ROWS, TOKENS], gl.float32, SCORES)
    nothing = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    state = OneHalfSums(gl.zeros([ROWS, HALF], gl.float32, SUMS), nothing, nothing - float("inf"))
    tile, tiles = tiles_of(split, states)
    for pair in range(gl.cdiv(tiles, 2)):
        second = visible_tile(tile + 1, states)
        n, n_second, phase = tile * TOKENS, second * TOKENS, pair & 1
        cut = is_cut(n if number == 0 else n_second, split, states)
        s = scores(number, tail, zero, shared, phase, GATHERED)
        if number == 0:
            s = warpgroup_mma_wait(0, deps=[s])
            p, m_i, factor = softmax(s, state.m_i, n, cut, scoring, call, 1, MASK, SCORE)
            hand_over(0, p.to(shared.p.dtype), m_i, shared)
            state = add_own(0, state, p, m_i, factor, n, split, shared)
            barrier_arrive(LEFT, THREADS)
            mbarrier.wait(shared.left_full.index(1), phase)
            if GATHERED:
                fence_async_shared()
            state = begin_other(0, state, n_second, split, shared)
            acc = warpgroup_mma_wait(0, deps=[state.acc])
            barrier_arrive(LEFT + 1, THREADS)
            state = OneHalfSums(acc, state.l_i, state.m_i)
        else:
            mbarrier.wait(shared.right_full.index(0), phase)
            if GATHERED:
                fence_async_shared()
            state = begin_other(1, state, n, split, shared)
            s = warpgroup_mma_wait(1, deps=[s])
            p, m_i, factor = softmax(s, state.m_i, n_second, cut, scoring, call, 1, MASK, SCORE)
            hand_over(1, p.to(shared.p.dtype), m_i, shared)
            acc = warpgroup_mma_wait(0, deps=[state.acc])
            barrier_arrive(RIGHT, THREADS)
            state = add_own(
                1, OneHalfSums(acc, state.l_i, state.m_i), p, m_i, factor, n_second, split, shared
            )
            barrier_arrive(RIGHT + 1, THREADS)
        tile = visible_tile(second + 1, states)

    gdc_launch_dependents()  # if started earlier, the next kernel would crowd SMs that have no work
    shared.m.index(2 + number).store(state.l_i)
    barrier_sync(BOTH, CONSUMERS)
    l_i = state.l_i + shared.m.index(3 - number).load(gl.SliceLayout(1, SCORES))
    m_i = gl.where(l_i == 0.0, float("-inf"), state.m_i)
    keeps, l_i, m_i = with_sink(l_i, m_i, r, split, call)
    l_i = gl.where(l_i == 0.0, 1.0, l_i)
    if number == 0:
        store_lse(l_i, m_i, r, split, call, results)
    share = gl.convert_layout(gl.where(sees_any(rows.i, band), keeps / l_i, 0.0), gl.SliceLayout(1, SUMS))
    half = in_fp32(shared.left if number == 0 else shared.right, ROWS)
    half.store(share_of(state.acc, share, 1))
    store_half(half, number * HALF, split, call, results)


@gluon.jit
def allocate_rows_64(dtype: gl.constexpr, LEFT_ARRIVALS: gl.constexpr, RIGHT_ARRIVALS: gl.constexpr):
    """Allocate the shared memory of a program, with the arrivals that complete the left and right halves."""
    return Rows64Shared(
        ring(dtype, 2, ROWS, HALF), ring(dtype, 2, TOKENS, HALF), ring(dtype, 2, TOKENS, HALF),
        ring(dtype, 2, TOKENS, TAIL), ring(dtype, 2, ROWS, TOKENS), numbers(4, ROWS),
        barriers(2, LEFT_ARRIVALS), barriers(2, RIGHT_ARRIVALS),
    )  # fmt: skip
