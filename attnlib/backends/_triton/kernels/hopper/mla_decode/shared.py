"""Shared by the MLA decode kernels: tiles of 64 tokens of a latent cache, queries, scores and softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...band import visible
from ...scores import modify, unit_of
from ..primitives import async_load, opaque
from ..splits import TOKENS, entry_of, row_of, weighed

HALF: gl.constexpr = gl.constexpr(256)  # channels in half of a latent
TAIL: gl.constexpr = gl.constexpr(64)  # rotary channels


@gluon.jit
def first_entry(first, split, call, PAGE: gl.constexpr):
    """Return the page-table entry of the first tile; reload it if ``split`` has that of another page."""
    entry = split.entry
    if PAGE:
        if first * TOKENS // PAGE != split.column:
            entry = entry_of(first * TOKENS, split, call, PAGE)
    return entry


@gluon.jit
def row_of_tile(entry, n, split, call, PAGE: gl.constexpr):
    """Return the plane row of the tile that begins at token ``n``, at most that of the last tile."""
    return row_of(entry, gl.minimum(n, gl.maximum(split.high - 1, 0) // TOKENS * TOKENS), call, PAGE)


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
def scored(s, n, i, modifiers, band, split, AXIS: gl.constexpr):
    """Apply score options and the mask to products with a tile of tokens, which begins at token ``n``.

    Tokens lie along ``AXIS``. Hidden scores are -inf.
    """
    j = gl.expand_dims(n + gl.arange(0, TOKENS, gl.SliceLayout(1 - AXIS, s.type.layout)), 1 - AXIS)
    s, _ = modify(s, modifiers, gl.expand_dims(i + band.offset, AXIS), j)
    if (n < split.all_low) | (n + TOKENS > split.all_high):
        s = opaque(gl.where(visible(gl.expand_dims(i, AXIS), j, band), s, float("-inf")))
    return s


@gluon.jit
def softmax(s, m_i, n, i, modifiers, band, split, AXIS: gl.constexpr):
    """Return a tile's probabilities, the new maximum and the factor for earlier sums (:func:`weighed`)."""
    return weighed(scored(s, n, i, modifiers, band, split, AXIS), m_i, unit_of(modifiers), AXIS)
