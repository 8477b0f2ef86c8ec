"""The generic forward kernel, after FlashAttention-2 (Dao, 2023, arXiv 2307.08691).

One program computes one block of queries of one head and sequence.
"""

import triton
import triton.language as tl

from .band import KeyBand, bounds, key_range, origin_of, sees_any, visible
from .mask_tiles import entry, sparse_tiles_of
from .scores import (
    LN2,
    LOG2E,
    Modifiers,
    changed,
    descaled,
    dropout_keep,
    load_slope,
    modify,
    online_softmax,
    placed,
    unit_behind,
)
from .tile import COUNTS, ChannelBlocks, Channels, Rows, TilePlace, load_tile, locate, products, store_tile


@triton.jit(do_not_specialize=COUNTS)
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    alibi_slopes_ptr, sinks_ptr, key_starts_ptr, key_ends_ptr,  # all tensors from here on may be None
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, dropout_seed_ptr, origin_ptr, q_descale_ptr, k_descale_ptr,
    v_descale_ptr,
    lists_ptr,  # lists of the tiles to visit, only if there is a MASK
    k_desc, k_tail_desc, v_desc, mask_tensors, score_tensors,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_slopes, stride_list_b, stride_list_h, room,
    batch, heads, group, s, t, heads_per_wave, left, right, prefix, scale, softcap, threshold, dropout_scale,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr,  # mask and score functions, or None
):  # fmt: skip
    """Write the output of attention ``[b, s, h, e]`` and the natural-log LSE ``[b, h, s]``.

    For packed sequences, the shapes are ``[t, h, e]`` and ``[h, t]``.
    """
    work = locate(
        tl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, s, t, heads_per_wave, BLOCK_M,
        right is not None,
    )  # fmt: skip
    if work.start >= work.rows:
        return
    sequence, head, kv_head, keys = work.sequence, work.head, work.head // group, work.others
    origin = origin_of(origin_ptr, sequence, batch)
    start, end = bounds(key_starts_ptr, key_ends_ptr, sequence, keys)
    band = KeyBand(start, end, left, right, prefix, origin.query - origin.key, origin.key)
    slope = (
        None
        if alibi_slopes_ptr is None
        else load_slope(alibi_slopes_ptr, stride_slopes, sequence, head, batch)
    )
    of_kv = sequence * (heads // group) + kv_head
    scale = descaled(scale, q_descale_ptr, sequence * heads + head, sequence, batch)
    scale = descaled(scale, k_descale_ptr, of_kv, sequence, batch)
    dropout_scale = descaled(dropout_scale, v_descale_ptr, of_kv, sequence, batch)
    modifiers = Modifiers(scale, softcap, slope)
    unit = unit_behind(modifiers, SCORE)
    seed = None if dropout_seed_ptr is None else tl.load(dropout_seed_ptr)

    of_q, of_k = TilePlace(work.plane, work.row, head), TilePlace(work.plane, work.other, kv_head)
    k_rows = Rows(k_ptr, stride_kb, stride_kt, stride_kg, k_desc, k_tail_desc)
    v_rows = Rows(v_ptr, stride_vb, stride_vt, stride_vg, v_desc)
    d: tl.constexpr = Channels(D, D_MAIN, D_TAIL)
    e: tl.constexpr = Channels(E, E_MAIN, 0)
    # True if the rows after a sequence's visible keys may hold other keys (packed or bounded sequences).
    # If False, loads through descriptors need no mask.
    HOLES: tl.constexpr = (
        cu_seqlens_k_ptr is not None or key_starts_ptr is not None or key_ends_ptr is not None
    )

    m = tl.arange(0, BLOCK_M)
    stored = work.start + m < work.rows
    q = load_tile(Rows(q_ptr, stride_qb, stride_qs, stride_qh), of_q, work.start, stored, d, True)
    m_i, l_i = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # a sink acts like a key whose value is 0
        sink = tl.load(sinks_ptr + head, mask=sequence < batch, other=float("-inf")).to(tl.float32)
        m_i = tl.zeros([BLOCK_M], tl.float32) + sink * (LOG2E / unit)
        l_i = tl.where(m_i > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, E_MAIN], tl.float32)

    i0 = keys - work.rows + work.start
    i = i0 + m
    low, high, all_low, all_high = key_range(i0, tl.minimum(i0 + BLOCK_M, keys), band)
    SPARSE: tl.constexpr = MASK is not None
    HIDES_FIRST: tl.constexpr = left is not None or key_starts_ptr is not None or SPARSE
    if SPARSE:
        tiles = sparse_tiles_of(
            lists_ptr, work, stride_list_b, stride_list_h, room, BLOCK_M, cu_seqlens_q_ptr is not None
        )
        edges = tiles.before, tiles.whole, tiles.cut
    else:
        low = low // BLOCK_N * BLOCK_N
        all_low = tl.cdiv(all_low, BLOCK_N) * BLOCK_N if HIDES_FIRST else low
        all_high = tl.maximum(all_high // BLOCK_N * BLOCK_N, all_low)
        edges = tl.minimum(all_low, high), all_high, high
    for phase in tl.static_range(0 if HIDES_FIRST else 1, 3):  # tiles: first masked, then full, then masked
        if SPARSE:
            begin = tiles.before if phase == 2 else 0
        else:
            begin = low if phase == 0 else (all_low if phase == 1 else all_high)
        for at in tl.range(begin, edges[phase], 1 if SPARSE else BLOCK_N, num_stages=STAGES):
            n = entry(tiles, at, phase != 1) * BLOCK_N if SPARSE else at
            j = n + tl.arange(0, BLOCK_N)
            valid = (j >= start) & (j < end)
            k = load_tile(k_rows, of_k, n, valid, d, phase != 1, HOLES)
            place = placed(origin, sequence, head, i[:, None], j[None, :], keys - work.rows)
            # Evaluate the mask before the scores. Otherwise, Triton gives the running maxima the layout of
            # the mask's loads, and converts every tile of scores through shared memory.
            if MASK is not None and phase != 1:
                shown = MASK(place.b, place.h, place.i, place.j, place.first, mask_tensors)
            p, _ = modify(products(q, k, d, PRECISION), modifiers, (i + band.offset)[:, None], j[None, :])
            p = changed(p, modifiers, place, score_tensors, SCORE)
            if phase != 1:
                seen = visible(i[:, None], j[None, :], band)
                if MASK is not None:
                    seen = seen & shown
                p = tl.where(seen, p, float("-inf"))
            m_i, p, correction = online_softmax(m_i, p, unit)
            l_i = l_i * correction + tl.sum(p, 1)
            acc *= correction[:, None]
            if dropout_seed_ptr is not None:
                keep = dropout_keep(
                    seed, threshold, origin, sequence, head, i, n, BLOCK_N, origin_ptr is None
                )
                p = tl.where(keep, p, 0.0)
            v = load_tile(v_rows, of_k, n, valid, e, phase != 1, HOLES).main
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    nothing = l_i == 0.0
    l_i = tl.where(nothing, 1.0, l_i)
    lse = tl.where(nothing, float("-inf"), m_i * (unit * LN2) + tl.log2(l_i) * LN2)
    tl.store(
        lse_ptr + (work.plane * stride_lb + work.row + head * stride_lh + work.start) + m, lse, mask=stored
    )
    out_rows, factor = Rows(out_ptr, stride_ob, stride_os, stride_oh), (dropout_scale / l_i)[:, None]
    sees = sees_any(i, band)[:, None]  # rows that see no key hold arbitrary numbers
    store_tile(out_rows, of_q, work.start, stored, ChannelBlocks(acc, acc), factor, sees, e)
