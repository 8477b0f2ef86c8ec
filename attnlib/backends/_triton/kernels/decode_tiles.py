"""The inner loop of the generic decode kernel: add tiles of a paged cache to the running softmax sums."""

from typing import NamedTuple

import triton
import triton.language as tl

from .band import ChunkOrigin, KeyBand, tile_at, visible
from .paged import entries_at, page_in, place, tokens_from
from .scores import Modifiers, changed, modify, online_softmax, placed, unit_behind
from .stored_bytes import QueryFactors, as_factor, both_factors, halved, in_range, split_scale
from .tile import ChannelBlocks, Rows, load_columns


class DecodeSizes(NamedTuple):
    """The compile-time sizes and options of the decode kernel.

    ``D``, ``D_TAIL`` and ``E`` are channel counts, ``PAGE`` is the page size (0: a contiguous cache), and
    ``FULL`` and ``EDGE`` are the numbers of tokens in a full and in a masked tile. ``ONE``: every sequence
    has one query, so all rows of a tile see the same keys. ``PAIRS``: int8 or fp8 numbers (``STORED``) are
    loaded in pairs, and even and odd channels are summed separately.
    """

    D: tl.constexpr
    D_TAIL: tl.constexpr
    E: tl.constexpr
    PAGE: tl.constexpr
    FULL: tl.constexpr
    EDGE: tl.constexpr
    ONE: tl.constexpr
    NATIVE: tl.constexpr
    STAGES: tl.constexpr
    PAIRS: tl.constexpr
    STORED: tl.constexpr
    PRECISION: tl.constexpr


class Stored(NamedTuple):
    """The paged tensors of one sequence and KV head, and the tokens ``[low, high)`` to read.

    ``v.ptr`` is None for an MLA cache, and the scale pointers are None if the cache has no scales.
    """

    k: Rows
    tail: Rows
    v: Rows
    k_scale: Rows
    v_scale: Rows
    table_ptr: tl.tensor
    pages: tl.tensor
    low: tl.tensor
    high: tl.tensor


class RunningSums(NamedTuple):
    """The running sums of online softmax: the output, the maximum score and the sum of probabilities.

    ``l_i`` has one sum per row, or one per element of a tile. ``odd`` holds the odd output channels if
    ``acc`` holds only the even ones, and is unused otherwise.
    """

    acc: tl.tensor
    odd: tl.tensor
    m_i: tl.tensor
    l_i: tl.tensor


class Scoring(NamedTuple):
    """The inputs of scores besides q and k: the query indices ``i``, heads, band and options.

    Mask and score functions receive these indices and read ``mask_tensors`` and ``score_tensors``.
    ``first`` is the index of the sequence's first query.
    """

    i: tl.tensor
    head: tl.tensor
    sequence: tl.tensor
    first: tl.tensor
    origin: ChunkOrigin
    band: KeyBand
    modifiers: Modifiers
    mask_tensors: tuple
    score_tensors: tuple


@triton.jit
def load_queries(q_ptr, at, valid, stored, sizes, D_MAIN: tl.constexpr):
    """Load query rows as operands of products with stored keys, and return them with a factor for each row.

    The scores of a row must be multiplied by its factor. Without stored bytes and in fp32, it is 1.0.
    """
    LATENT: tl.constexpr = stored.v.ptr is None
    MAIN: tl.constexpr = sizes.E if LATENT else D_MAIN  # channels in the first block, before the tail
    q = load_columns(q_ptr, at, valid, sizes.E if LATENT else sizes.D, D_MAIN, True)
    tail = load_columns(q_ptr + MAIN, at, valid, sizes.D - MAIN, sizes.D_TAIL, True) if sizes.D_TAIL else q
    queries, gain = ChannelBlocks(q, tail), 1.0
    if stored.k_scale.ptr is not None and q.dtype != tl.float32:
        OF_TAIL: tl.constexpr = stored.tail.ptr.dtype.element_ty if LATENT and sizes.D_TAIL else tl.float16
        queries, gain = in_range(queries, OF_TAIL)
    return halved(queries) if sizes.PAIRS else QueryFactors(queries.main, queries.main, queries.tail), gain


@triton.jit
def load_plane(
    x, page, n, valid, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr
):
    """Load a tile of ``WIDTH`` channels from one of the cache's tensors: keys, values or key tails.

    If ``MASKED``, tokens that are not ``valid`` become zeros.
    """
    if x.desc is not None and not MASKED:
        row = page.to(tl.int32) * (x.stride_b // x.stride_t).to(tl.int32) + (n % PAGE if PAGE else n)
        return x.desc.load([row, 0])
    else:
        return load_columns(x.ptr, place(x, page, n, PAGE, valid.shape[0]), valid, WIDTH, COLUMNS, MASKED)


@triton.jit
def load_scale(x, page, n, valid, PAGE: tl.constexpr):
    """Load the scales of a tile's tokens, with 0 for invalid tokens."""
    return tl.load(x.ptr + place(x, page, n, PAGE, valid.shape[0]), mask=valid, other=0.0)


@triton.jit
def add_tile(
    sums, page, n, queries, scoring, stored, sizes,
    MASK: tl.constexpr, SCORE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the tile of ``BLOCK`` tokens that begins at token ``n`` to the running sums.

    If ``n`` is a tensor, it has all tokens of the tile.
    """
    LATENT: tl.constexpr = stored.v.ptr is None
    SCALED: tl.constexpr = stored.k_scale.ptr is not None
    PER: tl.constexpr = 2 if sizes.PAIRS else 1  # channels per loaded element
    # The number of key channels in the first block, before the tail.
    MAIN: tl.constexpr = sizes.E if LATENT else queries.main.shape[1] * PER
    q = queries.main
    j = tokens_from(n, BLOCK)
    valid = (j >= stored.low) & (j < stored.high)
    WIDTH: tl.constexpr = (MAIN if LATENT else sizes.D) // PER
    k = load_plane(stored.k, page, n, valid, WIDTH, q.shape[1], sizes.PAGE, MASKED)
    if sizes.D_TAIL:
        k_tail = load_plane(stored.tail, page, n, valid, sizes.D - MAIN, sizes.D_TAIL, sizes.PAGE, MASKED)
        k_tail = as_factor(k_tail, queries.tail.dtype, sizes.NATIVE, False)
    if not LATENT:
        v = load_plane(stored.v, page, n, valid, sizes.E // PER, sums.acc.shape[1], sizes.PAGE, MASKED)
    if SCALED:
        k_scale = load_scale(stored.k_scale, page, n, valid, sizes.PAGE)
        v_scale = k_scale if LATENT else load_scale(stored.v_scale, page, n, valid, sizes.PAGE)

    i, band, modifiers = scoring.i, scoring.band, scoring.modifiers
    at = placed(
        scoring.origin, scoring.sequence, scoring.head[:, None], i[:, None], j[None, :], scoring.first
    )
    # Evaluate the mask before the scores. Otherwise, Triton gives the running maxima the layout of the mask's
    # loads, and converts every tile of scores through shared memory.
    if MASK is not None and MASKED:
        shown = MASK(at.b, at.h, at.i, at.j, at.first, scoring.mask_tensors)
    if sizes.PAIRS:
        even, odd = both_factors(k.T, sizes.STORED, sizes.NATIVE)
        s = tl.dot(queries.odd, odd, tl.dot(q, even))
    else:
        k = as_factor(k, q.dtype, sizes.NATIVE, LATENT)
        s = tl.dot(q, k.T, input_precision=sizes.PRECISION)
    v = k if LATENT else v
    if sizes.D_TAIL and not LATENT:
        s = tl.dot(queries.tail, k_tail.T, s, input_precision=sizes.PRECISION)
    if SCALED:
        s *= k_scale[None, :]
        exponent, inverse, rest = split_scale(v_scale)  # if it came before, Triton 3.6 could not compile all
    if sizes.D_TAIL and LATENT:  # the tail of a latent key has no scale
        s = tl.dot(queries.tail, k_tail.T, s, input_precision=sizes.PRECISION)
    s, _ = modify(s, modifiers, (i + band.offset)[:, None], j[None, :])
    s = changed(s, modifiers, at, scoring.score_tensors, SCORE)
    unit = unit_behind(modifiers, SCORE)
    if SCALED:
        s = s * unit + exponent[None, :]
        unit = 1.0
    if MASKED:
        seen = valid[None, :] if sizes.ONE else visible(i[:, None], j[None, :], band)
        if MASK is not None:
            seen = seen & shown
        s = tl.where(seen, s, float("-inf"))
    m_i, p, correction = online_softmax(sums.m_i, s, unit)
    shares, p = (p * inverse[None, :], p * rest[None, :]) if SCALED else (p, p)
    if len(sums.l_i.shape) == 2:
        l_i = sums.l_i * correction[:, None] + shares
    else:
        l_i = sums.l_i * correction + tl.sum(shares, 1)
    if sizes.PAIRS:
        even, odd = both_factors(v, sizes.STORED, sizes.NATIVE)
        p = p.to(even.dtype)
        acc = tl.dot(p, even, sums.acc * correction[:, None])
        acc_odd = tl.dot(p, odd, sums.odd * correction[:, None])
    else:
        v = as_factor(v, q.dtype, sizes.NATIVE, True)
        acc = tl.dot(p.to(v.dtype), v, sums.acc * correction[:, None], input_precision=sizes.PRECISION)
        acc_odd = sums.odd
    return RunningSums(acc, acc_odd, m_i, l_i)


@triton.jit
def sweep(
    sums, tiles, queries, scoring, stored, sizes, MASK: tl.constexpr, SCORE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add all masked tiles of a range, or all full tiles, to the running sums."""
    BLOCK: tl.constexpr = sizes.EDGE if MASKED else sizes.FULL
    n = tile_at(0, tiles, MASKED, sizes.FULL, sizes.EDGE)
    entries = entries_at(stored.table_ptr, n, stored.high, sizes.PAGE, BLOCK)
    for t in tl.range(0, tiles.masked if MASKED else tiles.full, num_stages=sizes.STAGES):
        n = tile_at(t, tiles, MASKED, sizes.FULL, sizes.EDGE)
        page = page_in(entries, n, stored.pages, sizes.PAGE, BLOCK)
        sums = add_tile(sums, page, n, queries, scoring, stored, sizes, MASK, SCORE, MASKED, BLOCK)
        if sizes.PAGE:  # load page numbers one tile ahead, so that loads of keys do not wait for them
            following = tile_at(t + 1, tiles, MASKED, sizes.FULL, sizes.EDGE)
            entries = entries_at(stored.table_ptr, following, stored.high, sizes.PAGE, BLOCK)
    return sums
