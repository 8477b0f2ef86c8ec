"""Appends to a cache: keys rotated, and stored with their values where the slots say, in one byte each if so asked."""

import triton
import triton.language as tl

from .tile import COUNTS, load_where

ABS: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # all bits of an fp32 number but its sign
OF_ZEROS: tl.constexpr = tl.constexpr(2.0**-40)  # the scale of nothing but zeros; as in backends/_torch/pages.py


@triton.jit(do_not_specialize=COUNTS)
def write(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, new_k_ptr, new_v_ptr, cos_ptr, sin_ptr, slots_ptr,
    k_page, k_place, k_head, v_page, v_place, v_head,
    k_scale_page, k_scale_place, k_scale_head, v_scale_page, v_scale_place, v_scale_head,
    new_k_b, new_k_s, new_k_head, new_v_b, new_v_s, new_v_head, angles_b, angles_s,
    rows, heads, s, page_size, slots,
    D: tl.constexpr, D_ALL: tl.constexpr, E: tl.constexpr, E_ALL: tl.constexpr,
    PAIRS_K: tl.constexpr, PAIRS_V: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Writes rows of all tokens and heads to ``slots_ptr``, one slot a token; a slot outside ``[0, slots)`` is skipped.

    The first ``2 * PAIRS_K`` channels of K are rotated, and likewise of V, which is the rotary key of latent storage.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = row < rows
    token, head = row // heads, (row % heads).to(tl.int64)
    b, i = (token // s).to(tl.int64), (token % s).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=here, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < slots)
    slot = slot.to(tl.int32)  # which the slots that are kept fit
    page, place = (slot // page_size).to(tl.int64), (slot % page_size).to(tl.int64)
    angles = b * angles_b + i * angles_s

    at = b * new_k_b + i * new_k_s + head * new_k_head
    k = rotated(new_k_ptr, at, cos_ptr, sin_ptr, angles, here, D, D_ALL, PAIRS_K, INTERLEAVED)
    if E:
        at = b * new_v_b + i * new_v_s + head * new_v_head
        v = rotated(new_v_ptr, at, cos_ptr, sin_ptr, angles, here, E, E_ALL, PAIRS_V, INTERLEAVED)

    at = page * k_page + place * k_place + head * k_head
    scale_at = page * k_scale_page + place * k_scale_place + head * k_scale_head
    store(k_ptr, k_scale_ptr, k, at, scale_at, kept, D)
    if E:
        at = page * v_page + place * v_place + head * v_head
        scale_at = page * v_scale_page + place * v_scale_place + head * v_scale_head
        store(v_ptr, v_scale_ptr, v, at, scale_at, kept, E)


@triton.jit
def rotated(
    ptr, at, cos_ptr, sin_ptr, angles, here,
    WIDTH: tl.constexpr, ALL: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rows at ``ptr + at``, zeros beyond their width; with their first pairs turned, rounded as ``rope.rotate`` rounds.

    Every product is rounded by itself, so the kernel must be compiled without fused multiply-adds.
    """
    c = tl.arange(0, ALL)
    x = load_where(ptr + at[:, None] + c[None, :], c, here, WIDTH, True)
    if PAIRS:
        if INTERLEAVED:
            first, pair, partner = c % 2 == 0, c // 2, c ^ 1
        else:
            first = c < PAIRS
            pair, partner = tl.where(first, c, c - PAIRS), tl.where(first, c + PAIRS, c - PAIRS)
        turns = here[:, None] & (c < 2 * PAIRS)[None, :]
        other = tl.load(ptr + at[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + angles[:, None] + pair[None, :], mask=turns, other=0.0)
        sin = tl.load(sin_ptr + angles[:, None] + pair[None, :], mask=turns, other=0.0)
        result = x.to(tl.float32) * cos + other * tl.where(first[None, :], -sin, sin)
        x = tl.where(turns, result.to(x.dtype), x)
    return x


@triton.jit
def store(ptr, scale_ptr, x, at, scale_at, kept, WIDTH: tl.constexpr):
    """Write rows ``x`` to ``ptr + at``; with their scales to ``scale_ptr + scale_at``, if there are any."""
    columns = tl.arange(0, x.shape[1])
    to = ptr + at[:, None] + columns[None, :]
    some = kept[:, None] & (columns < WIDTH)[None, :]
    if scale_ptr is None:
        tl.store(to, x.to(ptr.dtype.element_ty), mask=some)
    else:
        x = x.to(tl.float32)
        limit = 127.0 if ptr.dtype.element_ty == tl.int8 else 448.0
        top = tl.max(x.to(tl.int32, bitcast=True) & ABS, 1)  # as an integer, NaN is more than infinity
        scale = tl.div_rn(top.to(tl.float32, bitcast=True), limit)
        scale = tl.where(scale == 0, OF_ZEROS, scale)
        tl.store(scale_ptr + scale_at, scale, mask=kept)
        x = tl.div_rn(x, scale[:, None])
        if ptr.dtype.element_ty == tl.int8:
            tl.store(to, to_int8(x), mask=some)
        else:
            tl.store(to, to_e4m3(x), mask=some)


@triton.jit
def to_int8(x):
    """fp32 rounded to the nearest integer, ties to even: the last bits of ``x + 1.5 * 2 ** 23``."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def to_e4m3(x):
    """fp32 rounded to the nearest fp8 e4m3 number, ties to even, as a byte; by integers, since chips before
    sm_89 have no fp8.

    Four bits of exponent with a bias of 7, three of mantissa, and 0x7F for NaN and what is too large.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & ABS
    # Below 2 ** -6 numbers lie 2 ** -9 apart, as those from 2 ** 14 on do in fp32.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    odd = (magnitude >> 20) & 1
    normal = tl.minimum((magnitude - (120 << 23) + 0x7FFFF + odd) >> 20, 0x7F)
    return (tl.where(magnitude < 121 << 23, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
