"""The visible entries of lists of selected keys."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..band import KeyBand, bounds, key_range, origin_of
from ..tile import COUNTS, Work, locate, slot_of

NO_ENTRY: tl.constexpr = tl.constexpr(2147483647)  # sorts behind all entries


@triton.jit
def locate_query(n, cu_seqlens_q_ptr, cu_seqlens_k_ptr, lengths_ptr, batch, s, t):
    """Return the work of a program for query ``n``; ``others`` is the number of keys of its sequence.

    ``lengths_ptr`` has the lengths of sequences in a cache, which are at most ``t``, or is None. If queries
    are packed, there are ``batch + 1`` more numbers than queries. A number without a query gets ``start >=
    rows``.
    """
    work = locate(n, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, 1, False)
    keys = work.others
    if lengths_ptr is not None:
        keys = tl.load(lengths_ptr + work.sequence, mask=work.sequence < batch, other=0)
        keys = tl.maximum(tl.minimum(keys, t), 0)
    return Work(work.sequence, work.plane, work.head, work.start, work.row, work.rows, work.other, keys)


@triton.jit
def each_once(entry, stays, m):
    """Sort the entries of a list that stay, and keep each of them once."""
    entry = tl.sort(tl.where(stays, entry, NO_ENTRY))
    before = tl.gather(entry, tl.maximum(m - 1, 0), 0)
    return entry, (entry < NO_ENTRY) & ((m == 0) | (entry > before))


@triton.jit
def repeats(entry, stays, first, bits_ptr, words, WORDS: tl.constexpr):
    """Return True if an entry of a list that stays occurs twice.

    The ``words`` int32 at ``bits_ptr`` have a bit for each entry from ``first`` on, which this function
    clears before it sets those of the list. With 2,048 entries, 4,096 lists take 0.08 ms, and
    0.96 ms if they are sorted (H100, 2026-11-28).
    """
    w = tl.arange(0, WORDS)
    tl.store(bits_ptr + w, 0, mask=w < words)
    tl.debug_barrier()
    at = tl.where(stays, entry - first, 0)
    bit = 1 << at % 32
    old = tl.atomic_or(bits_ptr + at // 32, bit, mask=stays, sem="relaxed")
    return tl.max(tl.where(stays & ((old & bit) != 0), 1, 0), 0) > 0


@triton.jit
def entries_in_band(entry_ptr, inside, i, band, BLOCK_SIZE: tl.constexpr):
    """Return entries of the lists of queries ``i``, which of them stay, and the first block that may stay.

    A block stays if the band shows some of its keys. Entries that are not ``inside`` do not exist.
    """
    low, high, _, _ = key_range(i, i + 1, band)
    first = (low + band.key) // BLOCK_SIZE
    entry = tl.load(entry_ptr, mask=inside, other=-1)
    stays = (entry >= 0) & (low < high) & (entry >= first)
    return entry, stays & (entry <= (high - 1 + band.key) // BLOCK_SIZE), first


@triton.jit
def table_entries(token, known, table_ptr, PAGE: tl.constexpr):
    """Load the page-table entries of ``known`` tokens; without ``PAGE``, return the tokens.

    ``PAGE = 0`` means a contiguous cache.
    """
    at = token // PAGE if PAGE else token * 0
    return token if PAGE is None else tl.load(table_ptr + at, mask=known, other=0)


@triton.jit
def rows_of(token, named, pages, page_rows, PAGE: tl.constexpr):
    """Return the cache rows of tokens whose page-table entries are ``named``.

    Page ``n`` begins at row ``n * page_rows``. A page index out of range is clamped to the last page. Without
    ``PAGE``, return the tokens.
    """
    if PAGE is not None:
        page = tl.minimum(named.to(tl.uint32), (pages - 1).to(tl.uint32)).to(tl.int32)
        token = page * page_rows + (token % PAGE if PAGE else token)
    return token


@triton.jit(do_not_specialize=(*COUNTS, "owners", "of_owner", "blocks", "words", "bits", "page_rows"))
def list_blocks(
    selected_ptr, lists_ptr,
    block_ids_ptr,  # all tensors from here on may be None
    key_starts_ptr, key_ends_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, lengths_ptr, origin_ptr, table_ptr,
    batch, s, t, planes, slots, owners, of_owner, blocks, words, bits, left, right, prefix, stride_table,
    pages, page_rows, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, WORDS: tl.constexpr,
    PAGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the blocks that a list of ``slots`` entries shows: first their number, then each of them once.

    The ``planes`` lists of a query follow each other, as in ``selected`` ``[b, s, c, n]``. One program has
    the ``BLOCK_M`` places of a list, and sorts it if an entry occurs twice, or if ``WORDS`` is 0. Otherwise
    each program has ``words`` int32 of its own, from number ``bits`` of ``lists`` on.

    With ``PAGE``, entries are tokens of a cache, and the program writes their rows in the cache instead; see
    :func:`rows_of`. ``EARLY``: launched with PDL (programmatic dependent launch). The program waits for the
    preceding kernel before it reads or writes anything, and then lets the next kernel start.

    With ``block_ids``, each program also writes ``slots`` numbers: for every block that stays, its number
    among the ``blocks`` of all sequences and owners, then ``blocks``. The owner of a block is a list, or a KV
    head if this has several lists. An owner has ``of_owner`` blocks, in one sequence or all packed ones.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    work = locate_query(pid // planes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, lengths_ptr, batch, s, t)
    if work.start >= work.rows:
        return
    known = tl.where(work.sequence < batch, work.sequence, 0)
    origin = origin_of(origin_ptr, known, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, known, work.others)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    i = work.others - work.rows + work.start

    row, m = (work.plane * s + work.row + work.start) * planes + pid % planes, tl.arange(0, BLOCK_M)
    entry, stays, first = entries_in_band(selected_ptr + row * slots + m, m < slots, i, band, BLOCK_SIZE)
    table_ptr = None if PAGE is None else table_ptr + known.to(tl.int64) * stride_table
    # These loads run while `repeats` waits for its atomics.
    named = table_entries(entry, stays, table_ptr, PAGE)
    bits_ptr = lists_ptr + bits + row * words
    again = True if WORDS == 0 else repeats(entry, stays, first, bits_ptr, words, WORDS)
    if again:
        entry, stays = each_once(entry, stays, m)
        named = table_entries(entry, stays, table_ptr, PAGE)
    count = stays.to(tl.int32)
    kept, total = tl.cumsum(count, 0), tl.sum(count, 0)
    list_ptr = lists_ptr + row * (slots + 1)
    tl.store(list_ptr + kept, rows_of(entry, named, pages, page_rows, PAGE), mask=stays)
    tl.store(list_ptr, total)
    if block_ids_ptr is not None:
        pair = pid % planes * owners // planes + work.plane * owners
        # The numbers by which `locate` finds blocks.
        key = tl.where(stays, entry, 0) * BLOCK_SIZE
        block = slot_of(work.other, work.sequence, key, BLOCK_SIZE, cu_seqlens_k_ptr is not None)
        at = tl.where(stays, kept - 1, total + m - kept)
        ids = tl.where(stays, pair * of_owner + block, blocks).to(block_ids_ptr.dtype.element_ty)
        tl.store(block_ids_ptr + tl.cast(pid, tl.int64) * slots + at, ids, mask=m < slots)


@triton.jit
def larger(a, b):
    """Return the larger of two numbers."""
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=COUNTS)
def list_unions(
    selected_ptr, lists_ptr,
    key_starts_ptr, key_ends_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr,  # any of these may be None
    batch, s, t, planes, slots, left, right, prefix,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Write the blocks that the lists of ``QUERIES`` neighbouring queries show: their number, then each once.

    Blocks ascend. Each is multiplied by ``1 << QUERIES``, and has a bit below for every query that has it in
    its list. One program has the ``BLOCK_M`` entries of a tile of queries, which ``locate`` numbers. The
    ``planes`` lists of a tile follow each other, with ``QUERIES * slots`` places behind their number.
    """
    pid = tl.program_id(0)
    work = locate(pid // planes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, QUERIES, False)
    if work.start >= work.rows:
        return
    known = tl.where(work.sequence < batch, work.sequence, 0)
    origin = origin_of(origin_ptr, known, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, known, work.others)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    m = tl.arange(0, BLOCK_M)
    query = m // slots
    inside = (query < QUERIES) & (work.start + query < work.rows)
    row = (work.plane * s + work.row + work.start + query) * planes + pid % planes
    i = work.others - work.rows + work.start + query
    entry_ptr = selected_ptr + row * slots + m % slots
    entry, stays, _ = entries_in_band(entry_ptr, inside, i, band, BLOCK_SIZE)

    key = tl.sort(tl.where(stays, entry * QUERIES + query, NO_ENTRY))  # by block, then by query
    block, exists = key // QUERIES, key < NO_ENTRY
    before, after = tl.gather(key, tl.maximum(m - 1, 0), 0), tl.gather(key, tl.minimum(m + 1, BLOCK_M - 1), 0)
    opens = exists & ((m == 0) | (block > before // QUERIES))
    closes = exists & ((m == BLOCK_M - 1) | (block < after // QUERIES))
    bit = tl.where(exists & ((m == 0) | (key > before)), 1 << key % QUERIES, 0)
    bits = tl.cumsum(bit, 0)
    # Sums ascend, so their maximum over the first entries of blocks is that before the block of an entry.
    bits -= tl.associative_scan(tl.where(opens, bits - bit, 0), 0, larger)
    count = opens.to(tl.int32)
    list_ptr = lists_ptr + tl.cast(pid, tl.int64) * (QUERIES * slots + 1)
    tl.store(list_ptr + tl.cumsum(count, 0), (block << QUERIES) + bits, mask=closes)
    tl.store(list_ptr, tl.sum(count, 0))
