"""The producer warps of the kernel for selected latents: they gather the rows that a list selects."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..mla_decode.rows_64 import LEFT, RIGHT, WITH_LOADERS
from ..mla_decode.shared import HALF
from ..primitives import barrier_sync, copy_by_pointers
from ..splits import TOKENS

# Each thread copies 16 bytes at a time, so eight threads copy a line of 128 bytes.
LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


class SelectedRows(NamedTuple):
    """The latents of a sequence, from its first token on, and the ``count`` tokens that a list selects.

    In a cache, the latents of all pages begin at ``k_ptr``, and their rotary channels at ``tail_ptr``. Page
    ``n`` begins at row ``n * page_rows``, and ``table_ptr`` has the pages of the sequence. Without a cache,
    the rotary channels follow the latent's, and the fields of a cache are None.
    """

    k_ptr: gl.tensor
    tail_ptr: gl.tensor
    stride_kt: gl.tensor
    stride_tt: gl.tensor
    list_ptr: gl.tensor
    count: gl.tensor
    table_ptr: gl.tensor
    pages: gl.tensor
    page_rows: gl.tensor


@gluon.jit
def tokens_of_tile(tile, rows):
    """Load the selected tokens of a tile. The last token of a list fills up its last tile.

    An empty list has no tiles; the number that is loaded for it is its count, which lies before its tokens.
    For an empty split, it is the token before the split.
    """
    n = tile * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    return gl.load(rows.list_ptr + gl.minimum(n, rows.count - 1))


@gluon.jit
def entries_of(tokens, rows, PAGE: gl.constexpr):
    """Load the page-table entries of tokens."""
    return gl.load(rows.table_ptr + (tokens // PAGE if PAGE else tokens * 0))


@gluon.jit
def rows_of(tokens, entries, rows, PAGE: gl.constexpr):
    """Return the cache rows of tokens. A page index out of range is clamped to the last page."""
    page = gl.minimum(entries.to(gl.uint32), (rows.pages - 1).to(gl.uint32)).to(gl.int32)
    return page * rows.page_rows + (tokens % PAGE if PAGE else tokens)


@gluon.jit
def copy_channels(at, FIRST: gl.constexpr, tile):
    """Start to copy channels of a tile's rows to shared memory, from channel ``FIRST`` on."""
    c = FIRST + gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    copy_by_pointers(tile, at[:, None] + c[None, :])


@gluon.jit
def mark_full_later(full):
    """Arrive at an mbarrier once the copies that this thread has started are complete."""
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def gather(rows, shared, PAGE: gl.constexpr):
    """Run the producer warps: gather tiles in pairs, each half of a tile as soon as its memory is free.

    The tokens of the next tile are loaded while a tile is copied. In a cache, tokens are loaded two tiles
    ahead, and page-table entries one tile.
    """
    CACHED: gl.constexpr = rows.table_ptr is not None
    tiles = gl.cdiv(gl.cdiv(rows.count, TOKENS), 2) * 2  # the last one may only repeat a token
    tokens = tokens_of_tile(0, rows)
    if CACHED:
        entries, following = entries_of(tokens, rows, PAGE), tokens_of_tile(1, rows)
    for t in range(tiles):
        slot = t % 2
        if CACHED:
            row, tokens = rows_of(tokens, entries, rows, PAGE), following
            entries, following = entries_of(tokens, rows, PAGE), tokens_of_tile(t + 2, rows)
        else:
            row, tokens = tokens, tokens_of_tile(t + 1, rows)
        # Rows begin at multiples of 16 bytes, which Triton has to know in order to copy 16 bytes at once.
        at = rows.k_ptr + gl.multiple_of(row.to(gl.int64) * rows.stride_kt, 8)
        if t >= 2:
            barrier_sync(LEFT + slot, WITH_LOADERS)
        copy_channels(at, 0, shared.left.index(slot))
        mark_full_later(shared.left_full.index(slot))
        if t >= 2:
            barrier_sync(RIGHT + slot, WITH_LOADERS)
        copy_channels(at, HALF, shared.right.index(slot))
        if CACHED:
            at = rows.tail_ptr + gl.multiple_of(row.to(gl.int64) * rows.stride_tt, 8)
        copy_channels(at, 0 if CACHED else 2 * HALF, shared.tail.index(slot))
        mark_full_later(shared.right_full.index(slot))
    if tiles > 0:  # an incomplete barrier would hang the next program
        for slot in gl.static_range(2):
            barrier_sync(LEFT + slot, WITH_LOADERS)
            barrier_sync(RIGHT + slot, WITH_LOADERS)
