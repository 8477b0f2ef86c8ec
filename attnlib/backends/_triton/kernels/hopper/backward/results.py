"""Epilogue of the Hopper backward: write dk and dv through shared memory, and add dq to fp32 sums.

In each tile of sums, elements have the order in which threads hold them in registers. A second kernel,
``finish_queries``, converts the sums to dq.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from ...band import KeyBand, bounds, origin_of, sees_any
from ...tile import COUNTS, locate
from ..primitives import add_fours, async_store
from .shared import KEYS


class Gradient(NamedTuple):
    """The tensor for the gradient of keys or values, as TMA descriptors, a pointer and strides."""

    desc: gl.tensor
    tail_desc: gl.tensor
    ptr: gl.tensor
    stride_t: gl.tensor
    stride_h: gl.tensor


class GradientOutputs(NamedTuple):
    """The outputs of the backward: dk, dv, and the fp32 sums of dq."""

    dk: Gradient
    dv: Gradient
    dq_sums_ptr: gl.tensor


@gluon.jit
def as_held(x):
    """Flatten a matrix product ``[64, n]`` into the order in which threads hold it in registers.

    The first 16 bytes of each of the 128 threads come first, then the next 16 bytes of each.
    """
    COUNT: gl.constexpr = x.shape[1] // 8
    x = x.reshape([4, 2, 8, COUNT, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return x.reshape([COUNT * 512])


@gluon.jit
def add_dq(dq, number: gl.constexpr, tile, first: gl.constexpr, results, shared, sizes):
    """Add a consumer's part of a dq tile to its fp32 sums; the part's channels begin at ``first``."""
    SIZE: gl.constexpr = dq.shape[0] * dq.shape[1]
    TILE: gl.constexpr = sizes.BLOCK_M * (sizes.D + sizes.D_TAIL)
    held = as_held(dq)
    at = results.dq_sums_ptr + tile.to(gl.int64) * TILE + (first * sizes.BLOCK_M + number * SIZE)
    add_fours(at + gl.arange(0, SIZE, held.type.layout), held)


@gluon.jit
def put(
    sums, factor, number: gl.constexpr, tile, desc, to, first: gl.constexpr, WIDTH: gl.constexpr, job, band,
    sizes,
):  # fmt: skip
    """Write the gradient of the ``number``-th key tile, times ``factor``, by way of shared memory.

    The tile has the channels from ``first`` on, out of ``WIDTH`` channels.
    """
    start = job.start + number * KEYS
    j = start + gl.arange(0, KEYS, gl.SliceLayout(1, sums.type.layout))
    bounded = (j >= band.start) & (j < band.end)
    sums = gl.where(bounded[:, None], sums * factor, 0.0)
    put_rows(sums, tile, desc, to, first, WIDTH, job.plane, job.kv_head, job.row, start, job.rows, sizes)


@gluon.jit
def put_rows(
    sums, tile, desc, to, first: gl.constexpr, WIDTH: gl.constexpr, plane, head, sequence_row, start, rows,
    sizes,
):  # fmt: skip
    """Write 64 rows of a gradient, from row ``start`` of a sequence on, by way of the shared memory ``tile``.

    Rows past the end of the sequence are not written, since in a packed tensor they belong to the next one.
    """
    tile.store(sums.to(tile.dtype))
    fence_async_shared()
    row, left = sequence_row + start, rows - start
    if not sizes.PACKED:
        async_store(desc, [plane.to(gl.int32), start, head.to(gl.int32), first], tile)
    elif left >= KEYS:
        async_store(desc, [0, row.to(gl.int32), head.to(gl.int32), first], tile)
    elif left > 0:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        n = gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
        d = first + gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))
        at = ((row + n) * to.stride_t)[:, None] + (head * to.stride_h + d)[None, :]
        gl.store(to.ptr + at, tile.load(LAYOUT), mask=(n < left)[:, None] & (d < WIDTH)[None, :])


@gluon.jit
def put_keys(dk, dk_tail, number: gl.constexpr, job, band, call, results, shared, sizes):
    """Write dk for the ``number``-th tile of keys."""
    to = results.dk
    put(dk, call.scale, number, shared.k.index(number), to.desc, to, 0, sizes.D_ALL, job, band, sizes)
    if sizes.D_TAIL:
        tile = shared.k_tail.index(number)
        put(dk_tail, call.scale, number, tile, to.tail_desc, to, sizes.D, sizes.D_ALL, job, band, sizes)


# ---- the second kernel: convert sums to dq


@triton.jit
def load_share(ptr, COLUMNS: tl.constexpr):
    """Load a matrix product ``[64, COLUMNS]`` that :func:`as_held` has flattened."""
    held = tl.load(ptr + tl.arange(0, 64 * COLUMNS)).reshape(COLUMNS // 8, 4, 8, 4, 2, 2)
    return held.permute(1, 4, 2, 0, 3, 5).reshape(64, COLUMNS)


@triton.jit
def store_block(
    sums_ptr, of_rows, FIRST: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BY_ROWS: tl.constexpr,
):  # fmt: skip
    """Write the ``WIDTH`` channels of a dq tile from channel ``FIRST`` on.

    Each of two consumers has summed one half of the tile: half of the rows if ``BY_ROWS``, otherwise half of
    the columns.
    """
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
    """Convert the fp32 sums to dq ``[b, s, h, d]``; a query that sees no key gets zeros.

    Each program converts one tile. The last tiles are converted first, because they are still in the L2
    cache. Programs start before the sums are complete (programmatic dependent launch), and wait for them.
    """
    gdc_wait()
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    work = locate(pid, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, s, t, batch * heads, BLOCK_M, False)
    if work.start >= work.rows:
        return
    start, end = bounds(key_starts_ptr, key_ends_ptr, work.sequence, work.others)
    origin = origin_of(origin_ptr, work.sequence, batch)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    tile = (work.plane * heads + work.head) * dq_tiles + work.start // BLOCK_M
    if cu_seqlens_q_ptr is not None:
        tile += work.row // BLOCK_M + work.sequence
    dq_sums_ptr += tile * (BLOCK_M * (D_MAIN + D_TAIL))
    dq_ptr += work.plane * stride_dqb + work.row * stride_dqs + work.head * stride_dqh
    of_rows = (dq_ptr, stride_dqs, work, band, scale)
    store_block(dq_sums_ptr, of_rows, 0, D, D_MAIN, BLOCK_M, BY_ROWS)
    if D_TAIL:
        store_block(dq_sums_ptr, of_rows, D_MAIN, D, D_TAIL, BLOCK_M, BY_ROWS)
