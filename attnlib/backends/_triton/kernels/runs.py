"""Block sparsity in decoding: runs of adjacent tiles that are all hidden, all partial or all full.

If a mask function hides parts of a cache, each program lists the runs among its own tokens, because only the
schedule on the device knows which tokens a program reads. The tiles of a run are adjacent, so that loading
them does not wait for an entry of a list.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .band import Tiles
from .mask_tiles import HIDDEN, WHOLE, lines_of
from .tile import slot_of

CUT: tl.constexpr = tl.constexpr(1)  # a partial tile: some pairs are visible
# A run is encoded as `first tile * KINDS + kind`.
KINDS: tl.constexpr = tl.constexpr(4)
CHUNK: tl.constexpr = tl.constexpr(128)  # tiles that are classified at a time
LINES: tl.constexpr = tl.constexpr(4)  # rows of tile states that are read at a time


class States(NamedTuple):
    """The states of tiles (hidden, partial or full), and a buffer for the runs of each block of rows.

    ``planes`` is the number of heads with different masks, ``columns`` the number of tiles per row of states,
    and ``room`` the number of runs that fit per block. Each of ``batch`` sequences has ``s`` queries (if
    packed, ``s`` is their total), and each query has ``group`` rows, one per query head of its KV head.
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

    A tile of the kernel has ``M`` rows and ``N`` keys. The tile states of the mask are for tiles of another
    size: ``GRAIN_M`` queries and ``GRAIN`` keys. The numbers of blocks of rows depend on ``KV_HEADS`` and
    ``PACKED``.
    """

    M: tl.constexpr
    N: tl.constexpr
    GRAIN_M: tl.constexpr
    GRAIN: tl.constexpr
    KV_HEADS: tl.constexpr
    PACKED: tl.constexpr


class Lines(NamedTuple):
    """The tile states of one block of queries: ``rows`` rows of tiles in each of ``heads`` heads.

    Each head's rows begin ``stride_heads`` rows after those of the previous head.
    """

    ptr: tl.tensor
    heads: tl.tensor
    rows: tl.tensor
    stride_heads: tl.tensor
    columns: tl.tensor


class SplitTokens(NamedTuple):
    """The tokens ``[low, high)`` that one split of a sequence reads.

    The band lets all queries of the block see the tokens in ``[all_low, all_high)``.
    """

    low: tl.tensor
    high: tl.tensor
    all_low: tl.tensor
    all_high: tl.tensor


class Runs(NamedTuple):
    """A list of ``count`` runs, that is, sequences of adjacent tiles of one kind.

    Each entry encodes the first tile of a run and its kind (hidden, partial or full). The last run ends
    before tile ``end``.
    """

    ptr: tl.tensor
    count: tl.tensor
    end: tl.tensor


@triton.jit
def lines_for(x, sizes, work, first, last):
    """Return the tile states for queries ``[first, last)`` of a sequence.

    If heads have different masks, the states of all query heads that share the KV head are included.
    """
    rows = tl.maximum((last - 1) // sizes.GRAIN_M - first // sizes.GRAIN_M + 1, 1)
    heads, head = tl.where(x.planes > 1, x.group, 1), tl.where(x.planes > 1, work.head * x.group, 0)
    stride_heads = lines_of(x.s, x.batch, sizes.GRAIN_M, sizes.PACKED)
    row = (work.plane * x.planes + head) * stride_heads
    row += slot_of(work.row, work.sequence, first, sizes.GRAIN_M, sizes.PACKED)
    return Lines(x.ptr + row.to(tl.int64) * x.columns, heads, rows, stride_heads, x.columns)


@triton.jit
def kinds_of(n, lines, tokens, N: tl.constexpr, GRAIN: tl.constexpr):
    """Return the kind of each tile in ``n``: hidden, partial, or full for all rows of the block.

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
    """List the runs of tiles that one split reads for queries ``[first, last)``.

    Other splits of the same queries read other tiles, and write their runs to other parts of the buffer.
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
    tl.debug_barrier()  # each warp reads runs that other warps wrote
    return Runs(runs, count, end)


@triton.jit
def run_at(r, runs, N: tl.constexpr, EDGE: tl.constexpr):
    """Return the tiles of run ``r`` that the kernel must process.

    A full run has full tiles of ``N`` tokens, a partial run has masked tiles of ``EDGE`` tokens, and a hidden
    run has none.
    """
    run = tl.load(runs.ptr + r)
    following = tl.load(runs.ptr + r + 1, mask=r + 1 < runs.count, other=runs.end * KINDS)
    tiles, kind = following // KINDS - run // KINDS, run % KINDS
    pieces = tl.where(kind == CUT, tiles * (N // EDGE), 0)
    return Tiles(run // KINDS * N, pieces, tl.where(kind == WHOLE, tiles, 0), pieces)
