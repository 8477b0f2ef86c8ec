"""Common code of the GQA decode kernels for Hopper: sizes, layouts, the producer warp for 16-bit pages."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..primitives import FIRST, async_load, barrier_sync, reinterpret
from ..splits import entry_of

M: gl.constexpr = gl.constexpr(16)  # query rows that a warp processes for a KV head
TOKENS: gl.constexpr = gl.constexpr(16)  # tokens of each tile that a warp processes
HALF: gl.constexpr = gl.constexpr(64)  # channels in half of a head
BOX: gl.constexpr = gl.constexpr(2048)  # size in bytes of 16 tokens x 64 channels of 16 bits


class ProgramSizes(NamedTuple):
    """The sizes of a program: warps per consumer, KV heads, tokens per page, and query rows."""

    WARPS: gl.constexpr
    HEADS: gl.constexpr
    PAGE: gl.constexpr
    BLOCK_M: gl.constexpr


class PagesShared(NamedTuple):
    """The shared memory of a program: tiles of keys and values, each warp's maxima and sums, mbarriers."""

    boxes: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.constexpr_function
def sums_of(warps):
    """Return the register layout of matrix products ``[warp, row, token or channel]``."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def factor_of(warps, number):
    """Return the register layout of the left (0) or right (1) operand of a matrix product."""
    return gl.DotOperandLayout(number, sums_of(warps), 2)


@gluon.constexpr_function
def threads_of(sizes):
    """Return the number of threads of all consumers and the producer."""
    return (sizes.WARPS * sizes.BLOCK_M // M + 1) * 32


@gluon.jit
def tiles_of(split, sizes):
    """Return the index of the first tile of a split, the number of tiles, and the tokens per tile."""
    TILE: gl.constexpr = sizes.WARPS // sizes.HEADS * TOKENS
    first = split.low // TILE
    return first, gl.maximum(gl.cdiv(split.high, TILE) - first, 0), TILE


@gluon.jit
def row_of(entry, n, call, sizes):
    """Return the cache row of token ``n``. A page index out of range is clamped to the last page."""
    page = gl.minimum(entry.to(gl.uint32), (call.pages - 1).to(gl.uint32)).to(gl.int32)
    return page * call.page_rows + (n % sizes.PAGE if sizes.PAGE else n)


@gluon.jit
def entries_at(n, split, call, sizes):
    """Load the page-table entries for each group of 16 tokens in the tile from token ``n`` on."""
    entries = ()
    for part in gl.static_range(sizes.WARPS // sizes.HEADS):
        entries = entries + (entry_of(n + part * TOKENS, split, call, sizes.PAGE),)  # noqa: RUF005
    return entries


@gluon.jit
def load_part(desc, boxes, number, part: gl.constexpr, head, row, full, sizes):
    """Start the TMA loads of both channel halves of a group of 16 tokens into a tile."""
    shape: gl.constexpr = [sizes.WARPS // sizes.HEADS, sizes.HEADS, TOKENS, HALF]
    for half in gl.static_range(2):
        box = reinterpret(boxes.index(number + half), boxes.dtype, shape, desc.layout).index(part)
        async_load(desc, [head, row, half * HALF], full, box)


@gluon.jit
def produce(k_desc, v_desc, split, call, shared, sizes):
    """Run the producer warp: load each tile of the split as soon as a ring slot becomes free."""
    SLOTS: gl.constexpr = shared.full.shape[0]
    first, tiles, TILE = tiles_of(split, sizes)
    head = split.head * sizes.HEADS
    entries = entries_at(first * TILE, split, call, sizes)
    for t in range(tiles):
        slot, n = t % SLOTS, (first + t) * TILE
        following = entries_at(n + TILE, split, call, sizes)
        if t >= SLOTS:
            barrier_sync(FIRST + slot, threads_of(sizes))
        full, number = shared.full.index(slot), slot * 4
        mbarrier.expect(full, BOX * 4 * sizes.WARPS)
        for part in gl.static_range(sizes.WARPS // sizes.HEADS):
            row = row_of(entries[part], n + part * TOKENS, call, sizes)
            load_part(k_desc, shared.boxes, number, part, head, row, full, sizes)
            load_part(v_desc, shared.boxes, number + 2, part, head, row, full, sizes)
        entries = following
    # Complete every named barrier, since an incomplete one would hang the next program.
    for slot in range(gl.minimum(tiles, SLOTS)):
        barrier_sync(FIRST + slot, threads_of(sizes))


@gluon.jit
def tokens_in(LAYOUT: gl.constexpr, sizes):
    """Return the positions of each warp's tokens within a tile, ``[warp, token]``."""
    warp, token = (
        gl.arange(0, sizes.WARPS, gl.SliceLayout(1, LAYOUT)),
        gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT)),
    )
    return (warp // sizes.HEADS * TOKENS)[:, None] + token[None, :]


@gluon.jit
def rows_in(number: gl.constexpr, split, call, LAYOUT: gl.constexpr, sizes):
    """Return the query head of each row of a consumer, ``[warp, row]``, and its query token, ``[row]``."""
    head = split.head * sizes.HEADS + gl.arange(0, sizes.WARPS, gl.SliceLayout(1, LAYOUT)) % sizes.HEADS
    r = split.start + number * M + gl.arange(0, M, gl.SliceLayout(0, LAYOUT))
    return (head * call.group)[:, None] + (r % call.group)[None, :], r // call.group


@gluon.jit
def channels(half: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the indices of the channels in the first (0) or second (1) half of a head."""
    return gl.arange(0, HALF, LAYOUT) + half * HALF
