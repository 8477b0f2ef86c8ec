"""Helpers that generated mask and score functions call: captured tensors, division, shifts, powers."""

from typing import NamedTuple

import triton
import triton.language as tl


class CapturedTensor(NamedTuple):
    """A captured tensor in a kernel, with one size and one stride per dimension (possibly none)."""

    ptr: tl.tensor
    sizes: tuple
    strides: tuple


@triton.jit
def element_at(table, indices):
    """Return pointers to elements of a captured tensor, in the shape to which the indices broadcast.

    Each index is clamped to its dimension.
    """
    at = table.ptr
    for n in tl.static_range(len(indices)):
        index = tl.minimum(tl.maximum(indices[n], 0), table.sizes[n] - 1)
        at += index.to(tl.int64) * table.strides[n]
    return at


@triton.jit
def bool_of(table, indices):
    """Load elements of a captured bool tensor."""
    return tl.load(element_at(table, indices)) != 0


@triton.jit
def int_of(table, indices, TYPE: tl.constexpr):
    """Load elements of a captured integer tensor as ``TYPE``, which is int32 or int64."""
    return tl.load(element_at(table, indices)).to(TYPE)


@triton.jit
def float_of(table, indices):
    """Load elements of a captured float tensor, converted to fp32."""
    return tl.load(element_at(table, indices)).to(tl.float32)


@triton.jit
def add_elements(table, indices, x):
    """Add a tile to elements of an fp32 tensor with atomics, in no fixed order.

    Along a dimension that no index depends on, the tile is summed first and added once.
    """
    at = element_at(table, indices)
    if len(at.shape) == 0:
        tl.atomic_add(at, tl.sum(x), sem="relaxed")
    else:
        for axis in tl.static_range(len(at.shape)):
            if at.shape[axis] == 1:
                x = tl.sum(x, axis, keep_dims=True)
        places = at.to(tl.int64)
        first = tl.min(places)
        # Often all indices of a tile name the same element: for example, if distances are clamped, all far
        # keys share one bias. In this case, add the sum once, since atomics to one address run one by one.
        if first == tl.max(places):
            tl.atomic_add(first.to(table.ptr.dtype), tl.sum(x), sem="relaxed")
        else:
            tl.atomic_add(at, x, mask=x != 0.0, sem="relaxed")


@triton.jit
def int_quotient(x, y, TYPE: tl.constexpr):
    """Return ``x // y`` of ints, rounded down as in Python; a divisor of 0 counts as 1."""
    x, y = tl.cast(x, TYPE), tl.cast(y, TYPE)
    y = tl.where(y == 0, 1, y)
    quotient, rest = x // y, x % y  # Triton rounds towards 0
    return quotient - tl.where((rest != 0) & ((rest ^ y) < 0), 1, 0)


@triton.jit
def int_rest(x, y, TYPE: tl.constexpr):
    """Return ``x % y`` of ints, with the sign of ``y`` as in Python; a divisor of 0 counts as 1."""
    x, y = tl.cast(x, TYPE), tl.cast(y, TYPE)
    y = tl.where(y == 0, 1, y)
    rest = x % y  # Triton gives it the sign of x
    return rest + tl.where((rest != 0) & ((rest ^ y) < 0), y, 0)


@triton.jit
def lshifted(x, n, BITS: tl.constexpr, TYPE: tl.constexpr):
    """Return ``x << n`` of ints, or 0 if ``n`` is not in ``[0, BITS)``."""
    x, n = tl.cast(x, TYPE), tl.cast(n, TYPE)
    inside = (n >= 0) & (n < BITS)
    return tl.where(inside, x << tl.where(inside, n, 0), 0)


@triton.jit
def rshifted(x, n, MOST: tl.constexpr, TYPE: tl.constexpr):
    """Return ``x >> n`` of ints; an ``n`` that is negative or above ``MOST`` counts as ``MOST``."""
    x, n = tl.cast(x, TYPE), tl.cast(n, TYPE)
    return x >> tl.where((n < 0) | (n > MOST), MOST, n)


@triton.jit
def power(x, y: tl.constexpr, INTEGER: tl.constexpr, ODD: tl.constexpr):
    """Return ``x ** y`` of floats; NaN if ``x`` is negative and ``y`` is not an integer.

    ``INTEGER``: ``y`` is an integer. ``ODD``: ``y`` is an odd integer.
    """
    found = tl.exp2(y * tl.log2(tl.abs(x)))
    if INTEGER:
        return tl.where(x < 0, -found, found) if ODD else found
    else:
        return tl.where(x < 0, float("nan"), found)


@triton.jit
def float_parts(x, y):
    """Return ``x // y`` and ``x % y`` of floats, with the quotient rounded down.

    A divisor of 0 counts as 1.
    """
    x, y = tl.cast(x, tl.float32), tl.cast(y, tl.float32)
    y = tl.where(y == 0.0, 1.0, y)
    quotient = tl.floor(tl.div_rn(x, y))
    rest = tl.fma(-quotient, y, x)
    above = (rest != 0.0) & ((rest < 0.0) != (y < 0.0))  # rounding made the quotient 1 too large
    return quotient - tl.where(above, 1.0, 0.0), rest + tl.where(above, y, 0.0)


@triton.jit
def float_quotient(x, y):
    """Return ``x // y`` of floats; see :func:`float_parts`."""
    return float_parts(x, y)[0]


@triton.jit
def float_rest(x, y):
    """Return ``x % y`` of floats; see :func:`float_parts`."""
    return float_parts(x, y)[1]
