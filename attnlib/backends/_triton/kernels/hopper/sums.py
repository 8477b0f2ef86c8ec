"""The last step of a backward whose programs add up the gradient of queries: from fp32 sums to dq."""

import triton
import triton.language as tl

from ..band import Band, bounds, origin_of, sees_any
from ..tile import COUNTS, locate


@triton.jit
def load_share(ptr, COLUMNS: tl.constexpr):
    """A product ``[64, COLUMNS]`` that lies as its threads held it: 16 bytes of each of 128, and then the next 16."""
    held = tl.load(ptr + tl.arange(0, 64 * COLUMNS)).reshape(COLUMNS // 8, 4, 8, 4, 2, 2)
    return held.permute(1, 4, 2, 0, 3, 5).reshape(64, COLUMNS)


@triton.jit
def store_block(
    sums_ptr, of_rows, FIRST: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BY_ROWS: tl.constexpr,
):  # fmt: skip
    """Write a block of ``WIDTH`` channels from ``FIRST`` on, of which each consumer made half of the rows or columns."""
    dq_ptr, stride, work, band, scale = of_rows
    COLUMNS: tl.constexpr = WIDTH if BY_ROWS else WIDTH // 2
    for c in tl.static_range(2):
        m = work.start + (c * 64 if BY_ROWS else 0) + tl.arange(0, 64)
        d = FIRST + (0 if BY_ROWS else c * COLUMNS) + tl.arange(0, COLUMNS)
        seen = sees_any(work.others - work.rows + m, band)
        dq = load_share(sums_ptr + (FIRST * BLOCK_M + c * 64 * COLUMNS), COLUMNS) * scale
        mask = (m < work.rows)[:, None] & (d < D)[None, :]
        at = (m.to(tl.int64) * stride)[:, None] + d[None, :]
        tl.store(dq_ptr + at, tl.where(seen[:, None], dq, 0.0).to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=[*COUNTS, "dq_tiles"])
def finish_queries(
    dq_sums_ptr, dq_ptr, key_starts_ptr, key_ends_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr,
    stride_dqb, stride_dqs, stride_dqh,
    batch, heads, s, t, dq_tiles, left, right, prefix, scale,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    """Writes dq ``[b, s, h, d]``: one program for each tile of sums; a query that sees no key gets zeros."""
    work = locate(
        tl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, s, t, batch * heads, BLOCK_M, False
    )
    if work.start >= work.rows:
        return
    start, end = bounds(key_starts_ptr, key_ends_ptr, work.sequence, work.others)
    origin = origin_of(origin_ptr, work.sequence, batch)
    band = Band(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    tile = (work.plane * heads + work.head) * dq_tiles + work.start // BLOCK_M
    if cu_seqlens_q_ptr is not None:
        tile += work.row // BLOCK_M + work.sequence
    dq_sums_ptr += tile * (BLOCK_M * (D_MAIN + D_TAIL))
    dq_ptr += work.plane * stride_dqb + work.row * stride_dqs + work.head * stride_dqh
    of_rows = (dq_ptr, stride_dqs, work, band, scale)
    store_block(dq_sums_ptr, of_rows, 0, D, D_MAIN, BLOCK_M, BY_ROWS)
    if D_TAIL:
        store_block(dq_sums_ptr, of_rows, D_MAIN, D, D_TAIL, BLOCK_M, BY_ROWS)
