"""Attention as functions: bind the shapes, describe the problem, select a backend, run it."""

from collections.abc import Callable, Sequence

from torch import Tensor

from .cache.layout import KVView
from .dispatch import Explanation
from .mask import Mask
from .rope import Angles


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_starts: Tensor | None = None,
    key_ends: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention of q ``[b, s, h, d]`` over k ``[b, t, g, d]`` and v ``[b, t, g, e]``, giving ``[b, s, h, e]``.

    Query head ``i`` reads KV head ``i // (h / g)``; K and V are never copied for it. The queries are the last
    ``s`` of the ``t`` keys (bottom-right alignment). The score of a visible pair is
    ``softcap * tanh(scale * q·k / softcap)`` (without softcap ``scale * q·k``) minus ``slope * |i - j|``. ``scale`` defaults to
    ``d ** -0.5``. ``sinks`` ``[h]`` are logits without a value, neither scaled nor capped. ``key_starts`` and ``key_ends``
    int32 ``[b]`` hide keys outside ``[start, end)`` and move nothing else. ``alibi_slopes`` are ``[h]`` or ``[b, h]``.
    A query that sees no key gives 0, with zero gradients. Dropout keeps what Philox bits of
    (``dropout_seed``, sequence, head, i, j) say; ``dropout_seed`` int64 ``[1]`` is drawn when None.

    Raises:
        ValueError: shapes or values that do not fit; the message names the argument and the remedy.
        TypeError: dtypes.
        NotImplementedError: a named backend cannot run this.

    >>> q, k = torch.randn(2, 9, 8, 64), torch.randn(2, 9, 2, 64)
    >>> attention(q, k, k, mask=CAUSAL).shape
    torch.Size([2, 9, 8, 64])
    """
    given = (scale, softcap, alibi_slopes, sinks, key_starts, key_ends, None, None, None, None, dropout_p, dropout_seed)
    return _attend("dense", q, k, v, mask, given, backend, lse=False)[0]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_starts: Tensor | None = None,
    key_ends: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attention` and its natural-log LSE ``[b, h, s]``, both differentiable.

    The LSE is fp32 (fp64 for fp64 inputs), includes the sink, and is -inf where a query sees no key and there is no sink.
    """
    given = (scale, softcap, alibi_slopes, sinks, key_starts, key_ends, None, None, None, None, dropout_p, dropout_seed)
    return _attend("dense", q, k, v, mask, given, backend, lse=True)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """:func:`attention` within each packed sequence: q ``[t, h, d]``, k ``[t', g, d]``, v ``[t', g, e]``, giving ``[t, h, e]``.

    Sequence ``n`` owns rows ``cu_seqlens[n]:cu_seqlens[n + 1]`` (int32, ``[b + 1]``, from 0); rows after the last
    offset give 0. The longest lengths are hints and may be too large. See :func:`attention` for the rest.
    """
    given = (
        scale,
        softcap,
        alibi_slopes,
        sinks,
        None,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        dropout_seed,
    )
    return _attend("varlen", q, k, v, mask, given, backend, lse=False)[0]


def varlen_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`varlen_attention` and its LSE ``[h, t]``; rows after the last offset are -inf."""
    given = (
        scale,
        softcap,
        alibi_slopes,
        sinks,
        None,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        dropout_seed,
    )
    return _attend("varlen", q, k, v, mask, given, backend, lse=True)


def cached_attention(
    q: Tensor,
    kv: KVView,
    *,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention of q ``[b, s, h, d]``, or packed ``[t, h, d]``, over what a cache stores, giving ``[..., h, e]``.

    The queries are the last ones of each sequence. For latent storage q is ``[latent | rope]``, and the value is the
    latent. There is no backward.

    Raises:
        NotImplementedError: a gradient is asked for.
        ValueError: the mask reaches further left than a windowed layout keeps, or shapes that do not fit.
    """
    return _attend_cached(q, kv, mask, (scale, softcap, alibi_slopes, sinks), backend, lse=False)[0]


def cached_attention_with_lse(
    q: Tensor,
    kv: KVView,
    *,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`cached_attention` and its LSE, ``[b, h, s]`` or packed ``[h, t]``."""
    return _attend_cached(q, kv, mask, (scale, softcap, alibi_slopes, sinks), backend, lse=True)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over two disjoint sets of keys from the attention over each.

    Outputs are ``[b, s, h, e]`` with LSE ``[b, h, s]``, or packed ``[t, h, e]`` with ``[h, t]``. Associative, with identity
    ``(0, -inf)``; differentiable; computes in fp32 (fp64 for fp64). An LSE of +inf gives NaN.
    """
    raise NotImplementedError


def write_cache(kv: KVView, k: Tensor, v: Tensor | None, slots: Tensor, *, angles: Angles | None = None) -> None:
    """Write tokens into a view's planes in place: k, rotated by ``angles`` first, and v at ``slots`` (page * page_size + offset).

    Grouped: k ``[..., g, d]``, v ``[..., g, e]``. Latent: k is the latent ``[..., r]``, v the rotary key ``[..., p]``, which is what
    ``angles`` rotate. ``slots`` is int64, one a token; -1 is skipped. Quantises when the layout stores int8 or fp8.
    """
    raise NotImplementedError


def copy_pages(kv: KVView, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole pages ``(from, to)`` of a view's planes in place."""
    raise NotImplementedError


def explain(call: Callable, *args, **kwargs) -> Explanation:
    """What ``call(*args, **kwargs)`` would run on and why, without running it; ``call`` is one of this module's.

    >>> print(explain(attention, q, k, v, mask=CAUSAL))
    """
    raise NotImplementedError


def _attend(kind: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, given: tuple, backend: str | None, *, lse: bool):
    raise NotImplementedError


def _attend_cached(q: Tensor, kv: KVView, mask: Mask, given: tuple, backend: str | None, *, lse: bool):
    raise NotImplementedError
