"""Shared by both decode families: the tokens of a split, the page of a token, softmax weights, output
pointers.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..band import KeyBand, key_range, origin_of
from ..paged import tokens_of_split
from .primitives import anew

TOKENS: gl.constexpr = gl.constexpr(64)  # of a tile
MOVED: gl.constexpr = gl.constexpr(8.0)  # powers of two by which a maximum grows before sums are scaled again


class DecodeCall(NamedTuple):
    """The call, by the parameters of the kernel; a page begins ``page_rows`` rows of a plane after the one
    before.
    """

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


class QueryRows(NamedTuple):
    """Where queries lie."""

    q_ptr: gl.tensor
    stride_qb: gl.tensor
    stride_qs: gl.tensor
    stride_qh: gl.tensor


class Split(NamedTuple):
    """Rows from ``start`` on of the ``count`` queries of a sequence from ``row`` on, of which there are
    ``splits``; and the number of its KV head, or of some together.

    They see tokens ``[begin, end)`` at most, tokens ``[low, high)`` of those if any, and all of them
    ``[all_low, all_high)``. ``entry`` is the entry of the page table for column ``column``, where they may
    begin.
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
def split_of(
    work, splits, n, starts_ptr, lengths_ptr, limit, call, BLOCK_M: gl.constexpr, PAGE: gl.constexpr
):
    """The split that is a program's work, or the ``n``-th of a block. What follows the last sequence has no
    tokens.
    """
    past = work.sequence >= call.batch
    known = gl.where(past, 0, work.sequence)
    column = known * 0 + (work.other // PAGE if PAGE else 0)
    # Beside the lengths, not after.
    entry = gl.load(call.table_ptr + known.to(gl.int64) * call.stride_table + column)
    length = gl.where(past, 0, gl.maximum(gl.minimum(gl.load(lengths_ptr + known), limit), 0))
    begin = gl.minimum(gl.maximum(work.other, gl.load(starts_ptr + known)), length)
    end = gl.minimum(work.other + work.others, length)
    origin = origin_of(call.origin_ptr, known, call.batch)
    band = KeyBand(begin, end, call.left, call.right, call.prefix, origin.query - origin.key, origin.key)
    first, last = (
        work.start // call.group,
        gl.minimum((work.start + BLOCK_M - 1) // call.group + 1, work.rows),
    )
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
        work.sequence + zero, work.plane, work.row + zero, work.rows + zero, work.start, splits, length,
        begin, end, low, high, all_low + zero, all_high + zero, entry, column, work.head.to(gl.int32),
    )  # fmt: skip


@gluon.jit
def entry_of(n, split, call, PAGE: gl.constexpr):
    """The entry of the page table for token ``n``, or for the last one that is seen."""
    n = gl.minimum(n, gl.maximum(split.high - 1, 0))
    known = gl.where(split.sequence >= call.batch, 0, split.sequence)
    return gl.load(call.table_ptr + known.to(gl.int64) * call.stride_table + (n // PAGE if PAGE else n * 0))


class BothHalvesSums(NamedTuple):
    """The running sums of both halves of the channels; of probabilities, or of these by place in a tile; the
    running maximum.
    """

    left: gl.tensor
    right: gl.tensor
    l_i: gl.tensor
    m_i: gl.tensor


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


class DecodeOutputs(NamedTuple):
    """Pointers and strides of the output and the LSE, and of partial results of splits, which have ``lines``
    rows.
    """

    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    split_ptr: gl.tensor
    stride_ob: gl.tensor
    stride_os: gl.tensor
    stride_oh: gl.tensor
    stride_lb: gl.tensor
    stride_lh: gl.tensor
    lines: gl.tensor
