"""What a program works on, and the tiles that it loads and stores."""

from typing import NamedTuple

import triton
import triton.language as tl

# Parameters whose divisibility decides nothing, and must not compile a kernel again.
COUNTS = (
    "stride_slopes", "stride_sb", "stride_sh", "stride_dlb", "stride_dlh", "stride_dls", "batch", "heads", "kv_heads",
    "group", "s", "t", "heads_per_wave", "left", "right", "prefix", "threshold",
)  # fmt: skip


class Rows(NamedTuple):
    """The rows of one head of one sequence: from ``ptr`` on, ``stride`` elements apart.

    With a descriptor of the whole tensor ``[b, t, h, d]``, they begin at ``(sequence, row, head)``.
    """

    ptr: tl.tensor
    stride: tl.tensor
    desc: tl.tensor | None
    sequence: tl.tensor
    row: tl.tensor
    head: tl.tensor


@triton.jit
def load_where(at, columns, valid, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows of ``WIDTH`` columns from pointers ``at``, zeros beyond; where masked, zeros but for valid rows."""
    PADDED: tl.constexpr = columns.shape[0] > WIDTH
    if MASKED and PADDED:
        return tl.load(at, mask=valid[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif MASKED:
        return tl.load(at, mask=valid[:, None], other=0.0)
    elif PADDED:
        return tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_rows(ptr, row, rows, columns, stride, end, WIDTH: tl.constexpr):
    """Rows ``row + rows`` of a matrix ``[end, WIDTH]``, zeros beyond it; ``stride`` is in elements."""
    at = ptr + tl.cast(row, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    return load_where(at, columns, row + rows < end, WIDTH, True)


@triton.jit
def load_tile(
    x, n, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, ANEW: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` rows from ``n`` on, ``WIDTH`` channels from ``FIRST`` on; where masked, zeros but for valid rows.

    A descriptor has addresses that take no registers. ``ANEW``: pointers are made anew in each tile, and hold none
    between tiles.
    """
    if x.desc is not None and not MASKED:
        at = [tl.cast(x.sequence, tl.int32), (x.row + n).to(tl.int32), x.head.to(tl.int32), FIRST]
        return x.desc.load(at).reshape(BLOCK, COLUMNS)
    else:
        rows, columns = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
        if ANEW:
            at = x.ptr + FIRST + ((n + rows).to(tl.int64)[:, None] * x.stride + columns[None, :])
        else:
            at = x.ptr + FIRST + tl.cast(n, tl.int64) * x.stride + (rows[:, None] * x.stride + columns[None, :])
        return load_where(at, columns, valid, WIDTH, MASKED)


@triton.jit
def store_rows(ptr, x, row, rows, columns, stride, end, WIDTH: tl.constexpr):
    """Write ``x`` into rows ``row + rows`` of a matrix ``[end, WIDTH]``; ``stride`` is in elements."""
    at = ptr + tl.cast(row, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(row + rows < end)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def offset(cu_ptr, n, total):
    """Where packed sequence ``n`` begins, at least 0 and at most ``total``, whatever the tensor says."""
    return tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), total)


class Work(NamedTuple):
    """What a program works on: a head of a sequence; its block of rows from ``start`` on.

    The sequence has ``rows`` rows from ``row`` on, and ``others`` rows of the other side (keys for queries, queries for
    keys) from ``other`` on.
    """

    sequence: tl.tensor
    head: tl.tensor
    start: tl.tensor
    row: tl.tensor
    rows: tl.tensor
    other: tl.tensor
    others: tl.tensor


@triton.jit
def locate(cu_ptr, cu_other_ptr, batch, heads, s, t, heads_per_wave, BLOCK: tl.constexpr, REVERSED: tl.constexpr):
    """The work of this program, for ``s`` rows of a sequence and ``t`` of the other side, or of all if packed.

    Heads come in waves whose keys and values fit the L2 cache; in a wave the longest rows start first. Packed
    sequence ``n`` owns blocks from ``cu[n] // BLOCK + n`` on, which leaves room for its last, partial one; sequence
    ``batch`` is what follows the last offset, and has no keys.
    """
    PACKED: tl.constexpr = cu_ptr is not None
    pairs, blocks = batch * heads, tl.cdiv(s, BLOCK)
    if PACKED:
        pairs, blocks = heads, s // BLOCK + batch + 1
    pid = tl.program_id(0)
    first_pair = pid // (heads_per_wave * blocks) * heads_per_wave
    rest = pid - first_pair * blocks
    width = tl.minimum(heads_per_wave, pairs - first_pair)
    block, pair = rest // width, first_pair + rest % width
    if REVERSED:
        block = blocks - 1 - block
    if PACKED:
        n, above = pid * 0, batch + 1  # no plain 0, which stays one where there is no sequence
        while above - n > 1:
            middle = (n + above) // 2
            fits = offset(cu_ptr, middle, s) // BLOCK + middle <= block
            n, above = tl.where(fits, middle, n), tl.where(fits, above, middle)
        row, other, others = offset(cu_ptr, n, s), t, 0
        start = (block - row // BLOCK - n) * BLOCK
        rows = s - row
        if n < batch:
            rows = tl.maximum(offset(cu_ptr, n + 1, s) - row, 0)
            other = offset(cu_other_ptr, n, t)
            others = tl.maximum(offset(cu_other_ptr, n + 1, t) - other, 0)
        start = tl.where(start < 0, rows, start)  # offsets that decrease: nobody's block
        return Work(n.to(tl.int64), pair.to(tl.int64), start, row.to(tl.int64), rows, other.to(tl.int64), others)
    else:
        zero = pair.to(tl.int64) * 0
        return Work((pair // heads).to(tl.int64), (pair % heads).to(tl.int64), block * BLOCK, zero, s, zero, t)
