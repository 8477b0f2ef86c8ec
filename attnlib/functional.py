"""The attention functions for dense tensors, packed sequences and KV caches, and :func:`explain`."""

from collections.abc import Callable
from copy import copy
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .call.call import NO_ORIGIN, Call, Dropout, Packing
from .dispatch.run import ExplainOnly, attend
from .dispatch.select import Explanation
from .dispatch.warnings import warn_of_layout
from .fp8 import descales_of
from .internal.signatures import kind
from .kv import KVView
from .masks.band import AnyMask
from .scores import Score, ScoreFunction

NO_DROPOUT = Dropout()
WITHOUT_LSE = ("attention", "varlen_attention", "cached_attention")
EXPLAINED = MappingProxyType(  # the functions that explain() accepts, by module
    {
        __name__: (*WITHOUT_LSE, *(f"{name}_with_lse" for name in WITHOUT_LSE)),
        f"{__package__}.weights": ("attention_maxima", "attention_weights"),
        f"{__package__}.parallel.functions": (
            *("context_attention", "gather_attention", "head_attention", "ring_attention"),
        ),
    }
)


@kind
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AnyMask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score: ScoreFunction | None = None,
    key_starts: Tensor | None = None,
    key_ends: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return softmax attention of q ``[b, s, h, d]`` over k ``[b, t, g, d]`` and v ``[b, t, g, e]``.

    The result is ``[b, s, h, e]``. Query head ``i`` reads KV head ``i // (h / g)``, without a copy of K and V
    for each query head. The queries are aligned with the last ``s`` of the ``t`` keys.

    The score of a visible pair is ``softcap * tanh(scale * q·k / softcap)``, or ``scale * q·k`` without a
    softcap. ALiBi subtracts ``slope * |i - j|``. ``score``, a function made by :func:`score_mod`, comes last.
    A query that sees no key gives 0, with zero gradients.

    Args:
        q: queries ``[b, s, h, d]`` in fp16, bf16, fp32, fp64 or e4m3. e4m3 inputs, as :func:`quantize_fp8`
            makes them, need descales. Their result is bf16, and they have no backward.
        k: keys ``[b, t, g, d]``, where ``h`` is a multiple of ``g``.
        v: values ``[b, t, g, e]``.
        mask: the keys that each query sees. It is required, because attnlib never infers causality.
        scale: the factor of q·k, above 0. None means ``d ** -0.5``.
        softcap: limits scores to values between ``-softcap`` and ``softcap``. None means no limit.
        alibi_slopes: float ``[h]`` or ``[b, h]``, the slope of each head.
        sinks: float ``[h]``, an extra logit of each head. It takes part in the softmax and has no value.
            Neither scale, softcap nor ALiBi changes it.
        score: a function of indices that changes the score, made by :func:`score_mod`.
        key_starts: int32 ``[b]``, the index of the first visible key of each sequence. The alignment of
            queries and keys stays the same.
        key_ends: int32 ``[b]``, one more than the index of the last visible key of each sequence.
        dropout_p: the probability of dropping an attention weight, in [0, 1).
        dropout_seed: int64 ``[1]``. The seed and the indices of sequence, head, query and key determine which
            weights are dropped. None means a random seed.
        q_descale: positive fp32 ``[b, h]``, the factor of an e4m3 q for each sequence and head.
        k_descale: positive fp32 ``[b, g]``, the same for k.
        v_descale: positive fp32 ``[b, g]``, the same for v.
        compute_dtype: ``torch.float8_e4m3fn`` rounds fp16 or bf16 q, k and v to e4m3 for the forward, with a
            scale for each sequence and head. The output has q's dtype. The backward computes in q's dtype, on
            the rounded numbers. None computes in the dtype of q.
        backend: ``"torch"``, ``"triton"``, ``"triton:generic"`` (only generic kernels) or ``"reference"``, to
            run on this backend or raise an error. None selects one. ``"strict"`` selects one too, and raises
            an error if the call would be slow.

    Raises:
        ValueError: a shape or value does not fit; the message names the argument and the remedy.
        TypeError: a dtype or type does not fit.
        NotImplementedError: the named backend cannot run this call.

    >>> q, k = torch.randn(2, 9, 8, 64), torch.randn(2, 9, 2, 64)
    >>> attention(q, k, k, mask=CAUSAL).shape
    torch.Size([2, 9, 8, 64])
    """
    call = _call(
        q,
        mask,
        Score(scale, softcap, alibi_slopes, sinks, score),
        Dropout(dropout_p, dropout_seed),
        (q_descale, k_descale, v_descale),
        keys=(k, v, key_starts, key_ends),
        compute_dtype=compute_dtype,
    )
    return attend(warn_of_layout(call), backend)[0]


@kind
def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AnyMask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score: ScoreFunction | None = None,
    key_starts: Tensor | None = None,
    key_ends: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`attention` and its LSE ``[b, h, s]``; both are differentiable.

    The LSE is the natural logarithm of the sum of ``exp(score)`` over the visible keys and the sink. It is
    fp32 (fp64 for fp64 inputs), and -inf for a query that has neither a visible key nor a sink.
    """
    call = _call(
        q,
        mask,
        Score(scale, softcap, alibi_slopes, sinks, score),
        Dropout(dropout_p, dropout_seed),
        (q_descale, k_descale, v_descale),
        keys=(k, v, key_starts, key_ends),
        compute_dtype=compute_dtype,
        lse=True,
    )
    return attend(warn_of_layout(call), backend)


@kind
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: AnyMask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score: ScoreFunction | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return attention within packed sequences, ``[s, h, e]``.

    q is ``[s, h, d]``, k ``[t, g, d]`` and v ``[t, g, e]``. Sequence ``n`` owns the rows from
    ``cu_seqlens[n]`` up to ``cu_seqlens[n + 1]``. The offsets are int32 ``[b + 1]`` and start at 0. Output
    rows after the last offset are 0. ``max_seqlen_q`` and ``max_seqlen_k`` are optional upper bounds on the
    sequence lengths; they need not be tight. The other arguments are those of :func:`attention`.
    """
    call = _call(
        q,
        mask,
        Score(scale, softcap, alibi_slopes, sinks, score),
        Dropout(dropout_p, dropout_seed),
        (q_descale, k_descale, v_descale),
        keys=(k, v, None, None),
        compute_dtype=compute_dtype,
        packing=Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )
    return attend(call, backend)[0]


@kind
def varlen_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: AnyMask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score: ScoreFunction | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`varlen_attention`, and its LSE ``[h, s]``, -inf after the last offset."""
    call = _call(
        q,
        mask,
        Score(scale, softcap, alibi_slopes, sinks, score),
        Dropout(dropout_p, dropout_seed),
        (q_descale, k_descale, v_descale),
        keys=(k, v, None, None),
        compute_dtype=compute_dtype,
        packing=Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        lse=True,
    )
    return attend(call, backend)


@kind
def cached_attention(
    q: Tensor,
    kv: KVView,
    *,
    mask: AnyMask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score: ScoreFunction | None = None,
    q_descale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return attention of q ``[b, s, h, d]``, or packed ``[t, h, d]``, over the tokens of a KV cache.

    The result is ``[..., h, e]``. ``kv`` is the view that a cache's ``append`` returns. The queries are the
    last tokens of each sequence. Over a latent (MLA) cache q is ``[latent | rope]``, and the latent is also
    the value. ``scale=None`` means ``d ** -0.5`` for q's width d, also over latents: an absorbed layer passes
    the scale of its heads. There is no backward. q may be float8_e4m3fn over a cache that stores
    float8_e4m3fn and computes in bf16; then ``q_descale`` is fp32 ``[b, h]``, with one row for each sequence.

    Raises:
        NotImplementedError: a gradient is needed.
        ValueError: a shape does not fit, or the mask shows older keys than the cache retains. With
            ``ATTNLIB_CHECK=1``, also if lengths, pages or offsets are out of range.
    """
    call = _call(
        q,
        mask,
        Score(scale, softcap, alibi_slopes, sinks, score),
        descales=(q_descale,),
        kv=_view(kv),
    )
    return attend(call, backend)[0]


@kind
def cached_attention_with_lse(
    q: Tensor,
    kv: KVView,
    *,
    mask: AnyMask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score: ScoreFunction | None = None,
    q_descale: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`cached_attention`, and its LSE ``[b, h, s]`` or packed ``[h, t]``."""
    call = _call(
        q,
        mask,
        Score(scale, softcap, alibi_slopes, sinks, score),
        descales=(q_descale,),
        kv=_view(kv),
        lse=True,
    )
    return attend(call, backend)


@kind
def explain(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explain which backend ``call(*args, **kwargs)`` would run on, and why, without running attention.

    ``call`` is one of these:

    - an attention function of this package;
    - a function of ``attnlib.parallel``: its first attention call is explained, without communication;
    - a layer: its first attention call is explained. The rest of its forward runs, so that the tokens of a
      cache step are written. Calling the layer afterwards writes the same tokens again.

    >>> q = torch.randn(1, 9, 8, 64)
    >>> print(explain(attention, q, q, q, mask=CAUSAL))
    dense attention
      device     cpu
      dtype      float32
      mask       CAUSAL
      heads      8
      kv_heads   8
      head_dim   64
      value_dim  64
    runs on: torch
      fast paths: on
      not on triton: needs a CUDA device, got cpu
    """
    if isinstance(call, nn.Module) and hasattr(call, "backend"):
        layer = copy(call)
        layer.backend = recorder = ExplainOnly(call.backend)
        layer(*args, **kwargs)
        if recorder.explanations:
            return recorder.explanations[0]
    if getattr(call, "__name__", None) not in EXPLAINED.get(getattr(call, "__module__", None), ()):
        names = ", ".join(EXPLAINED[__name__])
        raise ValueError(f"call: expected a layer or one of {names}, got {type(call).__name__}")
    recorder = ExplainOnly(kwargs.get("backend"))
    call(*args, **kwargs | {"backend": recorder})
    return recorder.explanations[0]


def _call(
    q: Tensor,
    mask: AnyMask,
    score: Score,
    dropout: Dropout = NO_DROPOUT,
    descales: tuple[Tensor | None, ...] = (),
    *,
    keys: tuple[Tensor | None, ...] = (None, None, None, None),
    kv: KVView | None = None,
    packing: Packing | None = None,
    compute_dtype: torch.dtype | None = None,
    lse: bool = False,
) -> Call:
    """Build a Call from the arguments of a function; ``keys`` are k, v, key_starts and key_ends."""
    k, v, *bounds = keys
    rest = packing, dropout, NO_ORIGIN, descales_of(*descales), lse, compute_dtype
    return Call(q, mask, score, k, v, kv, *bounds, *rest)


def _view(kv: KVView) -> KVView:
    if not isinstance(kv, KVView):
        raise TypeError(
            f"kv: expected the KVView that append() or view() of a cache returned, got {type(kv).__name__}"
        )
    return kv
