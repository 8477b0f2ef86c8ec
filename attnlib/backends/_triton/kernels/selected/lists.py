"""The visible entries of lists of selected keys."""

import triton
import triton.language as tl

from ..band import KeyBand, bounds, key_range, origin_of
from ..tile import COUNTS, Work, locate

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


@triton.jit(do_not_specialize=COUNTS)
def list_blocks(
    selected_ptr, lists_ptr,
    key_starts_ptr, key_ends_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, lengths_ptr, origin_ptr,  # may be None
    batch, s, t, planes, slots, left, right, prefix,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write the blocks that a list of ``slots`` entries shows: first their number, then each of them once.

    They are in order, so the order of a list and repeats in it do not matter. The ``planes`` lists of a query
    follow each other, as in ``selected`` ``[b, s, c, n]``. A block stays if the band shows some of its keys.
    One program sorts a list in ``BLOCK_M`` places.
    """
    pid = tl.program_id(0)
    work = locate_query(pid // planes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, lengths_ptr, batch, s, t)
    if work.start >= work.rows:
        return
    known = tl.where(work.sequence < batch, work.sequence, 0)
    origin = origin_of(origin_ptr, known, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, known, work.others)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    i = work.others - work.rows + work.start
    low, high, _, _ = key_range(i, i + 1, band)

    row = (work.plane * s + work.row + work.start) * planes + pid % planes
    m = tl.arange(0, BLOCK_M)
    entry = tl.load(selected_ptr + row * slots + m, mask=m < slots, other=-1)
    stays = (entry >= 0) & (low < high)
    stays = stays & (entry >= (low + origin.key) // BLOCK_SIZE)
    stays = stays & (entry <= (high - 1 + origin.key) // BLOCK_SIZE)
    entry = tl.sort(tl.where(stays, entry, NO_ENTRY))
    before = tl.gather(entry, tl.maximum(m - 1, 0), 0)
    is_first = (entry < NO_ENTRY) & ((m == 0) | (entry > before))
    count = is_first.to(tl.int32)
    list_ptr = lists_ptr + row * (slots + 1)
    tl.store(list_ptr + tl.cumsum(count, 0), entry, mask=is_first)
    tl.store(list_ptr, tl.sum(count, 0))
