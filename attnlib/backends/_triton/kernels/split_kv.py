"""Split-KV decoding: cut sequences into splits of about equal length, and merge the results of the splits.

The kernel ``schedule`` cuts sequences once for all layers of a decode step. The kernel ``combine`` merges
the results in each layer.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .paged import ENTRY, LAST, splits_of_long
from .scores import LN2, LOG2E
from .tile import COUNTS, owner, tokens_of


@triton.jit
def shares(l_i, m_i, lse2):
    """Return the factors that merge one more result, or a sink, into sums, and the new sum and maximum.

    The first factor is for the old sums, the second for the result. ``l_i`` is a sum of exponentials relative
    to the maximum ``m_i`` (log2 units). Explicit fused multiply-adds make all kernels round alike.
    """
    m_new = tl.maximum(m_i, lse2)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    old, new = tl.exp2(m_i - safe), tl.exp2(lse2 - safe)
    return old, new, tl.fma(l_i, old, new), m_new


@triton.jit
def join(acc, l_i, m_i, x, lse2):
    """Merge one more attention result ``x``, with LSE ``lse2`` in log2 units, into the running sums."""
    old, new, l_i, m_i = shares(l_i, m_i, lse2)
    return tl.fma(x, new[:, None], acc * old[:, None]), l_i, m_i


@triton.jit
def joined(
    split_ptr, lse_ptr, rows, step, splits, valid, columns, E_MAIN: tl.constexpr, AT_ONCE: tl.constexpr,
    NATURAL: tl.constexpr = False,
):  # fmt: skip
    """Merge the ``splits`` partial results of each row, ``AT_ONCE`` at a time; return acc, sum and maximum.

    The first result of a row is line ``rows`` of ``split_ptr``, and the others follow ``step`` lines apart.
    LSEs are in log2 units, unless they are ``NATURAL`` logarithms.
    """
    l_i, m_i = tl.zeros(rows.shape, tl.float32), tl.full(rows.shape, float("-inf"), tl.float32)
    acc = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for p in range(0, splits, AT_ONCE):
        several = p + tl.arange(0, AT_ONCE)
        line = rows[:, None] + several[None, :].to(tl.int64) * step
        there = valid[:, None] & (several < splits)[None, :]
        x = tl.load(
            split_ptr + line[:, :, None] * E_MAIN + columns[None, None, :],
            mask=there[:, :, None],
            other=0.0,
        )
        lse2 = tl.load(lse_ptr + line, mask=there, other=float("-inf"))
        if NATURAL:
            lse2 *= LOG2E
        m_new = tl.maximum(m_i, tl.max(lse2, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight, old = tl.exp2(lse2 - safe[:, None]), tl.exp2(m_i - safe)
        acc = acc * old[:, None] + tl.sum(x * weight[:, :, None], 1)
        l_i, m_i = l_i * old + tl.sum(weight, 1), m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=COUNTS)
def combine(
    split_ptr, schedule_ptr, cu_seqlens_q_ptr, sinks_ptr, out_ptr, lse_ptr, lines,
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh, batch, group, s, slots, long, long_splits,
    schedule_offset,
    E: tl.constexpr, E_MAIN: tl.constexpr, KV_HEADS: tl.constexpr, BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, AT_ONCE: tl.constexpr,
    TOGETHER: tl.constexpr, SPLIT_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of all splits; a program merges ``ROWS`` query rows and ``WIDTH`` channels.

    The order of merging depends only on the splits. Splits of a fixed size (``SPLIT_SIZE``) are merged one by
    one, so that a split without a visible key changes no bit. ``EARLY``: launched with PDL (programmatic
    dependent launch), so wait for the decode kernel before reading its partial results.
    """
    pid, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    rows_of, kv_head, sequence = pid % GROUPS, pid // GROUPS % KV_HEADS, pid // (GROUPS * KV_HEADS)
    after = sequence - batch  # if not negative, this is a block of a long sequence
    schedule_ptr += schedule_offset
    item = schedule_ptr + sequence * ENTRY  # slot `n` also describes sequence `n`
    slot, splits = tl.load(item + 4, mask=after < 0, other=0), tl.load(item + 5, mask=after < 0, other=0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if splits == 1:
        return
    first, shift, step = rows_of * ROWS, s * 0, (s * 0 + KV_HEADS * BLOCKS * BLOCK_M).to(tl.int64)
    row, count = s * 0, s
    if cu_seqlens_q_ptr is not None:
        LONG: tl.constexpr = BLOCKS * BLOCK_M
        if after >= 0:
            nth = after * BLOCKS + first // BLOCK_M
            sequence, block = owner(cu_seqlens_q_ptr, nth, batch, s, group, BLOCK_M, LONG)
            slot, step, shift = slots + 1 + after, step * long, (block - first // BLOCK_M) * BLOCK_M
            splits = splits_of_long(schedule_ptr, sequence, batch, long_splits)
        row, count = tokens_of(cu_seqlens_q_ptr, sequence, batch, s)
        if ((count * group > LONG) != (after >= 0)) | (splits == 1):
            return
    plane = tl.cast(sequence if cu_seqlens_q_ptr is None else 0, tl.int64)
    origin = (slot.to(tl.int64) * KV_HEADS + kv_head) * BLOCKS * BLOCK_M
    of_lse = split_ptr + lines.to(tl.int64) * E_MAIN
    c, end = tile * WIDTH + tl.arange(0, WIDTH), tl.minimum(first + ROWS, count * group - shift)
    for r0 in range(first, end, TOGETHER):
        r = r0 + tl.arange(0, TOGETHER)
        valid = r < end
        if SPLIT_SIZE:
            l_i, m_i = tl.zeros([TOGETHER], tl.float32), tl.full([TOGETHER], float("-inf"), tl.float32)
            acc = tl.zeros([TOGETHER, WIDTH], tl.float32)
            for p in range(splits):
                line = origin + r + p * step
                x = tl.load(split_ptr + line[:, None] * E_MAIN + c[None, :], mask=valid[:, None], other=0.0)
                acc, l_i, m_i = join(
                    acc, l_i, m_i, x, tl.load(of_lse + line, mask=valid, other=float("-inf"))
                )
        else:
            acc, l_i, m_i = joined(split_ptr, of_lse, origin + r, step, splits, valid, c, E_MAIN, AT_ONCE)
        token, head = (row + (r + shift) // group).to(tl.int64), kv_head * group + (r + shift) % group
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=valid, other=float("-inf")).to(tl.float32)
            share, _, l_i, m_i = shares(l_i, m_i, sink * LOG2E)
            acc *= share[:, None]
        l_i = tl.where(l_i == 0.0, 1.0, l_i)
        into = out_ptr + plane * stride_ob + token * stride_os + head * stride_oh
        acc = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(into[:, None] + c[None, :], acc, mask=valid[:, None] & (c < E)[None, :])
        at = lse_ptr + plane * stride_lb + head * stride_lh + token
        tl.store(at, (m_i + tl.log2(l_i)) * LN2, mask=r < tl.where(tile == 0, end, 0))


@triton.jit(do_not_specialize=COUNTS)
def schedule(
    starts_ptr, lengths_ptr, schedule_ptr, batch, slots, capacity, limit, reach,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, GRANULARITY: tl.constexpr, FINEST: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Write schedules that cut the sequences of a batch into splits.

    The first schedule is for ``capacity`` programs, the next one for half as many, and so on. A schedule
    consists of slots of ``ENTRY`` int32 numbers. In slot ``n``, the first four numbers describe a split, and
    the next three describe sequence ``n``:

        0       sequence, or -1 if the slot is empty
        1, 2    begin and end of the split, in tokens
        3       number of splits of its sequence
        4       first slot of sequence ``n``
        5       number of splits of sequence ``n``
        6       number of splits per block of rows, if sequence ``n`` is long

    A packed sequence is long if its rows do not fit into the blocks of one slot. A long sequence has at least
    as many splits per block as another sequence of the same length. Its splits have at most ``LARGEST`` and
    at least ``SMALLEST`` tokens; if both are impossible, ``SMALLEST`` decides.
    """
    level, b = tl.program_id(0), tl.arange(0, ROWS)
    length = tl.maximum(tl.minimum(tl.load(lengths_ptr + b, mask=b < batch, other=0), limit), 0)
    start = tl.maximum(tl.load(starts_ptr + b, mask=b < batch, other=0), length - reach)
    start = tl.minimum(tl.maximum(start, 0), length)
    grain = tl.minimum(FINEST << level, GRANULARITY)
    origin = start // grain
    units = tl.where(b < batch, tl.maximum(tl.cdiv(length, grain) - origin, 1), 0)
    programs = tl.maximum(capacity >> level, 1)
    size = tl.maximum(tl.cdiv(tl.sum(units, 0), programs), 1)
    max_splits = tl.maximum(batch + (programs + 1) // 2, programs)
    above = tl.maximum(tl.max(units, 0), size)
    while size < above:  # bisect for the smallest size whose splits fit the slots
        middle = (size + above) // 2
        fits = tl.sum(tl.cdiv(units, middle), 0) <= max_splits
        size, above = tl.where(fits, size, middle + 1), tl.where(fits, middle, above)
    splits = tl.cdiv(units, size)
    first, used = tl.cumsum(splits, 0) - splits, tl.sum(splits, 0)
    schedule_ptr += level.to(tl.int64) * slots * ENTRY
    for p0 in range(0, tl.max(splits, 0), SPLITS):
        p = p0 + tl.arange(0, SPLITS)[None, :]
        n = tl.maximum(splits, 1)[:, None]
        low, high = origin[:, None] + units[:, None] * p // n, origin[:, None] + units[:, None] * (p + 1) // n
        item = schedule_ptr + (first[:, None] + p) * ENTRY
        mine = p < splits[:, None]
        tl.store(item, b[:, None], mask=mine)
        tl.store(item + 1, tl.maximum(low * grain, start[:, None]), mask=mine)
        tl.store(item + 2, tl.where(p == n - 1, LAST, high * grain), mask=mine)
        tl.store(item + 3, n, mask=mine)
    tl.store(schedule_ptr + b * ENTRY + 4, first, mask=b < batch)
    tl.store(schedule_ptr + b * ENTRY + 5, splits, mask=b < batch)
    of_blocks = tl.minimum(tl.maximum(splits, tl.cdiv(length - start, LARGEST)), (length - start) // SMALLEST)
    tl.store(schedule_ptr + b * ENTRY + 6, tl.maximum(of_blocks, 1), mask=b < batch)
    for slot in range(used, slots, ROWS):
        tl.store(schedule_ptr + (slot + b) * ENTRY, -1, mask=slot + b < slots)
