"""Write new tokens to a cache: rotate keys, and quantize keys and values if the cache is int8 or fp8."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .tile import COUNTS, load_columns

ABS: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # all bits of an fp32 number except the sign
# The scale of a row of zeros, the same as in backends/_torch/pages.py.
OF_ZEROS: tl.constexpr = tl.constexpr(2.0**-40)


@triton.jit(do_not_specialize=COUNTS)
def write(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, new_k_ptr, new_v_ptr, cos_ptr, sin_ptr, slots_ptr,
    stride_kp, stride_kt, stride_kg, stride_vp, stride_vt, stride_vg,
    stride_ksp, stride_kst, stride_ksg, stride_vsp, stride_vst, stride_vsg,
    stride_nkb, stride_nks, stride_nkh, stride_nvb, stride_nvs, stride_nvh, stride_ab, stride_as,
    rows, heads, s, page_size, slots,
    D: tl.constexpr, D_ALL: tl.constexpr, E: tl.constexpr, E_ALL: tl.constexpr,
    PAIRS_K: tl.constexpr, PAIRS_V: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of all new tokens to their slots, the token positions in the cache.

    ``slots_ptr`` has one slot per token. Tokens with slots outside ``[0, slots)`` are skipped. Rotation
    applies to the first ``2 * PAIRS_K`` channels of K, and to the first ``2 * PAIRS_V`` channels of V, which
    holds the rotary key in an MLA cache. ``EARLY``: launched with PDL (programmatic dependent launch), so
    wait for the preceding kernel before reading, and let the next one start.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < rows
    token, head = row // heads, (row % heads).to(tl.int64)
    b, i = (token // s).to(tl.int64), (token % s).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=valid, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < slots)
    slot = slot.to(tl.int32)  # only valid slots are written, and these fit in int32
    page, place = (slot // page_size).to(tl.int64), (slot % page_size).to(tl.int64)
    angles = b * stride_ab + i * stride_as

    at = b * stride_nkb + i * stride_nks + head * stride_nkh
    k = rotated(new_k_ptr, at, cos_ptr, sin_ptr, angles, valid, D, D_ALL, PAIRS_K, INTERLEAVED)
    if E:
        at = b * stride_nvb + i * stride_nvs + head * stride_nvh
        v = rotated(new_v_ptr, at, cos_ptr, sin_ptr, angles, valid, E, E_ALL, PAIRS_V, INTERLEAVED)

    at = page * stride_kp + place * stride_kt + head * stride_kg
    store(k_ptr, k_scale_ptr, k, at, page * stride_ksp + place * stride_kst + head * stride_ksg, kept, D)
    if E:
        at = page * stride_vp + place * stride_vt + head * stride_vg
        store(v_ptr, v_scale_ptr, v, at, page * stride_vsp + place * stride_vst + head * stride_vsg, kept, E)


@triton.jit
def rotated(
    ptr, at, cos_ptr, sin_ptr, angles, valid,
    WIDTH: tl.constexpr, ALL: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load the rows at ``ptr + at`` and rotate their first ``PAIRS`` pairs of channels.

    Columns from ``WIDTH`` on become zeros. Results have the same bits as with ``rope.rotate``, which rounds
    every product, so this kernel must be compiled without fused multiply-adds.
    """
    x = load_columns(ptr, at, valid, WIDTH, ALL, True)
    if PAIRS:
        c = tl.arange(0, ALL)
        if INTERLEAVED:
            first, pair, partner = c % 2 == 0, c // 2, c ^ 1
        else:
            first = c < PAIRS
            pair, partner = tl.where(first, c, c - PAIRS), tl.where(first, c + PAIRS, c - PAIRS)
        turns = valid[:, None] & (c < 2 * PAIRS)[None, :]
        other = tl.load(ptr + at[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + angles[:, None] + pair[None, :], mask=turns, other=0.0)
        sin = tl.load(sin_ptr + angles[:, None] + pair[None, :], mask=turns, other=0.0)
        result = x.to(tl.float32) * cos + other * tl.where(first[None, :], -sin, sin)
        x = tl.where(turns, result.to(x.dtype), x)
    return x


@triton.jit
def store(ptr, scale_ptr, x, at, scale_at, kept, WIDTH: tl.constexpr):
    """Write rows of keys or values to ``ptr + at``.

    If there is a ``scale_ptr``, quantize each row, and write its scale to ``scale_ptr + scale_at``.
    """
    columns = tl.arange(0, x.shape[1])
    to = ptr + at[:, None] + columns[None, :]
    some = kept[:, None] & (columns < WIDTH)[None, :]
    if scale_ptr is not None:
        x = x.to(tl.float32)
        INT8: tl.constexpr = ptr.dtype.element_ty == tl.int8
        limit = 127.0 if INT8 else 448.0
        top = tl.max(x.to(tl.int32, bitcast=True) & ABS, 1)  # compared as integers, NaN exceeds infinity
        scale = tl.div_rn(top.to(tl.float32, bitcast=True), limit)
        scale = tl.where(scale == 0, OF_ZEROS, scale)
        tl.store(scale_ptr + scale_at, scale, mask=kept)
        x = tl.div_rn(x, scale[:, None])
        # The low bits of x + 1.5 * 2 ** 23 hold the nearest integer, ties to even.
        x = (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8) if INT8 else to_e4m3(x)
    tl.store(to, x.to(ptr.dtype.element_ty), mask=some)


@triton.jit
def to_e4m3(x):
    """Round fp32 to the nearest e4m3 number, ties to even, and return its byte.

    Uses integer arithmetic, because GPUs before sm_89 have no fp8 instructions. e4m3 has four exponent bits
    (bias 7) and three mantissa bits. NaN and overflow become 0x7F, which is NaN.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & ABS
    # Below 2 ** -6, e4m3 numbers are 2 ** -9 apart, as fp32 numbers are from 2 ** 14 on. Adding 2 ** 14
    # therefore rounds correctly.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    odd = (magnitude >> 20) & 1
    normal = tl.minimum((magnitude - (120 << 23) + 0x7FFFF + odd) >> 20, 0x7F)
    return (tl.where(magnitude < 121 << 23, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
