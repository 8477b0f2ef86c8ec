"""GQA decoding over 16-bit pages for Hopper, in Gluon: one program per SM, bound by memory bandwidth.

A producer warp loads the same tokens of adjacent KV heads by TMA. Each of eight consumer warps processes
16 tokens of one head in every tile. It keeps its own running sums, so it never waits for another warp.
With more than 16 query rows, there are two consumers of four warps, with 16 rows each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from ...band import KeyBand, origin_of, visible
from ...scores import Modifiers, load_slope, modify, unit_of
from ..primitives import FIRST, barrier_arrive, barriers
from ..splits import BothHalvesSums, weighed
from .results import store_joined, store_per_head
from .shared import (
    HALF,
    TOKENS,
    M,
    PagesShared,
    channels,
    factor_of,
    produce,
    rows_in,
    sums_of,
    threads_of,
    tiles_of,
    tokens_in,
)


@gluon.jit
def load_queries(number: gl.constexpr, half: gl.constexpr, queries, split, call, sizes):
    """Load half of the channels of all query rows, ``[warp, row, HALF]``, with zeros after the last row."""
    LEFT: gl.constexpr = factor_of(sizes.WARPS, 0)
    head, token = rows_in(number, split, call, gl.SliceLayout(2, LEFT), sizes)
    at = split.plane * queries.stride_qb + head * queries.stride_qh
    at += ((split.row + token).to(gl.int64) * queries.stride_qs)[None, :]
    c = channels(half, gl.SliceLayout(0, gl.SliceLayout(0, LEFT)))
    valid = gl.expand_dims((token < split.count)[None, :], 2)
    return gl.load(
        queries.q_ptr + (gl.expand_dims(at, 2) + gl.expand_dims(c[None, :], 0)), mask=valid, other=0.0
    )


@gluon.jit
def both_halves(boxes, number, KEYS: gl.constexpr, sizes):
    """Load a tile of keys or values, in two halves of its channels, as right operands of products."""
    RIGHT: gl.constexpr = factor_of(sizes.WARPS, 1)
    left, right = boxes.index(number), boxes.index(number + 1)
    if KEYS:
        left, right = left.permute((0, 2, 1)), right.permute((0, 2, 1))
    return left.load(RIGHT), right.load(RIGHT)


@gluon.jit
def add_tile(state, q, n, i, modifiers, band, split, boxes, number, sizes):
    """Add the tile of tokens that begins at token ``n`` to the running sums."""
    SUMS: gl.constexpr = sums_of(sizes.WARPS)
    RIGHT: gl.constexpr = factor_of(sizes.WARPS, 1)
    TILE: gl.constexpr = sizes.WARPS // sizes.HEADS * TOKENS
    left, right = both_halves(boxes, number, True, sizes)
    s = mma_v2(q[1], right, mma_v2(q[0], left, gl.zeros([sizes.WARPS, M, TOKENS], gl.float32, SUMS)))
    left, right = both_halves(boxes, number + 2, False, sizes)
    j = gl.expand_dims(n + tokens_in(gl.SliceLayout(1, SUMS), sizes), 1)
    s, _ = modify(s, modifiers, i + band.offset, j)
    if (n < split.all_low) | (n + TILE > split.all_high):
        s = gl.where(visible(i, j, band), s, float("-inf"))
        token = n + tokens_in(gl.SliceLayout(2, RIGHT), sizes)
        there = gl.expand_dims((token >= split.low) & (token < split.high), 2)
        left, right = gl.where(there, left, gl.zeros_like(left)), gl.where(there, right, gl.zeros_like(right))
    p, m_i, factor = weighed(s, state.m_i, unit_of(modifiers), 2)
    weights, factor = (
        gl.convert_layout(p.to(left.dtype), factor_of(sizes.WARPS, 0)),
        gl.expand_dims(factor, 2),
    )
    acc_left = mma_v2(weights, left, state.left * factor)
    acc_right = mma_v2(weights, right, state.right * factor)
    return BothHalvesSums(acc_left, acc_right, state.l_i * factor + p, m_i)


@gluon.jit
def consume(number: gl.constexpr, queries, split, call, results, shared, sizes):
    """Run consumer ``number``: compute attention for 16 query rows per KV head, and write the results."""
    SUMS: gl.constexpr = sums_of(sizes.WARPS)
    BY_ROW: gl.constexpr = gl.SliceLayout(2, SUMS)
    SLOTS: gl.constexpr = shared.full.shape[0]
    left = load_queries(number, 0, queries, split, call, sizes)
    right = load_queries(number, 1, queries, split, call, sizes)
    known = gl.where(split.sequence >= call.batch, 0, split.sequence)
    origin = origin_of(call.origin_ptr, known, call.batch)
    band = KeyBand(
        split.begin, split.end, call.left, call.right, call.prefix, origin.query - origin.key, origin.key
    )
    head, token = rows_in(number, split, call, BY_ROW, sizes)
    i, slope = gl.expand_dims((split.length - split.count + token)[None, :], 2), None
    if call.slopes_ptr is not None:
        slope = gl.expand_dims(load_slope(call.slopes_ptr, call.stride_slopes, known, head, call.batch), 2)
    modifiers = Modifiers(call.scale, call.softcap, slope)

    nothing = gl.zeros([sizes.WARPS, M, HALF], gl.float32, SUMS)
    least = gl.full([sizes.WARPS, M], float("-inf"), gl.float32, BY_ROW)
    state = BothHalvesSums(nothing, nothing, gl.zeros([sizes.WARPS, M, TOKENS], gl.float32, SUMS), least)
    first, tiles, TILE = tiles_of(split, sizes)
    for t in range(tiles):
        slot, n = t % SLOTS, (first + t) * TILE
        mbarrier.wait(shared.full.index(slot), (t // SLOTS) & 1)
        state = add_tile(state, (left, right), n, i, modifiers, band, split, shared.boxes, slot * 4, sizes)
        barrier_arrive(FIRST + slot, threads_of(sizes))

    gdc_launch_dependents()  # if launched earlier, the next kernel would crowd the idle SMs
    if sizes.WARPS == sizes.HEADS:
        store_per_head(number, state, band, split, call, results, sizes)
    else:
        store_joined(number, state, band, split, call, results, shared, sizes)


@gluon.jit
def allocate_pages(dtype: gl.constexpr, sizes, STAGES: gl.constexpr):
    """Allocate the shared memory of a program, with a ring of ``STAGES`` slots for tiles."""
    BOXES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([sizes.WARPS, TOKENS, HALF], dtype)
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return PagesShared(
        gl.allocate_shared_memory(dtype, [STAGES * 4, sizes.WARPS, TOKENS, HALF], BOXES),
        gl.allocate_shared_memory(gl.float32, [2 * sizes.BLOCK_M // M, sizes.WARPS, M], SUMS),
        barriers(STAGES),
    )


@gluon.jit
def decode_pages(k_desc, v_desc, queries, split, call, results, shared, sizes):
    """Run one consumer of eight warps or two consumers of four, and a producer warp."""
    if sizes.BLOCK_M == M:
        gl.warp_specialize(
            [
                (consume, (0, queries, split, call, results, shared, sizes)),
                (produce, (k_desc, v_desc, split, call, shared, sizes)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, queries, split, call, results, shared, sizes)),
                (consume, (1, queries, split, call, results, shared, sizes)),
                (produce, (k_desc, v_desc, split, call, shared, sizes)),
            ],
            [4, 1],
            [240, 24],
        )
