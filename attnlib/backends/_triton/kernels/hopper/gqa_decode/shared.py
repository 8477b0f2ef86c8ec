"""What a program decodes of a cache's pages for Hopper, and how its producer warp loads that."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..primitives import FIRST, async_load, barrier_sync, reinterpret
from ..splits import entry_of

M: gl.constexpr = gl.constexpr(16)  # rows of queries of a KV head that a warp multiplies
TOKENS: gl.constexpr = gl.constexpr(16)  # of a warp's part of a tile
HALF: gl.constexpr = gl.constexpr(64)  # channels come in halves
BOX: gl.constexpr = gl.constexpr(2048)  # bytes of a box of 16 tokens and 64 channels of 16 bits


class ProgramSizes(NamedTuple):
    """Warps of a consumer, KV heads that they share out, tokens of a page, rows of a program."""

    WARPS: gl.constexpr
    HEADS: gl.constexpr
    PAGE: gl.constexpr
    BLOCK_M: gl.constexpr


class PagesShared(NamedTuple):
    """Shared memory: boxes of keys and values, weights and maxima of all warps, barriers of loads."""

    boxes: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.constexpr_function
def sums_of(warps):
    """The layout of products, ``[warp, row, token or channel]``."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def factor_of(warps, number):
    """The layout of a first or second factor."""
    return gl.DotOperandLayout(number, sums_of(warps), 2)


@gluon.constexpr_function
def threads_of(sizes):
    """Threads of consumers and the producer."""
    return (sizes.WARPS * sizes.BLOCK_M // M + 1) * 32


@gluon.jit
def tiles_of(split, sizes):
    """The number of the first tile, how many there are, and tokens of each."""
    TILE: gl.constexpr = sizes.WARPS // sizes.HEADS * TOKENS
    first = split.low // TILE
    return first, gl.maximum(gl.cdiv(split.high, TILE) - first, 0), TILE


@gluon.jit
def row_of(entry, n, call, sizes):
    """The row of the planes where token ``n`` lies, on a page that there is."""
    page = gl.minimum(entry.to(gl.uint32), (call.pages - 1).to(gl.uint32)).to(gl.int32)
    return page * call.page_rows + (n % sizes.PAGE if sizes.PAGE else n)


@gluon.jit
def entries_at(n, split, call, sizes):
    """The entries for all parts of the tile from token ``n`` on."""
    entries = ()
    for part in gl.static_range(sizes.WARPS // sizes.HEADS):
        entries = entries + (entry_of(n + part * TOKENS, split, call, sizes.PAGE),)  # noqa: RUF005
    return entries


@gluon.jit
def load_part(desc, boxes, number, part: gl.constexpr, head, row, full, sizes):
    """Load 16 rows of a plane, which are this part of a tile."""
    shape: gl.constexpr = [sizes.WARPS // sizes.HEADS, sizes.HEADS, TOKENS, HALF]
    for half in gl.static_range(2):
        box = reinterpret(boxes.index(number + half), boxes.dtype, shape, desc.layout).index(part)
        async_load(desc, [head, row, half * HALF], full, box)


@gluon.jit
def produce(k_desc, v_desc, split, call, shared, sizes):
    """Load tiles as slots become free."""
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
    # A barrier that is left half full would hang the next program.
    for slot in range(gl.minimum(tiles, SLOTS)):
        barrier_sync(FIRST + slot, threads_of(sizes))


@gluon.jit
def tokens_in(LAYOUT: gl.constexpr, sizes):
    """The tokens of a tile by number, ``[warp, token]``."""
    warp, token = (
        gl.arange(0, sizes.WARPS, gl.SliceLayout(1, LAYOUT)),
        gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT)),
    )
    return (warp // sizes.HEADS * TOKENS)[:, None] + token[None, :]


@gluon.jit
def rows_in(number: gl.constexpr, split, call, LAYOUT: gl.constexpr, sizes):
    """The query heads of all rows of a consumer, ``[warp, row]``; and the query tokens of those of a warp."""
    head = split.head * sizes.HEADS + gl.arange(0, sizes.WARPS, gl.SliceLayout(1, LAYOUT)) % sizes.HEADS
    r = split.start + number * M + gl.arange(0, M, gl.SliceLayout(0, LAYOUT))
    return (head * call.group)[:, None] + (r % call.group)[None, :], r // call.group


@gluon.jit
def channels(half: gl.constexpr, LAYOUT: gl.constexpr):
    """The channels of a half."""
    return gl.arange(0, HALF, LAYOUT) + half * HALF
