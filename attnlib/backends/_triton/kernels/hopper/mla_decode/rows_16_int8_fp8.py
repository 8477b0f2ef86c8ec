"""MLA decoding with 16 query rows over int8 or fp8 latents for Hopper, in Gluon: one program per SM.

As in ``rows_16.py``, matrix products are transposed, and two consumers process alternate tiles. Stored bytes
are read from shared memory in pairs, as 16-bit operands. Each pair is converted in registers to an even and
an odd channel in fp16.
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
from ...scores import Modifiers, unit_behind
from ...stored_bytes import both_factors, halved, in_range, split_scale
from ...tile import ChannelBlocks
from ..primitives import FIRST, anew, async_load, barrier_arrive, barrier_sync, barriers, ring
from ..splits import TOKENS, BothHalvesSums, entry_of, weighed
from .results import in_fp32, join_and_store
from .shared import (
    HALF,
    TAIL,
    Scoring,
    clear_others,
    first_entry,
    indices_of,
    is_cut,
    load_queries,
    numbers,
    row_of,
    scored,
    slope_of,
    tiles_of,
)
from .states import visible_tile

ROWS: gl.constexpr = gl.constexpr(16)
SLOTS: gl.constexpr = gl.constexpr(4)
CHUNK: gl.constexpr = gl.constexpr(128)  # this many of the 256 channel pairs are in registers at a time
# The register layout of scores and output sums.
SUMS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
PAIRS: gl.constexpr = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2))
# Named barriers: FIRST + n signals that ring slot n is free; the two consumers meet at BOTH.
BOTH: gl.constexpr = gl.constexpr(FIRST + SLOTS)
WITH_PRODUCER: gl.constexpr = gl.constexpr(160)  # threads: 128 of one consumer, 32 of the producer
CONSUMERS: gl.constexpr = gl.constexpr(256)


class PairsShared(NamedTuple):
    """The shared memory of one program of the kernel.

    ``q`` holds the even and odd latent channels of queries, and ``q_tail`` their rotary channels. Each slot
    of the ring holds a tile of keys: stored bytes in ``pairs``, rotary channels in ``tail``, and ``scale``.
    ``p`` holds probabilities, and ``joined`` the maxima and sums that the consumers join at the end. The
    mbarriers ``full`` signal that a slot has been loaded.
    """

    q: gl.shared_memory_descriptor
    q_tail: gl.shared_memory_descriptor
    pairs: gl.shared_memory_descriptor
    tail: gl.shared_memory_descriptor
    scale: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    joined: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


class ChunkSums(NamedTuple):
    """A consumer's running softmax sums.

    ``sums`` has two tensors for each chunk of channels: its even and its odd ones. ``l_i`` has sums of
    probabilities, one per token position in a tile; ``m_i`` is the running maximum.
    """

    sums: tuple
    l_i: gl.tensor
    m_i: gl.tensor


@gluon.jit
def produce(k_desc, tail_desc, scale_desc, split, states, call, shared, PAGE: gl.constexpr):
    """Run the producer warp: load each tile of the split as soon as a ring slot becomes free."""
    tile, tiles = tiles_of(split, states)
    entry = first_entry(tile, split, call, PAGE)
    for t in range(tiles):
        slot = t % SLOTS
        row = row_of(entry, tile * TOKENS, split, call, PAGE)
        tile = visible_tile(tile + 1, states)
        entry = entry_of(tile * TOKENS, split, call, PAGE)
        if t >= SLOTS:
            barrier_sync(FIRST + slot, WITH_PRODUCER)
        full = shared.full.index(slot)
        mbarrier.expect(full, TOKENS * (2 * HALF + 2 * TAIL + 4))
        async_load(k_desc, [row, 0], full, shared.pairs.index(slot))
        async_load(tail_desc, [row, 0], full, shared.tail.index(slot))
        async_load(scale_desc, [0, row], full, shared.scale.index(slot))
    # Complete every named barrier, since an incomplete one would hang the next program.
    for slot in range(gl.minimum(tiles, SLOTS)):
        barrier_sync(FIRST + slot, WITH_PRODUCER)


@gluon.jit
def load_in_range(number: gl.constexpr, queries, split, call, shared):
    """Write the queries' even or odd channels to shared memory in fp16, and return a factor per row.

    Consumer 0 writes the even and the rotary channels, consumer 1 the odd ones. Rows are scaled by powers of
    two into the range of fp16; the factors undo the scaling.
    """
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    main = load_queries(queries, split, call, 0, ROWS, 2 * HALF, Q)
    tail = load_queries(queries, split, call, 2 * HALF, ROWS, TAIL, Q)
    scaled, gain = in_range(ChannelBlocks(main, tail), shared.q_tail.dtype)
    halves = halved(scaled)
    if number == 0:
        shared.q.index(0).store(halves.main)
        shared.q_tail.index(0).store(halves.tail)
    else:
        shared.q.index(1).store(halves.odd)
    fence_async_shared()
    barrier_sync(BOTH, CONSUMERS)
    return gl.convert_layout(gain, gl.SliceLayout(0, SUMS))


@gluon.jit
def factors(pairs, STORED: gl.constexpr):
    """Load pairs of int8 or fp8 bytes, and return even and odd channels as fp16 operands in registers."""
    return both_factors(pairs.load(PAIRS), STORED, True)


@gluon.jit
def scores(slot, scale, shared, STORED: gl.constexpr):
    """Compute ``k @ q.T`` for a tile of int8 or fp8 latents, which have a ``scale`` per token.

    Rotary channels are stored without a scale.
    """
    s, q = gl.zeros([TOKENS, ROWS], gl.float32, SUMS), anew(0)
    for c in gl.static_range(0, HALF, CHUNK):
        even, odd = factors(shared.pairs.index(slot).slice(c, CHUNK, 1), STORED)
        q_even, q_odd = shared.q.index(q).slice(c, CHUNK, 1), shared.q.index(q + 1).slice(c, CHUNK, 1)
        s = warpgroup_mma(even, q_even.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(odd, q_odd.permute((1, 0)), s, is_async=True)
        s, _, _ = warpgroup_mma_wait(0, deps=[s, even, odd])
    s = warpgroup_mma(
        shared.tail.index(slot), shared.q_tail.index(q).permute((1, 0)), s * scale, is_async=True
    )
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def add_tile(
    number: gl.constexpr, state, slot, n, cut, scoring, split, call, shared,
    STORED: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Add the tile that begins at token ``n`` to the running softmax sums.

    The scale of tokens outside the split is set to 0, since it may be arbitrary data.
    """
    clear_others(shared.pairs.index(slot), n, split)
    j = (n + gl.arange(0, TOKENS, gl.SliceLayout(1, SUMS)))[:, None]
    scale = shared.scale.index(slot).permute((1, 0)).load(SUMS)
    scale = gl.where((j >= split.begin) & (j < split.end), scale, 0.0)
    exponent, inverse, rest = split_scale(scale)
    s = scored(scores(slot, scale, shared, STORED), n, cut, scoring, call, 0, MASK, SCORE)
    p, m_i, factor = weighed(s * unit_behind(scoring.modifiers, SCORE) + exponent, state.m_i, 1.0, 0)
    weights, factor = shared.p.index(number), factor[None, :]
    weights.store((p * rest).to(shared.p.dtype))
    fence_async_shared()
    sums = ()
    for c in gl.static_range(0, HALF, CHUNK):
        even, odd = factors(shared.pairs.index(slot).slice(c, CHUNK, 1).permute((1, 0)), STORED)
        acc_even = warpgroup_mma(even, weights, state.sums[c // CHUNK * 2] * factor, is_async=True)
        acc_odd = warpgroup_mma(odd, weights, state.sums[c // CHUNK * 2 + 1] * factor, is_async=True)
        acc_even, acc_odd, _, _ = warpgroup_mma_wait(0, deps=[acc_even, acc_odd, even, odd])
        sums = sums + (acc_even, acc_odd)  # noqa: RUF005
    return ChunkSums(sums, state.l_i * factor + p * inverse, m_i)


@gluon.jit
def in_order(even, odd):
    """Interleave the sums of even and odd channels of a chunk."""
    return gl.join(even, odd).permute((0, 2, 1)).reshape([HALF, ROWS])


@gluon.jit
def consume(
    number: gl.constexpr, queries, split, states, call, results, shared,
    STORED: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Run consumer ``number``: compute attention over every other tile, beginning with tile ``number``.

    At the end, the two consumers join their sums, and each writes half of the channels.
    """
    gain = load_in_range(number, queries, split, call, shared)
    r = split.start + gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
    rows = indices_of(r, split, call)
    offset = rows.origin.query - rows.origin.key
    band = KeyBand(split.begin, split.end, call.left, call.right, call.prefix, offset, rows.origin.key)
    slope = None if call.slopes_ptr is None else slope_of(rows, call, 0)
    scoring = Scoring(rows, band, Modifiers((call.scale * gain)[None, :], call.softcap, slope))
    none = gl.zeros([CHUNK, ROWS], gl.float32, SUMS)
    least = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, SUMS))
    state = ChunkSums((none, none, none, none), gl.zeros([TOKENS, ROWS], gl.float32, SUMS), least)
    tile, tiles = tiles_of(split, states)
    if number == 1:
        tile = visible_tile(tile + 1, states)
    for t in range(number, tiles, 2):
        slot, n, cut = t % SLOTS, tile * TOKENS, is_cut(tile * TOKENS, split, states)
        mbarrier.wait(shared.full.index(slot), (t // SLOTS) & 1)
        state = add_tile(number, state, slot, n, cut, scoring, split, call, shared, STORED, MASK, SCORE)
        barrier_arrive(FIRST + slot, WITH_PRODUCER)
        tile = visible_tile(visible_tile(tile + 1, states) + 1, states)

    gdc_launch_dependents()  # if started earlier, the next kernel would crowd SMs that have no work
    given = in_fp32(shared.pairs.index(number), ROWS)  # one of this consumer's ring slots
    taken = in_fp32(shared.pairs.index(1 - number), ROWS)
    left, right = in_order(state.sums[0], state.sums[1]), in_order(state.sums[2], state.sums[3])
    sums = BothHalvesSums(left, right, gl.sum(state.l_i, 0), state.m_i)
    join_and_store(number, sums, given, taken, shared.joined, band, split, call, results, BOTH, CONSUMERS)


@gluon.jit
def allocate_rows_16_int8_fp8(dtype: gl.constexpr):
    """Allocate the shared memory of a program; rotary channels are stored in ``dtype``."""
    return PairsShared(
        ring(gl.float16, 2, ROWS, HALF), ring(dtype, 1, ROWS, TAIL), ring(gl.int16, SLOTS, TOKENS, HALF),
        ring(dtype, SLOTS, TOKENS, TAIL), ring(gl.float32, SLOTS, 1, TOKENS),
        ring(gl.float16, 2, TOKENS, ROWS), numbers(4, ROWS), barriers(SLOTS),
    )  # fmt: skip


@gluon.jit
def decode_rows_16_int8_fp8(
    planes, queries, split, states, call, results, shared,
    STORED: gl.constexpr, PAGE: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Run two consumer warpgroups and a producer warp (warp specialization).

    ``planes`` has the descriptors of latents, rotary channels and scales.
    """
    gl.warp_specialize(
        [
            (consume, (0, queries, split, states, call, results, shared, STORED, MASK, SCORE)),
            (consume, (1, queries, split, states, call, results, shared, STORED, MASK, SCORE)),
            (produce, (planes[0], planes[1], planes[2], split, states, call, shared, PAGE)),
        ],
        [4, 1],
        [240, 24],
    )
