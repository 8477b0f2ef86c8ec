"""The producer warps for an int8 or fp8 cache: they gather the rows of lists, converted to 16 bits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..mla_decode.conversion import LAYOUT, WORDS, load_bytes, store_scaled
from ..mla_decode.rows_64 import LEFT, RIGHT, WITH_LOADERS
from ..primitives import barrier_sync, prefetch
from ..splits import TOKENS
from .producer import copy_channels, finish, mark_full_later, rows_of_tile

# Threads copy rotary channels of the same rows as in LAYOUT, 16 bytes at a time.
TAILS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))


@gluon.jit
def prefetch_rows(rows, row):
    """Prefetch the bytes and the rotary channels of a tile into the L2 cache, by lines of 128 bytes."""
    row, line = row.to(gl.int64), gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))
    words = rows.k_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    prefetch(words + (row[:, None] * (4 * WORDS) + line[None, :] * WORDS))
    prefetch(rows.tail_ptr + row * rows.stride_tt)


@gluon.jit
def gather_and_convert(rows, shared):
    """Run the producer warps: convert each half of a tile as soon as its slot becomes free.

    While one half of a tile is converted, the next half is being loaded. Lists are loaded two tiles ahead,
    and rows are prefetched one tile ahead. Consumers have a fence behind each wait for a half, so this
    function needs none. A fence would wait for the loads in flight.
    """
    STORED: gl.constexpr = rows.k_ptr.dtype.element_ty
    k_ptr, scale_ptr = rows.k_ptr, rows.scale_ptr
    tiles = gl.cdiv(gl.cdiv(rows.count, TOKENS), 2) * 2  # the last one may only repeat a row
    row, following = rows_of_tile(0, rows, LAYOUT), rows_of_tile(1, rows, LAYOUT)
    a, b, scale = load_bytes(k_ptr, row, 0), load_bytes(k_ptr, row, 1), gl.load(scale_ptr + row)
    for t in range(tiles):
        slot = t % 2
        left, right, full = shared.left.index(slot), shared.right.index(slot), shared.right_full.index(slot)
        prefetch_rows(rows, following)
        if t >= 2:
            barrier_sync(LEFT + slot, WITH_LOADERS)
        store_scaled(a, scale, left, 0, STORED)
        a = load_bytes(k_ptr, row, 2)
        store_scaled(b, scale, left, 1, STORED)
        b = load_bytes(k_ptr, row, 3)
        mbarrier.arrive(shared.left_full.index(slot), count=1)
        if t >= 2:
            barrier_sync(RIGHT + slot, WITH_LOADERS)
        of_tail = gl.convert_layout(row, gl.SliceLayout(1, TAILS)).to(gl.int64)
        at = rows.tail_ptr + gl.multiple_of(of_tail * rows.stride_tt, 8)
        copy_channels(at, 0, shared.tail.index(slot), TAILS)
        mark_full_later(full)
        row, following = following, rows_of_tile(t + 2, rows, LAYOUT)
        store_scaled(a, scale, right, 0, STORED)
        a = load_bytes(k_ptr, row, 0)
        store_scaled(b, scale, right, 1, STORED)
        b, scale = load_bytes(k_ptr, row, 1), gl.load(scale_ptr + row)
        mbarrier.arrive(full, count=1)
    finish(tiles)
