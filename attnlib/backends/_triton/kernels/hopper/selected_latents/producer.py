"""The producer warps of the kernel for selected latents: they gather the rows that a list selects."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..mla_decode.rows_64 import LEFT, RIGHT, WITH_LOADERS
from ..mla_decode.shared import HALF
from ..primitives import barrier_sync, copy_by_pointers
from ..splits import TOKENS

# Each thread copies 16 bytes at a time, so eight threads copy a line of 128 bytes.
LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


class SelectedRows(NamedTuple):
    """The rows of latents of a sequence or of a cache, and the list that selects ``count`` of them.

    A cache has rotary channels in the rows at ``tail_ptr``, and an int8 or fp8 cache has a scale per row at
    ``scale_ptr``. Without a cache, these are None, and the rotary channels follow the latent's.
    """

    k_ptr: gl.tensor
    tail_ptr: gl.tensor
    scale_ptr: gl.tensor
    stride_kt: gl.tensor
    stride_tt: gl.tensor
    list_ptr: gl.tensor
    count: gl.tensor


@gluon.jit
def rows_of_tile(tile, rows, LAYOUT: gl.constexpr):
    """Load the selected rows of a tile. The last row of a list fills up its last tile.

    An empty list has no tiles; the number that is loaded for it is its count, which lies before its rows. For
    an empty split, it is the row before the split.
    """
    n = tile * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    return gl.load(rows.list_ptr + gl.minimum(n, rows.count - 1))


@gluon.jit
def copy_channels(at, FIRST: gl.constexpr, tile, LAYOUT: gl.constexpr):
    """Start to copy channels of a tile's rows to shared memory, from channel ``FIRST`` on."""
    c = FIRST + gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    copy_by_pointers(tile, at[:, None] + c[None, :])


@gluon.jit
def mark_full_later(full):
    """Arrive at an mbarrier once the copies that this thread has started are complete."""
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def gather(rows, shared):
    """Run the producer warps: gather tiles in pairs, each half of a tile as soon as its memory is free.

    The list of the next tile is loaded while a tile is copied.
    """
    CACHED: gl.constexpr = rows.tail_ptr is not None
    tiles = gl.cdiv(gl.cdiv(rows.count, TOKENS), 2) * 2  # the last one may only repeat a row
    following = rows_of_tile(0, rows, LAYOUT)
    for t in range(tiles):
        slot = t % 2
        row, following = following, rows_of_tile(t + 1, rows, LAYOUT)
        # Rows begin at multiples of 16 bytes, which Triton has to know in order to copy 16 bytes at once.
        at = rows.k_ptr + gl.multiple_of(row.to(gl.int64) * rows.stride_kt, 8)
        if t >= 2:
            barrier_sync(LEFT + slot, WITH_LOADERS)
        copy_channels(at, 0, shared.left.index(slot), LAYOUT)
        mark_full_later(shared.left_full.index(slot))
        if t >= 2:
            barrier_sync(RIGHT + slot, WITH_LOADERS)
        copy_channels(at, HALF, shared.right.index(slot), LAYOUT)
        if CACHED:
            at = rows.tail_ptr + gl.multiple_of(row.to(gl.int64) * rows.stride_tt, 8)
        copy_channels(at, 0 if CACHED else 2 * HALF, shared.tail.index(slot), LAYOUT)
        mark_full_later(shared.right_full.index(slot))
    finish(tiles)


@gluon.jit
def finish(tiles):
    """Complete the named barriers after the last tile; an incomplete one would hang the next program."""
    if tiles > 0:
        for slot in gl.static_range(2):
            barrier_sync(LEFT + slot, WITH_LOADERS)
            barrier_sync(RIGHT + slot, WITH_LOADERS)
