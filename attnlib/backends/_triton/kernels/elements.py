"""What programs of indices are written with: elements of captured tensors, and division that rounds down."""

from typing import NamedTuple

import triton
import triton.language as tl


class CapturedTensor(NamedTuple):
    """A captured tensor as kernels take it: a size and a stride for each dimension, which may be none."""

    ptr: tl.tensor
    sizes: tuple
    strides: tuple


@triton.jit
def element_at(table, indices):
    """Where elements lie, in the shape to which the indices broadcast; each of them is clamped to what there
    is.
    """
    at = table.ptr
    for n in tl.static_range(len(indices)):
        index = tl.minimum(tl.maximum(indices[n], 0), table.sizes[n] - 1)
        at += index.to(tl.int64) * table.strides[n]
    return at


@triton.jit
def bool_of(table, indices):
    """Elements of a tensor of bools."""
    return tl.load(element_at(table, indices)) != 0


@triton.jit
def int_of(table, indices, TYPE: tl.constexpr):
    """Elements of a tensor of integers, as such of int32 or int64."""
    return tl.load(element_at(table, indices)).to(TYPE)


@triton.jit
def float_of(table, indices):
    """Elements of a tensor of floats, in fp32."""
    return tl.load(element_at(table, indices)).to(tl.float32)


@triton.jit
def add_elements(table, indices, x):
    """Add a tile to elements in fp32, in no fixed order.

    Along a dimension in which no index differs, the sum of the tile is added once.
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
        # Often all are one: distances are clamped, and far keys have one bias. As many atomics would wait in
        # line.
        if first == tl.max(places):
            tl.atomic_add(first.to(table.ptr.dtype), tl.sum(x), sem="relaxed")
        else:
            tl.atomic_add(at, x, mask=x != 0.0, sem="relaxed")


@triton.jit
def int_quotient(x, y, TYPE: tl.constexpr):
    """``x // y`` of ints, rounded down; a divisor of 0 counts as 1."""
    x, y = tl.cast(x, TYPE), tl.cast(y, TYPE)
    y = tl.where(y == 0, 1, y)
    quotient, rest = x // y, x % y  # towards 0
    return quotient - tl.where((rest != 0) & ((rest ^ y) < 0), 1, 0)


@triton.jit
def int_rest(x, y, TYPE: tl.constexpr):
    """``x % y`` of ints, of the sign of ``y``; a divisor of 0 counts as 1."""
    x, y = tl.cast(x, TYPE), tl.cast(y, TYPE)
    y = tl.where(y == 0, 1, y)
    rest = x % y  # of the sign of x
    return rest + tl.where((rest != 0) & ((rest ^ y) < 0), y, 0)


@triton.jit
def lshifted(x, n, BITS: tl.constexpr, TYPE: tl.constexpr):
    """``x << n`` of ints; 0 for fewer than 0 bits, and for all of them."""
    x, n = tl.cast(x, TYPE), tl.cast(n, TYPE)
    inside = (n >= 0) & (n < BITS)
    return tl.where(inside, x << tl.where(inside, n, 0), 0)


@triton.jit
def rshifted(x, n, MOST: tl.constexpr, TYPE: tl.constexpr):
    """``x >> n`` of ints; by ``MOST`` for more, and for fewer than 0 bits."""
    x, n = tl.cast(x, TYPE), tl.cast(n, TYPE)
    return x >> tl.where((n < 0) | (n > MOST), MOST, n)


@triton.jit
def power(x, y: tl.constexpr, INTEGER: tl.constexpr, ODD: tl.constexpr):
    """``x ** y`` of floats; NaN for ``x`` below 0, unless ``y`` is an integer."""
    found = tl.exp2(y * tl.log2(tl.abs(x)))
    if INTEGER:
        return tl.where(x < 0, -found, found) if ODD else found
    else:
        return tl.where(x < 0, float("nan"), found)


@triton.jit
def float_parts(x, y):
    """``x // y`` and ``x % y`` of floats, rounded down; a divisor of 0 counts as 1."""
    x, y = tl.cast(x, tl.float32), tl.cast(y, tl.float32)
    y = tl.where(y == 0.0, 1.0, y)
    quotient = tl.floor(tl.div_rn(x, y))
    rest = tl.fma(-quotient, y, x)
    above = (rest != 0.0) & ((rest < 0.0) != (y < 0.0))  # the quotient was rounded up to an integer
    return quotient - tl.where(above, 1.0, 0.0), rest + tl.where(above, y, 0.0)


@triton.jit
def float_quotient(x, y):
    """``x // y`` of floats, as :func:`float_parts` has it."""
    return float_parts(x, y)[0]


@triton.jit
def float_rest(x, y):
    """``x % y`` of floats, as :func:`float_parts` has it."""
    return float_parts(x, y)[1]
