"""Scores, probabilities and dropout for a tile of queries and keys.

Scores times a factor ``unit`` are in log2 units: a probability is ``exp2(score * unit - lse2)``.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


class Modifiers(NamedTuple):
    """The options that change scores: scale, softcap and the head's ALiBi slope in log2 units.

    ``softcap`` and ``slope`` may be None. ``slope`` is a scalar or has one value per row.
    """

    scale: tl.tensor
    softcap: tl.tensor | None
    slope: tl.tensor | None


@triton.jit
def load_slope(slopes_ptr, stride, sequence, head, batch):
    """Load the ALiBi slope of a head in log2 units.

    For the tokens after the last packed sequence, the slope is 0.
    """
    # One bool per head, because Triton 3.9's interpreter rejects a scalar mask for several heads.
    known = sequence + head * 0 < batch if len(head.shape) > 0 else sequence < batch
    return tl.load(slopes_ptr + (sequence * stride + head), mask=known, other=0).to(tl.float32) * LOG2E


@triton.jit
def descaled(x, ptr, at, sequence, batch):
    """Multiply ``x`` by the descale (the scale of fp8 tensors) of a sequence and head, if there are descales.

    For the tokens after the last packed sequence, the descale is 1.
    """
    if ptr is None:
        return x
    else:
        return x * tl.load(ptr + at, mask=sequence + at * 0 < batch, other=1.0)


@triton.jit
def tanh(x):
    """Return ``tanh(x)``, accurate to fp32 rounding.

    Near 0, a Taylor polynomial avoids the cancellation in ``1 - exp``.
    """
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    fading = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - fading) / (1 + fading)
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
def short_tanh(x):
    """Return ``tanh(x)`` with an absolute error of up to 3e-7, in a third of the instructions of ``tanh``."""
    grown = tl.exp2(x * (2 * LOG2E)) + 1
    return 1 - 2 * tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def unit_of(modifiers):
    """Return the factor by which scores are multiplied before ``exp2``.

    With softcap or ALiBi, :func:`modify` returns scores in log2 units, and the factor is 1. Otherwise it
    returns raw products, and the factor is ``scale * log2(e)``.
    """
    return modifiers.scale * LOG2E if modifiers.softcap is None and modifiers.slope is None else 1.0


@triton.jit
def modify(s, modifiers, i, j, SHORT: tl.constexpr = False):
    """Apply softcap and ALiBi to the products q·k, and return scores and their derivative.

    ALiBi subtracts the slope times the distance ``|i - j|``. The derivative is with respect to the scaled
    products, and it is 1 without a softcap. ``SHORT`` takes fewer instructions, and is exact enough for
    inputs of 8 or 16 bits. ``i`` and ``j`` are then the tile's rows and columns, counted from its first
    column; rows may be queries or keys.
    """
    derivative = 1.0
    if modifiers.softcap is not None or modifiers.slope is not None:
        if modifiers.softcap is None:
            s *= modifiers.scale
        elif SHORT:
            capped = short_tanh(s * (modifiers.scale / modifiers.softcap))
            s, derivative = modifiers.softcap * capped, 1 - capped * capped
        else:
            capped = tanh(s * modifiers.scale / modifiers.softcap)
            s, derivative = modifiers.softcap * capped, 1 - capped * capped
        s *= LOG2E
        if modifiers.slope is None:
            pass
        elif SHORT:
            # A thread's columns differ by multiples of 8, which are constants for the compiler.
            distance = (i.to(tl.float32) - (j & 7).to(tl.float32)) - (j & -8).to(tl.float32)
            s -= modifiers.slope * tl.abs(distance)
        else:
            s -= modifiers.slope * tl.abs(i - j).to(tl.float32)
    return s, derivative


class PairIndices(NamedTuple):
    """The indices that mask and score functions receive for the query-key pairs of a tile.

    If the call is one chunk of a larger call, the indices count from the start of the larger one.
    """

    b: tl.tensor
    h: tl.tensor
    i: tl.tensor
    j: tl.tensor
    first: tl.tensor


@triton.jit
def placed(origin, sequence, head, i, j, first):
    """Convert indices within a chunk of a larger call to indices within that larger call.

    ``first`` is the index of the sequence's first query.
    """
    b, h = (origin.sequence + sequence).to(tl.int32), (origin.head + head).to(tl.int32)
    return PairIndices(b, h, i + origin.query, j + origin.key, first + origin.query)


@triton.jit
def natural(s, modifiers):
    """Convert scores from :func:`modify` to natural units, which score functions take."""
    return s * (unit_of(modifiers) * LN2)


@triton.jit
def changed(s, modifiers, place, tensors, SCORE: tl.constexpr):
    """Apply a score function to scores from :func:`modify`, and return the new scores in log2 units.

    Without a function, return the scores of :func:`modify` unchanged.
    """
    if SCORE is None:
        return s
    else:
        s = natural(s, modifiers)
        return SCORE(s, place.b, place.h, place.i, place.j, place.first, tensors) * LOG2E


@triton.jit
def unit_behind(modifiers, SCORE: tl.constexpr):
    """Return the factor by which scores from :func:`changed` are multiplied before ``exp2``."""
    return unit_of(modifiers) if SCORE is None else 1.0


@triton.jit
def unchanged(
    ds, s, modifiers, seen, place, tensors, grads, DERIVATIVE: tl.constexpr, GRADIENTS: tl.constexpr
):
    """Return the gradient of a score function's input, given the gradient ``ds`` of its output.

    The gradient is 0 for hidden pairs of query and key; ``seen`` is a tile of bools, or True. If ``grads``
    are given, the gradients of the tensors that the function captures are added to them.
    """
    if DERIVATIVE is None:
        return ds
    else:
        s = natural(s, modifiers)
        if GRADIENTS is not None:
            GRADIENTS(s, ds, seen, place.b, place.h, place.i, place.j, place.first, tensors, grads)
        return tl.where(
            seen, DERIVATIVE(s, ds, place.b, place.h, place.i, place.j, place.first, tensors), 0.0
        )


@triton.jit
def online_softmax(m_i, s, unit):
    """Return the new running maximum, a tile's probabilities, and the factor that rescales earlier sums."""
    m_new = tl.maximum(m_i, tl.max(s, 1))
    # Until a row sees a key, its maximum is -inf. Subtracting -inf from scores would give NaN.
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    correction = tl.exp2((m_i - safe) * unit)  # exactly 1 if m_i is unchanged; an FMA would round
    p = tl.exp2(s * unit - (safe * unit)[:, None])
    return m_new, p, correction


@triton.jit
def dropout_keep(seed, threshold, origin, sequence, head, i, j0, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr):
    """Return the dropout mask of a tile: True if a pair's random bits reach the threshold.

    The bits are Philox-4x32-10 of ``(j // 4, i, head, sequence)``. If this call is a chunk of a larger call,
    these indices count from the start of the larger one. Four keys share one Philox result. If the call is
    not a chunk (``WHOLE``), the four are adjacent in a tile; in a chunk, each key computes the result again.
    """
    STEP: tl.constexpr = 4 if WHOLE else 1
    keys = (origin.key + j0 + tl.arange(0, BLOCK_N // STEP) * STEP)[None, :] + tl.zeros(
        [i.shape[0], 1], tl.int32
    )
    rows = (i + origin.query)[:, None] + tl.zeros([1, BLOCK_N // STEP], tl.int32)
    head, sequence = (head + origin.head).to(tl.int32), (sequence + origin.sequence).to(tl.int32)
    a, b, c, d = tl.philox(seed, keys // 4, rows, head, sequence)
    if WHOLE:
        bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(i.shape[0], BLOCK_N)
    else:
        bits = tl.where(keys % 4 < 2, tl.where(keys % 4 == 0, a, b), tl.where(keys % 4 == 2, c, d))
    return bits.to(tl.uint32, bitcast=True) >= threshold
