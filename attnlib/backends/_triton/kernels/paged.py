"""The vocabulary of kernels over pages: who works on what, which page holds a token, and where it lies
there.
"""

import triton
import triton.language as tl

from .tile import Work, owner, tokens_of

LAST: tl.constexpr = tl.constexpr(2147483647)  # the end of what goes on to a sequence's end
FEW: tl.constexpr = tl.constexpr(4)  # pages of a tile, whose entries are read for all of its tokens together
ENTRY: tl.constexpr = tl.constexpr(8)  # int32 that a schedule holds for each split


@triton.jit
def entry_of(table_ptr, n, end, PAGE: tl.constexpr):
    """The entry of a page table for token ``n``, or that of the last token before ``end``, in two halves.

    Triton would copy int32 to shared memory and wait there, with all loads in flight, in every tile: what is
    copied asynchronously has 4 bytes at least. A page of 0 tokens is a row of a contiguous cache, which holds
    all.
    """
    n = tl.maximum(tl.minimum(n, end - 1), 0)
    half = table_ptr.to(tl.pointer_type(tl.uint16), bitcast=True) + 2 * (n // PAGE if PAGE else n * 0)
    return tl.load(half), tl.load(half + 1)


@triton.constexpr_function
def pages_of(PAGE, BLOCK):
    """How many pages a tile of ``BLOCK`` tokens, a power of two, touches at most; it begins at a multiple of
    that.
    """
    if PAGE == 0:
        return 1
    step = min(PAGE & -PAGE, BLOCK)  # between the places in a page where a tile may begin
    return (PAGE - step + BLOCK - 1) // PAGE + 1


@triton.jit
def page_offset(n, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where in its page token ``n`` lies, with which a tile begins."""
    return 0 if PAGE == 0 or BLOCK % PAGE == 0 else n % PAGE


@triton.jit
def entries_at(table_ptr, n, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The entries for the tile of tokens from ``n`` on: one a page, or one tensor with those of all
    tokens.
    """
    FEW_PAGES: tl.constexpr = pages_of(PAGE, BLOCK) <= FEW
    entries = (entry_of(table_ptr, n if FEW_PAGES else n + tl.arange(0, BLOCK), end, PAGE),)
    first = n - page_offset(n, PAGE, BLOCK)
    for p in tl.static_range(1, pages_of(PAGE, BLOCK) if FEW_PAGES else 1):
        entries = entries + (entry_of(table_ptr, first + p * PAGE, end, PAGE),)  # noqa: RUF005
    return entries


@triton.jit
def page_named(entry, pages):
    """The page that an entry names, made to be one that there is. In the next tile, for which the entry is
    read: what is computed with a value waits for it."""
    low, high = entry
    page = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    return tl.minimum(page, (pages - 1).to(tl.uint32)).to(tl.int64)


@triton.jit
def page_in(entries, n, pages, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The page of the tile from ``n`` on, or of each of its tokens, as its entries name them."""
    page, token = page_named(entries[0], pages), tl.arange(0, BLOCK) + page_offset(n, PAGE, BLOCK)
    for p in tl.static_range(1, len(entries)):
        page = tl.where(token < p * PAGE, page, page_named(entries[p], pages))
    return page


@triton.jit
def place(x, page, n, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the tokens from ``n`` on lie in a plane, in elements."""
    within = n + tl.arange(0, BLOCK)
    if PAGE:
        within = within % PAGE
    if PAGE == 0 or PAGE > 256:  # else a page has less than 2^31 elements
        within = within.to(tl.int64)
    return page * x.stride_b + within * x.stride_t


@triton.jit
def splits_of_long(schedule_ptr, sequence, batch, long_splits):
    """The splits of every block of a long sequence, at most so many; what follows the last one has no
    keys.
    """
    return tl.minimum(
        tl.load(schedule_ptr + sequence * ENTRY + 6, mask=sequence < batch, other=1), long_splits
    )


@triton.jit
def tokens_of_split(low, high, n, splits, BLOCK: tl.constexpr):
    """Of the tokens ``[low, high)`` those of split ``n``, if all splits have about as many tiles of
    ``BLOCK``.
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
    """The work of a program: a block of ``group`` rows a query, or none of sequence -1; the sequence's
    queries, and the tokens of a split. Of how many splits they are one; and which of equal ones, or -1 if the
    schedule has cut them.

    A slot of a schedule has a split, or -1; one more takes what follows the last packed sequence. A packed
    sequence with more rows than fit the blocks of a slot is long. Its blocks have ``long`` slots after the
    schedule, with the first split of what each of them sees; the second has as many slots after these, and so
    on.
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
        block = BLOCKS - 1 - block  # those that see most start first
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
        row, count = tokens_of(cu_q_ptr, tl.maximum(sequence, 0), batch, s)  # those of nobody are the last
        if SCHEDULED:
            sequence = tl.where(((count * group > BLOCKS * BLOCK_M) == is_long) & (n < splits), sequence, -1)
    plane = tl.cast(slot * 0 if PACKED else sequence, tl.int64)
    return Work(sequence, plane, kv_head, block * BLOCK_M, row, count, begin, end - begin), splits, n
