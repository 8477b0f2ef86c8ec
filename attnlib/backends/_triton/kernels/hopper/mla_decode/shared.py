"""Common code of the MLA decode kernels: load tiles of 64 tokens, load queries, compute softmax."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...band import ChunkOrigin, KeyBand, origin_of, visible
from ...mask_tiles import WHOLE
from ...scores import Modifiers, changed, load_slope, modify, placed, unit_behind
from ..primitives import async_load, opaque
from ..splits import TOKENS, entry_of, weighed
from .states import state_of, visible_tile

HALF: gl.constexpr = gl.constexpr(256)  # channels in half of a latent
TAIL: gl.constexpr = gl.constexpr(64)  # rotary channels


@gluon.jit
def tiles_of(split, states):
    """Return the index of the first tile of a split, and the number of tiles.

    Tiles that a mask function hides do not count.
    """
    first = split.low // TOKENS
    if states.ptr is None:
        return first, gl.maximum(gl.cdiv(split.high, TOKENS) - first, 0)
    else:
        return visible_tile(first, states), states.count


@gluon.jit
def first_entry(first, split, call, PAGE: gl.constexpr):
    """Return the page-table entry of a split's first tile, loading it unless ``split`` has it already."""
    entry = split.entry
    if PAGE:
        if first * TOKENS // PAGE != split.column:
            entry = entry_of(first * TOKENS, split, call, PAGE)
    return entry


@gluon.jit
def row_of(entry, n, split, call, PAGE: gl.constexpr):
    """Return the first cache row of the tile at token ``n``, or of the last tile if ``n`` is beyond it.

    A page index out of range is clamped to the last page.
    """
    n = gl.minimum(n, gl.maximum(split.high - 1, 0) // TOKENS * TOKENS)
    page = gl.minimum(entry.to(gl.uint32), (call.pages - 1).to(gl.uint32)).to(gl.int32)
    return page * call.page_rows + (n % PAGE if PAGE else n)


@gluon.jit
def load_half(desc, row, column, half, full):
    """Start the TMA load of half of a tile of latents."""
    mbarrier.expect(full, TOKENS * HALF * 2)
    async_load(desc, [row, column], full, half)


@gluon.jit
def load_last_half(desc, tail_desc, row, half, tail, full):
    """Start the TMA loads of the second half of a tile of latents, and of the rotary channels."""
    mbarrier.expect(full, TOKENS * (HALF + TAIL) * 2)
    async_load(desc, [row, HALF], full, half)
    async_load(tail_desc, [row, 0], full, tail)


@gluon.jit
def load_queries(
    queries, split, call, FIRST: gl.constexpr, ROWS: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr
):
    """Load ``COUNT`` channels of the query rows, from channel ``FIRST`` on; rows after the last are zero."""
    n, c = (
        gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)),
        FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT)),
    )
    valid, head = split.start + n < split.count * call.group, split.start % call.group + n
    if call.group < ROWS:
        later = head // call.group
    else:  # dividing every row would take longer than the load
        later = (head >= call.group).to(gl.int32)
    token, head = split.row + split.start // call.group + later, head - later * call.group
    at = split.plane * queries.stride_qb + token.to(gl.int64) * queries.stride_qs + head * queries.stride_qh
    return gl.load(queries.q_ptr + (at[:, None] + c[None, :]), mask=valid[:, None], other=0.0)


@gluon.jit
def clear_others(values, n, split):
    """Set the rows of a tile that lie outside the split to zero, since they may hold arbitrary data.

    ``n`` is the first token of the tile. A fence makes the zeros visible to wgmma.
    """
    if (n < split.begin) | (n + TOKENS > split.end):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        for first in gl.static_range(0, TOKENS, 16):
            rows = values.slice(first, 16, 0)
            j = n + first + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
            x = rows.load(LAYOUT)
            rows.store(gl.where(((j >= split.begin) & (j < split.end))[:, None], x, gl.zeros_like(x)))
        fence_async_shared()


class RowIndices(NamedTuple):
    """The query ``i`` and head of query rows, and their sequence, whose first query is ``first``."""

    i: gl.tensor
    head: gl.tensor
    sequence: gl.tensor
    first: gl.tensor
    origin: ChunkOrigin


class Scoring(NamedTuple):
    """The inputs of scores besides products of queries and keys."""

    rows: RowIndices
    band: KeyBand
    modifiers: Modifiers


@gluon.jit
def indices_of(r, split, call):
    """Return the indices of the query rows ``r`` of a split."""
    known = gl.where(split.sequence >= call.batch, 0, split.sequence)
    first, origin = split.length - split.count, origin_of(call.origin_ptr, known, call.batch)
    return RowIndices(first + r // call.group, r % call.group, known, first, origin)


@gluon.jit
def slope_of(rows, call, AXIS: gl.constexpr):
    """Return the ALiBi slopes of query rows, which lie along dimension ``1 - AXIS``."""
    slope = load_slope(call.slopes_ptr, call.stride_slopes, rows.sequence, rows.head, call.batch)
    return gl.expand_dims(slope, AXIS)


@gluon.jit
def is_cut(n, split, states):
    """Return True if the tile that begins at token ``n`` has pairs that a band or mask function hides."""
    cut = (n < split.all_low) | (n + TOKENS > split.all_high)
    if states.ptr is not None:
        cut |= state_of(n // TOKENS, states) != WHOLE
    return cut


@gluon.jit
def scored(s, n, cut, scoring, call, AXIS: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr):
    """Apply score options and the mask to the products of queries and the tile that begins at token ``n``.

    Tokens lie along dimension ``AXIS`` of ``s``. If the tile is ``cut``, scores of hidden tokens become -inf.
    """
    rows, band, modifiers = scoring.rows, scoring.band, scoring.modifiers
    i, head = gl.expand_dims(rows.i, AXIS), gl.expand_dims(rows.head, AXIS)
    j = gl.expand_dims(n + gl.arange(0, TOKENS, gl.SliceLayout(1 - AXIS, s.type.layout)), 1 - AXIS)
    at = placed(rows.origin, rows.sequence, head, i, j, rows.first)
    s, _ = modify(s, modifiers, i + band.offset, j)
    s = changed(s, modifiers, at, call.score_tensors, SCORE)
    if cut:
        seen = visible(i, j, band)
        if MASK is not None:
            seen = seen & MASK(at.b, at.h, at.i, at.j, at.first, call.mask_tensors)
        s = opaque(gl.where(seen, s, float("-inf")))
    return s


@gluon.jit
def softmax(s, m_i, n, cut, scoring, call, AXIS: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr):
    """Return a tile's probabilities, the new maximum and the factor for earlier sums; see :func:`weighed`."""
    s = scored(s, n, cut, scoring, call, AXIS, MASK, SCORE)
    return weighed(s, m_i, unit_behind(scoring.modifiers, SCORE), AXIS)


@gluon.jit
def numbers(COUNT: gl.constexpr, SIZE: gl.constexpr):
    """Allocate shared memory for ``COUNT`` fp32 vectors of ``SIZE`` elements."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
