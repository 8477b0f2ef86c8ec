"""The scores of an index branch: products of small heads, of which a sum over heads remains."""

import triton
import triton.language as tl

from .paged import entries_at, page_in, place
from .tile import COUNTS, Rows, TilePlace, load_columns, pointers


@triton.jit(do_not_specialize=(*COUNTS, "groups", "span"))
def index_scores(
    q_ptr, k_ptr, weights_ptr, ends_ptr, result_ptr,
    starts_ptr, table_ptr, k_scale_ptr,  # any of these may be None
    stride_qb, stride_qs, stride_qh, stride_kb, stride_kt, stride_xb, stride_xt, stride_table,
    s, t, pages, groups, span, scale,
    HEADS: tl.constexpr, HEADS_ALL: tl.constexpr, D: tl.constexpr, D_ALL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, RELU: tl.constexpr,
    POOL: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the scores ``[b, s, groups, t]`` of queries ``[b, s, groups * HEADS, D]`` for keys ``[b, t, D]``.

    Each query sees the keys before its number in ``ends_ptr``, from that of its sequence in ``starts_ptr``
    on, and gets -inf for the others. Of each ``POOL`` keys, only the largest score is written, ``[b, s,
    groups, cdiv(t, POOL)]``; POOL divides BLOCK_N. ``weights_ptr`` is None if all weights are 1. Over a
    cache, keys are ``[pages, page, D]``, ``table_ptr`` has the pages of each sequence, and keys in fp8 have a
    scale each. One program computes ``span`` keys for the queries of ``BLOCK_M`` rows; each has ``HEADS_ALL``
    rows. With several heads, a tile of products is ``[keys, rows]``, so that most of a sum over heads is
    within a thread.
    """
    QUERIES: tl.constexpr = BLOCK_M // HEADS_ALL
    spans, tiles = tl.cdiv(t, span), tl.cdiv(s, QUERIES)
    first, rest = tl.program_id(0) % spans * span, tl.program_id(0) // spans
    i0, pair = rest % tiles * QUERIES, (rest // tiles).to(tl.int64)
    batch, group = pair // groups, pair % groups
    stop = tl.minimum(first + span, t)

    e = i0 + tl.arange(0, QUERIES)
    columns = tl.cdiv(t, POOL)
    out = result_ptr + ((batch * s + e) * groups + group) * columns
    end = tl.minimum(tl.load(ends_ptr + batch * s + e, mask=e < s, other=0), t)
    start = 0 if starts_ptr is None else tl.load(starts_ptr + batch)
    seen = tl.minimum(stop, tl.max(end, 0))
    k_rows, scale_rows = Rows(k_ptr, stride_kb, stride_kt, 0), Rows(k_scale_ptr, stride_xb, stride_xt, 0)
    if first < seen:
        m = tl.arange(0, BLOCK_M)
        i, head = i0 + m // HEADS_ALL, m % HEADS_ALL
        valid = (i < s) & (head < HEADS)
        of_query = batch * stride_qb + i.to(tl.int64) * stride_qs + (group * HEADS + head) * stride_qh
        q = load_columns(q_ptr, of_query, valid, D, D_ALL, True)
        w = tl.zeros([BLOCK_M], tl.float32) + scale
        if weights_ptr is not None:
            of_head = ((batch * s + i) * groups + group) * HEADS + head
            w *= tl.load(weights_ptr + of_head, mask=valid, other=0.0)
        if table_ptr is not None:
            table_ptr += batch * stride_table
            entries = entries_at(table_ptr, tl.cast(first, tl.int32), seen, PAGE, BLOCK_N)
        for n in tl.range(first, seen, BLOCK_N, num_stages=STAGES):
            n = tl.cast(n, tl.int32)  # the interpreter counts with Python's ints
            j, c = n + tl.arange(0, BLOCK_N), n // POOL + tl.arange(0, BLOCK_N // POOL)
            if table_ptr is None:
                ptr, at = pointers(k_rows, TilePlace(batch, 0, 0), n, BLOCK_N, False)
            else:  # page-table entries are loaded one tile ahead
                page = page_in(entries, n, pages, PAGE, BLOCK_N)
                entries = entries_at(table_ptr, n + BLOCK_N, seen, PAGE, BLOCK_N)
                ptr, at = k_ptr, place(k_rows, page, n, PAGE, BLOCK_N)
            k = load_columns(ptr, at, j < seen, D, D_ALL, True).to(q.dtype)
            key_scale = 1.0
            if k_scale_ptr is not None:
                key_scale = tl.load(
                    k_scale_ptr + place(scale_rows, page, n, PAGE, BLOCK_N), mask=j < seen, other=0.0
                )
            if HEADS == 1:
                x = tl.dot(q, k.T, input_precision=PRECISION)
                x = (tl.maximum(x, 0.0) if RELU else x) * w[:, None]
                if k_scale_ptr is not None:
                    x *= key_scale[None, :]
                x = tl.where((j >= start)[None, :] & (j[None, :] < end[:, None]), x, float("-inf"))
                if POOL > 1:
                    x = tl.max(x.reshape(QUERIES, BLOCK_N // POOL, POOL), 2)
                tl.store(out[:, None] + c[None, :], x, mask=(e < s)[:, None] & (c < columns)[None, :])
            else:
                x = tl.dot(k, q.T, input_precision=PRECISION)
                x = (tl.maximum(x, 0.0) if RELU else x) * w[None, :]
                x = tl.sum(x.reshape(BLOCK_N, QUERIES, HEADS_ALL), 2)
                if k_scale_ptr is not None:
                    x *= key_scale[:, None]
                x = tl.where((j >= start)[:, None] & (j[:, None] < end[None, :]), x, float("-inf"))
                if POOL > 1:
                    x = tl.max(x.reshape(BLOCK_N // POOL, POOL, QUERIES), 1)
                tl.store(out[None, :] + c[:, None], x, mask=(e < s)[None, :] & (c < columns)[:, None])
    hidden = first + tl.cdiv(tl.maximum(seen - first, 0), BLOCK_N) * BLOCK_N
    for n in tl.range(hidden, stop, BLOCK_N):
        c = n // POOL + tl.arange(0, BLOCK_N // POOL)
        nothing = tl.full([QUERIES, BLOCK_N // POOL], float("-inf"), tl.float32)
        tl.store(out[:, None] + c[None, :], nothing, mask=(e < s)[:, None] & (c < columns)[None, :])
