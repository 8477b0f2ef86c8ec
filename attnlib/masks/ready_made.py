"""Ready-made mask functions, a few lines each; combine them with ``&``, ``|`` and ``~``.

All indices are storage indices, as in :class:`attnlib.Mask`. Put the tensors on the device of the call. A
call raises ValueError if a tensor of its mask has the wrong size; if sequence lengths are known only on the
device, the sizes are checked only with ``ATTNLIB_CHECK=1``.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..internal.checks import are_checks_on, check_count, is_strided, refuse_tensor, varies
from ..internal.signatures import kind
from ..tracing.trace import QUERY_OFFSET
from .band import CAUSAL, FULL, AnyMask, sliding
from .function import MaskFunction, RetainedKeys
from .recognition import mask_mod


@kind
def documents(numbers: Tensor) -> MaskFunction:
    """Return the mask of packed documents: a query sees only the keys of its own document.

    ``numbers`` int ``[b, t]`` is the document number of each token; columns after those of the ``t`` keys are
    ignored.

    >>> documents(torch.tensor([[0, 0, 1, 1, 1]])) & CAUSAL
    MaskFunction(band=CAUSAL, ...
    """
    _check("numbers", numbers, 2)
    return replace(mask_mod(lambda b, h, i, j, number: number[b, i] == number[b, j], numbers), dims=("bT",))


@kind
def documents_of(cu_seqlens: Tensor, tokens: int) -> MaskFunction:
    """Return the :func:`documents` mask of one packed row ``[1, tokens]``, given the document offsets.

    ``cu_seqlens`` int ``[n + 1]`` holds the offsets, which start at 0. A dense call with this mask runs as
    :func:`attnlib.varlen_attention`, unless it also uses another function, ALiBi, dropout, ``key_starts`` or
    ``key_ends``: their results depend on positions in the row.
    """
    _check("cu_seqlens", cu_seqlens, 1)
    at = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    numbers = torch.bucketize(at, cu_seqlens[1:], right=True, out_int32=True)[None]
    ends = (
        cu_seqlens[1:].clamp(max=tokens),
        cu_seqlens.new_full((1,), tokens),
    )  # tokens after the last document form a section of their own
    return replace(documents(numbers), sections=torch.cat((cu_seqlens.new_zeros(1), *ends)).int())


@kind
def prefix_lm(lengths: Tensor) -> MaskFunction:
    """Return the prefix-LM mask: all queries see the whole prompt, and attention is causal after it.

    ``lengths`` int ``[b]`` is the prompt length of each sequence.
    """
    _check("lengths", lengths, 1)
    return CAUSAL | replace(mask_mod(lambda b, h, i, j, length: j < length[b], lengths), dims=("b",))


@kind
def dilated(step: int) -> MaskFunction:
    """Return the mask that shows every ``step``-th key, counted from the query's own key."""
    check_count("step", step, least=1)
    return mask_mod(lambda b, h, i, j: (i - j) % step == 0)


@kind
def global_tokens(count: int) -> MaskFunction:
    """Return the mask in which the first ``count`` tokens see all keys, and all queries see these tokens.

    Combined with a window, this is Longformer attention (Beltagy et al., 2020, arXiv 2004.05150).

    >>> (sliding(256) | global_tokens(4)).band
    FULL
    """
    check_count("count", count, least=1)
    return mask_mod(lambda b, h, i, j: (i < count) | (j < count))


@kind
def attention_sinks(count: int, window: int) -> AnyMask:
    """Return the causal StreamingLLM mask, which shows the last ``window`` keys and the first ``count`` keys.

    For layers with this mask, a paged cache frees the pages between the first and the last keys (Xiao et al.,
    2023, arXiv 2309.17453).
    """
    check_count("count", count, least=1)
    both = sliding(window) | (CAUSAL & mask_mod(lambda b, h, i, j: j < count))
    return replace(both, far=RetainedKeys(window, count))


@kind
def chunked(size: int) -> MaskFunction:
    """Return the mask of causal attention within chunks of ``size`` tokens, as in Llama 4."""
    check_count("size", size, least=1)
    return sliding(size) & mask_mod(lambda b, h, i, j: i // size == j // size)


@kind
def bidirectional_spans(numbers: Tensor) -> MaskFunction:
    """Return a causal mask in which all tokens of a span also see each other.

    Gemma 3 uses such spans for images. ``numbers`` int ``[b, t]`` is the span number of each token; a
    negative number means that the token is in no span.
    """
    _check("numbers", numbers, 2)
    spans = mask_mod(lambda b, h, i, j, n: (n[b, i] == n[b, j]) & (n[b, i] >= 0), numbers)
    return CAUSAL | replace(spans, dims=("bT",))


@kind
def head_windows(windows: Tensor) -> MaskFunction:
    """Return a causal mask with one window per query head.

    Head ``h`` sees the last ``windows[h]`` keys, the query's own key included; ``windows`` is int ``[h]``.
    """
    _check("windows", windows, 1)
    return CAUSAL & replace(mask_mod(lambda b, h, i, j, window: i - j < window[h], windows), dims=("h",))


@kind
def tree(shown: Tensor) -> MaskFunction:
    """Return the mask of a draft tree, for speculative decoding.

    Every query sees all tokens that were stored before the current step. Among the tokens of this step, query
    ``i`` sees key ``j`` if ``shown[i, j]`` is True. Row ``i`` of ``shown`` bool ``[tokens, tokens]`` marks
    draft token ``i`` and its ancestors in the tree.
    """
    _check("shown", shown, 2, torch.bool)

    def descends(b, h, i, j, first, shown):
        return (j < first[b]) | shown[i - first[b], (j - first[b]).clamp(0)]

    return replace(mask_mod(descends, QUERY_OFFSET, shown), dims=("ss",))


@kind
def seqused(queries: Tensor, keys: Tensor) -> MaskFunction:
    """Return the causal mask of the first ``queries[b]`` rows over the first ``keys[b]`` keys.

    ``queries`` and ``keys``, int ``[b]`` each, are flash-attn's ``seqused_q`` and ``seqused_k``. In sequence
    ``b``, row ``queries[b] - 1`` sees all ``keys[b]`` keys; later rows see no key.
    """
    _check("queries", queries, 1)
    _check("keys", keys, 1)

    def aligned(b, h, i, j, first, queries, keys):
        row = i - first[b]
        return (row < queries[b]) & (j < keys[b]) & (j <= row + keys[b] - queries[b])

    return replace(mask_mod(aligned, QUERY_OFFSET, queries, keys), dims=("b", "b"))


@kind
def block_list(indices: Tensor, block_size: int, keys: int) -> MaskFunction:
    """Return the block-sparse mask that shows the key blocks listed in ``indices``.

    ``indices`` int ``[b, h, query blocks, n]`` lists up to ``n`` key blocks per query block, padded with -1;
    ``h`` may be 1. Blocks have ``block_size`` tokens. Query blocks start at the call's first row, key blocks
    at key 0, and ``keys`` is the number of keys. All queries of a block see the same blocks of keys, as in
    FlexAttention's ``BlockMask``. :func:`selected` lists blocks for every query, as Native Sparse Attention
    and MoBA do.

    Dense calls raise ValueError unless the blocks cover exactly their queries and keys. A number that is no
    block raises one only with ``ATTNLIB_CHECK=1``; otherwise it shows nothing.
    """
    _check("indices", indices, 4)
    check_count("block_size", block_size, least=1)
    check_count("keys", keys, least=1)
    blocks = -(-keys // block_size)
    known = (indices >= 0) & (indices < blocks)
    if are_checks_on(indices) and (wrong := indices[~known & (indices != -1)]).numel():
        raise ValueError(
            f"indices: expected -1 or less than {blocks}, the blocks of {block_size} in {keys} keys, got "
            f"{wrong[0].item()}"
        )
    # One more block, which stays hidden, takes the entries of -1, and is read for keys after the last block.
    shown = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    shown.scatter_(3, torch.where(known, indices, blocks).long(), True)
    shown[..., blocks] = False
    one_head = indices.shape[1] == 1

    def read(b, h, i, j, first, shown):
        return shown[b, 0 if one_head else h, (i - first[b]) // block_size, j // block_size]

    dims = "b", "1" if one_head else "h", f"s/{block_size}", f"t/{block_size}+1"
    return replace(mask_mod(read, QUERY_OFFSET, shown), dims=(dims,))


@kind
def mask_tensor(shown: Tensor) -> MaskFunction:
    """Return the mask that a bool tensor ``[b, h, s, t]`` describes: True where a key is visible.

    Any dimension may be 1. Row 0 is the call's first query. Packed calls accept a larger tensor, and compare
    its size with ``max_seqlen_q`` and ``max_seqlen_k`` if these are given. Calls over a cache accept any
    ``t >= s``. Lengths that are known only on the device are checked only with ``ATTNLIB_CHECK=1``.
    """
    _check("shown", shown, 4, torch.bool)
    batch, heads, rows, columns = which = [varies(size) for size in shown.shape]

    def read(b, h, i, j, first, shown):
        return shown[b if batch else 0, h if heads else 0, i - first[b] if rows else 0, j if columns else 0]

    dims = "".join(dim if several else "1" for dim, several in zip("bhst", which, strict=True))
    return FULL & replace(mask_mod(read, QUERY_OFFSET, shown), dims=(dims,))


def _check(name: str, x: Tensor, dims: int, dtype: torch.dtype | None = None) -> None:
    if not is_strided(x):
        refuse_tensor(name, x)
    if (x.dtype != dtype) if dtype else (x.is_floating_point() or x.dtype == torch.bool):
        raise TypeError(f"{name}: expected {dtype or 'integers'}, got {x.dtype}")
    if x.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dimensions, got {tuple(x.shape)}")
