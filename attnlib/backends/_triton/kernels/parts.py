"""Parts of sequences: cut for a whole step by ``schedule``, of about equal length, and added up by ``combine``."""

import triton
import triton.language as tl

from .paged import ENTRY, tokens_of
from .tile import LN2, LOG2E

# Parameters whose divisibility decides nothing, and must not compile a kernel again.
COUNTS = ("batch", "group", "s", "level", "slots", "capacity", "limit", "reach")


@triton.jit
def join(acc, total, top, x, lse2):
    """Weighted sums, their weights and the largest weight as an exponent of 2, with attention ``x`` over more keys.

    Sums of products are written as they are to be rounded, the same in all kernels.
    """
    new_top = tl.maximum(top, lse2)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2(top - safe), tl.exp2(lse2 - safe)
    return tl.fma(x, new[:, None], acc * old[:, None]), tl.fma(total, old, new), new_top


@triton.jit
def join_sink(total, top, sink2):
    """The share that weights keep beside that of a sink, which has no value; weights with it, and the largest."""
    new_top = tl.maximum(top, sink2)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    share = tl.exp2(top - safe)
    return share, tl.fma(total, share, tl.exp2(sink2 - safe)), new_top


@triton.jit(do_not_specialize=COUNTS)
def combine(
    part_ptr, schedule_ptr, cu_q_ptr, sinks_ptr, out_ptr, lse_ptr, lines,
    out_b, out_s, out_h, lse_b, lse_h, batch, group, s, level,
    E: tl.constexpr, E_MAIN: tl.constexpr, VARLEN: tl.constexpr, KV_HEADS: tl.constexpr, BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, MOST: tl.constexpr,
    SOME: tl.constexpr, SPLIT_SIZE: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of ``ROWS`` rows of queries, ``WIDTH`` channels, in an order that depends on them alone.

    Parts of a ``SPLIT_SIZE`` each are joined one by one, so that those without a visible key make no difference.
    """
    pid, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    rows_of, kv_head, sequence = pid % GROUPS, pid // GROUPS % KV_HEADS, pid // (GROUPS * KV_HEADS)
    item = schedule_ptr + level + sequence * ENTRY  # this slot also tells of the sequence of its number
    slot, parts = tl.load(item + 4), tl.load(item + 5)
    if parts == 1:
        return
    row, count = s * 0, s
    if VARLEN:
        row, count = tokens_of(cu_q_ptr, sequence, batch, s)
        if count * group > BLOCKS * BLOCK_M:  # which had no parts
            return
    plane = 0
    if not VARLEN:
        plane = sequence
    wide = tl.cast(plane, tl.int64)
    origin = (slot.to(tl.int64) * KV_HEADS + kv_head) * BLOCKS * BLOCK_M
    of_lse = part_ptr + lines.to(tl.int64) * E_MAIN
    STEP: tl.constexpr = KV_HEADS * BLOCKS * BLOCK_M
    c = tile * WIDTH + tl.arange(0, WIDTH)
    every, few = tl.arange(0, MOST), tl.arange(0, SOME)
    for r in range(rows_of * ROWS, tl.minimum((rows_of + 1) * ROWS, count * group)):
        total, acc = tl.zeros([1], tl.float32), tl.zeros([WIDTH], tl.float32)
        if SPLIT_SIZE:
            top, acc = tl.full([1], float("-inf"), tl.float32), acc[None, :]
            for p in range(parts):
                line = origin + r + (p + tl.arange(0, 1)).to(tl.int64) * STEP
                x = tl.load(part_ptr + line[:, None] * E_MAIN + c[None, :])
                acc, total, top = join(acc, total, top, x, tl.load(of_lse + line))
            acc = acc.reshape(WIDTH)
        else:
            lse = tl.load(of_lse + origin + r + every * STEP, mask=every < parts, other=float("-inf"))
            top = tl.max(lse, 0)
            safe = tl.where(top == float("-inf"), 0.0, top)
            for p in range(0, parts, SOME):
                line = origin + r + (p + few).to(tl.int64) * STEP
                weight = tl.exp2(tl.load(of_lse + line, mask=p + few < parts, other=float("-inf")) - safe)
                x = tl.load(part_ptr + line[:, None] * E_MAIN + c[None, :], mask=(p + few < parts)[:, None], other=0.0)
                total += tl.sum(weight, 0)
                acc += tl.sum(x * weight[:, None], 0)
        token, head = row + r // group, kv_head * group + r % group
        if SINKS:
            share, total, top = join_sink(total, top, tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
            acc *= share
        total = tl.where(total == 0.0, 1.0, total)
        acc /= total
        into = out_ptr + wide * out_b + token.to(tl.int64) * out_s + head * out_h
        tl.store(into + c, acc.to(out_ptr.dtype.element_ty), mask=c < E)
        at = lse_ptr + wide * lse_b + head.to(tl.int64) * lse_h + token + tl.arange(0, 1)
        tl.store(at, (top + tl.log2(total)) * LN2, mask=tile == 0)


@triton.jit(do_not_specialize=COUNTS)
def schedule(
    starts_ptr, lengths_ptr, schedule_ptr, batch, slots, capacity, limit, reach,
    ROWS: tl.constexpr, PARTS: tl.constexpr, GRAIN: tl.constexpr,
):  # fmt: skip
    """Cuts sequences into parts for ``capacity`` programs, and at the next level for half of them, and so on.

    A slot holds a part, ``(sequence, begin, end, parts of the sequence)``, or sequence -1; and of the sequence
    of its own number ``(first slot, parts)``.
    """
    level, b = tl.program_id(0), tl.arange(0, ROWS)
    length = tl.maximum(tl.minimum(tl.load(lengths_ptr + b, mask=b < batch, other=0), limit), 0)
    start = tl.maximum(tl.load(starts_ptr + b, mask=b < batch, other=0), length - reach)
    start = tl.minimum(tl.maximum(start, 0), length)
    origin = start // GRAIN
    grains = tl.where(b < batch, tl.maximum(tl.cdiv(length, GRAIN) - origin, 1), 0)
    size = tl.maximum(tl.cdiv(tl.sum(grains, 0), tl.maximum(capacity >> level, 1)), 1)
    room = batch + (tl.maximum(capacity >> level, 1) + 1) // 2
    room = tl.maximum(room, tl.maximum(capacity >> level, 1))
    above = tl.maximum(tl.max(grains, 0), size)
    while size < above:  # the least size of which there are slots for all parts
        middle = (size + above) // 2
        fits = tl.sum(tl.cdiv(grains, middle), 0) <= room
        size, above = tl.where(fits, size, middle + 1), tl.where(fits, middle, above)
    parts = tl.cdiv(grains, size)
    first, used = tl.cumsum(parts, 0) - parts, tl.sum(parts, 0)
    schedule_ptr += level.to(tl.int64) * slots * ENTRY
    for p0 in range(0, tl.max(parts, 0), PARTS):
        p = p0 + tl.arange(0, PARTS)[None, :]
        n = tl.maximum(parts, 1)[:, None]
        low, high = origin[:, None] + grains[:, None] * p // n, origin[:, None] + grains[:, None] * (p + 1) // n
        item = schedule_ptr + (first[:, None] + p) * ENTRY
        mine = p < parts[:, None]
        zero = p * 0
        tl.store(item, b[:, None] + zero, mask=mine)
        tl.store(item + 1, tl.maximum(low * GRAIN, start[:, None]), mask=mine)
        tl.store(item + 2, tl.where(p == n - 1, 2147483647, high * GRAIN), mask=mine)
        tl.store(item + 3, n + zero, mask=mine)
    tl.store(schedule_ptr + b * ENTRY + 4, first, mask=b < batch)
    tl.store(schedule_ptr + b * ENTRY + 5, parts, mask=b < batch)
    for slot in range(used, slots, ROWS):
        tl.store(schedule_ptr + (slot + b) * ENTRY, -1, mask=slot + b < slots)
