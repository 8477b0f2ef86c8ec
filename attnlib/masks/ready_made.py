"""Masks by function that people ask for, in a few lines each; all of them compose by ``&``, ``|`` and ``~``.

Indices are storage indices, as in :class:`attnlib.Mask`. Tensors lie on the device of the call. Calls raise
ValueError for a tensor of other sizes than theirs; lengths that are known on the device alone need
``ATTNLIB_CHECK=1`` for that.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..internal.checks import check_count, is_strided, refuse_tensor, varies
from ..internal.signatures import kind
from ..tracing.trace import FIRST_QUERY
from .band import CAUSAL, FULL, AnyMask, mask_mod, sliding
from .function import MaskFunction, RetainedKeys


@kind
def documents(numbers: Tensor) -> MaskFunction:
    """Queries see the keys of their own document; ``numbers`` int ``[b, t]`` tell which document a token is
    of.

    More columns than ``t`` are never read.

    >>> documents(torch.tensor([[0, 0, 1, 1, 1]])) & CAUSAL
    MaskFunction(band=Mask(left=None, right=0, prefix=0), ...
    """
    _check("numbers", numbers, 2)
    return replace(mask_mod(lambda b, h, i, j, number: number[b, i] == number[b, j], numbers), dims=("bT",))


@kind
def documents_of(cu_seqlens: Tensor, tokens: int) -> MaskFunction:
    """:func:`documents` of one sequence ``[1, tokens]``, which begin at these offsets, int ``[n + 1]`` from
    0.

    Dense calls with it run as :func:`attnlib.varlen_attention` does, where nothing else depends on places in
    the row: no other function, ALiBi, dropout, ``key_starts`` or ``key_ends``.
    """
    _check("cu_seqlens", cu_seqlens, 1)
    at = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    numbers = torch.bucketize(at, cu_seqlens[1:], right=True, out_int32=True)[None]
    ends = (
        cu_seqlens[1:].clamp(max=tokens),
        cu_seqlens.new_full((1,), tokens),
    )  # of what comes after them, too
    return replace(documents(numbers), sections=torch.cat((cu_seqlens.new_zeros(1), *ends)).int())


@kind
def prefix_lm(lengths: Tensor) -> MaskFunction:
    """All of a prompt, and causally what follows; the prompts have ``lengths`` int ``[b]``."""
    _check("lengths", lengths, 1)
    return CAUSAL | replace(mask_mod(lambda b, h, i, j, length: j < length[b], lengths), dims=("b",))


@kind
def dilated(step: int) -> MaskFunction:
    """Every ``step``-th key, counted from the query's own."""
    check_count("step", step, least=1)
    return mask_mod(lambda b, h, i, j: (i - j) % step == 0)


@kind
def global_tokens(count: int) -> MaskFunction:
    """The first ``count`` tokens see all and are seen by all; with a window, Longformer (Beltagy et al.,
    2004.05150).

    >>> (sliding(256) | global_tokens(4)).band
    Mask(left=None, right=None, prefix=0)
    """
    check_count("count", count, least=1)
    return mask_mod(lambda b, h, i, j: (i < count) | (j < count))


@kind
def attention_sinks(count: int, window: int) -> AnyMask:
    """The last ``window`` keys and the first ``count`` ones, causally (StreamingLLM; Xiao et al., 2023,
    2309.17453).

    A paged cache of the layers that have this mask keeps both, and drops the pages between.
    """
    check_count("count", count, least=1)
    both = sliding(window) | (CAUSAL & mask_mod(lambda b, h, i, j: j < count))
    return replace(both, far=RetainedKeys(window, count))


@kind
def chunked(size: int) -> MaskFunction:
    """Causal attention within chunks of ``size`` tokens, as in Llama 4."""
    check_count("size", size, least=1)
    return sliding(size) & mask_mod(lambda b, h, i, j: i // size == j // size)


@kind
def bidirectional_spans(numbers: Tensor) -> MaskFunction:
    """Causal attention, and all of the span that a token is in, as image tokens have in Gemma 3.

    ``numbers`` int ``[b, t]`` tell which span a token is in; below 0 it is in none.
    """
    _check("numbers", numbers, 2)
    spans = mask_mod(lambda b, h, i, j, n: (n[b, i] == n[b, j]) & (n[b, i] >= 0), numbers)
    return CAUSAL | replace(spans, dims=("bT",))


@kind
def head_windows(windows: Tensor) -> MaskFunction:
    """Causal attention to the last ``windows[h]`` keys, int ``[h]``, of which the query's own is one."""
    _check("windows", windows, 1)
    return CAUSAL & replace(mask_mod(lambda b, h, i, j, window: i - j < window[h], windows), dims=("h",))


@kind
def tree(shown: Tensor) -> MaskFunction:
    """All that was stored before this step, and of the step's own tokens those that ``shown`` has, for
    drafts.

    ``shown`` bool ``[tokens, tokens]`` tells of each token of a draft tree which it descends from, itself
    included.
    """
    _check("shown", shown, 2, torch.bool)

    def descends(b, h, i, j, first, shown):
        return (j < first[b]) | shown[i - first[b], (j - first[b]).clamp(0)]

    return replace(mask_mod(descends, FIRST_QUERY, shown), dims=("ss",))


@kind
def used(queries: Tensor, keys: Tensor) -> MaskFunction:
    """Causal attention of the first ``queries[b]`` rows to the first ``keys[b]`` keys, int ``[b]`` each.

    They are flash-attn's ``seqused_q`` and ``seqused_k``: the last of these rows sees the last of these keys,
    and rows beyond see nothing.
    """
    _check("queries", queries, 1)
    _check("keys", keys, 1)

    def aligned(b, h, i, j, first, queries, keys):
        row = i - first[b]
        return (row < queries[b]) & (j < keys[b]) & (j <= row + keys[b] - queries[b])

    return replace(mask_mod(aligned, FIRST_QUERY, queries, keys), dims=("b", "b"))


@kind
def block_list(indices: Tensor, block_size: int, keys: int) -> MaskFunction:
    """Of ``keys`` keys the blocks that a list names, int ``[b, h, query blocks, n]``; -1 names none, and h
    may be 1.

    Blocks have ``block_size`` tokens, those of queries counted from the call's first row, those of keys from
    0. So select native sparse attention (Yuan et al., 2025, 2502.11089) and MoBA (Lu et al., 2025,
    2502.13189).
    """
    _check("indices", indices, 4)
    check_count("block_size", block_size, least=1)
    check_count("keys", keys, least=1)
    blocks = -(-keys // block_size)
    # One more, for those that name none, and for keys beyond.
    shown = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    known = (indices >= 0) & (indices < blocks)
    shown.scatter_(3, torch.where(known, indices, blocks).long(), True)
    shown[..., blocks] = False
    one_head = indices.shape[1] == 1

    def read(b, h, i, j, first, shown):
        return shown[b, 0 if one_head else h, (i - first[b]) // block_size, j // block_size]

    return replace(mask_mod(read, FIRST_QUERY, shown), dims=("b1" if one_head else "bh",))


@kind
def mask_tensor(shown: Tensor) -> MaskFunction:
    """Show what a bool tensor ``[b, h, s, t]`` shows; its dimensions may be 1, and its rows are the call's
    queries.

    Packed calls take a larger one, and compare it with ``max_seqlen_q`` and ``max_seqlen_k``, if these are
    given. Calls over a cache take any ``t`` of ``s`` or more. Lengths that are known on the device alone are
    compared with ``ATTNLIB_CHECK=1`` only.
    """
    _check("shown", shown, 4, torch.bool)
    batch, heads, rows, columns = which = [varies(size) for size in shown.shape]

    def read(b, h, i, j, first, shown):
        return shown[b if batch else 0, h if heads else 0, i - first[b] if rows else 0, j if columns else 0]

    dims = "".join(dim if several else "1" for dim, several in zip("bhst", which, strict=True))
    return FULL & replace(mask_mod(read, FIRST_QUERY, shown), dims=(dims,))


def _check(name: str, x: Tensor, dims: int, dtype: torch.dtype | None = None) -> None:
    if not is_strided(x):
        refuse_tensor(name, x)
    if (x.dtype != dtype) if dtype else (x.is_floating_point() or x.dtype == torch.bool):
        raise TypeError(f"{name}: expected {dtype or 'integers'}, got {x.dtype}")
    if x.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dimensions, got {tuple(x.shape)}")
