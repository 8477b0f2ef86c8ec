"""What programs of indices are written with: elements of captured tensors, and division that rounds down."""

from typing import NamedTuple

import triton
import triton.language as tl


class Table(NamedTuple):
    """A captured tensor as kernels take it: a size and a stride for each dimension, which may be none."""

    ptr: tl.tensor
    sizes: tuple
    strides: tuple


@triton.jit
def element_at(table, indices):
    """Where elements lie, in the shape to which the indices broadcast; each of them is clamped to what there is."""
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
def int_of(table, indices):
    """Elements of a tensor of integers, as int32."""
    return tl.load(element_at(table, indices)).to(tl.int32)


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
        # Often all are one: distances are clamped, and far keys have one bias. As many atomics would wait in line.
        if first == tl.max(places):
            tl.atomic_add(first.to(table.ptr.dtype), tl.sum(x), sem="relaxed")
        else:
            tl.atomic_add(at, x, mask=x != 0.0, sem="relaxed")


@triton.jit
def int_quotient(x, y):
    """``x // y`` of ints, rounded down; a divisor of 0 counts as 1."""
    x, y = tl.cast(x, tl.int32), tl.cast(y, tl.int32)
    y = tl.where(y == 0, 1, y)
    quotient, rest = x // y, x % y  # towards 0
    return quotient - tl.where((rest != 0) & ((rest ^ y) < 0), 1, 0)


@triton.jit
def int_rest(x, y):
    """``x % y`` of ints, of the sign of ``y``; a divisor of 0 counts as 1."""
    x, y = tl.cast(x, tl.int32), tl.cast(y, tl.int32)
    y = tl.where(y == 0, 1, y)
    rest = x % y  # of the sign of x
    return rest + tl.where((rest != 0) & ((rest ^ y) < 0), y, 0)


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
