"""Common code of the warps in the Hopper backward: the work of a program, its steps, and loaded tiles."""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...band import query_range
from ...mask_tiles import MOST, sparse_tiles_of
from ..primitives import FIRST

KEYS: gl.constexpr = gl.constexpr(64)  # keys per tile
CONSUMERS: gl.constexpr = gl.constexpr(256)  # threads of both consumers
DONE: gl.constexpr = gl.constexpr(FIRST + 6)  # named barrier after which no consumer reads keys
# Each ring slot has a named barrier that releases it to the producer; this is the number of the first.
FREED: gl.constexpr = gl.constexpr(FIRST + 7)


class BackwardSizes(NamedTuple):
    """Compile-time constants of the backward: channels of blocks and of whole tensors, tiles and ring slots.

    ``TILES``: key tiles per program.
    ``BLOCK_M``: queries per tile.
    ``BY_ROWS``: tiles of dq are computed in two halves, each with half of the queries; otherwise each with
        half of the channels.
    ``HOLES``: rows before or after a sequence's keys may hold padding or another sequence.
    ``DQ_WARPGROUP``: a third warpgroup computes dq.
    ``AFTER``: the order in which programs add to dq: any (0), after the program of the next keys (1), or
        after the program of the previous keys (-1).
    ``SPARSE``: a mask function hides keys, and lists name the tiles that remain.
    ``NEEDS_SCORE``: the derivative of a score function depends on the score. It is computed while the score
        is in registers, and kept in 16 bits until it multiplies the gradient of the probabilities.
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
    NEEDS_SCORE: gl.constexpr = False


class BackwardCall(NamedTuple):
    """The parameters of the backward kernel."""

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
    """The work of a program: key tiles of a KV head from ``start`` on, and the query tiles that see them.

    ``row``, ``rows``: first row and number of the sequence's keys.
    ``other``, ``queries``: first row and number of the sequence's queries.
    ``plane``: batch index of the sequence in the tensors, 0 if sequences are packed.
    ``ahead``: index of the sequence's first query, relative to its first key.
    ``low``, ``high``: queries ``[low, high)`` see some of the keys.
    ``first``, ``first_dq``: first query of a head's first tile, and index of that tile's sums of dq.
    ``tiles``: query tiles per head; not used with a sparse list.
    ``steps``: query tiles of all heads that share the KV head.
    ``cut``: with a sparse list, the number of leading steps whose tiles are partial.
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
    """One step of a program: a query tile of one head.

    ``dq``, ``dq_before``: indices of the sums of dq of this tile and of the previous one.
    ``number``: position of the tile in a sparse list.
    """

    tile: gl.tensor
    head: gl.tensor
    dq: gl.tensor
    dq_before: gl.tensor
    number: gl.tensor


class BackwardShared(NamedTuple):
    """The shared memory of the backward: keys and values, rings of query tiles, and mbarriers."""

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
    """Return the queries ``[low, high)`` that see a program's keys, their first tile, and the tile count.

    The program's keys begin at ``start``.
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
    """Return the work of a program: its keys, and the query tiles that see them."""
    ahead = work.rows - work.others
    low, high, first, tiles = tiles_of(work.start, work, band, sizes)
    if sizes.AFTER < 0:
        first += tiles - 1
    if sizes.SPARSE:
        first = 0
    first_dq = (
        work.plane.to(gl.int32) * call.heads + work.head.to(gl.int32) * call.group
    ) * call.dq_tiles + first
    if sizes.PACKED:  # sequences are adjacent in dq, each with an extra, partial tile
        first_dq += work.other.to(gl.int32) // sizes.BLOCK_M + work.sequence.to(gl.int32)
    steps, cut, entries_ptr = tiles * call.group, 0, 0
    if sizes.SPARSE:
        BLOCK_N: gl.constexpr = sizes.TILES * KEYS
        left = sparse_tiles_of(
            call.lists_ptr, work, call.stride_list_b, call.stride_list_h, call.room, BLOCK_N, sizes.PACKED
        )
        steps, cut, entries_ptr = left.cut + left.whole, left.cut, left.first
    return Job(
        work.sequence, work.plane, work.head, work.start, work.row, work.rows, work.other, work.others, ahead,
        low, high, first * sizes.BLOCK_M, first_dq, tiles, steps, cut, entries_ptr,
    )  # fmt: skip


@gluon.jit
def sparse_step(number, job, call):
    """Return the step for entry ``number`` of a sparse list.

    ``dq_before`` is set to the step's own tile, because consumers that take sparse lists do not use it.
    """
    at = gl.where(number < job.cut, number, call.room - 1 - (number - job.cut))
    found = gl.load(job.entries_ptr + at, mask=number < job.steps, other=0)
    member, tile = found // MOST, found % MOST
    dq = job.first_dq + member * call.dq_tiles + tile
    return QueryStep(tile, job.kv_head * call.group + member, dq, dq, number)


@gluon.jit
def first_step(job, call, sizes):
    """Return the first step of a program, with its own tile as the previous one, since there is none.

    This is harmless: consumers that add dq one step late add only zeros in the first step.
    """
    if sizes.SPARSE:
        return sparse_step(job.steps * 0, job, call)
    else:
        return QueryStep(0, job.kv_head * call.group, job.first_dq, job.first_dq, 0)


@gluon.jit
def next_step(step, job, call, sizes):
    """Return the next step: the next query tile of the same head, or the first tile of the next head.

    If a program must add after the program of the previous keys (``AFTER`` = -1), it visits tiles in
    descending order, and each tile for all heads of the group before the next tile. It thus begins with the
    same tile as the program of the previous keys.
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
    """Return the index of the first query in the query tile of a step."""
    return job.first + step.tile * (-sizes.BLOCK_M if sizes.AFTER < 0 else sizes.BLOCK_M)


@gluon.jit
def full_queries(j, job, band):
    """Return the queries ``[low, high)`` that see all keys of the tile from ``j`` on.

    The range is empty if the bounds of the sequence cut the tile.
    """
    return full_queries_of(j, job.ahead, job.queries, band)


@gluon.jit
def full_queries_of(j, ahead, queries, band):
    """Return what :func:`full_queries` does, for ``queries`` of which the first has the index ``ahead``."""
    j0, j1 = gl.maximum(j, band.start), gl.minimum(j + KEYS, band.end)
    _, _, low, high = query_range(j0, j1, ahead, ahead + queries, band)
    return low, gl.where(j1 - j0 < KEYS, low, high)


@gluon.jit
def vectors(SLOTS: gl.constexpr, LENGTH: gl.constexpr):
    """Allocate shared memory for ``SLOTS`` fp32 vectors of ``LENGTH`` elements."""
    return gl.allocate_shared_memory(gl.float32, [SLOTS, LENGTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))


# ---- loaded tiles


@gluon.jit
def clear_outside(tile, n, low, high):
    """Zero the rows of a tile outside ``[low, high)``, since they may hold arbitrary data.

    The first row of the tile has number ``n``.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HEIGHT: gl.constexpr = tile.shape[0]
    for first in gl.static_range(0, HEIGHT, 16):
        rows = tile.slice(first, 16, 0)
        i = n + first + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        x = rows.load(LAYOUT)
        rows.store(gl.where(((i >= low) & (i < high))[:, None], x, gl.zeros_like(x)))


@gluon.jit
def wait_for_keys(job, band, shared, sizes):
    """Wait until keys and values are loaded, and zero the rows that are not keys of this sequence.

    These rows may hold NaN, and 0 times NaN is NaN. Both consumers zero all of these rows, so that neither
    must wait for the other.
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
    """If queries of a tile see none of the program's keys, wait for the tile and zero these queries.

    Their rows may belong to another sequence.
    """
    if (m0 < job.low) | (m0 + sizes.BLOCK_M > job.high):
        mbarrier.wait(shared.q_full.index(slot), phase)
        mbarrier.wait(shared.dout_full.index(slot), phase)
        clear_outside(shared.q.index(slot), m0, job.low, job.high)
        if sizes.D_TAIL:
            clear_outside(shared.q_tail.index(slot), m0, job.low, job.high)
        clear_outside(shared.dout.index(slot), m0, job.low, job.high)
        fence_async_shared()
        tl.debug_barrier()  # otherwise Triton adds a barrier after the branch, to every step


@gluon.jit
def spread(vector, zero):
    """Broadcast a vector of one number per query to a tile ``[keys, queries]``."""
    tile, _ = gl.broadcast(gl.expand_dims(vector.load(gl.SliceLayout(0, zero.type.layout)), 0), zero)
    return tile
