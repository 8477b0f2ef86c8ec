"""The producer of a Hopper forward of 8 bits: a warpgroup that loads, and transposes values for the tensor cores.

A product of 8 bits reads both operands along the dimension that is summed, so values must lie by channels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..band import Band, bounds, origin_of
from ..tile import Work
from .consumer import clear_others
from .primitives import FIRST, barrier_sync
from .producer import drain, load, load_queries, next_tile
from .shared import ROWS, blocks_of, post, work_of

AT_ONCE: gl.constexpr = gl.constexpr(128)  # channels that are turned at once


@gluon.constexpr_function
def _by_pairs(keys, pairs):
    """A tile of pairs of channels as ldmatrix gives it transposed, with keys 8 apart beside each other."""
    key = [[1 << n, 0] for n in range(keys.bit_length() - 1)]
    pair = [[0, 1 << n] for n in range(pairs.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [key[0], key[3], *key[4:], *pair[3:-2]], [key[1], key[2], *pair[:3]], pair[-2:], [], [keys, pairs]
    )


@gluon.jit
def turned(x):
    """Pairs of channels ``[keys, pairs]`` in 16 bits as pairs of keys ``[channels, pairs]``.

    Of 16 keys, 2c and 2c + 1 are followed by 2c + 8 and 2c + 9. Of 16 channels, even ones come before odd ones.
    """
    KEYS: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1]
    x = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=&r,=r,r,r", [x],
        dtype=gl.int16, is_pure=True, pack=4,
    )  # fmt: skip
    x = x.reshape([KEYS // 16, 2, 4, 2, PAIRS // 8, 8]).permute((4, 1, 5, 0, 2, 3))
    return x.reshape([PAIRS * 2, KEYS // 2])


@gluon.jit
def turn(number, n, start, end, raw, raw_full, shared, sizes):
    """Transpose the values of the ``number``-th block, from key ``n`` on; those of keys that nobody sees become 0."""
    KEYS: gl.constexpr = sizes.BLOCK_N
    WIDTH: gl.constexpr = min(AT_ONCE, sizes.E)
    LAYOUT: gl.constexpr = _by_pairs(KEYS, WIDTH // 2)
    OF_RAW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, sizes.E // 2], gl.int16)
    OF_TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([sizes.E, KEYS // 2], gl.int16)
    slot = number % sizes.V_SLOTS
    pairs = raw._reinterpret(gl.int16, [sizes.V_SLOTS, KEYS, sizes.E // 2], OF_RAW).index(slot)
    places = shared.v._reinterpret(gl.int16, [sizes.V_SLOTS, sizes.E, KEYS // 2], OF_TURNED).index(slot)
    mbarrier.wait(raw_full.index(slot), number // sizes.V_SLOTS & 1)
    if number >= sizes.V_SLOTS:
        barrier_sync(FIRST + sizes.K_SLOTS + slot, sizes.THREADS)
    if sizes.HOLES:
        clear_others(pairs, n, Band(start, end, None, None, None, 0, 0), sizes)
    for first in gl.static_range(0, sizes.E, WIDTH):
        x = pairs.slice(first // 2, WIDTH // 2, 1).load(LAYOUT)
        places.slice(first, WIDTH, 0).store(turned(x))
    fence_async_shared()
    mbarrier.arrive(shared.v_full.index(slot), count=1)


@gluon.jit
def produce(q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, counter_ptr, call, raw, raw_full, shared, sizes):
    """Load what all tiles of this program need; a block's values are turned when the next block is on its way."""
    tile, number, loaded = gl.program_id(0), 0, 0
    last_n, last_start, last_end = 0, 0, 0
    while tile < call.tiles:
        work = work_of(tile, call, sizes)
        start, end = bounds(call.starts_ptr, call.ends_ptr, work.sequence, work.others)
        origin = origin_of(call.origin_ptr, work.sequence, call.batch)
        band = Band(start, end, call.left, call.right, call.prefix, origin.query - origin.key, origin.key)
        blocks = blocks_of(work, band, sizes, 0, ROWS * sizes.CONSUMERS)
        plane, kv_head = work.plane.to(gl.int32), (work.head // call.group).to(gl.int32)
        first_key = work.other.to(gl.int32)
        for step in range(blocks.top - blocks.bottom):
            n = (blocks.top - 1 - step) * sizes.BLOCK_N
            at, k_slot = (plane, first_key + n, kv_head), loaded % sizes.K_SLOTS
            if loaded >= sizes.K_SLOTS:
                barrier_sync(FIRST + k_slot, sizes.THREADS)
            load(k_desc, k_tail_desc, shared.k, shared.k_tail, k_slot, shared.k_full, at, sizes.D, sizes.D_TAIL)
            load(v_desc, v_desc, raw, raw, loaded % sizes.V_SLOTS, raw_full, at, sizes.E, 0)
            if loaded > 0:
                turn(loaded - 1, last_n, last_start, last_end, raw, raw_full, shared, sizes)
            if step == 0:  # the first keys are on their way before there is room for queries
                post(work, tile, number, call, shared, sizes)
                load_queries(q_desc, q_tail_desc, number, work, shared, sizes)
            last_n, last_start, last_end = n, start, end
            loaded += 1
        number += 1
        tile = next_tile(tile, counter_ptr, call.tiles)
    if loaded > 0:
        turn(loaded - 1, last_n, last_start, last_end, raw, raw_full, shared, sizes)
    zero = (tile * 0).to(gl.int64)
    post(Work(zero, zero, zero, tile, zero, tile, zero, tile), tile, number, call, shared, sizes)  # no more
    drain(loaded, sizes.K_SLOTS, FIRST, sizes.THREADS)
    drain(loaded, sizes.V_SLOTS, FIRST + sizes.K_SLOTS, sizes.THREADS)
