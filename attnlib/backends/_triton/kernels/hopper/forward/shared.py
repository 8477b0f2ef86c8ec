"""Common code of the warps in the Hopper forward: rings of tiles, barriers, and work that is posted.

The producer posts the work: it writes to shared memory which tile of queries the consumers compute next.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...band import key_range
from ...mask_tiles import sparse_tiles_of
from ...tile import Work, locate

ROWS: gl.constexpr = gl.constexpr(64)  # queries per consumer
POSTS: gl.constexpr = gl.constexpr(2)  # posts in shared memory: for the current and the next tile of queries
WORDS: gl.constexpr = gl.constexpr(8)  # int32 words that describe one tile


class ForwardSizes(NamedTuple):
    """Compile-time constants of the forward: channel blocks, block size of keys, consumers, and ring slots.

    ``HOLES``: rows before or after a sequence's keys may hold padding or another sequence.
    ``HIDES_FIRST``: the mask may hide the first keys of a sequence.
    ``PIECES``: the number of pieces in which the value channels are multiplied.
    ``TRANSPOSED``: values are stored channel-major.
    ``K_THREADS``, ``V_THREADS``: threads that meet at the named barrier of a slot of keys, or of values.
    ``SPARSE``: a mask function hides keys, and lists name the blocks that remain.
    ``E_TAIL``: channels of values that a second consumer sums for the same queries (partner.py), or 0.
    ``PARTS``: the number of parts in which the scores of a key block are computed.
    ``TURNS``: two consumers, which see the same key blocks, take turns to issue their products.
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
    K_THREADS: gl.constexpr
    V_THREADS: gl.constexpr
    TRANSPOSED: gl.constexpr = False
    SPARSE: gl.constexpr = False
    E_TAIL: gl.constexpr = 0
    PARTS: gl.constexpr = 1
    TURNS: gl.constexpr = False


class ForwardCall(NamedTuple):
    """The parameters of the forward kernel; ``tiles`` is the number of query blocks, over all heads."""

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
    """The shared memory of the forward: rings of tiles, posted work, and the mbarriers that guard them.

    ``p``, ``factors``: what the partner of a consumer receives (partner.py).
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
    v_tail: gl.shared_memory_descriptor = None
    p: gl.shared_memory_descriptor = None
    factors: gl.shared_memory_descriptor = None


class KeyBlocks(NamedTuple):
    """The key blocks that a set of query rows must visit, and those that need no mask.

    ``[bottom, top)``: blocks that at least one row sees.
    ``[full_bottom, full_top)``: blocks that every row sees completely.
    """

    bottom: gl.tensor
    top: gl.tensor
    full_bottom: gl.tensor
    full_top: gl.tensor


@gluon.jit
def work_of(tile, call, sizes):
    """Return the work that a tile number stands for: a block of queries of one head and sequence."""
    REVERSED: gl.constexpr = call.right is not None
    heads, ahead = call.heads, call.heads_per_wave
    BLOCK_M: gl.constexpr = ROWS * sizes.CONSUMERS
    return locate(
        tile, call.cu_q_ptr, call.cu_k_ptr, call.batch, heads, call.s, call.t, ahead, BLOCK_M, REVERSED
    )


@gluon.jit
def blocks_of(work, band, sizes, FIRST_ROW: gl.constexpr, COUNT: gl.constexpr):
    """Return the key blocks that ``COUNT`` query rows of a tile see, beginning with row ``FIRST_ROW``.

    The range has at least one block, even if all keys of the block are hidden.
    """
    i = work.others - work.rows + work.start + FIRST_ROW
    low, high, all_low, all_high = key_range(i, gl.minimum(i + COUNT, work.others), band)
    bottom = gl.maximum(low, 0) // sizes.BLOCK_N
    top = gl.maximum(gl.cdiv(high, sizes.BLOCK_N), bottom + 1)
    return KeyBlocks(bottom, top, gl.cdiv(all_low, sizes.BLOCK_N), all_high // sizes.BLOCK_N)


class Visits(NamedTuple):
    """The key blocks that consumers visit for a tile of queries; there is always at least one.

    Without a mask function, these are the ``count`` blocks below ``top``, in descending order. With one, a
    sparse list names the blocks: ``cut`` partial blocks first, then the full blocks. ``room`` is the number
    of blocks that fit in the list.
    """

    count: gl.tensor
    top: gl.tensor
    cut: gl.tensor
    first_ptr: gl.tensor
    room: gl.tensor


class Visit(NamedTuple):
    """One step of a consumer, which visits one key block.

    ``before``: the block visited before this one.
    ``masked``: the block needs a mask.
    ``more``: another block follows.
    """

    block: gl.tensor
    before: gl.tensor
    masked: gl.tensor
    more: gl.tensor


@gluon.jit
def visits_of(work, band, call, sizes):
    """Return the key blocks to visit for a tile of queries."""
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
    """Return the index of the ``n``-th key block to visit."""
    if sizes.SPARSE:
        return gl.load(visits.first_ptr + gl.where(n < visits.cut, n, visits.room - 1 - (n - visits.cut)))
    else:
        return visits.top - 1 - n


@gluon.jit
def post(work, tile, number, call, shared, sizes):
    """Post the work of the ``number``-th tile to the consumers, once they have released its query slot.

    Finding the work takes divisions, about 600 cycles. The producer has this time to spare, so it does this
    for all consumers.
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
    """Read one int32 word of the work that was posted for the ``number``-th tile."""
    return gl.max(
        shared.work.index(number % POSTS * WORDS + word).load(gl.BlockedLayout([1], [32], [4], [0])), 0
    )


@gluon.jit
def wait_for_work(number, shared):
    """Wait until the ``number``-th tile of this program is posted, and return its index."""
    mbarrier.wait(shared.work_full.index(number % POSTS), number // POSTS & 1)
    return posted(number, 0, shared)


@gluon.jit
def read(number, shared, sizes):
    """Read the work that was posted for the ``number``-th tile of this program."""
    sequence, head, start = posted(number, 1, shared), posted(number, 2, shared), posted(number, 3, shared)
    row, rows = posted(number, 4, shared).to(gl.int64), posted(number, 5, shared)
    other, others = posted(number, 6, shared).to(gl.int64), posted(number, 7, shared)
    return Work(sequence, 0 * sequence if sizes.PACKED else sequence, head, start, row, rows, other, others)


# ---- ring slots


@gluon.jit
def advance(slot, phase, SLOTS: gl.constexpr):
    """Return the next slot of a ring of tiles, and the phase of its mbarrier."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def clear_others(values, n, band, sizes):
    """Zero the rows of a value block outside the sequence's keys, since they may hold arbitrary data.

    ``n`` is the first key of the block. A fence makes the zeros visible to wgmma.
    """
    BLOCK_N: gl.constexpr = sizes.BLOCK_N
    if (n < band.start) | (n + BLOCK_N > band.end):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        for first in gl.static_range(0, BLOCK_N, 16):
            rows = values.slice(first, 16, 0)
            j = n + first + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
            x = rows.load(LAYOUT)
            rows.store(gl.where(((j >= band.start) & (j < band.end))[:, None], x, gl.zeros_like(x)))
        fence_async_shared()
