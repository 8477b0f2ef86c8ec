"""What the producer and the consumers of a program share: rings of tiles, barriers, and the work that is
posted.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...band import key_range
from ...mask_tiles import sparse_tiles_of
from ...tile import Work, locate

ROWS: gl.constexpr = gl.constexpr(64)  # queries of a consumer
POSTS: gl.constexpr = gl.constexpr(2)  # works that are posted: the last one, and the next
WORDS: gl.constexpr = gl.constexpr(8)  # of a post


class ForwardSizes(NamedTuple):
    """What a kernel is compiled for: channels of blocks, keys of a block, consumers, and the slots of each
    ring.

    ``HOLES``: rows beyond a sequence's keys may be another's. ``HIDES_FIRST``: so may the mask hide its first
    keys. ``PIECES``: the channels of values are multiplied in as many parts. ``TRANSPOSED``: values lie by
    channels. ``SPARSE``: a function hides keys, and lists say which blocks are left.
    """

    D: gl.constexpr
    D_TAIL: gl.constexpr
    E: gl.constexpr
    BLOCK_N: gl.constexpr
    CONSUMERS: gl.constexpr
    Q_SLOTS: gl.constexpr
    K_SLOTS: gl.constexpr
    V_SLOTS: gl.constexpr
    Q_IN_REGISTERS: gl.constexpr
    OUT_IN_Q: gl.constexpr
    HOLES: gl.constexpr
    HIDES_FIRST: gl.constexpr
    PACKED: gl.constexpr
    PIECES: gl.constexpr
    THREADS: gl.constexpr
    TRANSPOSED: gl.constexpr = False
    SPARSE: gl.constexpr = False


class ForwardCall(NamedTuple):
    """The call, by the parameters of the kernel; ``tiles`` are its blocks of queries, of all heads and
    sequences.
    """

    cu_q_ptr: gl.tensor
    cu_k_ptr: gl.tensor
    starts_ptr: gl.tensor
    ends_ptr: gl.tensor
    slopes_ptr: gl.tensor
    sinks_ptr: gl.tensor
    origin_ptr: gl.tensor
    stride_slopes: gl.tensor
    batch: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    s: gl.tensor
    t: gl.tensor
    heads_per_wave: gl.tensor
    left: gl.tensor
    right: gl.tensor
    prefix: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor
    tiles: gl.tensor
    lists_ptr: gl.tensor = None
    stride_list_b: gl.tensor = None
    stride_list_h: gl.tensor = None
    room: gl.tensor = None


class ForwardShared(NamedTuple):
    """Shared memory: rings of tiles, the work that the producer posts, and the barriers that say when each is
    there.
    """

    q: gl.shared_memory_descriptor
    q_tail: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    work: gl.shared_memory_descriptor
    work_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor


class KeyBlocks(NamedTuple):
    """Numbers of blocks of keys: those seen, ``[bottom, top)``, and among them those that all rows see
    whole.
    """

    bottom: gl.tensor
    top: gl.tensor
    full_bottom: gl.tensor
    full_top: gl.tensor


@gluon.jit
def work_of(tile, call, sizes):
    """The head of a sequence and the block of its queries that a tile is."""
    REVERSED: gl.constexpr = call.right is not None
    heads, ahead = call.heads, call.heads_per_wave
    BLOCK_M: gl.constexpr = ROWS * sizes.CONSUMERS
    return locate(
        tile, call.cu_q_ptr, call.cu_k_ptr, call.batch, heads, call.s, call.t, ahead, BLOCK_M, REVERSED
    )


@gluon.jit
def blocks_of(work, band, sizes, FIRST_ROW: gl.constexpr, COUNT: gl.constexpr):
    """The blocks that ``COUNT`` rows of the work from ``FIRST_ROW`` on see; one at least, and be it
    hidden.
    """
    i = work.others - work.rows + work.start + FIRST_ROW
    low, high, all_low, all_high = key_range(i, gl.minimum(i + COUNT, work.others), band)
    bottom = gl.maximum(low, 0) // sizes.BLOCK_N
    top = gl.maximum(gl.cdiv(high, sizes.BLOCK_N), bottom + 1)
    return KeyBlocks(bottom, top, gl.cdiv(all_low, sizes.BLOCK_N), all_high // sizes.BLOCK_N)


class Visits(NamedTuple):
    """The blocks of keys that consumers visit, one at least: from ``top`` down, or those of a list, cut ones
    first.
    """

    count: gl.tensor
    top: gl.tensor
    cut: gl.tensor
    first_ptr: gl.tensor
    room: gl.tensor


class Visit(NamedTuple):
    """A block that is visited, and the one before; whether it is masked, and whether more follow."""

    block: gl.tensor
    before: gl.tensor
    masked: gl.tensor
    more: gl.tensor


@gluon.jit
def visits_of(work, band, call, sizes):
    """The blocks of keys that the work visits."""
    BLOCK_M: gl.constexpr = ROWS * sizes.CONSUMERS
    if sizes.SPARSE:
        tiles = sparse_tiles_of(
            call.lists_ptr, work, call.stride_list_b, call.stride_list_h, call.room, BLOCK_M, sizes.PACKED
        )
        return Visits(gl.maximum(tiles.cut + tiles.whole, 1), 0, tiles.cut, tiles.first, call.room)
    else:
        blocks = blocks_of(work, band, sizes, 0, BLOCK_M)
        return Visits(blocks.top - blocks.bottom, blocks.top, 0, 0, 0)


@gluon.jit
def visited(visits, n, sizes):
    """The number of the ``n``-th block that is visited."""
    if sizes.SPARSE:
        return gl.load(visits.first_ptr + gl.where(n < visits.cut, n, visits.room - 1 - (n - visits.cut)))
    else:
        return visits.top - 1 - n


@gluon.jit
def post(work, tile, number, call, shared, sizes):
    """Tell the consumers the work of the ``number``-th tile, once they have left the queries of the one
    before.

    The divisions that find it take 600 cycles, which the producer has.
    """
    slot = number % sizes.Q_SLOTS * sizes.CONSUMERS
    for c in gl.static_range(sizes.CONSUMERS):
        mbarrier.wait(shared.q_empty.index(slot + c), ((number // sizes.Q_SLOTS) & 1) ^ 1)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    zero, at = gl.full([1], 0, gl.int32, LAYOUT), number % POSTS * WORDS
    shared.work.index(at).store(zero + tile)
    shared.work.index(at + 1).store(zero + work.sequence.to(gl.int32))
    shared.work.index(at + 2).store(zero + work.head.to(gl.int32))
    shared.work.index(at + 3).store(zero + work.start)
    shared.work.index(at + 4).store(zero + work.row.to(gl.int32))
    shared.work.index(at + 5).store(zero + work.rows)
    shared.work.index(at + 6).store(zero + work.other.to(gl.int32))
    shared.work.index(at + 7).store(zero + work.others)
    mbarrier.arrive(shared.work_full.index(number % POSTS), count=1)


@gluon.jit
def posted(number, word, shared):
    """One word of the work that was posted."""
    return gl.max(
        shared.work.index(number % POSTS * WORDS + word).load(gl.BlockedLayout([1], [32], [4], [0])), 0
    )


@gluon.jit
def wait_for_work(number, shared):
    """The ``number``-th tile of this program, once it is posted."""
    mbarrier.wait(shared.work_full.index(number % POSTS), number // POSTS & 1)
    return posted(number, 0, shared)


@gluon.jit
def read(number, shared, sizes):
    """The work of the ``number``-th tile of this program."""
    sequence, head, start = posted(number, 1, shared), posted(number, 2, shared), posted(number, 3, shared)
    row, rows = posted(number, 4, shared).to(gl.int64), posted(number, 5, shared)
    other, others = posted(number, 6, shared).to(gl.int64), posted(number, 7, shared)
    return Work(sequence, 0 * sequence if sizes.PACKED else sequence, head, start, row, rows, other, others)
