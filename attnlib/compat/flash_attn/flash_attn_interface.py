"""flash-attn's functions for dense and packed sequences; :mod:`.kv_cache` has the function for caches."""

from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, Dropout
from ...dispatch.run import attend
from ...functional import cached_attention_with_lse, varlen_attention_with_lse
from ...internal.signatures import kind
from ...scores import Score
from .kv_cache import band, flash_lse, pages_of
from .kv_cache import flash_attn_with_kvcache as flash_attn_with_kvcache

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, None]


@kind
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention of q ``[b, s, h, d]`` over k ``[b, t, g, d]`` and v ``[b, t, g, e]``.

    Returns ``[b, s, h, e]``. With ``return_attn_probs``, also returns the log-sum-exp of the scores
    ``[b, h, s]``, which is inf for a query that sees no key, and None, because attention probabilities are
    never stored. The dropout pattern differs from flash-attn's.

    Raises:
        NotImplementedError: ``deterministic`` without ``torch.use_deterministic_algorithms(True)``, which
            also covers the backward.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    score = Score(*(options[name] for name in ("scale", "softcap", "alibi_slopes")))
    call = Call(q, options["mask"], score, k, v, dropout=Dropout(dropout_p), lse=True)
    return _result(*attend(call), return_attn_probs)


@kind
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """Run :func:`flash_attn_func` with keys and values in one tensor ``[b, t, 2, g, d]``."""
    return flash_attn_func(q, *kv.unbind(-3), *args, **kwargs)


@kind
def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """Run :func:`flash_attn_func` with queries, keys and values in one tensor ``[b, s, 3, h, d]``."""
    return flash_attn_func(*qkv.unbind(-3), *args, **kwargs)


@kind
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Run :func:`flash_attn_func` on packed sequences q ``[t, h, d]`` with offsets int32 ``[b + 1]``.

    The LSE is ``[h, t]``. With a ``block_table`` int32 ``[b, n]``, k and v are pages
    ``[pages, page_size, g, d]``, and there is no backward.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    if block_table is None:
        out, lse = varlen_attention_with_lse(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            **options,
        )
        return _result(out, lse, return_attn_probs)
    if options.pop("dropout_p"):
        raise NotImplementedError("dropout_p: expected 0 with a block_table, which is for inference only")
    view = pages_of(k, v, table=block_table, lengths=cu_seqlens_k.diff().int(), cu_seqlens_q=cu_seqlens_q)
    return _result(*cached_attention_with_lse(q, view, **options), return_attn_probs)


@kind
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """Run :func:`flash_attn_varlen_func` with keys and values in one tensor ``[t, 2, g, d]``."""
    return flash_attn_varlen_func(q, *kv.unbind(-3), *args, **kwargs)


@kind
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Result:
    """Run :func:`flash_attn_varlen_func` with queries, keys and values in one tensor ``[t, 3, h, d]``."""
    return flash_attn_varlen_func(
        *qkv.unbind(-3), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs
    )


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> dict[str, object]:
    """Convert the options of flash-attn's functions to attnlib's arguments."""
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise NotImplementedError(
            "deterministic: expected False, since a single call cannot be made deterministic; call "
            "torch.use_deterministic_algorithms(True) first"
        )
    return {
        "mask": band(causal, window_size),
        "scale": softmax_scale,
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
    }


def _result(out: Tensor, lse: Tensor, with_lse: bool) -> Result:
    return (out, flash_lse(lse), None) if with_lse else out
