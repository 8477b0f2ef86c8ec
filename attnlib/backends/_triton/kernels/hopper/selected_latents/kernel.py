"""The kernel for selected tokens of latents on Hopper, in Gluon: a program per query and 64 of its heads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from ...tile import COUNTS, locate
from ..mla_decode.rows_64 import ROWS, WITH_LOADERS, allocate_rows_64, consume
from ..mla_decode.shared import HALF
from ..mla_decode.states import TileStates
from ..primitives import anew, prefetch
from ..splits import TOKENS, DecodeCall, DecodeOutputs, QueryRows, Split
from .int8_fp8 import gather_and_convert
from .producer import SelectedRows, gather

COPYING: gl.constexpr = gl.constexpr(128)  # threads of the producer; all of them arrive for each half
LINE: gl.constexpr = gl.constexpr(64)  # channels of 16 bits in a cache line


@gluon.jit
def prefetch_queries(q_ptr, stride_qh):
    """Prefetch the query rows of a program into the L2 cache."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    row = q_ptr + gl.arange(0, ROWS, gl.SliceLayout(1, LINES)) * stride_qh
    line = gl.arange(0, 2 * HALF // LINE, gl.SliceLayout(0, LINES))
    prefetch(row[:, None] + line[None, :] * LINE)
    prefetch(row + 2 * HALF)


@gluon.jit(do_not_specialize=COUNTS)
def selected_latents(
    q_ptr, k_ptr, out_ptr, lse_ptr, lists_ptr,  # the lists as list_blocks writes them
    sinks_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,  # any of these may be None
    k_rope_ptr, k_scale_ptr, split_ptr,  # None without a cache, as are the other arguments of caches
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_tt, stride_ob, stride_os, stride_oh,
    stride_lb, stride_lh, batch, heads, slots, splits, lines, s, t, scale, softcap, SPLIT: gl.constexpr,
):  # fmt: skip
    """Write the output of attention ``[b, s, h, 512]`` and the natural-log LSE ``[b, h, s]``.

    ``k`` holds latents of 512 + 64 channels, whose first 512 are the values. All heads of a query share one
    list of up to ``slots`` tokens. The programs of a query are neighbours, so that they share its rows in the
    L2 cache.

    A cache stores the 64 rotary channels in ``k_rope``, and lists have the rows of tokens in the cache. An
    int8 or fp8 cache has a scale per token. If lists are ``SPLIT``, programs write partial results for
    ``merge_splits``.

    Over a cache, programs start while ``list_blocks`` still runs (programmatic dependent launch). Before they
    wait, they may read what earlier kernels wrote, since ``list_blocks`` waits before it lets them start.
    """
    CACHED: gl.constexpr = k_rope_ptr is not None
    CONVERTED: gl.constexpr = k_scale_ptr is not None
    parts = heads // ROWS
    pid = gl.program_id(0)
    query = pid // parts
    if SPLIT:
        query, n = query // splits, query % splits
    # The last queries come first: with a causal mask, their lists are the longest.
    work = locate(query, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, 1, True)
    plane, token, head = work.plane, work.row + work.start, (pid % parts * ROWS).to(gl.int64)
    q_ptr += plane * stride_qb + token * stride_qs + head * stride_qh
    if CONVERTED:  # one thread arrives when it has converted half of a tile
        shared = allocate_rows_64(q_ptr.dtype.element_ty, 1, COPYING + 1)
    else:
        shared = allocate_rows_64(q_ptr.dtype.element_ty, COPYING, COPYING)
    fence_async_shared()
    if CACHED:
        if work.start < work.rows:
            prefetch_queries(q_ptr, stride_qh)
        gdc_wait()
    if work.start >= work.rows:
        return
    list_ptr = lists_ptr + (plane * s + token) * (slots + 1)
    count, sequence = gl.load(list_ptr), work.sequence.to(gl.int32)
    if SPLIT:
        # Tiles are gathered in pairs, so a split has whole pairs. The first is only empty if its list is.
        pairs = gl.cdiv(count, 2 * TOKENS)
        begin = gl.minimum(gl.cdiv(pairs * n, splits) * (2 * TOKENS), count)
        count = gl.minimum(gl.cdiv(pairs * (n + 1), splits) * (2 * TOKENS), count) - begin
        list_ptr += begin
    if not CACHED:
        k_ptr += gl.multiple_of(plane * stride_kb + work.other * stride_kt, 8)
    rows = SelectedRows(k_ptr, k_rope_ptr, k_scale_ptr, stride_kt, stride_tt, list_ptr + 1, count)
    # To the consumers, these are all heads of the only query of a call, which sees `count` tokens in a single
    # split. Fewer numbers than in a call with all queries and heads stay in registers.
    queries = QueryRows(q_ptr, 0, 0, stride_qh)
    if SPLIT:  # to the consumers, partial results are an output and an LSE in fp32
        line = n.to(gl.int64) * lines + (plane * s + token) * heads + head
        out_ptr, lse_ptr = split_ptr, split_ptr + lines.to(gl.int64) * splits * (2 * HALF) + line
        results = DecodeOutputs(out_ptr + line * (2 * HALF), lse_ptr, lse_ptr, 0, 0, 2 * HALF, 0, 1, 0)
        sequence = gl.where(n == 0, sequence, batch)  # only the first split adds the sink
    else:
        results = DecodeOutputs(
            out_ptr + (plane * stride_ob + token * stride_os + head * stride_oh),
            lse_ptr + (plane * stride_lb + token + head * stride_lh),
            lse_ptr, 0, 0, stride_oh, 0, stride_lh, 0,
        )  # fmt: skip
    single = anew(1)  # Triton 3.6 fails to compile a constant here
    split = Split(sequence, 0, 0, 1, 0, single, count, 0, count, 0, count, 0, count, None, None, None)
    states = TileStates(None, count, count)
    sinks_ptr = None if sinks_ptr is None else sinks_ptr + head
    call = DecodeCall(
        None, None, sinks_ptr, None, None, None, None, None, batch, ROWS, None, None, None, scale, softcap
    )
    if CONVERTED:
        # With 56 registers, converting leaves 40 to 88 bytes on the stack (sm_90, triton 3.6 to 3.9).
        gl.warp_specialize(
            [
                (consume, (0, queries, split, states, call, results, shared, WITH_LOADERS, True, None, None)),
                (consume, (1, queries, split, states, call, results, shared, WITH_LOADERS, True, None, None)),
                (gather_and_convert, (rows, shared)),
            ],
            [4, 4],
            [216, 72],
        )
    else:
        # 216 and 72 registers leave 8 bytes on the stack of a consumer (sm_90, triton 3.7 and 3.8).
        gl.warp_specialize(
            [
                (consume, (0, queries, split, states, call, results, shared, WITH_LOADERS, True, None, None)),
                (consume, (1, queries, split, states, call, results, shared, WITH_LOADERS, True, None, None)),
                (gather, (rows, shared)),
            ],
            [4, 4],
            [224, 56],
        )
