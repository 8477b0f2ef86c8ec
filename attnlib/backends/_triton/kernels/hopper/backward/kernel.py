"""The Hopper backward in Gluon, after FlashAttention-3: one pass with five matrix products.

Each program owns a block of keys: a producer warp loads one query tile after another, and two consumer
warpgroups multiply. Tiles are transposed, ``[keys, queries]``. With probabilities ``P = exp(S - lse)`` and
``dP = v @ dout.T``, the gradient of the scores is ``dS = P * (dP - delta)``.

All programs add to fp32 sums of dq. In each tile of sums, elements have the order in which threads hold them
in registers, so that a warp adds 512 contiguous bytes. Adding through shared memory and TMA is slower,
because matrix products already use all the bandwidth of shared memory. Causal 8k, d = 128:

    added from registers            559 TFLOP/s
    added through shared memory     488 TFLOP/s

Paper: Shah et al., 2024, arXiv 2407.08608.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...band import KeyBand, bounds, origin_of
from ...tile import COUNTS, locate
from ..primitives import barriers, ring
from .producer import produce
from .results import Gradient, GradientOutputs
from .shared import KEYS, BackwardCall, BackwardShared, BackwardSizes, job_of, vectors
from .turns import end_turns, wait_for_turns
from .upto_128 import consume_upto_128, multiply_queries
from .upto_192 import consume_upto_192
from .upto_256 import consume_keys, consume_values


@gluon.jit
def allocate(tile_type: gl.constexpr, sizes):
    """Allocate the shared memory of a program: keys and values, rings of query tiles, and mbarriers."""
    TILES: gl.constexpr = sizes.TILES
    SLOTS: gl.constexpr = sizes.SLOTS
    BLOCK_M: gl.constexpr = sizes.BLOCK_M
    q, k = ring(tile_type, SLOTS, BLOCK_M, sizes.D), ring(tile_type, TILES, KEYS, sizes.D)
    dout, v = ring(tile_type, SLOTS, BLOCK_M, sizes.E), ring(tile_type, TILES, KEYS, sizes.E)
    ds = ring(tile_type, 2 * TILES, KEYS, BLOCK_M)
    q_tail, k_tail, p = q, k, ds
    if sizes.D_TAIL:
        q_tail, k_tail = (
            ring(tile_type, SLOTS, BLOCK_M, sizes.D_TAIL),
            ring(tile_type, TILES, KEYS, sizes.D_TAIL),
        )
    if TILES == 1:
        p = ring(tile_type, 1, KEYS, BLOCK_M)
    keys_full = barriers(1)
    turn = keys_full  # a new, unused barrier fails: Triton reuses its memory, but initializes it late
    if sizes.AFTER:
        turn = barriers(1)
    shared = BackwardShared(
        q, q_tail, dout, k, k_tail, v, p, ds, vectors(SLOTS, BLOCK_M), vectors(SLOTS, BLOCK_M), keys_full,
        barriers(SLOTS, 2), barriers(SLOTS, 1), turn,
    )  # fmt: skip
    fence_async_shared()
    return shared


@gluon.jit(do_not_specialize=[*COUNTS, "dq_tiles"])
def backward(
    lse2_ptr, delta_ptr, dk_ptr, dv_ptr, dq_sums_ptr, alibi_slopes_ptr, key_starts_ptr, key_ends_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, origin_ptr, lists_ptr,
    q_desc, q_tail_desc, dout_desc, k_desc, k_tail_desc, v_desc, dk_desc, dk_tail_desc, dv_desc,
    mask_tensors, score_tensors,
    stride_dkt, stride_dkg, stride_dvt, stride_dvg, stride_lb, stride_lh, stride_slopes,
    stride_list_b, stride_list_h, room,
    batch, heads, kv_heads, group, s, t, heads_per_wave, dq_tiles, sums, left, right, prefix, scale, softcap,
    D: gl.constexpr, D_MAIN: gl.constexpr, D_TAIL: gl.constexpr, E: gl.constexpr, E_MAIN: gl.constexpr,
    BLOCK_M: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, BY_ROWS: gl.constexpr,
    DQ_REGISTERS: gl.constexpr, AFTER: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    # Functions are used only if DQ_REGISTERS > 0.
    MASK: gl.constexpr, SCORE: gl.constexpr, DERIVATIVE: gl.constexpr, NEEDS_SCORE: gl.constexpr,
):  # fmt: skip
    """Write dk ``[b, t, g, d]`` and dv ``[b, t, g, e]``, and add to the fp32 sums of dq.

    Each head has ``dq_tiles`` tiles of sums. With programmatic dependent launch, a program starts before its
    inputs are written, waits for them, and then lets programs of the next kernel start.

    To add in a fixed order (``AFTER``), programs draw their work from a counter that follows the ``sums`` in
    memory. After the counter, an int32 for each tile tells programs whose turn it is to add.
    """
    HOLES: gl.constexpr = (
        cu_seqlens_k_ptr is not None or key_starts_ptr is not None or key_ends_ptr is not None
    )
    PACKED: gl.constexpr = cu_seqlens_q_ptr is not None
    sizes: gl.constexpr = BackwardSizes(
        D_MAIN, D_TAIL, E_MAIN, D, E, TILES, BLOCK_M, SLOTS, BY_ROWS, HOLES, PACKED, DQ_REGISTERS > 0, AFTER,
        MASK is not None, NEEDS_SCORE,
    )  # fmt: skip
    shared = allocate(q_desc.dtype, sizes)
    gdc_wait()
    gdc_launch_dependents()
    BLOCK_N: gl.constexpr = TILES * KEYS
    program, turns_ptr = gl.program_id(0), dq_sums_ptr
    if AFTER:
        counter_ptr = (dq_sums_ptr + sums).to(gl.pointer_type(gl.int32), bitcast=True)
        program, turns_ptr = gl.atomic_add(counter_ptr, 1), counter_ptr + 1
    work = locate(
        program, cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, kv_heads, t, s, heads_per_wave, BLOCK_N, AFTER > 0
    )
    start, end = bounds(key_starts_ptr, key_ends_ptr, work.sequence, work.rows)
    origin = origin_of(origin_ptr, work.sequence, batch)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    call = BackwardCall(
        lse2_ptr, delta_ptr, turns_ptr, alibi_slopes_ptr, stride_lb, stride_lh, stride_slopes, batch, heads,
        group, dq_tiles, scale, softcap, lists_ptr, stride_list_b, stride_list_h, room, mask_tensors,
        score_tensors,
    )  # fmt: skip
    dk = Gradient(dk_desc, dk_tail_desc, dk_ptr, stride_dkt, stride_dkg)
    dv = Gradient(dv_desc, None, dv_ptr, stride_dvt, stride_dvg)
    results, job = GradientOutputs(dk, dv, dq_sums_ptr), job_of(work, band, call, sizes)
    if DQ_REGISTERS:
        gl.warp_specialize(
            [
                (consume_upto_128, (0, job, band, call, results, shared, sizes, MASK, SCORE, DERIVATIVE)),
                (consume_upto_128, (1, job, band, call, results, shared, sizes, MASK, SCORE, DERIVATIVE)),
                (multiply_queries, (job, call, results, shared, sizes)),
                (
                    produce,
                    (q_desc, q_tail_desc, dout_desc, k_desc, k_tail_desc, v_desc, job, call, shared, sizes),
                ),
                (wait_for_turns, (work, band, job, call, shared, sizes)),
                (end_turns, (work, job, call, sizes)),
            ],
            [4, 4, 1, 1, 1],
            [REGISTERS, DQ_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    elif TILES == 2:  # these consumers never add to dq in a fixed order
        gl.warp_specialize(
            [
                (consume_upto_192, (0, job, band, call, results, shared, sizes)),
                (consume_upto_192, (1, job, band, call, results, shared, sizes)),
                (
                    produce,
                    (q_desc, q_tail_desc, dout_desc, k_desc, k_tail_desc, v_desc, job, call, shared, sizes),
                ),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume_values, (job, band, call, results, shared, sizes)),
                (consume_keys, (job, band, call, results, shared, sizes)),
                (
                    produce,
                    (q_desc, q_tail_desc, dout_desc, k_desc, k_tail_desc, v_desc, job, call, shared, sizes),
                ),
                (wait_for_turns, (work, band, job, call, shared, sizes)),
                (end_turns, (work, job, call, sizes)),
            ],
            [4, 1, 1, 1],
            [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
