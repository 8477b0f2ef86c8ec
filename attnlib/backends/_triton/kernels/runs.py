"""Block sparsity in decoding: runs of adjacent tiles with the same state.

If a mask function hides tiles of a cache, each program lists its own runs, because only the schedule on the
device knows which tokens the program reads. Within a run tiles are adjacent, so their loads do not wait for
a list.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .band import Tiles
from .mask_tiles import HIDDEN, WHOLE, lines_of, slot_of

CUT: tl.constexpr = tl.constexpr(1)  # a partial tile: some pairs are visible
# A run is encoded as `first tile * KINDS + kind`.
KINDS: tl.constexpr = tl.constexpr(4)
CHUNK: tl.constexpr = tl.constexpr(128)  # tiles classified per step
LINES: tl.constexpr = tl.constexpr(4)  # rows of states read at once


class States(NamedTuple):
    """The states of tiles, and a buffer for the runs of each block of rows.

    ``planes`` is the number of heads with different masks, ``columns`` the number of tiles per row, and
    ``room`` the capacity for runs. Each of ``batch`` sequences has ``s`` queries (packed: all together),
    and each query has ``group`` rows.
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
    """The tile sizes of decoding with block sparsity.

    ``M`` rows and ``N`` keys are a tile of the kernel; ``GRAIN_M`` queries and ``GRAIN`` keys are a tile
    with a state. ``KV_HEADS`` and ``PACKED`` serve to number the blocks.
    """

    M: tl.constexpr
    N: tl.constexpr
    GRAIN_M: tl.constexpr
    GRAIN: tl.constexpr
    KV_HEADS: tl.constexpr
    PACKED: tl.constexpr


class Lines(NamedTuple):
    """The states of some rows of tiles: ``rows`` rows in each of ``heads`` heads.

    The next head begins ``stride_heads`` rows later.
    """

    ptr: tl.tensor
    heads: tl.tensor
    rows: tl.tensor
    stride_heads: tl.tensor
    columns: tl.tensor


class SplitTokens(NamedTuple):
    """The tokens ``[low, high)`` of a split.

    All queries of a block see the tokens in ``[all_low, all_high)``.
    """

    low: tl.tensor
    high: tl.tensor
    all_low: tl.tensor
    all_high: tl.tensor


class Runs(NamedTuple):
    """A list of ``count`` runs.

    Each entry encodes the first tile of a run and its kind (hidden, partial or full). The last run ends
    before tile ``end``.
    """

    ptr: tl.tensor
    count: tl.tensor
    end: tl.tensor


@triton.jit
def lines_for(x, sizes, work, first, last):
    """Return the states for queries ``[first, last)`` of a sequence.

    If heads have different masks, all heads of the group are included.
    """
    rows = tl.maximum((last - 1) // sizes.GRAIN_M - first // sizes.GRAIN_M + 1, 1)
    heads, head = tl.where(x.planes > 1, x.group, 1), tl.where(x.planes > 1, work.head * x.group, 0)
    stride_heads = lines_of(x.s, x.batch, sizes.GRAIN_M, sizes.PACKED)
    row = (work.plane * x.planes + head) * stride_heads
    row += slot_of(work.row, work.sequence, first, sizes.GRAIN_M, sizes.PACKED)
    return Lines(x.ptr + row.to(tl.int64) * x.columns, heads, rows, stride_heads, x.columns)


@triton.jit
def kinds_of(n, lines, tokens, N: tl.constexpr, GRAIN: tl.constexpr):
    """Return the kind of tiles ``n``: hidden, partial, or full for all rows.

    Tiles outside the split's tokens count as hidden.
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
    """List the runs of a split's tiles for a block of rows with queries ``[first, last)``.

    Other splits of the block have other tiles, and write their runs to other parts of the buffer.
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
    tl.debug_barrier()  # all warps read what some warps wrote
    return Runs(runs, count, end)


@triton.jit
def run_at(r, runs, N: tl.constexpr, EDGE: tl.constexpr):
    """Return the tiles of run ``r``.

    Full runs have full tiles of ``N`` tokens, partial runs have masked tiles of ``EDGE`` tokens, and hidden
    runs have none.
    """
    run = tl.load(runs.ptr + r)
    following = tl.load(runs.ptr + r + 1, mask=r + 1 < runs.count, other=runs.end * KINDS)
    tiles, kind = following // KINDS - run // KINDS, run % KINDS
    pieces = tl.where(kind == CUT, tiles * (N // EDGE), 0)
    return Tiles(run // KINDS * N, pieces, tl.where(kind == WHOLE, tiles, 0), pieces)
