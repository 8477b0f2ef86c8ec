"""The running sums of the decode kernel, tile by tile of what a cache stores."""

from typing import NamedTuple

import triton
import triton.language as tl

from .band import visible
from .paged import entries_at, page_in, place
from .scores import LOG2E, modify, online_softmax
from .stored_bytes import in_half, power_below, split_scale
from .tile import load_where


class Sizes(NamedTuple):
    """What is known when a kernel is compiled: widths of tiles, tokens of a page (0: a row holds all), and how to sum.

    ``TAIL`` is where the second block of a key begins in its plane. ``ONE``: a sequence has one query, so all rows of a
    tile see the same keys. ``APART``: probabilities are summed by place, and over places in the end.
    """

    D: tl.constexpr
    D_MAIN: tl.constexpr
    D_TAIL: tl.constexpr
    TAIL: tl.constexpr
    E: tl.constexpr
    E_MAIN: tl.constexpr
    LATENT: tl.constexpr
    SCALED: tl.constexpr
    PAGE: tl.constexpr
    ONE: tl.constexpr
    APART: tl.constexpr
    NATIVE: tl.constexpr
    STAGES: tl.constexpr
    TF32: tl.constexpr


class Plane(NamedTuple):
    """A stored plane of one KV head: elements between pages and between tokens; a descriptor of its rows, or None."""

    ptr: tl.tensor
    by_page: tl.tensor
    by_token: tl.tensor
    desc: tl.tensor | None


class Stored(NamedTuple):
    """What a cache stores for one KV head. ``v`` is None for latent storage, the scales are None without any."""

    k: Plane
    tail: Plane
    v: Plane | None
    k_scale: Plane | None
    v_scale: Plane | None


class Table(NamedTuple):
    """The page table of one sequence, of ``end`` tokens; and how many pages there are."""

    ptr: tl.tensor
    pages: tl.tensor
    end: tl.tensor


class Queries(NamedTuple):
    """Rows of queries, their second block, what undoes their scale, and their indices."""

    q: tl.tensor
    tail: tl.tensor
    gain: tl.tensor
    i: tl.tensor


class Tiling(NamedTuple):
    """Tokens ``[low, high)`` in tiles from ``origin`` on: ``before`` masked ones, full ones in
    ``[full_low, full_high)``, and masked ones again."""

    low: tl.tensor
    high: tl.tensor
    origin: tl.tensor
    before: tl.tensor
    full_low: tl.tensor
    full_high: tl.tensor


class Sums(NamedTuple):
    """The running output, maximum and sum of FlashAttention."""

    acc: tl.tensor
    m_i: tl.tensor
    l_i: tl.tensor


@triton.jit
def tiling_of(low, high, all_low, all_high, BLOCK: tl.constexpr, EDGE: tl.constexpr, FULL: tl.constexpr):
    """The tiles of ``[low, high)``; full ones, of ``BLOCK`` tokens, only if asked for, masked ones of ``EDGE``."""
    origin = low // EDGE * EDGE
    full_low, full_high = origin, origin
    if FULL:
        full_low = tl.cdiv(tl.maximum(all_low, low), BLOCK) * BLOCK
        full_high = tl.minimum(all_high, high) // BLOCK * BLOCK
        is_any = full_low < full_high
        full_low, full_high = tl.where(is_any, full_low, origin), tl.where(is_any, full_high, origin)
    return Tiling(low, high, origin, (full_low - origin) // EDGE, full_low, full_high)


@triton.jit
def tile_at(t, tiling, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Where tile ``t`` begins, of those that need a mask or of those that need none."""
    if MASKED:
        after = tiling.full_high + (t - tiling.before) * BLOCK
        return tl.where(t < tiling.before, tiling.origin + t * BLOCK, after)
    else:
        return tiling.full_low + t * BLOCK


@triton.jit
def in_range(q, tail, D_TAIL: tl.constexpr, LATENT: tl.constexpr):
    """Queries as fp16, which meets 8-bit keys, rows scaled by powers of two to be in its range; what undoes the scale.

    The tail of a latent key is no such key, and that of its query keeps its dtype.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), 1)
    if D_TAIL:
        largest = tl.maximum(largest, tl.max(tl.abs(tail.to(tl.float32)), 1))
    power, gain = power_below(largest)
    if D_TAIL:
        tail = (tail.to(tl.float32) * power[:, None]).to(q.dtype if LATENT else tl.float16)
    return (q.to(tl.float32) * power[:, None]).to(tl.float16), tail, gain


@triton.jit
def load_plane(
    plane, page, n, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of a plane, ``WIDTH`` channels from ``FIRST`` on; where masked, zeros but for valid tokens."""
    if plane.desc is not None and not MASKED:
        row = page.to(tl.int32) * (plane.by_page // plane.by_token).to(tl.int32) + (n % PAGE if PAGE else n)
        return plane.desc.load([row, 0])
    else:
        at, columns = place(page, n, plane.by_page, plane.by_token, PAGE, BLOCK), tl.arange(0, COLUMNS)
        at = plane.ptr + FIRST + (at[:, None] + columns[None, :])
        return load_where(at, columns, valid, WIDTH, MASKED)


@triton.jit
def load_scale(plane, page, n, valid, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of a tile's tokens, 0 but for valid ones."""
    return tl.load(plane.ptr + place(page, n, plane.by_page, plane.by_token, PAGE, BLOCK), mask=valid, other=0.0)


@triton.jit
def add_tile(sums, page, n, queries, modifiers, band, tiling, stored, sizes, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """The running sums with one tile of ``BLOCK`` tokens, from ``n`` on."""
    LATENT: tl.constexpr = sizes.LATENT
    SCALED: tl.constexpr = sizes.SCALED
    PLAIN: tl.constexpr = modifiers.softcap is None and modifiers.slope is None
    MAIN: tl.constexpr = sizes.E if LATENT else sizes.D_MAIN  # channels of a key before its tail
    PAGE: tl.constexpr = sizes.PAGE
    PRECISION: tl.constexpr = "tf32" if sizes.TF32 else "ieee"
    q, gain, i = queries.q, queries.gain, queries.i
    unit = modifiers.scale * LOG2E if PLAIN else 1.0
    j = n + tl.arange(0, BLOCK)
    valid = (j >= tiling.low) & (j < tiling.high)
    k = load_plane(stored.k, page, n, valid, 0, MAIN if LATENT else sizes.D, sizes.D_MAIN, PAGE, BLOCK, MASKED)
    if sizes.D_TAIL:
        WIDTH: tl.constexpr = sizes.D - MAIN
        k_tail = load_plane(stored.tail, page, n, valid, sizes.TAIL, WIDTH, sizes.D_TAIL, PAGE, BLOCK, MASKED)
    if not LATENT:
        v = load_plane(stored.v, page, n, valid, 0, sizes.E, sizes.E_MAIN, PAGE, BLOCK, MASKED)
    if SCALED:
        k_scale = load_scale(stored.k_scale, page, n, valid, PAGE, BLOCK)
        v_scale = k_scale
        if not LATENT:
            v_scale = load_scale(stored.v_scale, page, n, valid, PAGE, BLOCK)
        exponent, inverse, rest = split_scale(v_scale)

    HALF: tl.constexpr = SCALED and q.dtype == tl.float16
    k = in_half(k, sizes.NATIVE, LATENT) if HALF else k.to(q.dtype)
    if LATENT:
        v = k
    else:
        v = in_half(v, sizes.NATIVE, True) if HALF else v.to(q.dtype)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    if sizes.D_TAIL and not LATENT:
        k_tail = in_half(k_tail, sizes.NATIVE, False) if HALF else k_tail.to(q.dtype)
        s = tl.dot(queries.tail, k_tail.T, s, input_precision=PRECISION)
    if SCALED:
        s *= k_scale[None, :]
    if sizes.D_TAIL and LATENT:  # which is stored as it is
        s = tl.dot(queries.tail, k_tail.to(queries.tail.dtype).T, s, input_precision=PRECISION)
    if not PLAIN:
        if SCALED:
            s *= gain[:, None]
        s = modify(s, modifiers, (i + band.apart)[:, None], j[None, :])
    if SCALED:
        s = s * (gain[:, None] * unit if PLAIN else 1.0) + exponent[None, :]
        unit = 1.0
    if MASKED:
        if sizes.ONE:
            s = tl.where(valid[None, :], s, float("-inf"))
        else:
            s = tl.where(visible(i[:, None], j[None, :], band), s, float("-inf"))
    m_i, p, correction = online_softmax(sums.m_i, s, unit)
    shares = p
    if SCALED:
        shares = p * inverse[None, :]
        p *= rest[None, :]
    if sizes.APART:
        l_i = sums.l_i * correction[:, None] + shares
    else:
        l_i = sums.l_i * correction + tl.sum(shares, 1)
    acc = sums.acc * correction[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m_i, l_i


@triton.jit
def sweep(
    sums, tiles, queries, modifiers, band, tiling, table, stored, sizes, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """The running sums with so many tiles that all need a mask, or none of which does; see :func:`tile_at`."""
    acc, m_i, l_i = sums.acc, sums.m_i, sums.l_i
    n = tile_at(0, tiling, BLOCK, MASKED)
    entry_low, entry_high = entries_at(table.ptr, n, table.end, sizes.PAGE, BLOCK)
    for t in tl.range(0, tiles, num_stages=sizes.STAGES):
        n = tile_at(t, tiling, BLOCK, MASKED)
        page = page_in(entry_low, entry_high, n, table.pages, sizes.PAGE, BLOCK)
        if sizes.PAGE:  # carried, so that the loads of a tile wait for no other load
            following = tile_at(t + 1, tiling, BLOCK, MASKED)
            entry_low, entry_high = entries_at(table.ptr, following, table.end, sizes.PAGE, BLOCK)
        acc, m_i, l_i = add_tile(
            Sums(acc, m_i, l_i), page, n, queries, modifiers, band, tiling, stored, sizes, MASKED, BLOCK
        )
    return Sums(acc, m_i, l_i)
