"""Attention as functions: bind the shapes, describe the problem, select a backend, run it."""

from collections.abc import Callable
from copy import copy
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from .call.call import NO_ORIGIN, Call, Dropout, Packing
from .dispatch.run import ExplainOnly, attend
from .dispatch.select import Explanation
from .dispatch.warnings import hinted
from .fp8 import descales_of
from .internal.signatures import kind
from .kv import KVView
from .masks.band import AnyMask
from .scores import Score, ScoreFunction

NO_DROPOUT = Dropout()
PLAIN = ("attention", "varlen_attention", "cached_attention")
EXPLAINED = MappingProxyType(  # the functions that explain() knows, by their modules
    {
        __name__: (*PLAIN, *(f"{name}_with_lse" for name in PLAIN)),
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
    """Softmax attention of q ``[b, s, h, d]`` over k ``[b, t, g, d]`` and v ``[b, t, g, e]``, giving ``[b, s,
    h, e]``.

    Query head ``i`` reads KV head ``i // (h / g)``; K and V are never copied for it. The queries are the last
    ``s`` of the ``t`` keys. The score of a visible pair is ``softcap * tanh(scale * q·k / softcap)`` (without
    softcap ``scale * q·k``) minus ``slope * |i - j|``, and then what ``score``, of :func:`score_mod`, makes
    of it. ``scale`` defaults to ``d ** -0.5``. ``alibi_slopes`` are ``[h]`` or ``[b, h]``. ``sinks`` ``[h]``
    are logits without a value, which nothing changes. ``key_starts`` and ``key_ends`` int32 ``[b]`` hide keys
    outside ``[start, end)`` and move nothing else. A query that sees no key gives 0, with zero gradients.
    Dropout keeps what Philox bits of (``dropout_seed``, sequence, head, i, j) say; ``dropout_seed`` int64
    ``[1]`` is drawn when None. q, k and v in float8_e4m3fn, as of :func:`quantize_fp8`, come with factors
    above 0 in fp32: ``q_descale`` ``[b, h]``, ``k_descale`` and ``v_descale`` ``[b, g]``. They give bf16, and
    have no backward.

    Raises:
        ValueError: shapes or values that do not fit; the message names the argument and the remedy.
        TypeError: dtypes.
        NotImplementedError: a named backend cannot run this.

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
    return attend(hinted(call), backend)[0]


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
    """:func:`attention` and its natural-log LSE ``[b, h, s]``, both differentiable.

    The LSE is fp32 (fp64 for fp64 inputs), includes the sink, and is -inf where there is neither key nor
    sink.
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
    return attend(hinted(call), backend)


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
    """:func:`attention` within packed sequences: q ``[s, h, d]``, k ``[t, g, d]``, v ``[t, g, e]`` give ``[s,
    h, e]``.

    Sequence ``n`` owns rows ``cu_seqlens[n]:cu_seqlens[n + 1]`` (int32, ``[b + 1]``, from 0); rows after the
    last offset give 0. The longest lengths are hints and may be too large. See :func:`attention` for the
    rest.
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
    """:func:`varlen_attention` and its LSE ``[h, t]``; rows after the last offset are -inf."""
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
    """Attention of q ``[b, s, h, d]``, or packed ``[t, h, d]``, over what a cache stores, giving ``[..., h,
    e]``.

    The queries are the last ones of each sequence. For latent storage q is ``[latent | rope]``, and the value
    is the latent. There is no backward. q may be float8_e4m3fn, with ``q_descale`` fp32 ``[b, h]``, a row for
    each sequence, over a cache that stores float8_e4m3fn and computes in bf16.

    Raises:
        NotImplementedError: a gradient is asked for. ValueError: the mask reaches further left than a
        windowed layout keeps, or shapes that do not fit; with
            ``ATTNLIB_CHECK=1`` also lengths, pages or offsets that kernels would clamp.
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
    """:func:`cached_attention` and its LSE, ``[b, h, s]`` or packed ``[h, t]``."""
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
    """What ``call(*args, **kwargs)`` would run on and why, without running it; ``call`` is one of this
    module's six.

    Or it is one of ``attnlib.parallel``, whose first call is told, and no other rank is asked. Or it is a
    layer: of its forward all but attention runs, and what its first attention call would run on is told. A
    step's tokens are then written to its cache, where the layer writes the same ones once it runs.

    >>> q = torch.randn(1, 9, 8, 64)
    >>> print(explain(attention, q, q, q, mask=CAUSAL))
    dense attention: ...
    runs on: torch
      fast paths: on
      not on triton: needs a CUDA device, got cpu
    """
    if isinstance(call, nn.Module) and hasattr(call, "backend"):
        layer, asked = copy(call), ExplainOnly(call.backend)
        layer.backend = asked
        layer(*args, **kwargs)
        if asked.told:
            return asked.told[0]
    if getattr(call, "__name__", None) not in EXPLAINED.get(getattr(call, "__module__", None), ()):
        names = ", ".join(EXPLAINED[__name__])
        raise ValueError(f"call: expected a layer or one of {names}, got {type(call).__name__}")
    asked = ExplainOnly(kwargs.get("backend"))
    call(*args, **kwargs | {"backend": asked})
    return asked.told[0]


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
    """Build the call of a public function; ``keys`` are k and v, ``bounds`` are key_starts and key_ends."""
    (k, v), (starts, ends), given = keys, bounds, descales_of(*descales)
    return Call(q, mask, score, k, v, kv, starts, ends, packing, dropout, NO_ORIGIN, given, lse)


def _view(kv: KVView) -> KVView:
    if not isinstance(kv, KVView):
        raise TypeError(
            f"kv: expected the KVView that append() or view() of a cache returned, got {type(kv).__name__}"
        )
    return kv
