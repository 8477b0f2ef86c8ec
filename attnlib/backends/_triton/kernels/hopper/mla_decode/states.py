"""The tiles of a split that a mask function hides, which the MLA decode kernels skip."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...mask_tiles import HIDDEN, WHOLE, lines_of
from ...tile import slot_of
from ..splits import TOKENS

CHUNK: gl.constexpr = gl.constexpr(128)  # tiles that are counted at a time


class TileStates(NamedTuple):
    """The states of a mask function's tiles for one block of query rows: hidden, partial or full.

    ``ptr`` points to the state of the cache's first tile; it is None without a mask function. ``count`` tiles
    of the split are not hidden, and its last tile ends at ``end``, in tiles.
    """

    ptr: gl.tensor
    count: gl.tensor
    end: gl.tensor


@gluon.jit
def states_of(states_ptr, columns, work, split, call, s, GRAIN_M: gl.constexpr, PACKED: gl.constexpr):
    """Return the states for the rows of a split, whose block has the rows of ``GRAIN_M`` queries.

    ``states_ptr`` points to a row of ``columns`` states for each block of queries, as ``classify_tiles``
    writes them.
    """
    row = work.plane * lines_of(s, call.batch, GRAIN_M, PACKED)
    row += slot_of(work.row, work.sequence, work.start // call.group, GRAIN_M, PACKED)
    ptr, count, end = states_ptr + row.to(gl.int64) * columns, split.low * 0, gl.cdiv(split.high, TOKENS)
    for tile in range(split.low // TOKENS, end, CHUNK):
        n = tile + gl.arange(0, CHUNK, gl.BlockedLayout([1], [32], [4], [0]))
        state = gl.load(ptr + n, mask=n < end, other=HIDDEN)
        count += gl.sum((state != HIDDEN).to(gl.int32), 0)
    return TileStates(ptr, count, end)


@gluon.jit
def state_of(tile, states):
    """Return the state of a tile; tiles after the last of the split count as full."""
    return gl.load(states.ptr + tile, mask=tile < states.end, other=WHOLE)


@gluon.jit
def visible_tile(tile, states):
    """Return the first tile from ``tile`` on that no mask function hides."""
    if states.ptr is not None:
        while state_of(tile, states) == HIDDEN:
            tile += 1
    return tile


@gluon.jit
def next_loaded(tile, states):
    """Return the tile to load after ``tile``: the next one that is not hidden, or after the last, ``tile``.

    A hidden tile must not be loaded, because its values may be NaN, and 0 * NaN is NaN.
    """
    following = visible_tile(tile + 1, states)
    if states.ptr is not None:
        following = gl.where(following < states.end, following, tile)
    return following
