"""The attention functions for dense tensors, packed sequences and KV caches, and :func:`explain`."""

from collections.abc import Callable
from copy import copy
from types import MappingProxyType
from typing import Any

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
    backend: str | None = None,
) -> Tensor:
    """Return softmax attention of q ``[b, s, h, d]`` over k ``[b, t, g, d]`` and v ``[b, t, g, e]``.

    The result is ``[b, s, h, e]``. Query head ``i`` reads KV head ``i // (h / g)``, without a copy of K and V
    for each query head. The queries are aligned with the last ``s`` of the ``t`` keys.

    The score of a visible pair is ``softcap * tanh(scale * q·k / softcap)``, or ``scale * q·k`` without a
    softcap. ALiBi subtracts ``slope * |i - j|``. ``score``, a function made by :func:`score_mod`, comes last.
    A query that sees no key gives 0, with zero gradients.

    - ``scale`` defaults to ``d ** -0.5``. ``alibi_slopes`` are ``[h]`` or ``[b, h]``.
    - ``sinks`` ``[h]`` are extra logits in the softmax. They have no value, and no option changes them.
    - ``key_starts`` and ``key_ends`` int32 ``[b]`` hide the keys outside ``[start, end)``. The alignment of
      queries and keys stays the same.
    - Dropout decides by ``dropout_seed`` and the indices of sequence, head, query and key. The seed is int64
      ``[1]``, or None for a random seed.
    - q, k and v may be float8_e4m3fn, as :func:`quantize_fp8` makes them. They need positive fp32 scales:
      ``q_descale`` ``[b, h]``, ``k_descale`` and ``v_descale`` ``[b, g]``. The result is bf16, and there is
      no backward.

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
        keys=(k, v),
        bounds=(key_starts, key_ends),
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
        keys=(k, v),
        bounds=(key_starts, key_ends),
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
        keys=(k, v),
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
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`varlen_attention`, and its LSE ``[h, s]``, -inf after the last offset."""
    call = _call(
        q,
        mask,
        Score(scale, softcap, alibi_slopes, sinks, score),
        Dropout(dropout_p, dropout_seed),
        (q_descale, k_descale, v_descale),
        keys=(k, v),
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
    the value. There is no backward. q may be float8_e4m3fn over a cache that stores float8_e4m3fn and
    computes in bf16; then ``q_descale`` is fp32 ``[b, h]``, with one row for each sequence.

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
    keys: tuple[Tensor | None, Tensor | None] = (None, None),
    kv: KVView | None = None,
    bounds: tuple[Tensor | None, Tensor | None] = (None, None),
    packing: Packing | None = None,
    lse: bool = False,
) -> Call:
    """Build a Call from the arguments of an attention function; ``bounds`` are key_starts and key_ends."""
    (k, v), (starts, ends), given = keys, bounds, descales_of(*descales)
    return Call(q, mask, score, k, v, kv, starts, ends, packing, dropout, NO_ORIGIN, given, lse)


def _view(kv: KVView) -> KVView:
    if not isinstance(kv, KVView):
        raise TypeError(
            f"kv: expected the KVView that append() or view() of a cache returned, got {type(kv).__name__}"
        )
    return kv
