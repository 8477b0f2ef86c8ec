"""The GQA decode kernel for Hopper, in Gluon: one program per SM.

A program reads a split of one sequence, for several adjacent KV heads. It runs ``pages.py`` over a 16-bit
cache, and ``int8_fp8.py`` over an int8 or fp8 cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from ...paged import ENTRY, claimed
from ...tile import COUNTS
from ..primitives import prefetch
from ..splits import DecodeCall, DecodeOutputs, QueryRows, split_of
from .int8_fp8 import allocate_int8_fp8, decode_int8_fp8
from .pages import allocate_pages, decode_pages
from .shared import ProgramSizes


@gluon.jit(do_not_specialize=COUNTS)
def decode_gqa(
    q_ptr, k_ptr, table_ptr, starts_ptr, lengths_ptr, cu_seqlens_q_ptr, alibi_slopes_ptr, sinks_ptr,
    origin_ptr, schedule_ptr, out_ptr, lse_ptr, split_ptr, k_desc, v_desc, k_scale_desc, v_scale_desc,
    stride_qb, stride_qs, stride_qh, stride_kp, stride_kt, stride_table, stride_ob, stride_os, stride_oh,
    stride_lb, stride_lh, stride_slopes, pages, batch, group, s, slots, long, long_splits, lines,
    schedule_offset, limit, left, right, prefix, scale, softcap, SCHEDULED: gl.constexpr, PAGE: gl.constexpr,
    KV_HEADS: gl.constexpr, HEADS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write the output ``[b, s, h, e]`` and the LSE ``[b, h, s]``, or partial results of splits.

    A program decodes ``HEADS`` adjacent KV heads. If the cache is int8 or fp8, it needs scales, and
    ``HEADS`` is eight. The other parameters are those of the generic decode kernel.
    """
    schedule_ptr += schedule_offset
    if SCHEDULED:
        slot = gl.minimum(gl.program_id(0) // (KV_HEADS // HEADS), slots - 1)
        prefetch(schedule_ptr + slot * ENTRY)
        prefetch(starts_ptr + slot % batch)
        prefetch(lengths_ptr + slot % batch)
    gdc_wait()
    work, splits, n = claimed(
        schedule_ptr, cu_seqlens_q_ptr, slots, batch, group, s, long, long_splits, SCHEDULED,
        KV_HEADS // HEADS, 1, BLOCK_M,
    )  # fmt: skip
    if SCHEDULED and work.sequence < 0:
        return
    WARPS: gl.constexpr = gl.num_warps()
    sizes: gl.constexpr = ProgramSizes(WARPS, HEADS, PAGE, BLOCK_M)
    if k_scale_desc is None:
        shared = allocate_pages(k_desc.dtype, sizes, STAGES)
    else:
        shared = allocate_int8_fp8(k_desc.dtype, STAGES)
    fence_async_shared()
    call = DecodeCall(
        table_ptr, alibi_slopes_ptr, sinks_ptr, origin_ptr, stride_table, stride_slopes, pages,
        (stride_kp // stride_kt).to(gl.int32), batch, group, left, right, prefix, scale, softcap,
    )  # fmt: skip
    queries = QueryRows(q_ptr, stride_qb, stride_qs, stride_qh)
    results = DecodeOutputs(
        out_ptr, lse_ptr, split_ptr, stride_ob, stride_os, stride_oh, stride_lb, stride_lh, lines.to(gl.int64)
    )
    split = split_of(work, splits, n, starts_ptr, lengths_ptr, limit, call, BLOCK_M, PAGE)
    if k_scale_desc is None:
        decode_pages(k_desc, v_desc, queries, split, call, results, shared, sizes)
    else:
        STORED: gl.constexpr = k_ptr.dtype.element_ty
        decode_int8_fp8(
            k_desc, v_desc, k_scale_desc, v_scale_desc, queries, split, call, results, shared, STORED, sizes
        )
