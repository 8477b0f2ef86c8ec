"""Stored bytes as factors of 16-bit products: all as fp16, which holds any of them, in the range that fp16
has.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .tile import ChannelBlocks


class QueryFactors(NamedTuple):
    """Rows of queries, and their tail; of pairs ``main`` has the even channels, and ``odd`` the odd ones."""

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
    """What is stored in ``dtype``, exactly; int8 and e4m3 in fp16 ``NATIVE``: in the instructions of NVIDIA's
    chips.

    ``STAYS``: where it was loaded, from where fp16 goes through shared memory to the product. Triton would
    rather move bytes, and cannot read those of a transposed factor but one by one.
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
    """The first and the second byte of each pair, int16, in fp16: even channels and odd ones.

    Pairs go to a product as any 16 bits do, and become two factors there, in registers.
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
    """A pointer to pairs of bytes, int16."""
    return ptr.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def halved(queries):
    """Queries that meet pairs."""
    main = queries.main.reshape(queries.main.shape[0], queries.main.shape[1] // 2, 2)
    even, odd = tl.split(main)
    return QueryFactors(even, odd, queries.tail)


@triton.jit
def in_range(queries, of_tail: tl.constexpr):
    """Queries as fp16, which meets 8-bit keys, rows scaled by powers of two to be in its range; what undoes
    the scale.

    The power brings a row below 4; what undoes it is 0 for the least of all. The tail of a latent key is no
    8-bit key: it has a dtype of its own, and so has that of a query.
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
    """A scale as a power of two, ``(exponent, inverse of the power, rest)``; the exponent is -40 at least.

    Scores that grow by the exponent give weights times that power: at most 1 whatever the scales, if the
    largest score is subtracted, and times the inverse what they were. The rest is less than 2, but where the
    scale is not finite.
    """
    exponent = tl.minimum(tl.maximum((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF, 87), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (exponent - 127).to(tl.float32), inverse, scale * inverse
