"""The vocabulary of kernels over pages: who works on what, which page holds a token, and where it lies there."""

from typing import NamedTuple

import triton
import triton.language as tl

from .tile import offset

FEW: tl.constexpr = tl.constexpr(4)  # pages of a tile, whose entries are read for all of its tokens together
ENTRY: tl.constexpr = tl.constexpr(8)  # int32 that a schedule holds for each split


@triton.jit
def entry_at(table_ptr, n):
    """Entry ``n`` of a page table, in two halves.

    Triton would copy int32 to shared memory and wait there, with all loads in flight, in every tile: what is copied
    asynchronously has 4 bytes at least.
    """
    half = table_ptr.to(tl.pointer_type(tl.uint16), bitcast=True) + 2 * n
    return tl.load(half), tl.load(half + 1)


@triton.constexpr_function
def pages_of(PAGE, BLOCK):
    """How many pages a tile of ``BLOCK`` tokens, a power of two, touches at most; it begins at a multiple of that."""
    power = PAGE & -PAGE
    step = power if power < BLOCK else BLOCK  # between the places in a page where a tile may begin
    return (PAGE - step + BLOCK - 1) // PAGE + 1


@triton.jit
def page_offset(n, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where in its page token ``n`` lies, with which a tile begins."""
    return 0 if BLOCK % PAGE == 0 else n % PAGE


@triton.jit
def entries_at(table_ptr, n, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The entry for the tile of tokens from ``n`` on, or for each of them; beyond ``end`` that of the last token.

    A page of 0 tokens is a row of a contiguous cache, which holds all.
    """
    if PAGE == 0:
        return entry_at(table_ptr, n * 0)
    elif pages_of(PAGE, BLOCK) == 1:
        return entry_at(table_ptr, tl.maximum(tl.minimum(n, end - 1), 0) // PAGE)
    elif pages_of(PAGE, BLOCK) <= FEW:
        low, high = entry_at(table_ptr, tl.maximum(tl.minimum(n, end - 1), 0) // PAGE)
        lows, highs = (low,), (high,)
        n -= page_offset(n, PAGE, BLOCK)
        for p in tl.static_range(1, pages_of(PAGE, BLOCK)):
            low, high = entry_at(table_ptr, tl.maximum(tl.minimum(n + p * PAGE, end - 1), 0) // PAGE)
            lows, highs = lows + (low,), highs + (high,)  # noqa: RUF005
        return lows, highs
    else:
        return entry_at(table_ptr, tl.maximum(tl.minimum(n + tl.arange(0, BLOCK), end - 1), 0) // PAGE)


@triton.jit
def page_named(low, high, pages):
    """The page that an entry names, made to be one that there is. In the next tile, for which the entry is read: what
    is computed with a value waits for it."""
    page = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    return tl.minimum(page, (pages - 1).to(tl.uint32)).to(tl.int64)


@triton.jit
def page_in(low, high, n, pages, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The page of the tile from ``n`` on, or of each of its tokens, as its entries name them."""
    if PAGE == 0:
        return page_named(low, high, pages)
    elif pages_of(PAGE, BLOCK) == 1 or pages_of(PAGE, BLOCK) > FEW:
        return page_named(low, high, pages)
    else:
        page, token = page_named(low[0], high[0], pages), tl.arange(0, BLOCK) + page_offset(n, PAGE, BLOCK)
        for p in tl.static_range(1, pages_of(PAGE, BLOCK)):
            page = tl.where(token < p * PAGE, page, page_named(low[p], high[p], pages))
        return page


@triton.jit
def place(page, n, by_page, by_token, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the tokens from ``n`` on lie in a plane, in elements."""
    within = n + tl.arange(0, BLOCK)
    if PAGE == 1:
        return page * by_page
    elif PAGE and PAGE <= 256:
        return page * by_page + (within % PAGE) * by_token  # less than 2^31 elements
    elif PAGE:
        return page * by_page + (within % PAGE).to(tl.int64) * by_token
    else:
        return page * by_page + within.to(tl.int64) * by_token


@triton.jit
def owner(cu_q_ptr, block, batch, tokens, group, BLOCK: tl.constexpr):
    """Whose block of rows this is, and its number among theirs: a sequence owns them from ``row // BLOCK + n`` on."""
    n, above = block * 0, batch + 1  # no plain 0, which stays one where there is no sequence
    while above - n > 1:
        middle = (n + above) // 2
        fits = offset(cu_q_ptr, middle, tokens) * group // BLOCK + middle <= block
        n, above = tl.where(fits, middle, n), tl.where(fits, above, middle)
    block = block - offset(cu_q_ptr, n, tokens) * group // BLOCK - n
    return n, tl.where(block < 0, tokens * group // BLOCK + 1, block)  # offsets that decrease: nobody's block


@triton.jit
def tokens_of(cu_q_ptr, n, batch, tokens):
    """The first query of packed sequence ``n``, and how many it has; sequence ``batch`` has what follows the last."""
    row = offset(cu_q_ptr, n, tokens)
    count = tokens - row
    if n < batch:
        count = tl.maximum(offset(cu_q_ptr, n + 1, tokens) - row, 0)
    return row, count


class Claim(NamedTuple):
    """What a program works on: a sequence, or -1 for nothing; a block of its rows; tokens ``[begin, end)``, one of how
    many splits; where the sequence's queries begin, and how many there are."""

    sequence: tl.tensor
    block: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    splits: tl.tensor
    row: tl.tensor
    count: tl.tensor


@triton.jit
def assigned(schedule_ptr, slot, slots, batch):
    """The split in a slot of a schedule: its sequence (or -1), tokens ``[begin, end)``, and splits of the sequence.

    One more slot takes what follows the last packed sequence.
    """
    item, planned = schedule_ptr + slot * ENTRY, slot < slots
    sequence = tl.load(item, mask=planned, other=batch)
    begin, end = tl.load(item + 1, mask=planned, other=0), tl.load(item + 2, mask=planned, other=0)
    return sequence, begin, end, tl.load(item + 3, mask=planned, other=1)


@triton.jit
def claimed(
    pid, schedule_ptr, cu_q_ptr, slots, batch, group, s,
    SCHEDULED: tl.constexpr, KV_HEADS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The work of a program.

    A packed sequence with more rows than fit a tile of its split is not split: more programs, after those of the
    schedule, take a block of its rows each.
    """
    PACKED: tl.constexpr = cu_q_ptr is not None
    block, slot = pid % BLOCKS, pid // (BLOCKS * KV_HEADS)
    beyond = False
    if SCHEDULED:
        sequence, begin, end, splits = assigned(schedule_ptr, slot, slots, batch)
        if PACKED:
            beyond = slot > slots
            if beyond:
                sequence, block = owner(cu_q_ptr, (slot - slots - 1) * BLOCKS + block, batch, s, group, BLOCK_M)
            end = tl.where(beyond, 2147483647, end)
    else:
        sequence, begin, end, splits = slot, 0, 2147483647, 1
        if PACKED:
            sequence, block = owner(cu_q_ptr, slot, batch, s, group, BLOCK_M)
        else:
            block = BLOCKS - 1 - block  # those that see most start first
    row, count = s * 0, s
    if PACKED:
        row, count = tokens_of(cu_q_ptr, tl.maximum(sequence, 0), batch, s)  # those of nobody are the last
        if SCHEDULED:
            sequence = tl.where((count * group > BLOCKS * BLOCK_M) == beyond, sequence, -1)
    return Claim(sequence, block, begin, end, splits, row, count)
