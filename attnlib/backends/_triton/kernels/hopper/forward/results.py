"""Epilogue of the Hopper forward: normalize output sums, and write them and the LSE."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...scores import LN2, LOG2E
from ..primitives import async_store
from .shared import ROWS


class ForwardOutputs(NamedTuple):
    """The outputs of the forward, as a TMA descriptor, pointers and strides; ``e`` is the value dimension."""

    out_desc: gl.tensor
    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    stride_ob: gl.tensor
    stride_os: gl.tensor
    stride_oh: gl.tensor
    stride_lb: gl.tensor
    stride_lh: gl.tensor
    e: gl.tensor


@gluon.jit
def with_sink(m_i, l_i, work, call):
    """Add the attention sink to a row's softmax; return its maximum, its sum and the factor for output sums.

    The sink acts like a key whose value is 0.
    """
    if call.sinks_ptr is None:
        return m_i, l_i, 1.0
    else:
        sink = gl.load(call.sinks_ptr + work.head).to(gl.float32) * LOG2E
        sink = gl.where(work.sequence < call.batch, sink, float("-inf"))
        m_new = gl.maximum(m_i, sink)
        safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        gain = gl.exp2(m_i - safe)
        return m_new, l_i * gain + gl.exp2(sink - safe), gain


@gluon.jit
def put_lse(m_i, l_i, work, first, call, results):
    """Write the LSE of query rows from ``first`` on; return the factor that normalizes their output sums."""
    m_i, l_i, gain = with_sink(m_i, l_i, work, call)
    nothing = l_i == 0.0
    l_i = gl.where(nothing, 1.0, l_i)
    lse = gl.where(nothing, float("-inf"), (m_i + gl.log2(l_i)) * LN2)
    at = work.plane.to(gl.int64) * results.stride_lb + work.row + work.head.to(gl.int64) * results.stride_lh
    m = gl.arange(0, ROWS, l_i.type.layout)
    gl.store(results.lse_ptr + at + (first + m), lse, mask=first + m < work.rows)
    return gain / l_i


@gluon.jit
def put_out(out, work, first, channel: gl.constexpr, results, sizes):
    """Write a tile from shared memory to the output, to rows from ``first`` and channels from ``channel`` on.

    Rows past the end of the sequence are not written, since in a packed tensor they belong to the next one.
    """
    fence_async_shared()
    left = work.rows - first
    if not sizes.PACKED:
        plane, head = work.plane.to(gl.int32), work.head.to(gl.int32)
        async_store(results.out_desc, [plane, first, head, channel], out)
    elif left >= ROWS:
        row = work.row.to(gl.int32) + first
        async_store(results.out_desc, [0, row, work.head.to(gl.int32), channel], out)
    elif left > 0:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        e = channel + gl.arange(0, sizes.E, gl.SliceLayout(0, LAYOUT))
        at = (work.row + first + m) * results.stride_os
        at = at[:, None] + (work.head.to(gl.int64) * results.stride_oh + e)[None, :]
        gl.store(results.out_ptr + at, out.load(LAYOUT), mask=(m < left)[:, None] & (e < results.e)[None, :])
