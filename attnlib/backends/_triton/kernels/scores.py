"""From products q·k to scores, to probabilities, and to what dropout keeps of them.

Scores are kept in units of ``log2``: a probability is ``exp2(score * unit - lse2)``.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


class Modifiers(NamedTuple):
    """What makes a score of a product: its scale, a cap (None without), and the head's slope in log2 units
    (or None).

    ``slope`` is one number, or one a row.
    """

    scale: tl.tensor
    softcap: tl.tensor | None
    slope: tl.tensor | None


@triton.jit
def load_slope(slopes_ptr, stride, sequence, head, batch):
    """The slope of a head in log2 units; 0 for what follows the last packed sequence."""
    # One bool for all heads is no mask to Triton 3.9's interpreter.
    known = sequence + head * 0 < batch if len(head.shape) > 0 else sequence < batch
    return tl.load(slopes_ptr + (sequence * stride + head), mask=known, other=0).to(tl.float32) * LOG2E


@triton.jit
def descaled(x, ptr, at, sequence, batch):
    """``x`` times the descale of a head, where there are any; that of what follows the last packed sequence
    is 1.
    """
    if ptr is None:
        return x
    else:
        return x * tl.load(ptr + at, mask=sequence + at * 0 < batch, other=1.0)


@triton.jit
def tanh(x):
    """``tanh(x)`` to fp32 rounding; a Taylor polynomial near 0, where ``1 - exp`` would cancel."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    fading = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - fading) / (1 + fading)
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
def unit_of(modifiers):
    """What scores are multiplied by in ``exp2``: plain ones are products as they are, others in log2
    units.
    """
    return modifiers.scale * LOG2E if modifiers.softcap is None and modifiers.slope is None else 1.0


@triton.jit
def modify(s, modifiers, i, j):
    """Products q·k as scores, capped and less the slope times the distance ``|i - j|``; and their derivative.

    That is by the scaled products, and 1 without a cap.
    """
    derivative = 1.0
    if modifiers.softcap is not None or modifiers.slope is not None:
        s *= modifiers.scale
        if modifiers.softcap is not None:
            capped = tanh(s / modifiers.softcap)
            s, derivative = modifiers.softcap * capped, 1 - capped * capped
        s *= LOG2E
        if modifiers.slope is not None:
            s -= modifiers.slope * tl.abs(i - j).to(tl.float32)
    return s, derivative


class PairIndices(NamedTuple):
    """What functions of indices are given of a tile: its indices in the whole of which this is a piece."""

    b: tl.tensor
    h: tl.tensor
    i: tl.tensor
    j: tl.tensor
    first: tl.tensor


@triton.jit
def placed(origin, sequence, head, i, j, first):
    """The indices of a tile, from those of a piece; ``first`` is that of the sequence's first query."""
    b, h = (origin.sequence + sequence).to(tl.int32), (origin.head + head).to(tl.int32)
    return PairIndices(b, h, i + origin.query, j + origin.key, first + origin.query)


@triton.jit
def natural(s, modifiers):
    """Scores of :func:`modify`, times their scale if they are products."""
    return s * (unit_of(modifiers) * LN2)


@triton.jit
def changed(s, modifiers, place, tensors, SCORE: tl.constexpr):
    """Scores of :func:`modify` as a function changes them, in log2 units then; as they are where there is
    none.
    """
    if SCORE is None:
        return s
    else:
        s = natural(s, modifiers)
        return SCORE(s, place.b, place.h, place.i, place.j, place.first, tensors) * LOG2E


@triton.jit
def unit_behind(modifiers, SCORE: tl.constexpr):
    """What scores of :func:`changed` are multiplied by in ``exp2``."""
    return unit_of(modifiers) if SCORE is None else 1.0


@triton.jit
def unchanged(
    ds, s, modifiers, seen, place, tensors, grads, DERIVATIVE: tl.constexpr, GRADIENTS: tl.constexpr
):
    """The gradient of scores before a function, from that behind it; 0 where not ``seen``, a tile of bools or
    True.

    Adds the gradients of what the function reads to ``grads``, where there are any.
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
    """The running maximum with a tile of scores; its probabilities; what sums so far are scaled by."""
    m_new = tl.maximum(m_i, tl.max(s, 1))
    # A row that has seen nothing keeps -inf as its maximum; subtracting it would give NaN.
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    correction = tl.exp2((m_i - safe) * unit)  # 1 if the maximum stays: as one fused sum it drifts
    p = tl.exp2(s * unit - (safe * unit)[:, None])
    return m_new, p, correction


@triton.jit
def dropout_keep(seed, threshold, origin, sequence, head, i, j0, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr):
    """Which probabilities of queries ``i`` and the keys from ``j0`` on dropout keeps, where bits reach the
    threshold.

    Those are Philox-4x32-10 of ``(j // 4, i, head, sequence)``, counted in the whole of which this may be a
    piece. Four keys share a number. In a ``WHOLE`` call they are side by side in a tile; in a piece, each
    makes it anew.
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
