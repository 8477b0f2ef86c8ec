"""Code of both Hopper decode kernels, GQA and MLA: splits, page-table lookups, softmax, output pointers."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..band import KeyBand, key_range, origin_of
from ..paged import tokens_of_split
from .primitives import anew

TOKENS: gl.constexpr = gl.constexpr(64)  # tokens of the cache per tile
# A row's sums are rescaled only if its maximum grows by more than this many powers of two.
MOVED: gl.constexpr = gl.constexpr(8.0)


class DecodeCall(NamedTuple):
    """The parameters of a decode kernel. Page ``n`` of the cache begins at row ``n * page_rows``.

    ``mask_tensors`` and ``score_tensors`` are the tensors that mask and score functions read.
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
    mask_tensors: gl.tuple = None
    score_tensors: gl.tuple = None


class QueryRows(NamedTuple):
    """The query tensor of a decode kernel, as a pointer and strides."""

    q_ptr: gl.tensor
    stride_qb: gl.tensor
    stride_qs: gl.tensor
    stride_qh: gl.tensor


class Split(NamedTuple):
    """One split of a sequence: a block of query rows, and a range of the tokens that they attend to.

    Each query has ``group`` rows, one per query head that shares the KV head. The block begins at row
    ``start``. The sequence has ``count`` queries, from token ``row`` of the query tensor on, and is decoded
    in ``splits`` splits. ``head`` is the index of the KV head, or of a set of KV heads that one program
    decodes together.

    ``[begin, end)``: bounds of the visible tokens.
    ``[low, high)``: tokens that some row may see; empty if there are none.
    ``[all_low, all_high)``: tokens that every row sees.
    ``entry``: the page-table entry in column ``column``, the page at which the split may begin.
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
    """Return the split that a program decodes.

    If ``n >= 0``, it is the ``n``-th of ``splits`` equal splits; otherwise the schedule has set its tokens.
    Work past the last sequence of the batch gets an empty range of tokens.
    """
    past = work.sequence >= call.batch
    known = gl.where(past, 0, work.sequence)
    column = known * 0 + (work.other // PAGE if PAGE else 0)
    # Load the page-table entry before the length is known, so that both loads overlap.
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
    if n >= 0:  # a long sequence is divided into equal splits
        low, high = tokens_of_split(low, high, n, splits, TOKENS)
        begin, end = gl.maximum(begin, low), gl.minimum(end, high)
        all_low, all_high = gl.maximum(all_low, low), gl.minimum(all_high, high)
    zero = length * 0
    splits = anew(splits + zero)  # + zero: Triton 3.6 fails to compile a constant here
    return Split(
        work.sequence + zero, work.plane, work.row + zero, work.rows + zero, work.start, splits, length,
        begin, end, low, high, all_low + zero, all_high + zero, entry, column, work.head.to(gl.int32),
    )  # fmt: skip


@gluon.jit
def entry_of(n, split, call, PAGE: gl.constexpr):
    """Return the page-table entry for token ``n``, clamped to the last token that the split sees."""
    n = gl.minimum(n, gl.maximum(split.high - 1, 0))
    known = gl.where(split.sequence >= call.batch, 0, split.sequence)
    return gl.load(call.table_ptr + known.to(gl.int64) * call.stride_table + (n // PAGE if PAGE else n * 0))


class BothHalvesSums(NamedTuple):
    """The running softmax state of a decode kernel, with the output channels in two halves.

    ``left`` and ``right`` are the output sums of each half, ``m_i`` is the running maximum. ``l_i`` is the
    sum of probabilities, either per row or still separate for each position in a tile.
    """

    left: gl.tensor
    right: gl.tensor
    l_i: gl.tensor
    m_i: gl.tensor


@gluon.jit
def weighed(s, m_i, unit, AXIS: gl.constexpr):
    """Return probabilities, the maximum subtracted from scores, and the factor that rescales earlier sums.

    A row keeps its old maximum until a score exceeds it by more than ``MOVED`` powers of two. The sums remain
    exact, since all of them are relative to the same maximum.
    """
    m_new, safe = raised(m_i, gl.max(s, AXIS) * unit)
    return gl.exp2(s * unit - gl.expand_dims(safe, AXIS)), m_new, gl.exp2(m_i - safe)


@gluon.jit
def raised(m_i, highest):
    """Return the new running maximum, and the number to subtract from scores.

    The maximum becomes ``highest`` if ``highest`` exceeds it by more than ``MOVED``; otherwise it stays.
    """
    m_new = gl.where(highest > m_i + MOVED, highest, m_i)
    # A row that has seen no key keeps -inf as its maximum; subtracting -inf would give NaN.
    return m_new, gl.where(m_new == float("-inf"), 0.0, m_new)


class DecodeOutputs(NamedTuple):
    """The outputs of a decode kernel: pointers and strides of the output, the LSE and the partial results.

    Each split of a sequence writes a partial result. ``lines`` is the number of rows of all partial results.
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
