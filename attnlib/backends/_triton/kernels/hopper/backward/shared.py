"""What the warps of a backward share: what a program works on, step by step, and how consumers find what is
loaded.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...band import query_range
from ...mask_tiles import sparse_tiles_of
from ..primitives import FIRST

KEYS: gl.constexpr = gl.constexpr(64)  # of a tile
CONSUMERS: gl.constexpr = gl.constexpr(256)  # threads of both
DONE: gl.constexpr = gl.constexpr(FIRST + 6)  # a barrier: nobody reads keys any more
# The first barrier of those that hand a slot back to the producer.
FREED: gl.constexpr = gl.constexpr(FIRST + 7)


class BackwardSizes(NamedTuple):
    """What a kernel is compiled for: channels of blocks, and of tensors; tiles of keys, queries of a tile,
    slots.

    ``BY_ROWS``: a tile of dq is multiplied in halves of its queries, otherwise of its channels. ``HOLES``:
    rows beyond a sequence's keys may be another's. ``DQ_WARPGROUP``: a third warpgroup multiplies dq.
    ``AFTER``: programs add to dq in any order (0), after that of the next keys (1), or of the keys before
    (-1). ``SPARSE``: a function hides keys, and lists say which tiles are left.
    """

    D: gl.constexpr
    D_TAIL: gl.constexpr
    E: gl.constexpr
    D_ALL: gl.constexpr
    E_ALL: gl.constexpr
    TILES: gl.constexpr
    BLOCK_M: gl.constexpr
    SLOTS: gl.constexpr
    BY_ROWS: gl.constexpr
    HOLES: gl.constexpr
    PACKED: gl.constexpr
    DQ_WARPGROUP: gl.constexpr
    AFTER: gl.constexpr
    SPARSE: gl.constexpr = False


class BackwardCall(NamedTuple):
    """The call, by the parameters of the kernel."""

    lse2_ptr: gl.tensor
    delta_ptr: gl.tensor
    turns_ptr: gl.tensor
    slopes_ptr: gl.tensor
    stride_lb: gl.tensor
    stride_lh: gl.tensor
    stride_slopes: gl.tensor
    batch: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    dq_tiles: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor
    lists_ptr: gl.tensor = None
    stride_list_b: gl.tensor = None
    stride_list_h: gl.tensor = None
    room: gl.tensor = None
    mask_tensors: gl.tuple = None
    score_tensors: gl.tuple = None


class Job(NamedTuple):
    """The tiles of keys from ``start`` on of a KV head, and the tiles of queries that see them, of its
    group's heads.

    The sequence has ``rows`` keys from ``row`` on and ``queries`` from ``other`` on, in sequence ``plane`` of
    the tensors; its first query has index ``ahead``. Queries ``[low, high)`` see some of the keys. The first
    tile of a head begins at query ``first``, its sums of dq are the ``first_dq``-th; ``tiles`` follow,
    ``steps`` in all heads. Where tiles are listed, ``tiles`` is what a head could have, and the first ``cut``
    steps are of tiles that are not whole.
    """

    sequence: gl.tensor
    plane: gl.tensor
    kv_head: gl.tensor
    start: gl.tensor
    row: gl.tensor
    rows: gl.tensor
    other: gl.tensor
    queries: gl.tensor
    ahead: gl.tensor
    low: gl.tensor
    high: gl.tensor
    first: gl.tensor
    first_dq: gl.tensor
    tiles: gl.tensor
    steps: gl.tensor
    cut: gl.tensor = 0
    entries_ptr: gl.tensor = 0


class QueryStep(NamedTuple):
    """A tile of queries, of a head; where its sums of dq are, and those of the tile before; its number in a
    list.
    """

    tile: gl.tensor
    head: gl.tensor
    dq: gl.tensor
    dq_before: gl.tensor
    number: gl.tensor


class BackwardShared(NamedTuple):
    """Shared memory: keys and values of a program, rings for what queries bring, and barriers that say it is
    there.
    """

    q: gl.shared_memory_descriptor
    q_tail: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor


@gluon.jit
def tiles_of(start, work, band, sizes):
    """The queries ``[low, high)`` that see keys of a program whose first is ``start``; their first tile; how
    many.
    """
    ahead = work.rows - work.others
    j0, j1 = gl.maximum(start, band.start), gl.minimum(start + sizes.TILES * KEYS, band.end)
    low, high, _, _ = query_range(j0, j1, ahead, work.rows, band)
    low, high = low - ahead, high - ahead
    first = low // sizes.BLOCK_M
    valid = (start >= 0) & (start < work.rows)
    return low, high, first, gl.where(valid, gl.maximum(gl.cdiv(high, sizes.BLOCK_M) - first, 0), 0)


@gluon.jit
def job_of(work, band, call, sizes):
    """What a program does for its keys."""
    ahead = work.rows - work.others
    low, high, first, tiles = tiles_of(work.start, work, band, sizes)
    if sizes.AFTER < 0:
        first += tiles - 1
    if sizes.SPARSE:
        first = 0
    first_dq = (
        work.plane.to(gl.int32) * call.heads + work.head.to(gl.int32) * call.group
    ) * call.dq_tiles + first
    if sizes.PACKED:  # sequences lie side by side, with a partial tile for each
        first_dq += work.other.to(gl.int32) // sizes.BLOCK_M + work.sequence.to(gl.int32)
    steps, cut, entries_ptr = tiles * call.group, 0, 0
    if sizes.SPARSE:
        BLOCK_N: gl.constexpr = sizes.TILES * KEYS
        left = sparse_tiles_of(
            call.lists_ptr, work, call.stride_list_b, call.stride_list_h, call.room, BLOCK_N, sizes.PACKED
        )
        steps, cut, entries_ptr, tiles = left.cut + left.whole, left.cut, left.first, call.room // call.group
    return Job(
        work.sequence, work.plane, work.head, work.start, work.row, work.rows, work.other, work.others, ahead,
        low, high, first * sizes.BLOCK_M, first_dq, tiles, steps, cut, entries_ptr,
    )  # fmt: skip


@gluon.jit
def sparse_step(number, job, call):
    """The tile of queries of this number in a list. The tile before is itself."""
    at = gl.where(number < job.cut, number, call.room - 1 - (number - job.cut))
    found = gl.load(job.entries_ptr + at, mask=number < job.steps, other=0)
    member, tile = found // job.tiles, found % job.tiles
    dq = job.first_dq + member * call.dq_tiles + tile
    return QueryStep(tile, job.kv_head * call.group + member, dq, dq, number)


@gluon.jit
def first_step(job, call, sizes):
    """The first tile of queries. The tile before is itself: what is added there is zeros."""
    if sizes.SPARSE:
        return sparse_step(job.steps * 0, job, call)
    else:
        return QueryStep(0, job.kv_head * call.group, job.first_dq, job.first_dq, 0)


@gluon.jit
def next_step(step, job, call, sizes):
    """The next tile of queries: of the same head, or the first of the next.

    After the program of the keys before, tiles follow backwards, and in all heads of the group before the
    next: each program so begins where that one did.
    """
    if sizes.SPARSE:
        return sparse_step(step.number + 1, job, call)
    else:
        if sizes.AFTER < 0:
            tile, head, dq = step.tile, step.head + 1, step.dq + call.dq_tiles
            if head == (job.kv_head + 1) * call.group:
                tile, head, dq = tile + 1, head - call.group, dq - call.dq_tiles * call.group - 1
        else:
            tile, head, dq = step.tile + 1, step.head, step.dq + 1
            if tile == job.tiles:
                tile, head, dq = 0, head + 1, dq + call.dq_tiles - job.tiles
        return QueryStep(tile, head, dq, step.dq, 0)


@gluon.jit
def start_of(step, job, sizes):
    """The first query of a step."""
    return job.first + step.tile * (-sizes.BLOCK_M if sizes.AFTER < 0 else sizes.BLOCK_M)


@gluon.jit
def full_queries(j, job, band):
    """The queries ``[low, high)`` that see all keys of a tile from ``j`` on; none, if the sequence ends
    within it.
    """
    j0, j1 = gl.maximum(j, band.start), gl.minimum(j + KEYS, band.end)
    _, _, low, high = query_range(j0, j1, job.ahead, job.ahead + job.queries, band)
    return low, gl.where(j1 - j0 < KEYS, low, high)


# ---- what consumers read


@gluon.jit
def clear_outside(tile, n, low, high):
    """Zero the rows of a tile, from row ``n`` on, outside ``[low, high)``: they may hold anything."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HEIGHT: gl.constexpr = tile.shape[0]
    for first in gl.static_range(0, HEIGHT, 16):
        rows = tile.slice(first, 16, 0)
        i = n + first + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        x = rows.load(LAYOUT)
        rows.store(gl.where(((i >= low) & (i < high))[:, None], x, gl.zeros_like(x)))


@gluon.jit
def wait_for_keys(job, band, shared, sizes):
    """Wait for keys and values, and zero those that are no keys of this sequence: 0 times what they hold may
    be NaN.

    Each consumer zeros all of them, and so none waits for the other.
    """
    mbarrier.wait(shared.keys_full.index(0), 0)
    if sizes.HOLES:
        low, high = band.start - job.start, band.end - job.start
        if (low > 0) | (high < sizes.TILES * KEYS):
            for c in gl.static_range(sizes.TILES):
                clear_outside(shared.k.index(c), c * KEYS, low, high)
                if sizes.D_TAIL:
                    clear_outside(shared.k_tail.index(c), c * KEYS, low, high)
                clear_outside(shared.v.index(c), c * KEYS, low, high)
            fence_async_shared()


@gluon.jit
def clear_queries(m0, slot, phase, job, shared, sizes):
    """Zero the queries of a tile that see none of these keys, once they are there: they may be another
    sequence's.
    """
    if (m0 < job.low) | (m0 + sizes.BLOCK_M > job.high):
        mbarrier.wait(shared.q_full.index(slot), phase)
        mbarrier.wait(shared.dout_full.index(slot), phase)
        clear_outside(shared.q.index(slot), m0, job.low, job.high)
        if sizes.D_TAIL:
            clear_outside(shared.q_tail.index(slot), m0, job.low, job.high)
        clear_outside(shared.dout.index(slot), m0, job.low, job.high)
        fence_async_shared()
        tl.debug_barrier()  # or Triton makes every step pass one, behind this branch


@gluon.jit
def spread(vector, zero):
    """A number for each query as a tile ``[keys, queries]``."""
    tile, _ = gl.broadcast(gl.expand_dims(vector.load(gl.SliceLayout(0, zero.type.layout)), 0), zero)
    return tile
