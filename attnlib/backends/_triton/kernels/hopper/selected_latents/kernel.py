"""The kernel for selected tokens of latents on Hopper, in Gluon: a program per query and 64 of its heads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...tile import COUNTS, locate
from ..mla_decode.rows_64 import ROWS, WITH_LOADERS, allocate_rows_64, consume
from ..mla_decode.states import TileStates
from ..primitives import anew
from ..splits import DecodeCall, DecodeOutputs, QueryRows, Split
from .producer import SelectedRows, gather

COPYING: gl.constexpr = gl.constexpr(128)  # threads of the producer; all of them arrive for each half


@gluon.jit(do_not_specialize=COUNTS)
def selected_latents(
    q_ptr, k_ptr, out_ptr, lse_ptr, lists_ptr,  # the lists as list_blocks writes them
    sinks_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,  # any of these may be None
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_ob, stride_os, stride_oh,
    stride_lb, stride_lh, batch, heads, slots, s, t, scale, softcap,
):  # fmt: skip
    """Write the output of attention ``[b, s, h, 512]`` and the natural-log LSE ``[b, h, s]``.

    ``k`` holds latents of 512 + 64 channels, whose first 512 are the values. All heads of a query share one
    list of up to ``slots`` tokens. The programs of a query are neighbours, so that they share its rows in the
    L2 cache.
    """
    parts = heads // ROWS
    pid = gl.program_id(0)
    # The last queries come first: with a causal mask, their lists are the longest.
    work = locate(pid // parts, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 1, s, t, 1, 1, True)
    if work.start >= work.rows:
        return
    plane, token, head = work.plane, work.row + work.start, (pid % parts * ROWS).to(gl.int64)
    list_ptr = lists_ptr + (plane * s + token) * (slots + 1)
    count = gl.load(list_ptr)
    latents = k_ptr + gl.multiple_of(plane * stride_kb + work.other * stride_kt, 8)
    rows = SelectedRows(latents, stride_kt, list_ptr + 1, count)
    shared = allocate_rows_64(k_ptr.dtype.element_ty, COPYING, COPYING)
    fence_async_shared()
    # To the consumers, these are all heads of the only query of a call, which sees `count` tokens in a single
    # split. Fewer numbers than in a call with all queries and heads stay in registers.
    queries = QueryRows(q_ptr + (plane * stride_qb + token * stride_qs + head * stride_qh), 0, 0, stride_qh)
    results = DecodeOutputs(
        out_ptr + (plane * stride_ob + token * stride_os + head * stride_oh),
        lse_ptr + (plane * stride_lb + token + head * stride_lh), lse_ptr, 0, 0, stride_oh, 0, stride_lh, 0,
    )  # fmt: skip
    single = anew(1)  # Triton 3.6 fails to compile a constant here
    split = Split(
        work.sequence.to(gl.int32), 0, 0, 1, 0, single, count, 0, count, 0, count, 0, count, None, None, None
    )
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
            (gather, (rows, shared)),
        ],
        [4, 4],
        [224, 56],
    )
