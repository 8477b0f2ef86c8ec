"""The epilogue of the MLA decode kernels: write the output and LSE, or partial results of a split."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...band import sees_any
from ...scores import LN2, LOG2E
from ...split_kv import shares
from ..primitives import barrier_sync, reinterpret
from .shared import HALF


@gluon.jit
def with_sink(l_i, m_i, r, split, call):
    """Add the sink logit to the softmax sums; it acts like the score of a key whose value is 0.

    Returns the factor for the output sums, and the new ``l_i`` and ``m_i``.
    """
    keeps = gl.full([r.shape[0]], 1.0, gl.float32, r.type.layout)
    if call.sinks_ptr is not None:  # for a split sequence, `combine` adds the sink
        mine = (r < split.count * call.group) & (split.splits == 1) & (split.sequence < call.batch)
        sink = gl.load(call.sinks_ptr + r % call.group, mask=mine, other=float("-inf")).to(gl.float32)
        keeps, _, l_i, m_i = shares(l_i, m_i, sink * LOG2E)
    return keeps, l_i, m_i


@gluon.jit
def store_lse(l_i, m_i, r, split, call, results):
    """Write the LSE of query rows: as a natural logarithm, or in log2 units if the sequence is split."""
    lse2 = m_i + gl.log2(l_i)
    token, valid = split.row + r // call.group, r < split.count * call.group
    if split.splits == 1:
        at = split.plane * results.stride_lb + r % call.group * results.stride_lh + token
        gl.store(results.lse_ptr + at, lse2 * LN2, mask=valid)
    else:
        line = gl.program_id(0).to(gl.int64) * r.shape[0] + r - split.start
        gl.store(results.split_ptr + results.lines * (2 * HALF) + line, lse2, mask=valid)


@gluon.jit
def share_of(acc, share, AXIS: gl.constexpr):
    """Multiply each row of sums by its factor; a factor of 0 gives 0 even for NaN and infinite sums."""
    share = gl.expand_dims(share, AXIS)
    return gl.where(share == 0.0, 0.0, acc * share)


@gluon.jit
def in_fp32(slots, ROWS: gl.constexpr):
    """Reinterpret the shared memory of ``slots`` as fp32 values ``[ROWS, HALF]``.

    Triton 3.8 cannot change the size of memory when it reinterprets it, so we slice the result.
    """
    FIT: gl.constexpr = slots.numel * slots.dtype.primitive_bitwidth // (32 * HALF)
    room = reinterpret(slots, gl.float32, [FIT, HALF], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    return room.slice(0, ROWS) if FIT > ROWS else room


@gluon.jit
def store_half(half, FIRST: gl.constexpr, split, call, results):
    """Write half of the channels, from ``FIRST`` on, from shared memory to ``out`` or as a partial result.

    Going through shared memory coalesces the stores: in the layout of matrix products, a thread has only 8
    adjacent bytes of a row.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    ROWS: gl.constexpr = half.shape[0]
    c = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    for n in gl.static_range(0, ROWS, 16):
        x, r = (
            half.slice(n, 16, 0).load(LAYOUT),
            split.start + n + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)),
        )
        valid = (r < split.count * call.group)[:, None] & (c >= 0)
        if split.splits == 1:
            token = (split.row + r // call.group).to(gl.int64)
            at = (
                split.plane * results.stride_ob
                + token * results.stride_os
                + r % call.group * results.stride_oh
            )
            gl.store(results.out_ptr + (at[:, None] + c), x.to(results.out_ptr.dtype.element_ty), mask=valid)
        else:
            line = gl.program_id(0).to(gl.int64) * ROWS + r - split.start
            gl.store(results.split_ptr + (line[:, None] * (2 * HALF) + c), x, mask=valid)


@gluon.jit
def join_and_store(
    number: gl.constexpr, sums, given, taken, of_rows, band, split, call, results,
    BOTH: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Add the sums of two consumer warpgroups and store them; each stores one half of the channels.

    This consumer copies its sums of the other half to ``given``, shared memory that it no longer needs. It
    reads the other consumer's sums of its own half from ``taken``.
    """
    LAYOUT: gl.constexpr = sums.left.type.layout
    OF_ROWS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ROWS: gl.constexpr = sums.left.shape[1]
    given.permute((1, 0)).store(sums.right if number == 0 else sums.left)
    of_rows.index(number).store(sums.m_i)
    of_rows.index(2 + number).store(sums.l_i)
    barrier_sync(BOTH, CONSUMERS)
    own, other = of_rows.index(number).load(OF_ROWS), of_rows.index(1 - number).load(OF_ROWS)
    m_i = gl.maximum(own, other)
    safe = gl.where(m_i == float("-inf"), 0.0, m_i)
    mine, others = gl.exp2(own - safe), gl.exp2(other - safe)
    l_i = of_rows.index(2 + number).load(OF_ROWS) * mine + of_rows.index(3 - number).load(OF_ROWS) * others
    acc = (sums.left if number == 0 else sums.right) * mine[None, :]
    acc += taken.permute((1, 0)).load(LAYOUT) * others[None, :]
    r = split.start + gl.arange(0, ROWS, OF_ROWS)
    keeps, l_i, m_i = with_sink(l_i, gl.where(l_i == 0.0, float("-inf"), m_i), r, split, call)
    l_i = gl.where(l_i == 0.0, 1.0, l_i)
    if number == 0:
        store_lse(l_i, m_i, r, split, call, results)
    seen = sees_any(split.length - split.count + r // call.group, band)
    taken.permute((1, 0)).store(share_of(acc, gl.where(seen, keeps / l_i, 0.0), 0))
    store_half(taken, number * HALF, split, call, results)
