"""What a program decodes: rows of queries over a split of a sequence, in tiles of 64 tokens of a latent cache."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..band import Band, key_range, origin_of, visible
from ..paged import tokens_of_split
from ..scores import modify, unit_of
from .primitives import anew, async_load, opaque

TOKENS: gl.constexpr = gl.constexpr(64)  # of a tile
HALF: gl.constexpr = gl.constexpr(256)  # channels of a latent come in halves
TAIL: gl.constexpr = gl.constexpr(64)  # rotary channels
MOVED: gl.constexpr = gl.constexpr(8.0)  # powers of two by which a maximum grows before sums are scaled again


class Problem(NamedTuple):
    """The call, by the parameters of the kernel; a page begins ``page_rows`` rows of a plane after the one before."""

    table_ptr: gl.tensor
    slopes_ptr: gl.tensor
    sinks_ptr: gl.tensor
    origin_ptr: gl.tensor
    stride_table: gl.tensor
    stride_slopes: gl.tensor
    pages: gl.tensor
    page_rows: gl.tensor
    batch: gl.tensor
    group: gl.tensor
    left: gl.tensor
    right: gl.tensor
    prefix: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor


class Queries(NamedTuple):
    """Where queries lie."""

    q_ptr: gl.tensor
    stride_qb: gl.tensor
    stride_qs: gl.tensor
    stride_qh: gl.tensor


class Split(NamedTuple):
    """Rows from ``start`` on of the ``count`` queries of a sequence from ``row`` on, of which there are ``splits``;
    and the number of its KV head, or of some together.

    They see tokens ``[begin, end)`` at most, tokens ``[low, high)`` of those if any, and all of them
    ``[all_low, all_high)``. ``entry`` is the entry of the page table for column ``column``, where they may begin.
    """

    sequence: gl.tensor
    plane: gl.tensor
    row: gl.tensor
    count: gl.tensor
    start: gl.tensor
    splits: gl.tensor
    length: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    low: gl.tensor
    high: gl.tensor
    all_low: gl.tensor
    all_high: gl.tensor
    entry: gl.tensor
    column: gl.tensor
    head: gl.tensor


@gluon.jit
def split_of(work, splits, n, starts_ptr, lengths_ptr, limit, call, BLOCK_M: gl.constexpr, PAGE: gl.constexpr):
    """The split that is a program's work, or the ``n``-th of a block. What follows the last sequence has no tokens."""
    past = work.sequence >= call.batch
    known = gl.where(past, 0, work.sequence)
    column = known * 0 + (work.other // PAGE if PAGE else 0)
    entry = gl.load(call.table_ptr + known.to(gl.int64) * call.stride_table + column)  # beside the lengths, not after
    length = gl.where(past, 0, gl.maximum(gl.minimum(gl.load(lengths_ptr + known), limit), 0))
    begin = gl.minimum(gl.maximum(work.other, gl.load(starts_ptr + known)), length)
    end = gl.minimum(work.other + work.others, length)
    origin = origin_of(call.origin_ptr, known, call.batch)
    band = Band(begin, end, call.left, call.right, call.prefix, origin.query - origin.key, origin.key)
    first, last = work.start // call.group, gl.minimum((work.start + BLOCK_M - 1) // call.group + 1, work.rows)
    i = length - work.rows
    low, high, all_low, all_high = key_range(i + first, i + last, band)
    high = gl.where(first < last, high, low)
    if n >= 0:  # of a long sequence
        low, high = tokens_of_split(low, high, n, splits, TOKENS)
        begin, end = gl.maximum(begin, low), gl.minimum(end, high)
        all_low, all_high = gl.maximum(all_low, low), gl.minimum(all_high, high)
    zero = length * 0
    splits = anew(splits + zero)  # one that is known fails in triton 3.6's passes
    return Split(
        work.sequence + zero, work.plane, work.row + zero, work.rows + zero, work.start, splits, length, begin,
        end, low, high, all_low + zero, all_high + zero, entry, column,
        work.head.to(gl.int32),
    )  # fmt: skip


@gluon.jit
def tiles_of(split):
    """The number of the first tile, and how many there are."""
    first = split.low // TOKENS
    return first, gl.maximum(gl.cdiv(split.high, TOKENS) - first, 0)


@gluon.jit
def entry_of(n, split, call, PAGE: gl.constexpr):
    """The entry of the page table for token ``n``, or for the last one that is seen."""
    n = gl.minimum(n, gl.maximum(split.high - 1, 0))
    known = gl.where(split.sequence >= call.batch, 0, split.sequence)
    return gl.load(call.table_ptr + known.to(gl.int64) * call.stride_table + (n // PAGE if PAGE else n * 0))


@gluon.jit
def first_entry(first, split, call, PAGE: gl.constexpr):
    """The entry for the first tile."""
    entry = split.entry
    if PAGE:
        if first * TOKENS // PAGE != split.column:
            entry = entry_of(first * TOKENS, split, call, PAGE)
    return entry


@gluon.jit
def row_of(entry, n, split, call, PAGE: gl.constexpr):
    """The row of the planes where the tile from token ``n`` on begins, on a page that there is."""
    n = gl.minimum(n, gl.maximum(split.high - 1, 0) // TOKENS * TOKENS)
    page = gl.minimum(entry.to(gl.uint32), (call.pages - 1).to(gl.uint32)).to(gl.int32)
    return page * call.page_rows + (n % PAGE if PAGE else n)


@gluon.jit
def load_half(desc, row, column, half, full):
    """Load half of a tile of latents."""
    mbarrier.expect(full, TOKENS * HALF * 2)
    async_load(desc, [row, column], full, half)


@gluon.jit
def load_last_half(desc, tail_desc, row, half, tail, full):
    """Load the second half of a tile of latents, and their rotary channels."""
    mbarrier.expect(full, TOKENS * (HALF + TAIL) * 2)
    async_load(desc, [row, HALF], full, half)
    async_load(tail_desc, [row, 0], full, tail)


@gluon.jit
def load_queries(
    queries, split, call, FIRST: gl.constexpr, ROWS: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr
):
    """``COUNT`` channels of the rows from channel ``FIRST`` on, zeros beyond the last row."""
    n, c = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))
    valid, head = split.start + n < split.count * call.group, split.start % call.group + n
    if call.group < ROWS:
        later = head // call.group
    else:  # a division of each row would take longer than the load
        later = (head >= call.group).to(gl.int32)
    token, head = split.row + split.start // call.group + later, head - later * call.group
    at = split.plane * queries.stride_qb + token.to(gl.int64) * queries.stride_qs + head * queries.stride_qh
    return gl.load(queries.q_ptr + (at[:, None] + c[None, :]), mask=valid[:, None], other=0.0)


@gluon.jit
def clear_others(values, n, split):
    """Zero the rows of a tile, from token ``n`` on, that are no token of the sequence: they may hold anything."""
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
    """Scores of products from token ``n`` on, which lie along ``AXIS``; -inf where they are hidden."""
    j = gl.expand_dims(n + gl.arange(0, TOKENS, gl.SliceLayout(1 - AXIS, s.type.layout)), 1 - AXIS)
    s, _ = modify(s, modifiers, gl.expand_dims(i + band.apart, AXIS), j)
    if (n < split.all_low) | (n + TOKENS > split.all_high):
        s = opaque(gl.where(visible(gl.expand_dims(i, AXIS), j, band), s, float("-inf")))
    return s


@gluon.jit
def weighed(s, m_i, unit, AXIS: gl.constexpr):
    """Probabilities of scores; the maximum that they are relative to; and what sums so far are scaled by.

    The maximum stays while no row's grows by more than ``MOVED`` powers of two; sums are exact all the same.
    """
    m_new, safe = raised(m_i, gl.max(s, AXIS) * unit)
    return gl.exp2(s * unit - gl.expand_dims(safe, AXIS)), m_new, gl.exp2(m_i - safe)


@gluon.jit
def raised(m_i, highest):
    """A maximum that is raised to what is highest now if that is much higher; and as it can be subtracted."""
    m_new = gl.where(highest > m_i + MOVED, highest, m_i)
    # A row that has seen nothing keeps -inf as its maximum; subtracting it would give NaN.
    return m_new, gl.where(m_new == float("-inf"), 0.0, m_new)


@gluon.jit
def softmax(s, m_i, n, i, modifiers, band, split, AXIS: gl.constexpr):
    """Probabilities of products from token ``n`` on, as :func:`weighed` gives them."""
    return weighed(scored(s, n, i, modifiers, band, split, AXIS), m_i, unit_of(modifiers), AXIS)


@gluon.jit
def numbers(COUNT: gl.constexpr, SIZE: gl.constexpr):
    """Room for ``COUNT`` vectors of fp32."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
