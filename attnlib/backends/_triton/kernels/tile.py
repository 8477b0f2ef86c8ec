"""What a program works on, and the tiles that it loads, multiplies and stores."""

from typing import NamedTuple

import triton
import triton.language as tl

from .band import MASK_FIELDS

# Parameters of any kernel whose divisibility decides nothing, and must not compile it again.
COUNTS = (
    *MASK_FIELDS, "stride_slopes", "stride_sb", "stride_sh", "stride_dlb", "stride_dlh", "stride_dls",
    "stride_table", "batch", "heads", "kv_heads", "group", "s", "t", "heads_per_wave", "threshold", "pages",
    "page_size", "rows", "slots", "schedule_offset", "limit", "reach", "capacity", "long", "long_splits",
    "room", "planes", "columns", "stride_state_b", "stride_state_h", "stride_list_b", "stride_list_h",
)  # fmt: skip


class Channels(NamedTuple):
    """How many channels a row has; those of its first block and of its second (0: there is none), powers of
    two.
    """

    ALL: tl.constexpr
    MAIN: tl.constexpr
    TAIL: tl.constexpr


class Rows(NamedTuple):
    """A tensor ``[b, t, h, d]`` by its strides, or ``[pages, page_size, g, d]``; descriptors of its blocks,
    or None.
    """

    ptr: tl.tensor | None
    stride_b: tl.tensor
    stride_t: tl.tensor
    stride_h: tl.tensor
    desc: tl.tensor | None = None
    tail_desc: tl.tensor | None = None


class TilePlace(NamedTuple):
    """Where the rows of a head of a sequence begin in a tensor. A packed tensor is one sequence."""

    b: tl.tensor
    t: tl.tensor
    h: tl.tensor


class ChannelBlocks(NamedTuple):
    """Some rows in blocks of their channels. Without a second block, ``tail`` is any tile and goes unread."""

    main: tl.tensor
    tail: tl.tensor


@triton.jit
def load_columns(ptr, at, valid, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """The first columns of rows ``at`` elements from ``ptr``, zeros beyond; masked, zeros but for valid
    rows.
    """
    columns = tl.arange(0, COLUMNS)
    rows = valid[:, None] if MASKED else True
    inside = (columns < WIDTH)[None, :] if COLUMNS > WIDTH else True
    return tl.load(ptr + (at[:, None] + columns[None, :]), mask=rows & inside, other=0.0)


@triton.jit
def pointers(x, place, n, ROWS: tl.constexpr, ANEW: tl.constexpr):
    """A pointer, and how far from it the rows from ``n`` on begin.

    ``ANEW``: made anew in each tile, to hold no registers between tiles.
    """
    rows = tl.arange(0, ROWS)
    ptr = x.ptr + (place.b * x.stride_b + place.t * x.stride_t) + place.h * x.stride_h
    if ANEW:
        return ptr, (n + rows).to(tl.int64) * x.stride_t
    else:
        return ptr + tl.cast(n, tl.int64) * x.stride_t, rows * x.stride_t


@triton.jit
def factor_of(x):
    """What products take: e4m3 in fp16, which holds it exactly, and all else as it is."""
    return x.to(tl.float16) if x.dtype == tl.float8e4nv else x


@triton.jit
def load_block(
    x, place, n, valid, channels, SECOND: tl.constexpr, MASKED: tl.constexpr, BY_DESC: tl.constexpr,
    ANEW: tl.constexpr,
):  # fmt: skip
    """The first or the second block of a tile; see :func:`load_tile`."""
    FIRST: tl.constexpr = channels.MAIN if SECOND else 0
    COLUMNS: tl.constexpr = channels.TAIL if SECOND else channels.MAIN
    if BY_DESC:  # whose addresses take no registers
        at = [place.b.to(tl.int32), (place.t + n).to(tl.int32), place.h.to(tl.int32), FIRST]
        return factor_of((x.tail_desc if SECOND else x.desc).load(at).reshape(valid.shape[0], COLUMNS))
    else:
        ptr, at = pointers(x, place, n, valid.shape[0], ANEW)
        return factor_of(load_columns(ptr + FIRST, at, valid, channels.ALL - FIRST, COLUMNS, MASKED))


@triton.jit
def load_tile(
    x, place, n, valid, channels, MASKED: tl.constexpr, HOLES: tl.constexpr = True, ANEW: tl.constexpr = False
):
    """A row from ``n`` on for each of ``valid``; where masked, zeros but for valid rows.

    A descriptor gives zeros beyond the tensor. ``HOLES``: rows that are not valid may lie within it.
    """
    BY_DESC: tl.constexpr = x.desc is not None and not (MASKED and HOLES)
    main = load_block(x, place, n, valid, channels, False, MASKED, BY_DESC, ANEW)
    return ChannelBlocks(
        main, load_block(x, place, n, valid, channels, True, MASKED, BY_DESC, ANEW) if channels.TAIL else main
    )


@triton.jit
def store_tile(x, place, n, valid, tile, factor, seen, channels):
    """Write a tile times ``factor``, zeros but where ``seen``, into the valid rows of those from ``n`` on."""
    for SECOND in tl.static_range(2 if channels.TAIL else 1):
        block = tl.where(seen, (tile.tail if SECOND else tile.main) * factor, 0.0)
        columns = (channels.MAIN if SECOND else 0) + tl.arange(0, block.shape[1])
        ptr, at = pointers(x, place, n, valid.shape[0], False)
        mask = valid[:, None] & (columns < channels.ALL)[None, :]
        tl.store(ptr + (at[:, None] + columns[None, :]), block.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def zeros(channels, ROWS: tl.constexpr):
    """A tile to add products to."""
    main = tl.zeros([ROWS, channels.MAIN], tl.float32)
    return ChannelBlocks(main, tl.zeros([ROWS, channels.TAIL], tl.float32) if channels.TAIL else main)


@triton.jit
def products(x, y, channels, PRECISION: tl.constexpr):
    """``x @ y.T`` of two tiles."""
    s = tl.dot(x.main, y.main.T, input_precision=PRECISION)
    if channels.TAIL:
        s = tl.dot(x.tail, y.tail.T, s, input_precision=PRECISION)
    return s


@triton.jit
def add_products(sums, x, y, channels, PRECISION: tl.constexpr):
    """``sums + x @ y``, of a matrix with a tile."""
    main, tail = tl.dot(x.to(y.main.dtype), y.main, sums.main, input_precision=PRECISION), sums.tail
    if channels.TAIL:
        tail = tl.dot(x.to(y.tail.dtype), y.tail, sums.tail, input_precision=PRECISION)
    return ChannelBlocks(main, tail)


@triton.jit
def offset(cu_ptr, n, total):
    """Where packed sequence ``n`` begins, at least 0 and at most ``total``, whatever the tensor says."""
    return tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), total)


@triton.jit
def tokens_of(cu_ptr, n, batch, total):
    """The first token of packed sequence ``n``, and how many it has; sequence ``batch`` has what follows the
    last.
    """
    row, above = offset(cu_ptr, n, total), offset(cu_ptr, tl.minimum(n + 1, batch), total)
    return row, tl.where(n < batch, tl.maximum(above - row, 0), total - row)


@triton.jit
def first_block(cu_ptr, n, tokens, group, BLOCK: tl.constexpr, LONG: tl.constexpr):
    """The number of the first block of rows of packed sequence ``n``, ``group`` rows a token.

    It leaves room for a last, partial block of each sequence before; or, if not 0, of those of more than
    ``LONG`` rows, each of which raises the rows before by as many.
    """
    rows = offset(cu_ptr, n, tokens) * group
    return rows // BLOCK + (tl.minimum(rows // LONG, n) if LONG else n)


@triton.jit
def owner(cu_ptr, block, batch, tokens, group, BLOCK: tl.constexpr, LONG: tl.constexpr):
    """Whose block of rows this is, and its number among theirs; see :func:`first_block`."""
    n, above = block * 0, batch + 1  # no plain 0, which stays one where there is no sequence
    while above - n > 1:
        middle = (n + above) // 2
        fits = first_block(cu_ptr, middle, tokens, group, BLOCK, LONG) <= block
        n, above = tl.where(fits, middle, n), tl.where(fits, above, middle)
    block = block - first_block(cu_ptr, n, tokens, group, BLOCK, LONG)
    return n, tl.where(block < 0, tokens * group // BLOCK + 1, block)  # offsets that decrease: nobody's block


class Work(NamedTuple):
    """What a program works on: a head of a sequence; its block of rows from ``start`` on.

    The sequence has ``rows`` rows from ``row`` on, and ``others`` rows of the other side (keys for queries,
    queries for keys) from ``other`` on, in sequence ``plane`` of the tensors.
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
    """The work of program ``pid``, for ``s`` rows of a sequence and ``t`` of the other side, or of all if
    packed.

    Heads come in waves whose keys and values fit the L2 cache; in a wave the longest rows start first. Packed
    sequence ``batch`` is what follows the last offset, and has no keys.
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
