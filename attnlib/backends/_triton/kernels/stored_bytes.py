"""Convert the values of an int8 or fp8 cache to fp16, without error, for matrix products."""

from typing import NamedTuple

import triton
import triton.language as tl

from .tile import ChannelBlocks


class QueryFactors(NamedTuple):
    """Query rows as operands of matrix products; ``tail`` holds the channels after the first block.

    If keys are loaded as pairs of bytes, ``main`` holds the even channels and ``odd`` the odd ones.
    """

    main: tl.tensor
    odd: tl.tensor
    tail: tl.tensor


FROM_INT8: tl.constexpr = tl.constexpr("""{ .reg .b32 unsigned, middle;
         mov.b32 middle, 0x64806480;
         xor.b32 unsigned, $2, 0x80808080;
         prmt.b32 $0, unsigned, 0x64646464, 0x4140;
         prmt.b32 $1, unsigned, 0x64646464, 0x4342;
         sub.f16x2 $0, $0, middle;
         sub.f16x2 $1, $1, middle; }""")  # 1024 + n is 0x6400 + n in fp16
FROM_E4M3: tl.constexpr = tl.constexpr("""{ .reg .b16 low, high;
         mov.b32 {low, high}, $2;
         cvt.rn.f16x2.e4m3x2 $0, low;
         cvt.rn.f16x2.e4m3x2 $1, high; }""")


@triton.jit
def as_factor(x, dtype: tl.constexpr, NATIVE: tl.constexpr, STAYS: tl.constexpr):
    """Convert values of the cache to ``dtype``, without error.

    ``NATIVE``: convert int8 and e4m3 to fp16 with NVIDIA instructions. ``STAYS``: convert before the tile
    passes through shared memory. Otherwise Triton moves the bytes through shared memory, and must read them
    one by one if the product needs the tile transposed.
    """
    if NATIVE and dtype == tl.float16 and x.dtype.primitive_bitwidth == 8:
        ASSEMBLY: tl.constexpr = FROM_INT8 if x.dtype == tl.int8 else FROM_E4M3
        return tl.inline_asm_elementwise(ASSEMBLY, "=&r,=&r,r", [x], tl.float16, is_pure=not STAYS, pack=4)
    else:
        return x.to(dtype)


BOTH_INT8: tl.constexpr = tl.constexpr("""{ .reg .b32 unsigned, middle;
         mov.b32 middle, 0x64806480;
         xor.b32 unsigned, $2, 0x80808080;
         prmt.b32 $0, unsigned, 0x64646464, 0x4240;
         prmt.b32 $1, unsigned, 0x64646464, 0x4341;
         sub.f16x2 $0, $0, middle;
         sub.f16x2 $1, $1, middle; }""")
BOTH_E4M3: tl.constexpr = tl.constexpr("""{ .reg .b32 sorted; .reg .b16 low, high;
         prmt.b32 sorted, $2, 0, 0x3120;
         mov.b32 {low, high}, sorted;
         cvt.rn.f16x2.e4m3x2 $0, low;
         cvt.rn.f16x2.e4m3x2 $1, high; }""")


@triton.jit
def both_factors(x, stored: tl.constexpr, NATIVE: tl.constexpr):
    """Unpack pairs of int8 or fp8 values into two fp16 tiles, one of even and one of odd channels.

    Pairs are loaded and moved as int16, like any 16-bit tile, and unpacked in registers just before the
    product.
    """
    if NATIVE:
        ASSEMBLY: tl.constexpr = BOTH_INT8 if stored == tl.int8 else BOTH_E4M3
        return tl.inline_asm_elementwise(
            ASSEMBLY, "=&r,=&r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        first, second = x.to(tl.int8).to(stored, bitcast=True), (x >> 8).to(tl.int8).to(stored, bitcast=True)
        return first.to(tl.float16), second.to(tl.float16)


@triton.jit
def pairs_at(ptr):
    """Cast a pointer to bytes to an int16 pointer, through which bytes are loaded in pairs."""
    return ptr.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def halved(queries):
    """Divide queries into even and odd channels, to match keys that are loaded as pairs of bytes."""
    main = queries.main.reshape(queries.main.shape[0], queries.main.shape[1] // 2, 2)
    even, odd = tl.split(main)
    return QueryFactors(even, odd, queries.tail)


@triton.jit
def in_range(queries, of_tail: tl.constexpr):
    """Scale queries into the range of fp16, and return them with the factors that undo the scaling.

    Each row is scaled by a power of two that brings it below 4. The factor that undoes this is 0 if a row has
    only zeros and subnormal numbers. The tail of an MLA cache's key (its rotary channels) is not quantized,
    so the tail of the query gets the same dtype, ``of_tail``.
    """
    q, tail = queries.main.to(tl.float32), queries.tail.to(tl.float32)
    CHANNELS: tl.constexpr = len(q.shape) - 1
    top = tl.maximum(tl.max(tl.abs(q), CHANNELS), tl.max(tl.abs(tail), CHANNELS))
    exponent = tl.minimum(top.to(tl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
    power = tl.expand_dims((0x7F000000 - exponent).to(tl.float32, bitcast=True), CHANNELS)
    return ChannelBlocks((q * power).to(tl.float16), (tail * power).to(of_tail)), exponent.to(
        tl.float32, bitcast=True
    )


@triton.jit
def split_scale(scale):
    """Split a scale into a power of two and a remaining factor; return ``exponent, 1 / power, rest``.

    The caller adds the exponent, which is at least -40, to the scores. This multiplies the probabilities by
    the power, but they never exceed 1, since the largest score is subtracted. ``1 / power`` undoes the
    multiplication. The remaining factor ``rest`` is less than 2 if the scale is finite.
    """
    exponent = tl.minimum(tl.maximum((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF, 87), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (exponent - 127).to(tl.float32), inverse, scale * inverse
