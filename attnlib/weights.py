"""Attention weights and largest scores, recomputed from q, k and the LSE of a call, without values."""

from types import MappingProxyType

from torch import Tensor

from .call.call import Call, Packing
from .call.statistic import Statistic, first_column
from .dispatch.statistics import compute
from .internal.checks import is_strided, refuse_tensor
from .internal.signatures import kind
from .kv import KVView
from .masks.band import AnyMask
from .scores import Score, ScoreFunction

KINDS = MappingProxyType({"none": "rows", "queries": "mass", "heads": "heads"})


@kind
def attention_weights(
    q: Tensor,
    k: Tensor | KVView,
    lse: Tensor,
    *,
    mask: AnyMask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    score: ScoreFunction | None = None,
    key_starts: Tensor | None = None,
    key_ends: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    over: str,
    rows: Tensor | None = None,
    at: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return the attention probabilities of a call, recomputed from its LSE: some rows, sums or means.

    The probability of a visible pair is ``P = exp(score - lse)``, where the score is the one that the
    attention function of the call computes. Hidden pairs and rows whose LSE is -inf have the probability 0.
    The LSE is the one that ``attention_with_lse``, ``varlen_attention_with_lse`` or
    ``cached_attention_with_lse`` returns for the same q, keys and options. The other options are theirs too.
    If the call had sinks, its LSE includes them, so rows of P sum to less than 1. There is no dropout: P is
    what dropout would have changed.

    ``over`` says what is summed, so that no more memory than the result is needed:

    ========== ============ ================== ==================================================
    over       dense        packed             result
    ========== ============ ================== ==================================================
    "none"     [b, h, r, t] [h, r, T]          P of the queries ``rows``
    "queries"  [b, h, t]    [h, t]             the mass of each key: P summed over all queries, or
                                               over ``rows`` only
    "heads"    [b, s, n]    [s, n]             the mean of P over query heads, at the keys ``at``
    ========== ============ ================== ==================================================

    Packed calls have ``cu_seqlens_q`` and ``cu_seqlens_k``. Their columns count inside the row's own
    sequence. T is ``max_seqlen_k``, or the length of the longest sequence, which is then read from the
    device. Columns after the end of a sequence are 0.

    The result is fp32, or fp64 for fp64 inputs. It has no gradient, even if q or k require one.

    Args:
        q: queries ``[b, s, h, d]``, or packed ``[s, h, d]``.
        k: keys ``[b, t, g, d]``, or packed ``[t, g, d]``; or the view of a cache, over grouped or latent
            storage of any dtype. Its keys are gathered, which takes the memory of all keys, and their number
            is read from the device. Over a cache, columns and ``at`` are storage indices, the mass is
            ``[b, h, T]``, and T is the largest length.
        lse: ``[b, h, s]``, or packed ``[h, s]``, in fp32 or fp64.
        mask: the mask of the call.
        scale, softcap, alibi_slopes, score: the options of the call, as in :func:`attention`.
        key_starts, key_ends: the key bounds of a dense call, as in :func:`attention`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in :func:`varlen_attention`.
        over: ``"none"``, ``"queries"`` or ``"heads"``.
        rows: int32 or int64 ``[r]`` or ``[b, r]``, numbers of queries of the call; packed ``[r]``, numbers of
            packed rows. -1 stands for no query. A number that occurs twice counts twice. ``over="none"``
            needs it.
        at: int32 or int64 ``[b, s, n]``, or packed ``[s, n]``, the keys of each query for ``over="heads"``,
            counted inside the sequence. -1 stands for no key, and gives 0.
        backend: as in :func:`attention`.

    Raises:
        ValueError: a shape or value does not fit; the message names the argument. With ``ATTNLIB_CHECK=1``,
            also if ``rows`` or ``at`` are out of range.
        TypeError: a dtype or type does not fit.
        NotImplementedError: the named backend cannot run this call, or ranks share the cache.

    >>> q, k = torch.randn(2, 9, 8, 64), torch.randn(2, 9, 2, 64)
    >>> out, lse = attention_with_lse(q, k, k, mask=CAUSAL)
    >>> attention_weights(q, k, lse, mask=CAUSAL, over="queries").shape
    torch.Size([2, 8, 9])
    """
    statistic = statistic_of(over, rows, at)._replace(lse=lse)
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = _call(
        q, k, mask, Score(scale, softcap, alibi_slopes, None, score), (key_starts, key_ends), packing
    )
    return compute(call, statistic, backend)


@kind
def attention_maxima(
    q: Tensor,
    k: Tensor | KVView,
    *,
    mask: AnyMask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    score: ScoreFunction | None = None,
    key_starts: Tensor | None = None,
    key_ends: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    of: str = "scores",
    backend: str | None = None,
) -> Tensor:
    """Return the largest score of each query, ``[b, h, s]``, or packed ``[h, s]``, over the keys it sees.

    A query that sees no key gets -inf. Sinks do not count. The arguments are those of
    :func:`attention_weights`, and the result has the same dtype and no gradient either.

    Args:
        of: ``"scores"``: scores after scale, softcap, ALiBi and ``score``, which the softmax gets.
            ``"products"``: ``scale * q·k`` alone, as QK-clip needs them.

    >>> q, k = torch.randn(2, 9, 8, 64), torch.randn(2, 9, 2, 64)
    >>> attention_maxima(q, k, mask=CAUSAL).shape
    torch.Size([2, 8, 9])
    """
    statistic = maxima_of(of)
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = Score(scale, softcap, alibi_slopes, None, score)
    call = _call(q, k, mask, options, (key_starts, key_ends), packing)
    return compute(call, statistic, backend)


def statistic_of(over: str, rows: Tensor | None, at: Tensor | None) -> Statistic:
    """Return the statistic that ``over`` names, without an LSE; see :func:`attention_weights`.

    Raises:
        ValueError: ``over`` is unknown, or ``rows`` or ``at`` do not belong to it.
    """
    if not isinstance(over, str) or over not in KINDS:
        raise ValueError(f"over: expected {', '.join(map(repr, KINDS))}, got {over!r}")
    if over == "none" and rows is None:
        raise ValueError(
            "rows: expected the numbers of queries for over='none', got None; torch.arange(s) gives all"
        )
    if over == "heads" and rows is not None:
        raise ValueError("rows: expected None for over='heads'; at= selects keys, with -1 for none")
    if (over == "heads") != (at is not None):
        expected = "the numbers of keys [b, s, n]" if over == "heads" else "None"
        got = "None" if at is None else "some"
        raise ValueError(f"at: expected {expected} for over={over!r}, got {got}")
    return Statistic(KINDS[over], None, rows, at)


def maxima_of(of: str) -> Statistic:
    """Return the statistic that ``of`` names; see :func:`attention_maxima`.

    Raises:
        ValueError: ``of`` is unknown.
    """
    if not isinstance(of, str) or of not in ("scores", "products"):
        raise ValueError(f"of: expected 'scores' or 'products', got {of!r}")
    return Statistic("maxima" if of == "scores" else "products")


def _packing(*given: Tensor | int | None) -> Packing | None:
    """Return the packing of a call, or None if no argument of packed calls is given."""
    return None if all(x is None for x in given) else Packing(*given)


def _call(
    q: Tensor,
    k: Tensor | KVView,
    mask: AnyMask,
    score: Score,
    bounds: tuple[Tensor | None, Tensor | None],
    packing: Packing | None,
) -> Call:
    """Return the call; one column of the keys stands for its values, which nothing reads."""
    if packing is not None and bounds != (None, None):
        name = "key_starts" if bounds[0] is not None else "key_ends"
        raise ValueError(
            f"{name}: expected None with cu_seqlens_q, which bounds the keys of packed sequences"
        )
    if not isinstance(k, KVView):
        if not is_strided(k):
            refuse_tensor("k", k)
        return Call(q, mask, score, k, first_column(k), None, *bounds, packing)
    for name, x in (("key_starts", bounds[0]), ("key_ends", bounds[1]), ("cu_seqlens_q", packing)):
        if x is not None:
            raise ValueError(f"{name}: expected None over a cache, whose view has its own bounds and offsets")
    return Call(q, mask, score, kv=k)
