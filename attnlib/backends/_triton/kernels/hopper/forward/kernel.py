"""The Hopper forward in Gluon, after FlashAttention-3: a persistent kernel with one program per SM.

A producer warp loads through TMA descriptors, and consumer warpgroups compute 64 queries each. For fp8
inputs, ``transpose_values.py`` runs first, and the consumers come from ``consumer_fp8.py``.

Paper: Shah et al., 2024, arXiv 2407.08608.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...tile import COUNTS
from ..primitives import barriers, ring
from .consumer import consume
from .consumer_fp8 import HeadDescales, consume_fp8
from .producer import produce
from .results import ForwardOutputs
from .shared import POSTS, ROWS, WORDS, ForwardCall, ForwardShared, ForwardSizes


@gluon.jit
def allocate(dtype: gl.constexpr, out_dtype: gl.constexpr, sizes):
    """Allocate the shared memory of a program."""
    TILES: gl.constexpr = sizes.Q_SLOTS * sizes.CONSUMERS
    q = ring(dtype, TILES, ROWS, sizes.D)
    out = q
    if sizes.TRANSPOSED:
        out = ring(out_dtype, sizes.CONSUMERS, ROWS, sizes.E)
    k = ring(dtype, sizes.K_SLOTS, sizes.BLOCK_N, sizes.D)
    if sizes.TRANSPOSED:
        v = ring(dtype, sizes.V_SLOTS, sizes.E, sizes.BLOCK_N)
    else:
        v = ring(dtype, sizes.V_SLOTS, sizes.BLOCK_N, sizes.E)
    q_tail, k_tail = q, k
    if sizes.D_TAIL:
        q_tail = ring(dtype, TILES, ROWS, sizes.D_TAIL)
        k_tail = ring(dtype, sizes.K_SLOTS, sizes.BLOCK_N, sizes.D_TAIL)
    if not (sizes.TRANSPOSED or sizes.OUT_IN_Q):
        out = ring(out_dtype, sizes.CONSUMERS, ROWS, sizes.E)
    work = gl.allocate_shared_memory(gl.int32, [POSTS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return ForwardShared(
        q, q_tail, k, k_tail, v, out, work, barriers(POSTS), barriers(TILES), barriers(TILES),
        barriers(sizes.K_SLOTS), barriers(sizes.V_SLOTS),
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*COUNTS, "tiles"])
def forward(
    out_ptr, lse_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr,  # all but the first two may be None
    alibi_slopes_ptr, sinks_ptr, key_starts_ptr, key_ends_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, counter_ptr, lists_ptr,
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, out_desc, mask_tensors, score_tensors,
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_slopes, stride_list_b, stride_list_h, room,
    batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale, softcap, tiles,
    D_MAIN: gl.constexpr, D_TAIL: gl.constexpr, E: gl.constexpr, E_MAIN: gl.constexpr,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, Q_SLOTS: gl.constexpr, K_SLOTS: gl.constexpr,
    V_SLOTS: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, OUT_IN_Q: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    MASK: gl.constexpr, SCORE: gl.constexpr,  # mask and score functions, or None
):  # fmt: skip
    """Write the output ``[b, s, h, e]`` and the natural-log LSE ``[b, h, s]``.

    For packed sequences the shapes are ``[t, h, e]`` and ``[h, t]``. fp8 inputs come with descales, and use
    two consumers.
    """
    FP8: gl.constexpr = q_descale_ptr is not None
    HOLES: gl.constexpr = (
        cu_seqlens_k_ptr is not None or key_starts_ptr is not None or key_ends_ptr is not None
    )
    HIDES_FIRST: gl.constexpr = left is not None or key_starts_ptr is not None
    PACKED: gl.constexpr = cu_seqlens_q_ptr is not None
    PIECES: gl.constexpr = E_MAIN // 64 if FP8 and E_MAIN > 128 else 1
    sizes: gl.constexpr = ForwardSizes(
        D_MAIN, D_TAIL, E_MAIN, BLOCK_N, CONSUMERS, Q_SLOTS, K_SLOTS, V_SLOTS, Q_IN_REGISTERS, OUT_IN_Q,
        HOLES, HIDES_FIRST, PACKED, PIECES, CONSUMERS * 128 + 32, FP8, MASK is not None,
    )  # fmt: skip
    shared = allocate(q_desc.dtype, out_desc.dtype, sizes)
    fence_async_shared()
    call = ForwardCall(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_starts_ptr, key_ends_ptr, alibi_slopes_ptr, sinks_ptr,
        origin_ptr, stride_slopes, batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale,
        softcap, tiles, lists_ptr, stride_list_b, stride_list_h, room,
    )  # fmt: skip
    results = ForwardOutputs(
        out_desc, out_ptr, lse_ptr, stride_ob, stride_os, stride_oh, stride_lb, stride_lh, E
    )
    if FP8:
        descales = HeadDescales(q_descale_ptr, k_descale_ptr, v_descale_ptr)
        gl.warp_specialize(
            [
                (consume_fp8, (0, call, descales, results, shared, sizes)),
                (consume_fp8, (1, call, descales, results, shared, sizes)),
                (
                    produce,
                    (q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, counter_ptr, call, shared, sizes),
                ),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, call, mask_tensors, score_tensors, results, shared, sizes, MASK, SCORE)),
                (consume, (1, call, mask_tensors, score_tensors, results, shared, sizes, MASK, SCORE)),
                (
                    produce,
                    (q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, counter_ptr, call, shared, sizes),
                ),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, call, mask_tensors, score_tensors, results, shared, sizes, MASK, SCORE)),
                (consume, (1, call, mask_tensors, score_tensors, results, shared, sizes, MASK, SCORE)),
                (consume, (2, call, mask_tensors, score_tensors, results, shared, sizes, MASK, SCORE)),
                (
                    produce,
                    (q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, counter_ptr, call, shared, sizes),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
