"""Stored bytes as factors of 16-bit products: all as fp16, which holds any of them, in the range that fp16 has."""

import triton
import triton.language as tl


@triton.jit
def in_half(x, NATIVE: tl.constexpr, STAYS: tl.constexpr):
    """int8 or e4m3 as fp16, exactly; ``NATIVE`` in the instructions of NVIDIA's chips.

    ``STAYS``: where it was loaded, from where fp16 goes through shared memory to the product. Triton would rather move
    bytes, and cannot read those of a transposed factor but one by one.
    """
    if not NATIVE:
        return x.to(tl.float16)
    elif x.dtype == tl.int8:  # 1024 + n is 0x6400 + n in fp16
        return tl.inline_asm_elementwise(
            """
            { .reg .b32 unsigned, middle;
              mov.b32 middle, 0x64806480;
              xor.b32 unsigned, $2, 0x80808080;
              prmt.b32 $0, unsigned, 0x64646464, 0x4140;
              prmt.b32 $1, unsigned, 0x64646464, 0x4342;
              sub.f16x2 $0, $0, middle;
              sub.f16x2 $1, $1, middle; }
            """,
            "=&r,=&r,r", [x], tl.float16, is_pure=not STAYS, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """
            { .reg .b16 low, high;
              mov.b32 {low, high}, $2;
              cvt.rn.f16x2.e4m3x2 $0, low;
              cvt.rn.f16x2.e4m3x2 $1, high; }
            """,
            "=&r,=&r,r", [x], tl.float16, is_pure=not STAYS, pack=4,
        )  # fmt: skip


@triton.jit
def power_below(top):
    """The power of two that brings numbers of at most ``top`` below 4, and its inverse (0 for the least of all)."""
    exponent = tl.minimum(top.to(tl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
    return (0x7F000000 - exponent).to(tl.float32, bitcast=True), exponent.to(tl.float32, bitcast=True)


@triton.jit
def split_scale(scale):
    """A scale as a power of two, ``(exponent, inverse of the power, rest)``; the exponent is -40 at least.

    Scores that grow by the exponent give weights times that power: at most 1 whatever the scales, if the largest score
    is subtracted, and times the inverse what they were. The rest is less than 2, but where the scale is not finite.
    """
    exponent = tl.minimum(tl.maximum((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF, 87), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (exponent - 127).to(tl.float32), inverse, scale * inverse
