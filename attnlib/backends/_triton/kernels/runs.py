"""Over a cache, the runs of tiles that a program visits where a mask by function hides some.

It lists them itself, since a schedule on the device says what it reads. Within a run tiles follow one
another, so that their loads wait for no other load.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .band import Tiles
from .mask_tiles import HIDDEN, WHOLE, lines_of, slot_of

CUT: tl.constexpr = tl.constexpr(1)  # a tile of which some pairs are seen
# By which the first tile of a run is multiplied, to have its kind added.
KINDS: tl.constexpr = tl.constexpr(4)
CHUNK: tl.constexpr = tl.constexpr(128)  # tiles that are looked at together
LINES: tl.constexpr = tl.constexpr(4)  # and rows of their states


class States(NamedTuple):
    """What tiles are, of so many ``planes`` (heads that differ) and columns; and room for the runs of a block
    of rows.

    There are ``s`` queries of each of so many sequences, or of all if packed, and ``group`` rows a query.
    """

    ptr: tl.tensor
    runs_ptr: tl.tensor
    planes: tl.tensor
    columns: tl.tensor
    room: tl.tensor
    batch: tl.tensor
    s: tl.tensor
    group: tl.tensor


class BlockSizes(NamedTuple):
    """The rows and keys of a tile; queries and keys of one with a state; and what tells rows of all blocks
    apart.
    """

    M: tl.constexpr
    N: tl.constexpr
    GRAIN_M: tl.constexpr
    GRAIN: tl.constexpr
    KV_HEADS: tl.constexpr
    PACKED: tl.constexpr


class Lines(NamedTuple):
    """The states of some rows of tiles: ``rows`` in each of so many ``heads``; the next head begins
    ``stride_heads`` rows further.
    """

    ptr: tl.tensor
    heads: tl.tensor
    rows: tl.tensor
    stride_heads: tl.tensor
    columns: tl.tensor


class SplitTokens(NamedTuple):
    """The tokens ``[low, high)`` of a split, of which a block of queries sees all of ``[all_low,
    all_high)``.
    """

    low: tl.tensor
    high: tl.tensor
    all_low: tl.tensor
    all_high: tl.tensor


class Runs(NamedTuple):
    """So many runs, each its first tile and its kind; the last one ends before tile ``end``."""

    ptr: tl.tensor
    count: tl.tensor
    end: tl.tensor


@triton.jit
def lines_for(x, sizes, work, first, last):
    """The states of queries ``[first, last)`` of a sequence, in all heads of a group that differ."""
    rows = tl.maximum((last - 1) // sizes.GRAIN_M - first // sizes.GRAIN_M + 1, 1)
    heads, head = tl.where(x.planes > 1, x.group, 1), tl.where(x.planes > 1, work.head * x.group, 0)
    stride_heads = lines_of(x.s, x.batch, sizes.GRAIN_M, sizes.PACKED)
    row = (work.plane * x.planes + head) * stride_heads
    row += slot_of(work.row, work.sequence, first, sizes.GRAIN_M, sizes.PACKED)
    return Lines(x.ptr + row.to(tl.int64) * x.columns, heads, rows, stride_heads, x.columns)


@triton.jit
def kinds_of(n, lines, tokens, N: tl.constexpr, GRAIN: tl.constexpr):
    """Whether tiles ``n`` are hidden, cut or seen whole by all rows; hidden those that are not of these
    tokens.
    """
    some, every = tl.full(n.shape, HIDDEN, tl.int32), tl.full(n.shape, WHOLE, tl.int32)
    visited, per_head = (n >= tokens.low // N) & (n * N < tokens.high), tl.maximum(lines.rows, 1)
    for several in range(0, lines.heads * lines.rows, LINES):
        at = several + tl.arange(0, LINES)
        line = (
            lines.ptr
            + (at // per_head * lines.stride_heads + at % per_head).to(tl.int64)[:, None] * lines.columns
        )
        for b in tl.static_range(max(1, N // GRAIN)):
            other = n * N // GRAIN + b
            there = (at < lines.heads * lines.rows)[:, None] & (visited & (other * GRAIN < tokens.high))[
                None, :
            ]
            state = tl.load(line + other[None, :], mask=there, other=HIDDEN).to(tl.int32)
            some = tl.maximum(some, tl.max(state, 0))
            every = tl.minimum(every, tl.min(tl.where(there, state, WHOLE), 0))
    whole = (every == WHOLE) & (n * N >= tokens.all_low) & ((n + 1) * N <= tokens.all_high)
    return tl.where(visited & (some > HIDDEN), tl.where(whole, WHOLE, CUT), HIDDEN)


@triton.jit
def list_runs(x, sizes, work, first, last, tokens):
    """The runs of some tokens that a block of rows visits, of queries ``[first, last)``.

    They are written where no other split of the block, which has other tiles, writes any.
    """
    line = (work.plane * sizes.KV_HEADS + work.head) * lines_of(x.s * x.group, x.batch, sizes.M, sizes.PACKED)
    line += slot_of(work.row * x.group, work.sequence, work.start, sizes.M, sizes.PACKED)
    begin, end = tokens.low // sizes.N, tl.cdiv(tokens.high, sizes.N)
    runs, count, lines = (
        x.runs_ptr + (line * x.room + begin),
        begin * 0,
        lines_for(x, sizes, work, first, last),
    )
    for chunk in range(begin, end, CHUNK):
        n = chunk + tl.arange(0, CHUNK)
        kind = kinds_of(n, lines, tokens, sizes.N, sizes.GRAIN)
        begins = (n < end) & (kind != kinds_of(n - 1, lines, tokens, sizes.N, sizes.GRAIN))
        tl.store(runs + count + tl.cumsum(begins.to(tl.int32), 0) - 1, n * KINDS + kind, mask=begins)
        count += tl.sum(begins.to(tl.int32), 0)
    tl.debug_barrier()  # what some warps have written all read
    return Runs(runs, count, end)


@triton.jit
def run_at(r, runs, N: tl.constexpr, EDGE: tl.constexpr):
    """The tiles of a run: none if they are hidden, pieces of ``EDGE`` if they are cut, or full ones of
    ``N``.
    """
    run = tl.load(runs.ptr + r)
    following = tl.load(runs.ptr + r + 1, mask=r + 1 < runs.count, other=runs.end * KINDS)
    tiles, kind = following // KINDS - run // KINDS, run % KINDS
    pieces = tl.where(kind == CUT, tiles * (N // EDGE), 0)
    return Tiles(run // KINDS * N, pieces, tl.where(kind == WHOLE, tiles, 0), pieces)
