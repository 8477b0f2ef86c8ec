"""The MLA decode kernel for Hopper, in Gluon: one program per SM, which reads a split of one sequence.

The launch tables choose tiles of 16 or 64 query rows, and latents are stored in 16 bits, int8 or fp8. The
program runs ``rows_64.py`` for 64 rows, otherwise ``rows_16.py`` or, over 8-bit latents,
``rows_16_int8_fp8.py``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from ...paged import claimed
from ...tile import COUNTS
from ..splits import DecodeCall, DecodeOutputs, QueryRows, split_of
from .conversion import convert
from .rows_16 import allocate_rows_16, decode_rows_16
from .rows_16_int8_fp8 import allocate_rows_16_int8_fp8, decode_rows_16_int8_fp8
from .rows_64 import LEFT, RIGHT, WITH_LOADERS, WITH_PRODUCER, allocate_rows_64
from .rows_64 import consume as consume_rows_64
from .rows_64 import produce as produce_rows_64
from .states import TileStates, states_of


@gluon.jit(do_not_specialize=COUNTS)
def decode_mla(
    q_ptr, k_ptr, k_scale_ptr, table_ptr, starts_ptr, lengths_ptr, cu_seqlens_q_ptr, alibi_slopes_ptr,
    sinks_ptr, origin_ptr, schedule_ptr, states_ptr, out_ptr, lse_ptr, split_ptr, k_desc, tail_desc,
    scale_desc, mask_tensors, score_tensors, stride_qb, stride_qs, stride_qh, stride_kp, stride_kt,
    stride_table, stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_slopes, pages, batch, group,
    s, slots, long, long_splits, lines, schedule_offset, limit, columns, left, right, prefix, scale, softcap,
    SCHEDULED: gl.constexpr, PAGE: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr,
    GRAIN_M: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):  # fmt: skip
    """Write the output ``[b, s, h, e]`` and the LSE ``[b, h, s]``, or partial results of splits.

    For packed sequences, the shapes are ``[t, h, e]`` and ``[h, t]``. ``BLOCK_M`` is 16 or 64 query
    rows. An int8 or fp8 cache needs scales. The other parameters are those of the generic decode kernel.
    """
    CONVERTED: gl.constexpr = k_scale_ptr is not None
    gdc_wait()
    schedule_ptr += schedule_offset
    work, splits, n = claimed(
        schedule_ptr, cu_seqlens_q_ptr, slots, batch, group, s, long, long_splits, SCHEDULED, 1, BLOCKS,
        BLOCK_M,
    )  # fmt: skip
    if SCHEDULED and work.sequence < 0:
        return
    if BLOCK_M == 64:
        shared = allocate_rows_64(tail_desc.dtype, 1, 2 if CONVERTED else 1)
    elif CONVERTED:
        shared = allocate_rows_16_int8_fp8(tail_desc.dtype)
    else:
        shared = allocate_rows_16(tail_desc.dtype)
    fence_async_shared()
    call = DecodeCall(
        table_ptr, alibi_slopes_ptr, sinks_ptr, origin_ptr, stride_table, stride_slopes, pages,
        (stride_kp // stride_kt).to(gl.int32), batch, group, left, right, prefix, scale, softcap,
        mask_tensors, score_tensors,
    )  # fmt: skip
    queries = QueryRows(q_ptr, stride_qb, stride_qs, stride_qh)
    results = DecodeOutputs(
        out_ptr, lse_ptr, split_ptr, stride_ob, stride_os, stride_oh, stride_lb, stride_lh, lines.to(gl.int64)
    )
    split = split_of(work, splits, n, starts_ptr, lengths_ptr, limit, call, BLOCK_M, PAGE)
    states = TileStates(None, split.low, split.high)
    if states_ptr is not None:
        PACKED: gl.constexpr = cu_seqlens_q_ptr is not None
        states = states_of(states_ptr, columns, work, split, call, s, GRAIN_M, PACKED)
    # Inline, unlike the branches below: moving this branch into a device function changes its machine code.
    if BLOCK_M == 64:
        if k_scale_ptr is None:
            gl.warp_specialize(
                [
                    (
                        consume_rows_64,
                        (0, queries, split, states, call, results, shared, WITH_PRODUCER, False, MASK, SCORE),
                    ),
                    (
                        consume_rows_64,
                        (1, queries, split, states, call, results, shared, WITH_PRODUCER, False, MASK, SCORE),
                    ),
                    (produce_rows_64, (k_desc, tail_desc, split, states, call, shared, PAGE)),
                ],
                [4, 1],
                [240, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (
                        consume_rows_64,
                        (0, queries, split, states, call, results, shared, WITH_LOADERS, False, MASK, SCORE),
                    ),
                    (
                        consume_rows_64,
                        (1, queries, split, states, call, results, shared, WITH_LOADERS, False, MASK, SCORE),
                    ),
                    (
                        convert,
                        (
                            k_ptr,
                            k_scale_ptr,
                            tail_desc,
                            split,
                            states,
                            call,
                            shared,
                            PAGE,
                            LEFT,
                            RIGHT,
                            WITH_LOADERS,
                        ),
                    ),
                ],
                [4, 4],
                [216, 72],
            )
    elif CONVERTED:
        STORED: gl.constexpr = k_ptr.dtype.element_ty
        planes = (k_desc, tail_desc, scale_desc)
        decode_rows_16_int8_fp8(
            planes, queries, split, states, call, results, shared, STORED, PAGE, MASK, SCORE
        )
    else:
        decode_rows_16(k_desc, tail_desc, queries, split, states, call, results, shared, PAGE, MASK, SCORE)
