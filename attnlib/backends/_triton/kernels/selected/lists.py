"""The visible entries of lists of selected keys."""

import triton
import triton.language as tl

from ..band import KeyBand, bounds, key_range, origin_of
from ..tile import COUNTS, locate, slot_of


@triton.jit(do_not_specialize=(*COUNTS, "owners", "of_owner", "blocks"))
def list_blocks(
    selected_ptr, lists_ptr,
    block_ids_ptr,  # all tensors from here on may be None
    key_starts_ptr, key_ends_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr,
    batch, s, t, planes, slots, owners, of_owner, blocks, left, right, prefix,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the blocks that a list of ``slots`` entries shows: first their number, then each of them once.

    The ``planes`` lists of a query follow each other, as in ``selected`` ``[b, s, c, n]``. A block stays if
    the band shows some of its keys. One program compares the ``BLOCK_M`` entries of a list, ``BLOCK_N`` at a
    time, with the entries before them.

    With ``block_ids``, each program also writes ``slots`` numbers: for every block that stays, its number
    among the ``blocks`` of all sequences and owners, then ``blocks``. The owner of a block is a list, or a KV
    head if this has several lists. An owner has ``of_owner`` blocks, in one sequence or all packed ones.
    """
    pid = tl.program_id(0)
    work = locate(pid // planes, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, 1, False)
    if work.start >= work.rows:
        return
    keys, origin = work.others, origin_of(origin_ptr, work.sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, work.sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    i = keys - work.rows + work.start
    low, high, _, _ = key_range(i, i + 1, band)

    row = (work.plane * s + work.row + work.start) * planes + pid % planes
    m, entries = tl.arange(0, BLOCK_M), selected_ptr + row * slots
    entry = tl.load(entries + m, mask=m < slots, other=-1)
    stays = (entry >= 0) & (low < high) & (m < slots)
    stays = stays & (entry >= (low + origin.key) // BLOCK_SIZE)
    stays = stays & (entry <= (high - 1 + origin.key) // BLOCK_SIZE)
    for at in range(0, slots, BLOCK_N):
        n = at + tl.arange(0, BLOCK_N)
        other = tl.load(entries + n, mask=n < slots, other=-1)
        is_earlier = (other[None, :] == entry[:, None]) & (n[None, :] < m[:, None])
        stays = stays & (tl.max(is_earlier.to(tl.int32), 1) == 0)
    count = stays.to(tl.int32)
    list_ptr = lists_ptr + row * (slots + 1)
    tl.store(list_ptr + tl.cumsum(count, 0), entry, mask=stays)
    tl.store(list_ptr, tl.sum(count, 0))
    if block_ids_ptr is not None:
        pair = pid % planes * owners // planes + work.plane * owners
        # The numbers by which `locate` finds blocks.
        block = slot_of(
            work.other, work.sequence, entry * BLOCK_SIZE, BLOCK_SIZE, cu_seqlens_k_ptr is not None
        )
        kept = tl.cumsum(count, 0)
        at = tl.where(stays, kept - 1, tl.sum(count, 0) + m - kept)
        ids = tl.where(stays, pair * of_owner + block, blocks).to(block_ids_ptr.dtype.element_ty)
        tl.store(block_ids_ptr + tl.cast(pid, tl.int64) * slots + at, ids, mask=m < slots)
