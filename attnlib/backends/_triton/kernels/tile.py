"""Assign rows of the output to the programs of a kernel; load, multiply and store tiles of rows."""

from typing import NamedTuple

import triton
import triton.language as tl

from .band import MASK_FIELDS

# Kernel parameters that Triton must not specialize on. Otherwise it would compile a kernel again for values
# with another divisibility, and the code would not be faster.
COUNTS = (
    *MASK_FIELDS, "stride_slopes", "stride_sb", "stride_sh", "stride_dlb", "stride_dlh", "stride_dls",
    "stride_table", "batch", "heads", "kv_heads", "group", "s", "t", "heads_per_wave", "threshold", "pages",
    "page_size", "rows", "slots", "schedule_offset", "limit", "reach", "capacity", "long", "long_splits",
    "room", "planes", "columns", "chunks", "stride_state_b", "stride_state_h", "stride_list_b",
    "stride_list_h", "stride_rb", "stride_rh", "stride_rows", "splits",
)  # fmt: skip


class Channels(NamedTuple):
    """The number of channels of a head, and the widths of the two blocks that they are divided into.

    The widths are powers of two. ``TAIL``, the width of the second block, is 0 if one block suffices.
    """

    ALL: tl.constexpr
    MAIN: tl.constexpr
    TAIL: tl.constexpr


class Rows(NamedTuple):
    """A tensor ``[b, t, h, d]`` or ``[pages, page_size, g, d]``, as a pointer and strides.

    ``desc`` and ``tail_desc`` are TMA descriptors of the first and second block of channels, or None.
    """

    ptr: tl.tensor | None
    stride_b: tl.tensor
    stride_t: tl.tensor
    stride_h: tl.tensor
    desc: tl.tensor | None = None
    tail_desc: tl.tensor | None = None


class TilePlace(NamedTuple):
    """The place in a tensor where one head of a sequence starts: batch index, token and head.

    Packed sequences all lie in batch entry ``b``; each starts at a token ``t`` of its own.
    """

    b: tl.tensor
    t: tl.tensor
    h: tl.tensor


class ChannelBlocks(NamedTuple):
    """A tile of rows, divided into two blocks of channels.

    If there is no second block, ``tail`` is an arbitrary tile that is never read.
    """

    main: tl.tensor
    tail: tl.tensor


@triton.jit
def load_columns(ptr, at, valid, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """Load ``COLUMNS`` columns of the rows at ``ptr + at``; columns from ``WIDTH`` on become zeros.

    If ``MASKED``, rows that are not ``valid`` become zeros too.
    """
    columns = tl.arange(0, COLUMNS)
    rows = valid[:, None] if MASKED else True
    inside = (columns < WIDTH)[None, :] if COLUMNS > WIDTH else True
    return tl.load(ptr + (at[:, None] + columns[None, :]), mask=rows & inside, other=0.0)


@triton.jit
def pointers(x, place, n, ROWS: tl.constexpr, ANEW: tl.constexpr):
    """Return a base pointer and the offsets of ``ROWS`` rows relative to it, beginning with row ``n``.

    ``ANEW``: recompute the offsets in each tile, so that they occupy no registers between tiles.
    """
    rows = tl.arange(0, ROWS)
    ptr = x.ptr + (place.b * x.stride_b + place.t * x.stride_t) + place.h * x.stride_h
    if ANEW:
        return ptr, (n + rows).to(tl.int64) * x.stride_t
    else:
        return ptr + tl.cast(n, tl.int64) * x.stride_t, rows * x.stride_t


@triton.jit
def factor_of(x):
    """Convert e4m3 to fp16 without error, since the matrix products here take no e4m3; keep other dtypes."""
    return x.to(tl.float16) if x.dtype == tl.float8e4nv else x


@triton.jit
def load_block(
    x, place, n, valid, channels, SECOND: tl.constexpr, MASKED: tl.constexpr, BY_DESC: tl.constexpr,
    ANEW: tl.constexpr,
):  # fmt: skip
    """Load one of the two channel blocks of a tile of rows; see :func:`load_tile`."""
    FIRST: tl.constexpr = channels.MAIN if SECOND else 0
    COLUMNS: tl.constexpr = channels.TAIL if SECOND else channels.MAIN
    if BY_DESC:  # descriptor addresses take no registers
        at = [place.b.to(tl.int32), (place.t + n).to(tl.int32), place.h.to(tl.int32), FIRST]
        return factor_of((x.tail_desc if SECOND else x.desc).load(at).reshape(valid.shape[0], COLUMNS))
    else:
        ptr, at = pointers(x, place, n, valid.shape[0], ANEW)
        return factor_of(load_columns(ptr + FIRST, at, valid, channels.ALL - FIRST, COLUMNS, MASKED))


@triton.jit
def load_tile(
    x, place, n, valid, channels, MASKED: tl.constexpr, HOLES: tl.constexpr = True, ANEW: tl.constexpr = False
):
    """Load a tile of rows, from row ``n`` on.

    If ``MASKED``, rows that are not ``valid`` become zeros. TMA descriptors return zeros only outside the
    tensor. If invalid rows may lie inside it (``HOLES``), masked tiles are therefore loaded by pointers.
    """
    BY_DESC: tl.constexpr = x.desc is not None and not (MASKED and HOLES)
    main = load_block(x, place, n, valid, channels, False, MASKED, BY_DESC, ANEW)
    return ChannelBlocks(
        main, load_block(x, place, n, valid, channels, True, MASKED, BY_DESC, ANEW) if channels.TAIL else main
    )


@triton.jit
def gathered_tile(x, place, rows, stride, valid, channels):
    """Load rows at any distances, ``rows * stride``, from a place; rows that are not ``valid`` are zeros."""
    ptr = x.ptr + (place.b * x.stride_b + place.t * x.stride_t) + place.h * x.stride_h
    at = tl.where(valid, rows, 0).to(tl.int64) * stride
    main = load_columns(ptr, at, valid, channels.ALL, channels.MAIN, True)
    rest: tl.constexpr = channels.ALL - channels.MAIN
    return ChannelBlocks(
        main,
        load_columns(ptr + channels.MAIN, at, valid, rest, channels.TAIL, True) if channels.TAIL else main,
    )


@triton.jit
def scatter_tile(x, place, rows, stride, valid, tile, factor, channels):
    """Write ``tile * factor`` to the valid ones of rows at any distances, ``rows * stride``, from a place."""
    ptr = x.ptr + (place.b * x.stride_b + place.t * x.stride_t) + place.h * x.stride_h
    at = tl.where(valid, rows, 0).to(tl.int64) * stride
    for SECOND in tl.static_range(2 if channels.TAIL else 1):
        block = (tile.tail if SECOND else tile.main) * factor
        columns = (channels.MAIN if SECOND else 0) + tl.arange(0, block.shape[1])
        mask = valid[:, None] & (columns < channels.ALL)[None, :]
        tl.store(ptr + (at[:, None] + columns[None, :]), block.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_tile(x, place, n, valid, tile, factor, seen, channels):
    """Write ``tile * factor`` to the valid rows from row ``n`` on; rows that are not ``seen`` get zeros."""
    for SECOND in tl.static_range(2 if channels.TAIL else 1):
        block = tl.where(seen, (tile.tail if SECOND else tile.main) * factor, 0.0)
        columns = (channels.MAIN if SECOND else 0) + tl.arange(0, block.shape[1])
        ptr, at = pointers(x, place, n, valid.shape[0], False)
        mask = valid[:, None] & (columns < channels.ALL)[None, :]
        tl.store(ptr + (at[:, None] + columns[None, :]), block.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def zeros(channels, ROWS: tl.constexpr):
    """Return an fp32 tile of zeros to which :func:`add_products` can add."""
    main = tl.zeros([ROWS, channels.MAIN], tl.float32)
    return ChannelBlocks(main, tl.zeros([ROWS, channels.TAIL], tl.float32) if channels.TAIL else main)


@triton.jit
def products(x, y, channels, PRECISION: tl.constexpr):
    """Return the matrix product ``x @ y.T`` of two tiles of rows, over all channels."""
    s = tl.dot(x.main, y.main.T, input_precision=PRECISION)
    if channels.TAIL:
        s = tl.dot(x.tail, y.tail.T, s, input_precision=PRECISION)
    return s


@triton.jit
def add_products(sums, x, y, channels, PRECISION: tl.constexpr):
    """Return ``sums + x @ y`` for a matrix ``x`` and a tile ``y`` with one or two channel blocks."""
    main, tail = tl.dot(x.to(y.main.dtype), y.main, sums.main, input_precision=PRECISION), sums.tail
    if channels.TAIL:
        tail = tl.dot(x.to(y.tail.dtype), y.tail, sums.tail, input_precision=PRECISION)
    return ChannelBlocks(main, tail)


@triton.jit
def offset(cu_ptr, n, total):
    """Return the start of packed sequence ``n``, clamped to ``[0, total]``."""
    return tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), total)


@triton.jit
def tokens_of(cu_ptr, n, batch, total):
    """Return the first token of packed sequence ``n``, and its length.

    Sequence ``batch`` stands for the tokens after the last sequence.
    """
    row, above = offset(cu_ptr, n, total), offset(cu_ptr, tl.minimum(n + 1, batch), total)
    return row, tl.where(n < batch, tl.maximum(above - row, 0), total - row)


@triton.jit
def first_block(cu_ptr, n, tokens, group, BLOCK: tl.constexpr, LONG: tl.constexpr):
    """Return the number of the first block of rows of packed sequence ``n``; tokens have ``group`` rows each.

    Every preceding sequence has one number reserved for a last, partial block. If ``LONG`` is not 0, only
    sequences with more than ``LONG`` rows get this number, so at most ``rows // LONG`` are reserved.
    """
    rows = offset(cu_ptr, n, tokens) * group
    return rows // BLOCK + (tl.minimum(rows // LONG, n) if LONG else n)


@triton.jit
def owner(cu_ptr, block, batch, tokens, group, BLOCK: tl.constexpr, LONG: tl.constexpr):
    """Return the packed sequence that a block of rows belongs to, and the block's number in that sequence.

    See :func:`first_block` for the numbers of blocks.
    """
    n, above = block * 0, batch + 1  # block * 0 is a tensor; the int 0 would stay an int if batch = 0
    while above - n > 1:
        middle = (n + above) // 2
        fits = first_block(cu_ptr, middle, tokens, group, BLOCK, LONG) <= block
        n, above = tl.where(fits, middle, n), tl.where(fits, above, middle)
    block = block - first_block(cu_ptr, n, tokens, group, BLOCK, LONG)
    return n, tl.where(block < 0, tokens * group // BLOCK + 1, block)  # if offsets decrease, skip this block


@triton.jit
def slot_of(row, sequence, start, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Return the number of the block of rows that begins at row ``start`` of a sequence.

    Blocks of packed sequences are numbered consecutively, with one extra, partial block per sequence.
    """
    return row // BLOCK + sequence + start // BLOCK if PACKED else start // BLOCK


class Work(NamedTuple):
    """The work of a program: a block of queries or keys, called rows, in one head of one sequence.

    The block begins at row ``start`` of the sequence. The sequence has ``rows`` rows, which begin at token
    ``row`` of batch entry ``plane`` in the tensors. If the rows are queries, ``other`` and ``others`` are the
    first token and the number of the sequence's keys; if they are keys, of its queries.
    """

    sequence: tl.tensor
    plane: tl.tensor
    head: tl.tensor
    start: tl.tensor
    row: tl.tensor
    rows: tl.tensor
    other: tl.tensor
    others: tl.tensor


@triton.jit
def locate(
    pid, cu_ptr, cu_other_ptr, batch, heads, s, t, heads_per_wave, BLOCK: tl.constexpr, REVERSED: tl.constexpr
):
    """Return the work of program ``pid``: one block of the ``s`` queries, or keys, of a sequence.

    ``t`` is the number of keys if the rows are queries, and of queries if they are keys. For packed sequences
    both are totals, and sequence ``batch`` stands for the tokens after the last one; it has no keys. Heads
    run in waves whose keys and values fit in the L2 cache. ``REVERSED``: each wave starts with its last
    blocks, which see the most keys if the mask is causal.
    """
    PACKED: tl.constexpr = cu_ptr is not None
    pairs = heads if PACKED else batch * heads
    blocks = s // BLOCK + batch + 1 if PACKED else tl.cdiv(s, BLOCK)
    first_pair = pid // (heads_per_wave * blocks) * heads_per_wave
    rest = pid - first_pair * blocks
    width = tl.minimum(heads_per_wave, pairs - first_pair)
    block, pair = rest // width, (first_pair + rest % width).to(tl.int64)
    if REVERSED:
        block = blocks - 1 - block
    if PACKED:
        n, block = owner(cu_ptr, block, batch, s, 1, BLOCK, 0)
        row, rows = tokens_of(cu_ptr, n, batch, s)
        other, others = (0, t) if cu_other_ptr is None else tokens_of(cu_other_ptr, n, batch, t)
        n, other, others = n.to(tl.int64), tl.cast(other, tl.int64), tl.where(n < batch, others, 0)
        return Work(n, n * 0, pair, block * BLOCK, row.to(tl.int64), rows, other, others)
    else:
        n = pair // heads
        return Work(n, n, pair % heads, block * BLOCK, n * 0, s, n * 0, t)
