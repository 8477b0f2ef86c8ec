"""Functions for kernels over a paged cache: claim a split of a sequence, look up pages, locate tokens."""

import triton
import triton.language as tl

from .tile import Work, owner, tokens_of

LAST: tl.constexpr = tl.constexpr(2147483647)  # the end of a split that extends to the end of its sequence
FEW: tl.constexpr = tl.constexpr(4)  # tiles with at most this many pages read page numbers as scalars
ENTRY: tl.constexpr = tl.constexpr(8)  # int32 numbers in a slot of a schedule, which describes one split


@triton.jit
def entry_of(table_ptr, n, end, PAGE: tl.constexpr):
    """Load the page-table entry of token ``min(n, end - 1)``, as two halves of 16 bits.

    Triton would copy a 32-bit entry to shared memory asynchronously, and wait in every tile for all loads in
    flight. It does not do this for 16-bit loads, because asynchronous copies have at least 4 bytes.
    ``PAGE = 0`` means a contiguous cache, in which each sequence has one entry.
    """
    n = tl.maximum(tl.minimum(n, end - 1), 0)
    half = table_ptr.to(tl.pointer_type(tl.uint16), bitcast=True) + 2 * (n // PAGE if PAGE else n * 0)
    return tl.load(half), tl.load(half + 1)


@triton.constexpr_function
def pages_of(PAGE, BLOCK):
    """Return the maximum number of pages that a tile of ``BLOCK`` tokens touches.

    ``BLOCK`` is a power of two, and tiles begin at multiples of it.
    """
    if PAGE == 0:
        return 1
    step = min(PAGE & -PAGE, BLOCK)  # tiles begin at multiples of `step` within a page
    return (PAGE - step + BLOCK - 1) // PAGE + 1


@triton.jit
def tokens_from(n, BLOCK: tl.constexpr):
    """Return the tokens of a tile: ``BLOCK`` tokens from ``n`` on, or ``n`` itself if it has all of them."""
    return n if len(n.shape) > 0 else n + tl.arange(0, BLOCK)


@triton.jit
def page_offset(n, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the position within its page of token ``n``, the first token of a tile."""
    return 0 if PAGE == 0 or BLOCK % PAGE == 0 else n % PAGE


@triton.jit
def entries_at(table_ptr, n, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Load the page-table entries of the tile that begins at token ``n``, or of a tile of the tokens ``n``.

    If a tile has few pages, return one scalar entry per page; otherwise a tensor with an entry per token.
    """
    FEW_PAGES: tl.constexpr = pages_of(PAGE, BLOCK) <= FEW and len(n.shape) == 0
    entries = (entry_of(table_ptr, n if FEW_PAGES else tokens_from(n, BLOCK), end, PAGE),)
    first = n - page_offset(n, PAGE, BLOCK)
    for p in tl.static_range(1, pages_of(PAGE, BLOCK) if FEW_PAGES else 1):
        entries = entries + (entry_of(table_ptr, first + p * PAGE, end, PAGE),)  # noqa: RUF005
    return entries


@triton.jit
def page_named(entry, pages):
    """Return the page number in a page-table entry, clamped to the existing pages.

    Call this function one tile after loading the entry, because the first use of an entry waits for its load.
    """
    low, high = entry
    page = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    return tl.minimum(page, (pages - 1).to(tl.uint32)).to(tl.int64)


@triton.jit
def page_in(entries, n, pages, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the page of the tile that begins at token ``n``, or a tensor with the page of each token.

    ``entries`` are those of :func:`entries_at`.
    """
    page, token = page_named(entries[0], pages), tl.arange(0, BLOCK) + page_offset(n, PAGE, BLOCK)
    for p in tl.static_range(1, len(entries)):
        page = tl.where(token < p * PAGE, page, page_named(entries[p], pages))
    return page


@triton.jit
def place(x, page, n, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets, in elements, of a tile's tokens (see :func:`tokens_from`) in the tensor ``x``."""
    within = tokens_from(n, BLOCK)
    if PAGE:
        within = within % PAGE
    if PAGE == 0 or PAGE > 256:  # smaller pages have fewer than 2^31 elements
        within = within.to(tl.int64)
    return page * x.stride_b + within * x.stride_t


@triton.jit
def splits_of_long(schedule_ptr, sequence, batch, long_splits):
    """Return the number of splits for each block of rows of a long packed sequence, at most ``long_splits``.

    The tokens after the last packed sequence have no keys, so they get one split.
    """
    return tl.minimum(
        tl.load(schedule_ptr + sequence * ENTRY + 6, mask=sequence < batch, other=1), long_splits
    )


@triton.jit
def tokens_of_split(low, high, n, splits, BLOCK: tl.constexpr):
    """Return the tokens of split ``n``, a subrange of ``[low, high)``.

    The tiles of ``BLOCK`` tokens are divided evenly between the splits.
    """
    first = low // BLOCK
    tiles = tl.maximum(tl.cdiv(high, BLOCK) - first, 0)
    begin, end = first + tiles * n // splits, first + tiles * (n + 1) // splits
    return tl.maximum(low, begin * BLOCK), tl.minimum(high, end * BLOCK)


@triton.jit
def claimed(
    schedule_ptr, cu_q_ptr, slots, batch, group, s, long, long_splits,
    SCHEDULED: tl.constexpr, KV_HEADS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return the work of a program, the number of splits of its sequence, and the index of its split.

    The work is a block of query rows (``group`` rows per query token) and the key tokens of one split. The
    sequence is -1 if the program has nothing to do. The index is -1 if the work already has only the
    tokens of its split.

    A slot of a schedule is a place for one split. An empty slot names sequence -1. A packed sequence is long
    if its rows do not fit into the blocks of one slot. Packed sequences use these slots, in this order:

    - the ``slots`` slots of the schedule,
    - one slot for the tokens after the last sequence,
    - ``long`` slots for the first splits of all blocks of long sequences,
    - ``long`` slots for their second splits, and so on.
    """
    PACKED: tl.constexpr = cu_q_ptr is not None
    pid = tl.program_id(0)
    block, kv_head, slot = pid % BLOCKS, (pid // BLOCKS % KV_HEADS).to(tl.int64), pid // (BLOCKS * KV_HEADS)
    sequence, begin, end, splits, n = slot, 0, LAST, slot * 0 + 1, slot * 0 - 1
    if SCHEDULED:
        item, planned = schedule_ptr + slot * ENTRY, slot < slots
        sequence, begin = tl.load(item, mask=planned, other=batch), tl.load(item + 1, mask=planned, other=0)
        end, splits = tl.load(item + 2, mask=planned, other=0), tl.load(item + 3, mask=planned, other=1)
    elif not PACKED:
        block = BLOCKS - 1 - block  # blocks that see the most keys start first
    row, count = s * 0, s
    if PACKED:
        after = slot - (slots + 1 if SCHEDULED else 0)
        is_long = after >= 0
        if is_long:
            n, block = after // long, after % long * BLOCKS + block
            LONG: tl.constexpr = BLOCKS * BLOCK_M if SCHEDULED else 0
            sequence, block = owner(cu_q_ptr, block, batch, s, group, BLOCK_M, LONG)
            splits = splits_of_long(schedule_ptr, sequence, batch, long_splits) if SCHEDULED else long_splits
        end = tl.where(is_long, LAST, end)
        row, count = tokens_of(cu_q_ptr, tl.maximum(sequence, 0), batch, s)  # the caller skips sequence -1
        if SCHEDULED:
            sequence = tl.where(((count * group > BLOCKS * BLOCK_M) == is_long) & (n < splits), sequence, -1)
    plane = tl.cast(slot * 0 if PACKED else sequence, tl.int64)
    return Work(sequence, plane, kv_head, block * BLOCK_M, row, count, begin, end - begin), splits, n
