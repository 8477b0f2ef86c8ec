"""Quantize q, k and v to e4m3 before a forward, with a scale for each sequence and head."""

from typing import NamedTuple

import triton
import triton.language as tl

from .cache_write import ABS, OF_ZEROS, to_e4m3
from .tile import COUNTS, Rows, load_columns, locate

INVERSE: tl.constexpr = tl.constexpr(1 / 448)  # of the largest e4m3 number
INFINITY: tl.constexpr = tl.constexpr(0x7F800000)  # the bits of infinity; those of NaN are larger


class Sequences(NamedTuple):
    """The sequences of a tensor: ``batch`` sequences, whose ``tokens`` are packed if there is a ``cu_ptr``.

    Tokens outside the key bounds become zeros. ``starts_ptr`` and ``ends_ptr`` may be None.
    """

    cu_ptr: tl.tensor | None
    starts_ptr: tl.tensor | None
    ends_ptr: tl.tensor | None
    batch: tl.tensor
    tokens: tl.tensor


class Rounded(NamedTuple):
    """The results for one tensor: its bytes in e4m3, contiguous, and a scale and a maximum for each head.

    Maxima are the largest finite magnitudes, as the bits of fp32 numbers. They begin with 0.
    """

    ptr: tl.tensor
    descale_ptr: tl.tensor
    maxima_ptr: tl.tensor


@triton.jit(do_not_specialize=(*COUNTS, "q_programs", "k_programs"))
def quantize(
    q_ptr, k_ptr, v_ptr, q_e4m3_ptr, k_e4m3_ptr, v_e4m3_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr,
    maxima_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_starts_ptr, key_ends_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    batch, heads, kv_heads, s, t, q_programs, k_programs,
    D: tl.constexpr, D_ALL: tl.constexpr, E: tl.constexpr, E_ALL: tl.constexpr, BLOCK_M: tl.constexpr,
    ROUND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Find the maxima of all heads; in a second launch, with ``ROUND``, write scales and e4m3 numbers.

    ``maxima_ptr`` has the heads of q, then of k, then of v. The first programs are for q, then come those for
    k, then those for v. ``NATIVE``: round with the GPU's instruction.
    """
    pid = tl.program_id(0)
    queries = Sequences(cu_seqlens_q_ptr, None, None, batch, s)
    keys = Sequences(cu_seqlens_k_ptr, key_starts_ptr, key_ends_ptr, batch, t)
    k_maxima_ptr = maxima_ptr + batch * heads
    if pid < q_programs:
        q = Rows(q_ptr, stride_qb, stride_qs, stride_qh)
        to = Rounded(q_e4m3_ptr, q_descale_ptr, maxima_ptr)
        visit(pid, q, to, queries, heads, D, D_ALL, BLOCK_M, ROUND, NATIVE)
    elif pid < q_programs + k_programs:
        k = Rows(k_ptr, stride_kb, stride_kt, stride_kg)
        to = Rounded(k_e4m3_ptr, k_descale_ptr, k_maxima_ptr)
        visit(pid - q_programs, k, to, keys, kv_heads, D, D_ALL, BLOCK_M, ROUND, NATIVE)
    else:
        v, v_maxima_ptr = Rows(v_ptr, stride_vb, stride_vt, stride_vg), k_maxima_ptr + batch * kv_heads
        to = Rounded(v_e4m3_ptr, v_descale_ptr, v_maxima_ptr)
        visit(pid - q_programs - k_programs, v, to, keys, kv_heads, E, E_ALL, BLOCK_M, ROUND, NATIVE)


@triton.jit
def visit(
    pid, x, to, sequences, heads, WIDTH: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr,
    ROUND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Add a tile of one head to its maximum, or with ``ROUND`` write the tile as e4m3.

    Infinities and NaN do not affect the maximum, and become NaN. Tokens after the last packed sequence are
    skipped.
    """
    batch, tokens = sequences.batch, sequences.tokens
    wave = batch * heads if sequences.cu_ptr is None else heads  # adjacent programs read adjacent heads
    work = locate(pid, sequences.cu_ptr, None, batch, heads, tokens, 0, wave, BLOCK, False)
    if work.sequence < batch:
        i = work.start + tl.arange(0, BLOCK)
        valid, token = i < work.rows, work.row + i
        seen = valid
        if sequences.starts_ptr is not None:
            seen &= i >= tl.load(sequences.starts_ptr + work.sequence)
        if sequences.ends_ptr is not None:
            seen &= i < tl.load(sequences.ends_ptr + work.sequence)
        head = work.plane * x.stride_b + work.head * x.stride_h
        tile = load_columns(x.ptr, head + token * x.stride_t, seen, WIDTH, ALL, True).to(tl.float32)
        magnitude = tile.to(tl.int32, bitcast=True) & ABS
        row = work.sequence * heads + work.head
        if ROUND:
            top = tl.load(to.maxima_ptr + row).to(tl.float32, bitcast=True)
            scale = tl.maximum(top * INVERSE, OF_ZEROS)
            if work.start == 0:
                tl.store(to.descale_ptr + row, scale)
            columns = tl.arange(0, ALL)
            at = ((work.plane * tokens + token) * heads + work.head) * WIDTH
            mask = valid[:, None] & (columns < WIDTH)[None, :]
            tile = tl.where(magnitude < INFINITY, tl.div_rn(tile, scale), float("nan"))
            # The interpreter has no conversion to e4m3 that rounds as GPUs do.
            number = tile.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else to_e4m3(tile)
            tl.store(to.ptr + (at[:, None] + columns[None, :]), number, mask=mask)
        else:
            finite = tl.where(magnitude < INFINITY, magnitude, 0)
            tl.atomic_max(to.maxima_ptr + row, tl.max(finite), sem="relaxed")
