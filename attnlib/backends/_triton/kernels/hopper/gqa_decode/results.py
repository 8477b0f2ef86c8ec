"""Epilogue of the Hopper GQA decode kernel: join the sums of warps that share a KV head; write results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...band import sees_any
from ...scores import LN2, LOG2E
from ...split_kv import shares
from ..primitives import FIRST, barrier_sync, reinterpret
from .shared import HALF, M, channels, sums_of, threads_of


@gluon.jit
def finish(l_i, m_i, h, r, band, split, call, results, sizes):
    """Write the LSE of rows ``r`` of KV heads ``h``, and return what :func:`store_channels` needs.

    This is, for each row, the factor that normalizes its sums, its offset in ``out``, its offset in the
    buffer for partial results, and True if the row is valid.
    """
    query, head = (split.start + r) // call.group, (split.head * sizes.HEADS + h) * call.group
    head += (split.start + r) % call.group
    valid, token = (query < split.count) & (h >= 0), (split.row + query).to(gl.int64)
    share = gl.where(sees_any(split.length - split.count + query, band), 1.0, 0.0)
    m_i = gl.where(l_i == 0.0, float("-inf"), m_i)
    if call.sinks_ptr is not None:  # if the sequence is split, `combine` adds the sink
        mine = valid & (split.splits == 1) & (split.sequence < call.batch)
        sink = gl.load(call.sinks_ptr + head, mask=mine, other=float("-inf")).to(gl.float32)
        keeps, _, l_i, m_i = shares(l_i, m_i, sink * LOG2E)
        share *= keeps
    l_i = gl.where(l_i == 0.0, 1.0, l_i)
    lse2, line = m_i + gl.log2(l_i), (gl.program_id(0).to(gl.int64) * sizes.HEADS + h) * sizes.BLOCK_M + r
    at = split.plane * results.stride_ob + token * results.stride_os + head * results.stride_oh
    if split.splits == 1:
        at_lse = split.plane * results.stride_lb + head * results.stride_lh + token
        gl.store(results.lse_ptr + at_lse, lse2 * LN2, mask=valid)
    else:
        gl.store(results.split_ptr + results.lines * (2 * HALF) + line, lse2, mask=valid)
    return share / l_i, at, line * (2 * HALF), valid


@gluon.jit
def store_channels(acc, c, rows, split, results):
    """Multiply the sums of channels ``c`` by each row's factor, and write the results.

    ``rows`` is what :func:`finish` returned. Results go to ``out``, or into the buffer of partial results if
    the sequence is split. Where the factor is 0 we write 0, even if the sum is NaN or infinite.
    """
    AXIS: gl.constexpr = len(acc.shape) - 1
    share, at, line, valid = rows
    share = gl.expand_dims(share, AXIS)
    acc = gl.where(share == 0.0, 0.0, acc * share)
    mask = gl.expand_dims(valid, AXIS) & (c >= 0)
    if split.splits == 1:
        gl.store(
            results.out_ptr + (gl.expand_dims(at, AXIS) + c),
            acc.to(results.out_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        gl.store(results.split_ptr + (gl.expand_dims(line, AXIS) + c), acc, mask=mask)


@gluon.jit
def store_per_head(number: gl.constexpr, state, band, split, call, results, sizes):
    """Write the results of warps that each have a KV head of their own."""
    BY_ROW: gl.constexpr = gl.SliceLayout(2, sums_of(sizes.WARPS))
    h = gl.arange(0, sizes.WARPS, gl.SliceLayout(1, BY_ROW))[:, None]
    r = number * M + gl.arange(0, M, gl.SliceLayout(0, BY_ROW))[None, :]
    rows = finish(gl.sum(state.l_i, 2), state.m_i, h, r, band, split, call, results, sizes)
    for half in gl.static_range(2):
        c = channels(half, gl.SliceLayout(0, gl.SliceLayout(0, sums_of(sizes.WARPS))))
        store_channels((state.left, state.right)[half], gl.expand_dims(c[None, :], 0), rows, split, results)


@gluon.jit
def store_joined(number: gl.constexpr, state, band, split, call, results, shared, sizes):
    """Join, through shared memory, the sums of warps that share a KV head, and write the results."""
    PARTS: gl.constexpr = sizes.WARPS // sizes.HEADS
    ROWS: gl.constexpr = sizes.HEADS * M
    OF: gl.constexpr = gl.BlockedLayout([PARTS, 1, 4], [1, 2, 16], [1, sizes.WARPS, 1], [2, 1, 0])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, OF))
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    MIXED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    shared.sums.index(2 * number).store(state.m_i)
    shared.sums.index(2 * number + 1).store(gl.sum(state.l_i, 2))
    # Wait until all consumers have read all tiles, whose shared memory is now reused.
    barrier_sync(FIRST + shared.full.shape[0], threads_of(sizes) - 32)
    m_i = reinterpret(shared.sums.index(2 * number), gl.float32, [PARTS, ROWS], PLAIN).load(
        gl.SliceLayout(2, OF)
    )
    l_i = reinterpret(shared.sums.index(2 * number + 1), gl.float32, [PARTS, ROWS], PLAIN).load(
        gl.SliceLayout(2, OF)
    )
    most = gl.max(m_i, 0)
    weight = gl.exp2(m_i - gl.where(most == float("-inf"), 0.0, most)[None, :])
    l_i, most = gl.convert_layout(gl.sum(l_i * weight, 0), BY_ROW), gl.convert_layout(most, BY_ROW)
    x, weight = gl.arange(0, ROWS, BY_ROW), gl.expand_dims(weight, 2)
    rows = finish(l_i, most, x // M, number * M + x % M, band, split, call, results, sizes)
    BOXES: gl.constexpr = shared.boxes.shape[0] // 2
    for half in gl.static_range(2):
        boxes = reinterpret(shared.boxes, gl.float32, [BOXES, sizes.WARPS, M, HALF], MIXED).index(number)
        boxes.store((state.left, state.right)[half])
        acc = reinterpret(boxes, gl.float32, [PARTS, ROWS, HALF], MIXED).load(OF)
        c = channels(half, gl.SliceLayout(0, gl.SliceLayout(0, OF)))[None, :]
        store_channels(gl.sum(gl.where(weight == 0.0, 0.0, acc * weight), 0), c, rows, split, results)
