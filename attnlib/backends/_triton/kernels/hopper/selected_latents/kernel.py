"""The kernel for selected tokens of latents on Hopper, in Gluon: a program per query and 64 of its heads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from ...tile import COUNTS, locate
from ..mla_decode.rows_64 import ROWS, WITH_LOADERS, allocate_rows_64, consume
from ..mla_decode.shared import HALF
from ..mla_decode.states import TileStates
from ..primitives import anew
from ..splits import TOKENS, DecodeCall, DecodeOutputs, QueryRows, Split
from .producer import SelectedRows, gather

COPYING: gl.constexpr = gl.constexpr(128)  # threads of the producer; all of them arrive for each half


@gluon.jit(do_not_specialize=COUNTS)
def selected_latents(
    q_ptr, k_ptr, out_ptr, lse_ptr, lists_ptr,  # the lists as list_blocks writes them
    sinks_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,  # any of these may be None
    k_rope_ptr, table_ptr, split_ptr,  # None without a cache, as are the other arguments of caches
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_tt, stride_ob, stride_os, stride_oh,
    stride_lb, stride_lh, stride_table, pages, batch, heads, slots, splits, lines, s, t, scale, softcap,
    PAGE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Write the output of attention ``[b, s, h, 512]`` and the natural-log LSE ``[b, h, s]``.

    ``k`` holds latents of 512 + 64 channels, whose first 512 are the values. All heads of a query share one
    list of up to ``slots`` tokens. The programs of a query are neighbours, so that they share its rows in the
    L2 cache.

    A cache stores the 64 rotary channels in ``k_rope``, and its page ``n`` begins ``n * stride_kb`` elements
    after ``k``. A page has ``PAGE`` tokens, or with ``PAGE = 0`` a whole sequence. If lists are ``SPLIT``,
    programs write partial results for ``merge_splits``.
    """
    parts = heads // ROWS
    pid = gl.program_id(0)
    if table_ptr is not None:
        gdc_wait()
    query = pid // parts
    if SPLIT:
        query, n = query // splits, query % splits
    # The last queries come first: with a causal mask, their lists are the longest.
    work = locate(query, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, 1, True)
    if work.start >= work.rows:
        return
    plane, token, head = work.plane, work.row + work.start, (pid % parts * ROWS).to(gl.int64)
    list_ptr = lists_ptr + (plane * s + token) * (slots + 1)
    count, sequence = gl.load(list_ptr), work.sequence.to(gl.int32)
    if SPLIT:
        # Tiles are gathered in pairs, so a split has whole pairs. The first is only empty if its list is.
        pairs = gl.cdiv(count, 2 * TOKENS)
        begin = gl.minimum(gl.cdiv(pairs * n, splits) * (2 * TOKENS), count)
        count = gl.minimum(gl.cdiv(pairs * (n + 1), splits) * (2 * TOKENS), count) - begin
        list_ptr += begin
    if table_ptr is None:
        latents = k_ptr + gl.multiple_of(plane * stride_kb + work.other * stride_kt, 8)
        rows = SelectedRows(latents, None, stride_kt, None, list_ptr + 1, count, None, None, None)
    else:
        entries_ptr = table_ptr + gl.minimum(work.sequence, batch - 1) * stride_table
        page_rows = (stride_kb // stride_kt).to(gl.int32)
        rows = SelectedRows(
            k_ptr, k_rope_ptr, stride_kt, stride_tt, list_ptr + 1, count, entries_ptr, pages, page_rows
        )
    shared = allocate_rows_64(k_ptr.dtype.element_ty, COPYING, COPYING)
    fence_async_shared()
    # To the consumers, these are all heads of the only query of a call, which sees `count` tokens in a single
    # split. Fewer numbers than in a call with all queries and heads stay in registers.
    queries = QueryRows(q_ptr + (plane * stride_qb + token * stride_qs + head * stride_qh), 0, 0, stride_qh)
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
    # 216 and 72 registers leave 8 bytes on the stack of a consumer (sm_90, triton 3.7 and 3.8).
    gl.warp_specialize(
        [
            (consume, (0, queries, split, states, call, results, shared, WITH_LOADERS, True, None, None)),
            (consume, (1, queries, split, states, call, results, shared, WITH_LOADERS, True, None, None)),
            (gather, (rows, shared, PAGE)),
        ],
        [4, 4],
        [224, 56],
    )
