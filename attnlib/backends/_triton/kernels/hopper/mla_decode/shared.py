"""Common code of the MLA decode kernels: load tiles of 64 tokens, load queries, compute softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...band import visible
from ...scores import modify, unit_of
from ..primitives import async_load, opaque
from ..splits import TOKENS, entry_of, weighed

HALF: gl.constexpr = gl.constexpr(256)  # channels in half of a latent
TAIL: gl.constexpr = gl.constexpr(64)  # rotary channels


@gluon.jit
def tiles_of(split):
    """Return the index of the first tile of a split, and the number of tiles."""
    first = split.low // TOKENS
    return first, gl.maximum(gl.cdiv(split.high, TOKENS) - first, 0)


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


@gluon.jit
def scored(s, n, i, modifiers, band, split, AXIS: gl.constexpr):
    """Apply score options and the mask to the products of queries and the tile that begins at token ``n``.

    Tokens lie along dimension ``AXIS`` of ``s``. The scores of hidden tokens become -inf.
    """
    j = gl.expand_dims(n + gl.arange(0, TOKENS, gl.SliceLayout(1 - AXIS, s.type.layout)), 1 - AXIS)
    s, _ = modify(s, modifiers, gl.expand_dims(i + band.offset, AXIS), j)
    if (n < split.all_low) | (n + TOKENS > split.all_high):
        s = opaque(gl.where(visible(gl.expand_dims(i, AXIS), j, band), s, float("-inf")))
    return s


@gluon.jit
def softmax(s, m_i, n, i, modifiers, band, split, AXIS: gl.constexpr):
    """Return a tile's probabilities, the new maximum and the factor for earlier sums; see :func:`weighed`."""
    return weighed(scored(s, n, i, modifiers, band, split, AXIS), m_i, unit_of(modifiers), AXIS)


@gluon.jit
def numbers(COUNT: gl.constexpr, SIZE: gl.constexpr):
    """Allocate shared memory for ``COUNT`` fp32 vectors of ``SIZE`` elements."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
