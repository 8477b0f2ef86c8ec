"""The attention function that transformers models call; it computes attention with attnlib."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from ...dispatch.run import Runner
from ...functional import attention, cached_attention, varlen_attention
from ...indexing import Chosen
from ...internal.padding import are_holed, edges_of
from ...kv import KVLayout, KVView
from ...layers.inspected import TakenStatistic, refusing_gradients
from ...layers.positions import sequence_of
from ...masks.band import CAUSAL, FULL, AnyMask, sliding
from ...masks.ready_made import documents, mask_tensor
from ...scores import bias_tensor
from .handed import read
from .latents import absorbed, are_latents, expanded, may_absorb, unabsorbed
from .lists import LISTS, check_padding, chosen_of
from .pages import attention_to_pages, pages_of
from .trees import restricted

# transformers may pass these arguments, but attnlib does not support them: they must be None or False, or a
# Cache, which has given its keys and values to the model already.
REFUSED = ("cache", "block_table", "head_mask")
# attnlib ignores these arguments, because the model itself has applied them or uses them elsewhere.
HARMLESS = MappingProxyType(
    {
        "num_items_in_batch": "the loss is divided by it",
        "position_ids": "queries and keys are rotated already, and masks mark where packed sequences begin",
        "cache_position": "masks are made from it",
        "position_embeddings": "queries and keys are rotated already",
        "encoder_hidden_states": "keys and values are made from them already",
        "seq_idx": "convolutions and state space layers read it",
        "labels": "the loss is computed from them",
    }
)
WANTED = MappingProxyType(
    {
        "sinks": "the model adds a sink logit for each query",
        "read_index": "continuous batching reads keys from its own pages",
        "write_index": "continuous batching writes keys to its own pages",
    }
)


class Options(NamedTuple):
    """Options of an attention call, under transformers' names."""

    is_causal: bool | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    position_bias: Tensor | None = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    max_length_q: int | None = None
    max_length_k: int | None = None
    chosen: Chosen | None = None  # the keys that an index branch chose
    backend: Runner = None  # of a replaced layer


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of query ``[b, h, s, d]`` over key ``[b, g, t, d]`` and value ``[b, g, t, e]``.

    Returns the output ``[b, s, h, e]``, and with ``output_attentions=True`` the weights ``[b, h, s, t]`` that
    ``eager`` attention returns, but before dropout, without a gradient, and 0 for a query that sees no key.
    Otherwise None stands in their place. If the layer caches latents, ``key`` holds its rotary keys and
    ``value`` its latents (:mod:`.latents`). ``attention_mask`` comes from
    :func:`.masks.attention_mask`, or is any bool or additive mask ``[b, h|1, s, t]``. If it is None or
    ``[b, t]``, the flags of the model decide if attention is causal, and which window it has.

    Raises:
        NotImplementedError: attnlib does not support an argument, or does not know a tensor. Unknown numbers
            and flags are ignored, as transformers' own functions do.
    """
    check_arguments({name: value for name, value in kwargs.items() if name not in LISTS})
    chosen = chosen_of(module, query, key, kwargs)
    if kwargs.get("block_indices") is not None:
        check_padding(module, attention_mask, key.shape[2], chosen.block_size)
    given = Options(**{name: kwargs[name] for name in Options._fields if name in kwargs})
    given = given._replace(chosen=chosen)
    taken = TakenStatistic() if kwargs.get("output_attentions") else None
    runner = given.backend if taken is None else taken
    options = {"scale": scaling, "softcap": given.softcap, "sinks": given.s_aux, "backend": runner}
    out = _attended(module, (query, key, value), attention_mask, dropout, given, options)
    return out, None if taken is None else refusing_gradients(_as_eager(taken.result, query, key, given), out)


def _attended(
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    attention_mask: Tensor | None,
    dropout: float,
    given: Options,
    options: dict[str, Any],
) -> Tensor:
    """Compute the output ``[b, s, h, e]`` of :func:`attention_forward`."""
    query, key, value = tensors
    is_latent = are_latents(query, key)
    if pages_of(key, value) is not None:
        bias = given.position_bias
        return attention_to_pages(module, query, key, attention_mask, bias, given.chosen, options)
    if is_latent and (
        given.cu_seq_lens_q is not None or not _absorbs(module, query, key, attention_mask, dropout)
    ):
        (key, value), is_latent = expanded(module, key, value), False
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = _band(module, given, q.shape[1], k.shape[1] if attention_mask is None else None)
    if given.cu_seq_lens_q is not None and q.shape[0] == 1:
        return _packed(q, k, v, mask, given, dropout, options)
    k, v, mask, bias, bounds = _seen(k, v, mask, attention_mask, given.position_bias)
    mask = mask if given.chosen is None else mask & given.chosen.mask
    if is_latent:
        return unabsorbed(module, _stored(absorbed(module, q), k, v, mask, bounds, options))
    if _decodes(q, k, v, bias, dropout):
        return _stored(q, k, v, mask, bounds, options)
    options |= {} if bounds is None else dict(zip(("key_starts", "key_ends"), bounds, strict=True))
    options["score"] = None if bias is None else bias_tensor(bias)
    return attention(q, k, v, mask=mask, dropout_p=dropout, **options).contiguous()


def _as_eager(weights: Tensor, query: Tensor, key: Tensor, given: Options) -> Tensor:
    """Return the weights of a call as ``eager`` attention has them, ``[b, h, s, t]`` in the dtype of queries.

    A call of packed sequences counts keys inside each sequence, and one over pages has all rows in turn.
    """
    (b, _, s, _), t = query.shape, key.shape[2]
    if weights.dim() == 3 and given.cu_seq_lens_q is not None:
        rows, firsts = given.cu_seq_lens_q, given.cu_seq_lens_k
        firsts = rows if firsts is None else firsts
        n = sequence_of(torch.arange(s, device=query.device), rows).clamp(max=len(rows) - 2)
        at = firsts[n][:, None] + torch.arange(weights.shape[-1], device=query.device)
        whole = weights.new_zeros(*weights.shape[:2], t)
        # Columns after the end of a sequence are 0, so they may be added anywhere.
        weights = whole.scatter_add_(-1, at.clamp(max=t - 1).long().expand_as(weights), weights)[None]
    elif weights.dim() == 3:
        weights = weights.unflatten(1, (b, s)).transpose(0, 1)
    return nn.functional.pad(weights, (0, t - weights.shape[-1])).to(query.dtype)


def refuse_weights(given: Mapping[str, Any]) -> None:
    """Raise NotImplementedError if a replaced layer is asked for attention weights, which no model reads."""
    if given.get("output_attentions"):
        raise NotImplementedError(
            "output_attentions: a model with replaced layers does not collect them; use "
            'attn_implementation="attnlib" without hf.replace, or weights() of the attnlib layers'
        )


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for an argument that attnlib does not support; the message names it."""
    for name, value in given.items():
        if name in REFUSED and not (value is None or value is False or isinstance(value, Cache)):
            raise NotImplementedError(
                f'{name}: attn_implementation="attnlib" does not support it; use "eager"'
            )
        if name not in HARMLESS and name not in Options._fields and _holds_tensor(value):
            raise NotImplementedError(_unread(name))


def _unread(name: str) -> str:
    wanted = WANTED.get(name, "the model's attention may depend on it")
    return f'{name}: attn_implementation="attnlib" does not read this tensor, but {wanted}; use "eager"'


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


def _absorbs(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, dropout: float
) -> bool:
    """True if attention may read latents directly; each sequence's last query must be its last token."""
    is_aligned = query.shape[2] == 1 or attention_mask is None or attention_mask.dim() == 4
    return is_aligned and not dropout and may_absorb(module, query, key.shape[2])


def _seen(
    k: Tensor, v: Tensor, mask: AnyMask, attention_mask: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, AnyMask, Tensor | None, tuple[Tensor, Tensor] | None]:
    """Apply transformers' mask; return keys, values, attnlib's mask, the bias of scores, and key bounds."""
    if attention_mask is None:
        return k, v, mask, bias, None
    if (tree := getattr(attention_mask, "tree", None)) is not None:
        return k, v, restricted(mask, tree, bias), None, None
    if attention_mask.dim() == 2:
        bounds, attention_mask = read(attention_mask)
        if attention_mask.shape[0] != k.shape[0]:
            raise NotImplementedError(
                f"attention_mask: expected one row for each of {k.shape[0]} rows of keys, got "
                f'{attention_mask.shape[0]}; attn_implementation="attnlib" does not broadcast it, so use '
                '"eager"'
            )
        # The mask has fewer tokens than keys if a static cache has unused rows, and more if it dropped keys.
        tokens = attention_mask.shape[1]
        k, v, bias = k[:, :tokens], v[:, :tokens], None if bias is None else bias[..., :tokens]
        attention_mask = attention_mask[:, tokens - k.shape[1] :]
        if attention_mask.dtype != torch.bool:
            return k, v, mask & documents(attention_mask.int()), bias, None
        if bounds is None and (torch.compiler.is_compiling() or are_holed(attention_mask).any()):
            mask = mask & mask_tensor(attention_mask[:, None, None])
            return k, v, mask, bias, None
        return k, v, mask, bias, edges_of(attention_mask) if bounds is None else bounds
    given = attention_mask[..., : k.shape[1]]
    if given.dtype == torch.bool:
        return k, v, mask_tensor(given), bias, None
    return k, v, FULL, given if bias is None else bias + given, None


def flags_of(module: nn.Module, is_causal: bool | None, sliding_window: int | None) -> str:
    """Return the kind of mask that a model's flags define: "full", "causal" or "window"."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return "full" if not is_causal else "causal" if sliding_window is None else "window"


def _band(module: nn.Module, given: Options, queries: int, keys: int | None) -> AnyMask:
    """Return the mask that a model's flags define; a single query is the last token.

    It sees all keys, except those before its window if there is no mask and ``keys`` counts them: a layer of
    Gemma 4 that reads the keys of another layer computes only the last token of a prompt.
    """
    flags = flags_of(module, given.is_causal, given.sliding_window)
    if flags == "full" or (queries == 1 and (flags == "causal" or not keys)):
        return FULL
    return CAUSAL if flags == "causal" else sliding(given.sliding_window)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask, given: Options, dropout: float, options: dict
) -> Tensor:
    """Compute attention of packed sequences ``[1, t, h, d]``."""
    cu_k = given.cu_seq_lens_q if given.cu_seq_lens_k is None else given.cu_seq_lens_k
    return varlen_attention(
        q[0],
        k[0],
        v[0],
        mask=mask,
        cu_seqlens_q=given.cu_seq_lens_q.int(),
        cu_seqlens_k=cu_k.int(),
        max_seqlen_q=given.max_length_q,
        max_seqlen_k=given.max_length_k,
        dropout_p=dropout,
        **options,
    )[None]


def _decodes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float) -> bool:
    """True for one query per sequence without gradients: dividing the keys among thread blocks is faster."""
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return q.shape[1] == 1 and bias is None and not (dropout or grad) and k.shape[1] > 0


def _stored(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask, bounds: tuple[Tensor, Tensor] | None, options: dict
) -> Tensor:
    """Compute attention over keys and values as if they were a cache with one page per sequence.

    Nothing is copied, and there are no gradients. ``k`` and ``v`` may be rotary keys and latents.
    """
    (b, t, g, d), e = k.shape, v.shape[-1]
    rows = torch.arange(b, dtype=torch.int32, device=q.device)
    starts, lengths = (torch.zeros_like(rows), torch.full_like(rows, t)) if bounds is None else bounds
    if d == q.shape[-1]:
        layout, planes = KVLayout.grouped(g, d, e, dtype=k.dtype), {"k": k, "v": v}
    else:
        layout, planes = KVLayout.latent(e, d, dtype=k.dtype), {"k": v, "v": v, "k_rope": k if d else None}
    view = KVView(layout, t, **planes, table=rows[:, None], starts=starts, lengths=lengths, check=False)
    return cached_attention(q, view, mask=mask, **options)
