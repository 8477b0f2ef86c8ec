"""GQA decoding over int8 or fp8 pages for Hopper, in Gluon: one program per SM, as in ``pages.py``.

A producer warp loads tiles of 32 tokens and eight KV heads, and their scales, by TMA. Each of eight consumer
warps processes the tokens of one KV head, in two groups of 16. A warp reads stored bytes from shared memory
in pairs, as 16-bit operands, and converts them in registers to even and odd channels in fp16.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from ...band import KeyBand, origin_of, visible
from ...scores import Modifiers, load_slope, modify, unit_of
from ...stored_bytes import both_factors, in_range, split_scale
from ...tile import ChannelBlocks
from ..primitives import FIRST, async_load, barrier_arrive, barrier_sync, barriers
from ..splits import entry_of, raised
from .results import finish, store_channels
from .shared import (
    BOX,
    HALF,
    TOKENS,
    M,
    factor_of,
    row_of,
    rows_in,
    sums_of,
    threads_of,
    tokens_in,
)

WARPS: gl.constexpr = gl.constexpr(8)  # consumer warps, one per KV head
TILE: gl.constexpr = gl.constexpr(32)  # tokens per tile


class ScaledPagesShared(NamedTuple):
    """The shared memory of a program.

    Each slot of the ring holds four boxes of 16 tokens: two of keys, then two of values. ``scales`` holds
    their scales, and ``full`` the mbarriers of the loads.
    """

    boxes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


class EvenOddSums(NamedTuple):
    """The running sums of even and odd channels ``[head, row, HALF]``, and the softmax state.

    ``l_i`` has sums of probabilities, one per token position in a group, ``[head, row, token]``. ``m_i`` is
    the running maximum.
    """

    even: gl.tensor
    odd: gl.tensor
    l_i: gl.tensor
    m_i: gl.tensor


@gluon.jit
def tiles_of(split):
    """Return the index of the first tile of a split, and the number of tiles."""
    first = split.low // TILE
    return first, gl.maximum(gl.cdiv(split.high, TILE) - first, 0)


@gluon.jit
def produce(k_desc, v_desc, k_scale_desc, v_scale_desc, split, call, shared, sizes):
    """Run the producer warp: load each tile of the split as soon as a ring slot becomes free."""
    SLOTS: gl.constexpr = shared.full.shape[0]
    first, tiles = tiles_of(split)
    head, n = split.head * WARPS, first * TILE
    entries = (entry_of(n, split, call, sizes.PAGE), entry_of(n + TOKENS, split, call, sizes.PAGE))
    for t in range(tiles):
        slot, n = t % SLOTS, (first + t) * TILE
        following = (
            entry_of(n + TILE, split, call, sizes.PAGE),
            entry_of(n + TILE + TOKENS, split, call, sizes.PAGE),
        )
        if t >= SLOTS:
            barrier_sync(FIRST + slot, threads_of(sizes))
        full = shared.full.index(slot)
        mbarrier.expect(full, (BOX + TOKENS * 4) * 4 * WARPS)
        for group in gl.static_range(2):
            row, number = row_of(entries[group], n + group * TOKENS, call, sizes), slot * 4 + group
            async_load(k_desc, [head, row, 0], full, shared.boxes.index(number))
            async_load(k_scale_desc, [row, head], full, shared.scales.index(number))
            async_load(v_desc, [head, row, 0], full, shared.boxes.index(number + 2))
            async_load(v_scale_desc, [row, head], full, shared.scales.index(number + 2))
        entries = following
    # Complete every named barrier, since an incomplete one would hang the next program.
    for slot in range(gl.minimum(tiles, SLOTS)):
        barrier_sync(FIRST + slot, threads_of(sizes))


@gluon.jit
def load_queries(queries, split, call, sizes):
    """Load the even and odd channels of queries, ``[head, row, HALF]`` in fp16, with a factor per row.

    Rows are scaled by powers of two into the range of fp16; the factors undo the scaling.
    """
    LEFT: gl.constexpr = factor_of(WARPS, 0)
    head, token = rows_in(0, split, call, gl.SliceLayout(2, LEFT), sizes)
    at = split.plane * queries.stride_qb + head * queries.stride_qh
    at += ((split.row + token).to(gl.int64) * queries.stride_qs)[None, :]
    c = 2 * gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(0, LEFT)))
    at, valid = (
        gl.expand_dims(at, 2) + gl.expand_dims(c[None, :], 0),
        gl.expand_dims((token < split.count)[None, :], 2),
    )
    even = gl.load(queries.q_ptr + at, mask=valid, other=0.0)
    odd = gl.load(queries.q_ptr + (at + 1), mask=valid, other=0.0)
    scaled, gain = in_range(ChannelBlocks(even, odd), gl.float16)
    return scaled.main, scaled.tail, gain


@gluon.jit
def scale_of(scales):
    """Load the scales of a group of tokens, ``[head, token]``, from shared memory."""
    return scales.permute((1, 0)).load(gl.SliceLayout(1, sums_of(WARPS)))


@gluon.jit
def scores(group: gl.constexpr, q, slot, n, i, modifiers, band, split, shared, STORED: gl.constexpr, sizes):
    """Return scores, inverse powers, remaining factors and values for the group of tokens from ``n`` on.

    The scale of a value is a power of two times a remaining factor. Scores include the exponent of the power;
    multiplying probabilities by the inverse power removes it again. Values are pairs of bytes.
    """
    SUMS: gl.constexpr = sums_of(WARPS)
    RIGHT: gl.constexpr = factor_of(WARPS, 1)
    even, odd = both_factors(
        shared.boxes.index(slot * 4 + group).permute((0, 2, 1)).load(RIGHT), STORED, True
    )
    s = mma_v2(q[1], odd, mma_v2(q[0], even, gl.zeros([WARPS, M, TOKENS], gl.float32, SUMS)))
    s *= gl.expand_dims(scale_of(shared.scales.index(slot * 4 + group)), 1)
    values = shared.boxes.index(slot * 4 + 2 + group).load(RIGHT)
    scale = scale_of(shared.scales.index(slot * 4 + 2 + group))
    token = n + tokens_in(gl.SliceLayout(1, SUMS), sizes)
    j = gl.expand_dims(token, 1)
    s, _ = modify(s, modifiers, i + band.offset, j)
    if (n < split.all_low) | (n + TOKENS > split.all_high):
        s = gl.where(visible(i, j, band), s, float("-inf"))
        scale = gl.where((token >= split.low) & (token < split.high), scale, 0.0)
        row = n + tokens_in(gl.SliceLayout(2, RIGHT), sizes)
        there = gl.expand_dims((row >= split.low) & (row < split.high), 2)
        values = gl.where(there, values, gl.zeros_like(values))
    exponent, inverse, rest = split_scale(scale)
    s = s * unit_of(modifiers) + gl.expand_dims(exponent, 1)
    return s, gl.expand_dims(inverse, 1), gl.expand_dims(rest, 1), values


@gluon.jit
def add_values(even, odd, weights, values, STORED: gl.constexpr):
    """Add values, weighted by probabilities, to the sums of even and odd channels."""
    weights = gl.convert_layout(weights.to(gl.float16), factor_of(WARPS, 0))
    v_even, v_odd = both_factors(values, STORED, True)
    return mma_v2(weights, v_even, even), mma_v2(weights, v_odd, odd)


@gluon.jit
def add_tile(state, q, slot, n, i, modifiers, band, split, shared, STORED: gl.constexpr, sizes):
    """Add the tile of tokens that begins at token ``n`` to the running sums."""
    s_a, inverse_a, rest_a, v_a = scores(0, q, slot, n, i, modifiers, band, split, shared, STORED, sizes)
    s_b, inverse_b, rest_b, v_b = scores(
        1, q, slot, n + TOKENS, i, modifiers, band, split, shared, STORED, sizes
    )
    m_i, safe = raised(state.m_i, gl.max(gl.maximum(s_a, s_b), 2))
    factor, safe = gl.expand_dims(gl.exp2(state.m_i - safe), 2), gl.expand_dims(safe, 2)
    a, b = gl.exp2(s_a - safe), gl.exp2(s_b - safe)
    even, odd = add_values(state.even * factor, state.odd * factor, a * rest_a, v_a, STORED)
    even, odd = add_values(even, odd, b * rest_b, v_b, STORED)
    return EvenOddSums(even, odd, state.l_i * factor + (a * inverse_a + b * inverse_b), m_i)


@gluon.jit
def store(state, band, split, call, results, sizes):
    """Write the results of all heads, with even and odd channels interleaved again."""
    acc = gl.join(state.even, state.odd).reshape([WARPS, M, 2 * HALF])
    BY_ROW: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
    l_i, m_i = gl.convert_layout(gl.sum(state.l_i, 2), BY_ROW), gl.convert_layout(state.m_i, BY_ROW)
    h = gl.arange(0, WARPS, gl.SliceLayout(1, BY_ROW))[:, None]
    r = gl.arange(0, M, gl.SliceLayout(0, BY_ROW))[None, :]
    c = gl.arange(0, 2 * HALF, gl.SliceLayout(0, gl.SliceLayout(0, acc.type.layout)))
    rows = finish(l_i, m_i, h, r, band, split, call, results, sizes)
    store_channels(acc, gl.expand_dims(c[None, :], 0), rows, split, results)


@gluon.jit
def consume(queries, split, call, results, shared, STORED: gl.constexpr, sizes):
    """Run the consumer: compute attention over all tiles of the split, and write the results."""
    SUMS: gl.constexpr = sums_of(WARPS)
    BY_ROW: gl.constexpr = gl.SliceLayout(2, SUMS)
    even, odd, gain = load_queries(queries, split, call, sizes)
    known = gl.where(split.sequence >= call.batch, 0, split.sequence)
    origin = origin_of(call.origin_ptr, known, call.batch)
    band = KeyBand(
        split.begin, split.end, call.left, call.right, call.prefix, origin.query - origin.key, origin.key
    )
    head, token = rows_in(0, split, call, BY_ROW, sizes)
    i, slope = gl.expand_dims((split.length - split.count + token)[None, :], 2), None
    if call.slopes_ptr is not None:
        slope = gl.expand_dims(load_slope(call.slopes_ptr, call.stride_slopes, known, head, call.batch), 2)
    modifiers = Modifiers(
        gl.expand_dims(call.scale * gl.convert_layout(gain, BY_ROW), 2), call.softcap, slope
    )

    nothing = gl.zeros([WARPS, M, HALF], gl.float32, SUMS)
    least = gl.full([WARPS, M], float("-inf"), gl.float32, BY_ROW)
    state = EvenOddSums(nothing, nothing, gl.zeros([WARPS, M, TOKENS], gl.float32, SUMS), least)
    first, tiles = tiles_of(split)
    SLOTS: gl.constexpr = shared.full.shape[0]
    for t in range(tiles):
        slot, n = t % SLOTS, (first + t) * TILE
        mbarrier.wait(shared.full.index(slot), (t // SLOTS) & 1)
        state = add_tile(state, (even, odd), slot, n, i, modifiers, band, split, shared, STORED, sizes)
        barrier_arrive(FIRST + slot, threads_of(sizes))

    gdc_launch_dependents()  # if launched earlier, the next kernel would crowd the idle SMs
    store(state, band, split, call, results, sizes)


@gluon.jit
def allocate_int8_fp8(dtype: gl.constexpr, STAGES: gl.constexpr):
    """Allocate the shared memory of a program, with a ring of ``STAGES`` slots for tiles."""
    BOXES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPS, TOKENS, HALF], dtype)
    SCALES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, WARPS], gl.float32)
    return ScaledPagesShared(
        gl.allocate_shared_memory(dtype, [STAGES * 4, WARPS, TOKENS, HALF], BOXES),
        gl.allocate_shared_memory(gl.float32, [STAGES * 4, TOKENS, WARPS], SCALES),
        barriers(STAGES),
    )


@gluon.jit
def decode_int8_fp8(
    k_desc, v_desc, k_scale_desc, v_scale_desc, queries, split, call, results, shared,
    STORED: gl.constexpr, sizes,
):  # fmt: skip
    """Run a consumer of eight warps and a producer warp (warp specialization)."""
    gl.warp_specialize(
        [
            (consume, (queries, split, call, results, shared, STORED, sizes)),
            (produce, (k_desc, v_desc, k_scale_desc, v_scale_desc, split, call, shared, sizes)),
        ],
        [1],
        [24],
    )
