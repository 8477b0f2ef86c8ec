"""The running sums of the decode kernel, tile by tile of what a cache stores."""

import triton
import triton.language as tl

from .paged import entries_at, page_in, place
from .stored_bytes import in_half, split_scale
from .tile import finite_part, load_where, modify, visible


@triton.jit
def clear_range(low, high, all_low, all_high, BLOCK: tl.constexpr, EDGE: tl.constexpr, CLEAR: tl.constexpr):
    """Where the tiles of ``[low, high)`` begin, how many need a mask before those ``[low, high)`` that need none."""
    origin = low // EDGE * EDGE
    clear_low, clear_high = origin, origin
    if CLEAR:
        clear_low = tl.cdiv(tl.maximum(all_low, low), BLOCK) * BLOCK
        clear_high = tl.minimum(all_high, high) // BLOCK * BLOCK
        some = clear_low < clear_high
        clear_low, clear_high = tl.where(some, clear_low, origin), tl.where(some, clear_high, origin)
    return origin, (clear_low - origin) // EDGE, clear_low, clear_high


@triton.jit
def tile_at(t, origin, before, clear_low, clear_high, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Where tile ``t`` begins of those that need a mask, around ``[clear_low, clear_high)``, or of those within."""
    if MASKED:
        return tl.where(t < before, origin + t * BLOCK, clear_high + (t - before) * BLOCK)
    else:
        return clear_low + t * BLOCK


@triton.jit
def attend(
    acc, top, total, stained, page, n, q, q_tail, gain, i, slope, low, high, begin, end,
    k_ptr, tail_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_desc, tail_desc,
    k_p, k_t, tail_p, tail_t, v_p, v_t, ks_p, ks_t, vs_p, vs_t,
    left, right, prefix, scale, softcap, unit,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, TAIL: tl.constexpr, E: tl.constexpr,
    E_MAIN: tl.constexpr, LATENT: tl.constexpr, SCALED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PREFIX: tl.constexpr, ONE: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, PAGE: tl.constexpr,
    TMA: tl.constexpr, NATIVE: tl.constexpr, APART: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The running sums with one tile of ``BLOCK`` tokens, from ``n`` on; ``APART``, weights are summed by place."""
    PLAIN: tl.constexpr = not (SOFTCAP or SLOPES)
    j = n + tl.arange(0, BLOCK)
    stored = (j >= low) & (j < high)
    if TMA:
        line = page.to(tl.int32) * (k_p // k_t).to(tl.int32) + (n % PAGE if PAGE else n)
        k = k_desc.load([line, 0])
    else:
        at, columns = place(page, n, k_p, k_t, PAGE, BLOCK), tl.arange(0, D_MAIN)
        k = load_where(k_ptr + (at[:, None] + columns[None, :]), columns, stored, E if LATENT else D, MASKED)
    if D_TAIL:
        if TMA:
            k_tail = tail_desc.load([line, 0])
        else:
            at, columns = place(page, n, tail_p, tail_t, PAGE, BLOCK), tl.arange(0, D_TAIL)
            at = tail_ptr + TAIL + (at[:, None] + columns[None, :])
            k_tail = load_where(at, columns, stored, D - (E if LATENT else D_MAIN), MASKED)
    if not LATENT:
        at, columns = place(page, n, v_p, v_t, PAGE, BLOCK), tl.arange(0, E_MAIN)
        v = load_where(v_ptr + (at[:, None] + columns[None, :]), columns, stored, E, MASKED)
    if SCALED:
        k_scale = tl.load(k_scale_ptr + place(page, n, ks_p, ks_t, PAGE, BLOCK), mask=stored, other=0.0)
        v_scale = k_scale
        if not LATENT:
            v_scale = tl.load(v_scale_ptr + place(page, n, vs_p, vs_t, PAGE, BLOCK), mask=stored, other=0.0)
        if MASKED and not ONE:
            v_scale, broken = finite_part(v_scale)
            stained |= broken
        exponent, inverse, rest = split_scale(v_scale)

    HALF: tl.constexpr = SCALED and q.dtype == tl.float16
    k = in_half(k, NATIVE, LATENT) if HALF else k.to(q.dtype)
    if LATENT:
        v = k
    else:
        v = in_half(v, NATIVE, True) if HALF else v.to(q.dtype)
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if D_TAIL and not LATENT:
        k_tail = in_half(k_tail, NATIVE, False) if HALF else k_tail.to(q.dtype)
        scores = tl.dot(q_tail, k_tail.T, scores, input_precision=PRECISION)
    if SCALED:
        scores *= k_scale[None, :]
    if D_TAIL and LATENT:  # which is stored as it is
        scores = tl.dot(q_tail, k_tail.to(q_tail.dtype).T, scores, input_precision=PRECISION)
    if not PLAIN:
        if SCALED:
            scores *= gain[:, None]
        scores = modify(scores, scale, softcap, slope, i[:, None], j[None, :], SOFTCAP, SLOPES)
    if SCALED:
        scores = scores * (gain[:, None] * unit if PLAIN else 1.0) + exponent[None, :]
        unit = 1.0
    if MASKED:
        if ONE:  # all rows see what the tile loads
            seen = stored[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        else:
            seen = visible(i[:, None], j[None, :], begin, end, left, right, prefix, LEFT, RIGHT, PREFIX)
            scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing keeps -inf as its maximum; subtracting it would give NaN.
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    correction = tl.exp2((top - safe) * unit)  # 1 if the maximum stays: as one fused sum it drifts
    weights = tl.exp2(scores * unit - (safe * unit)[:, None])
    shares = weights
    if SCALED:
        shares = weights * inverse[None, :]
        weights *= rest[None, :]
    if APART:
        total = total * correction[:, None] + shares
    else:
        total = total * correction + tl.sum(shares, 1)
    acc *= correction[:, None]
    if MASKED and not ONE:  # a hidden value that is not finite makes NaN of its product with 0
        v, broken = finite_part(v)
        stained |= broken
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_top, total, stained


@triton.jit
def sweep(
    acc, top, total, stained, tiles, here, before, clear_low, clear_high, table_ptr, pages,
    q, q_tail, gain, i, slope, low, high, begin, end,
    k_ptr, tail_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_desc, tail_desc,
    k_p, k_t, tail_p, tail_t, v_p, v_t, ks_p, ks_t, vs_p, vs_t,
    left, right, prefix, scale, softcap, unit,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, TAIL: tl.constexpr, E: tl.constexpr,
    E_MAIN: tl.constexpr, LATENT: tl.constexpr, SCALED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PREFIX: tl.constexpr, ONE: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, PAGE: tl.constexpr,
    TMA: tl.constexpr, NATIVE: tl.constexpr, APART: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running sums with so many tiles that all need a mask, or none of which does; see :func:`tile_at`."""
    n = tile_at(0, here, before, clear_low, clear_high, BLOCK, MASKED)
    low_half, high_half = entries_at(table_ptr, n, end, PAGE, BLOCK)
    for t in tl.range(0, tiles, num_stages=STAGES):
        n = tile_at(t, here, before, clear_low, clear_high, BLOCK, MASKED)
        page = page_in(low_half, high_half, n, pages, PAGE, BLOCK)
        if PAGE:  # carried, so that the loads of a tile wait for no other load
            following = tile_at(t + 1, here, before, clear_low, clear_high, BLOCK, MASKED)
            low_half, high_half = entries_at(table_ptr, following, end, PAGE, BLOCK)
        acc, top, total, stained = attend(
            acc, top, total, stained, page, n, q, q_tail, gain, i, slope, low, high, begin, end,
            k_ptr, tail_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_desc, tail_desc,
            k_p, k_t, tail_p, tail_t, v_p, v_t, ks_p, ks_t, vs_p, vs_t,
            left, right, prefix, scale, softcap, unit,
            D, D_MAIN, D_TAIL, TAIL, E, E_MAIN, LATENT, SCALED, LEFT, RIGHT, PREFIX, ONE, SOFTCAP, SLOPES,
            PAGE, TMA, NATIVE, APART, MASKED, BLOCK, PRECISION,
        )  # fmt: skip
    return acc, top, total, stained
