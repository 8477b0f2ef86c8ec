"""Attention as functions: bind the shapes, describe the problem, select a backend, run it."""

from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor

from . import repeats
from .cache.layout import KVView
from .dispatch import Backend, Explanation, explanation, select
from .host_checks import check_view, is_asked_for
from .mask import FULL, Mask
from .shapes import bind, is_strided, refuse_tensor
from .spec import DTYPES, AttentionSpec, describe
from .terms import Terms, check


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
    ``softcap * tanh(scale * q·k / softcap)`` (without softcap ``scale * q·k``) minus ``slope * |i - j|``. ``scale``
    defaults to ``d ** -0.5``. ``alibi_slopes`` are ``[h]`` or ``[b, h]``. ``sinks`` ``[h]`` are logits without a value,
    neither scaled nor capped. ``key_starts`` and ``key_ends`` int32 ``[b]`` hide keys outside ``[start, end)`` and move
    nothing else. A query that sees no key gives 0, with zero gradients. Dropout keeps what Philox bits of
    (``dropout_seed``, sequence, head, i, j) say; ``dropout_seed`` int64 ``[1]`` is drawn when None.

    Raises:
        ValueError: shapes or values that do not fit; the message names the argument and the remedy.
        TypeError: dtypes.
        NotImplementedError: a named backend cannot run this.

    >>> q, k = torch.randn(2, 9, 8, 64), torch.randn(2, 9, 2, 64)
    >>> attention(q, k, k, mask=CAUSAL).shape
    torch.Size([2, 9, 8, 64])
    """
    terms = Terms(scale, softcap, alibi_slopes, sinks, key_starts, key_ends, None, None, dropout_seed, dropout_p)
    return _attend("dense", q, k, v, mask, terms, backend, lse=False)[0]


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

    The LSE is fp32 (fp64 for fp64 inputs), includes the sink, and is -inf where there is neither key nor sink.
    """
    terms = Terms(scale, softcap, alibi_slopes, sinks, key_starts, key_ends, None, None, dropout_seed, dropout_p)
    return _attend("dense", q, k, v, mask, terms, backend, lse=True)


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
    """:func:`attention` within packed sequences: q ``[s, h, d]``, k ``[t, g, d]``, v ``[t, g, e]`` give ``[s, h, e]``.

    Sequence ``n`` owns rows ``cu_seqlens[n]:cu_seqlens[n + 1]`` (int32, ``[b + 1]``, from 0); rows after the last
    offset give 0. The longest lengths are hints and may be too large. See :func:`attention` for the rest.
    """
    packing = (cu_seqlens_q, cu_seqlens_k, dropout_seed, dropout_p, max_seqlen_q, max_seqlen_k)
    terms = Terms(scale, softcap, alibi_slopes, sinks, None, None, *packing)
    return _attend("varlen", q, k, v, mask, terms, backend, lse=False)[0]


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
    packing = (cu_seqlens_q, cu_seqlens_k, dropout_seed, dropout_p, max_seqlen_q, max_seqlen_k)
    terms = Terms(scale, softcap, alibi_slopes, sinks, None, None, *packing)
    return _attend("varlen", q, k, v, mask, terms, backend, lse=True)


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
        ValueError: the mask reaches further left than a windowed layout keeps, or shapes that do not fit; with
            ``ATTNLIB_CHECK=1`` also lengths, pages or offsets that kernels would clamp.
    """
    return _attend_cached(q, kv, mask, Terms(scale, softcap, alibi_slopes, sinks), backend, lse=False)[0]


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
    return _attend_cached(q, kv, mask, Terms(scale, softcap, alibi_slopes, sinks), backend, lse=True)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over two disjoint sets of keys from the attention over each.

    Outputs are ``[b, s, h, e]`` with LSE ``[b, h, s]``, or packed ``[t, h, e]`` with ``[h, t]``. Associative, with
    identity ``(0, -inf)``; differentiable; computes in fp32 (fp64 for fp64). An LSE of +inf gives NaN.

    Raises:
        ValueError: the shapes or devices do not fit.
        TypeError: the dtypes of the two outputs, or of the two LSEs, differ, or an LSE is not fp32 or fp64.
    """
    states = (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))
    for n, (name, x) in enumerate(states):
        if not is_strided(x):
            refuse_tensor(name, x)
        first, dtypes = states[n % 2], (torch.float32, torch.float64) if n % 2 else DTYPES
        if x.dtype not in dtypes or x.dtype != first[1].dtype:
            raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, alike in both states, got {x.dtype}")
        if x.device != out_a.device:
            raise ValueError(f"{name}: expected device {out_a.device} like out_a, got {x.device}")
    dims = ("bshe", "bhs") if out_a.dim() == 4 else ("she", "hs")
    bind(*((name, x, dims[n % 2]) for n, (name, x) in enumerate(states)))
    wide = torch.float64 if torch.float64 in (out_a.dtype, lse_a.dtype) else torch.float32
    lse_a, lse_b = lse_a.to(wide), lse_b.to(wide)
    top = torch.maximum(lse_a, lse_b).detach()
    top = top.masked_fill(top == -torch.inf, 0)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    nothing = total == 0
    safe_total = total.masked_fill(nothing, 1)
    lse = (top + safe_total.log()).masked_fill(nothing, -torch.inf)
    share_a, share_b = (_beside_output(weight / safe_total) for weight in (weight_a, weight_b))
    return (share_a * out_a.to(wide) + share_b * out_b.to(wide)).to(out_a.dtype), lse


def _beside_output(x: Tensor) -> Tensor:
    """LSE-shaped ``[..., h, s]`` -> ``[..., s, h, 1]``."""
    return x.transpose(-1, -2)[..., None]


def explain(call: Callable, *args, **kwargs) -> Explanation:
    """What ``call(*args, **kwargs)`` would run on and why, without running it; ``call`` is one of this module's six.

    >>> q = torch.randn(1, 9, 8, 64)
    >>> print(explain(attention, q, q, q, mask=CAUSAL))
    dense attention: ...
    runs on: torch
      not on triton: needs a CUDA device, got cpu
    """
    doors = {
        attention: "dense",
        attention_with_lse: "dense",
        varlen_attention: "varlen",
        varlen_attention_with_lse: "varlen",
        cached_attention: "cached",
        cached_attention_with_lse: "cached",
    }
    if not any(call is door for door in doors):  # not `in`: what is no door may have no hash
        raise ValueError(f"call: expected one of {', '.join(door.__name__ for door in doors)}, got {call!r}")
    bound = signature(call).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    terms = Terms(**{name: given[name] for name in Terms._fields if name in given})
    lse = call.__name__.endswith("_with_lse")
    if doors[call] == "cached":
        spec = _describe_cached(given["q"], given["kv"], given["mask"], terms, lse=lse)[1]
    else:
        spec = _describe(doors[call], given["q"], given["k"], given["v"], given["mask"], terms, lse=lse)[3]
    return explanation(spec, given["backend"])


def prepare(
    kind: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: Terms, name: str | None, *, lse: bool
) -> tuple[Tensor, Tensor, Tensor, AttentionSpec, Terms, Backend]:
    """The door of dense and packed calls: checks everything, casts and chooses, without computing."""
    q, k, v, spec, terms = _describe(kind, q, k, v, mask, terms, lse=lse)
    return q, k, v, spec, terms, select(spec, name)


def _attend(kind: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: Terms, name: str | None, *, lse: bool):
    key = repeats.key(kind, q, k, v, mask, terms, name)
    if (run := repeats.find(key)) is not None:
        return run(q, k, v)
    q, k, v, spec, terms, backend = prepare(kind, q, k, v, mask, terms, name, lse=lse)
    result = backend.attention(q, k, v, spec, terms)
    if key is not None:
        repeats.remember(key, backend.repeated(q, k, v, spec, terms))
    return result


def _attend_cached(q: Tensor, kv: KVView, mask: Mask, terms: Terms, name: str | None, *, lse: bool):
    if isinstance(kv, KVView) and kv.parts is not None and _sees_all_before(mask, terms):
        return _attend_parts(q, kv, mask, terms, name)
    key = repeats.cached_key(q, kv, mask, terms, name)
    if key is not None and (run := kv.repeats.get(key)) is not None:
        return run(q)
    q, spec, terms = _describe_cached(q, kv, mask, terms, lse=lse)
    backend = select(spec, name)
    checks = is_asked_for(kv.lengths)
    if checks:
        check_view(kv, q.shape[0])
    result = backend.cached_attention(q, kv, spec, terms)
    if key is not None and not checks and (run := backend.repeated_cached(q, kv, spec, terms)) is not None:
        kv.repeats[key] = run
    return result


def _sees_all_before(mask: Mask, terms: Terms) -> bool:
    """Whether every query sees all keys before its own, and how far off they are does not matter."""
    unbounded = isinstance(mask, Mask) and mask.left is None and (mask.right is None or mask.right >= 0)
    return unbounded and terms.alibi_slopes is None


def _attend_parts(q: Tensor, kv: KVView, mask: Mask, terms: Terms, name: str | None) -> tuple[Tensor, Tensor]:
    """What runs of sequences share, read once for all queries of a run, merged with the rest of each."""
    shared, rest = kv.parts
    state = _attend_cached(q, rest, mask, terms, name, lse=True)
    packed = q if kv.cu_seqlens_q is not None else q.flatten(0, 1)
    out, lse = _attend_cached(packed, shared, FULL, terms._replace(sinks=None), name, lse=True)
    if packed is not q:
        out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return merge_states(*state, out, lse)


def _describe(kind: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: Terms, *, lse: bool):
    """Bind, check and describe a call on tensors."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
            refuse_tensor(name, x)
    dims = ("bshd", "btgd", "btge")
    if kind == "varlen":
        dims = ("shd", "tgd", "tge")
        if terms.cu_seqlens_q is None:
            raise TypeError("cu_seqlens_q: expected an int32 tensor, got None")
    sizes = bind(("q", q, dims[0]), ("k", k, dims[1]), ("v", v, dims[2]))
    h, g = sizes["h"], sizes["g"]
    if g == 0 or h == 0 or h % g:
        raise ValueError(f"k: expected a number of KV heads g that divides h={h} query heads, got g={g}")
    q, k, v = _autocast(q, k, v)
    terms = check(terms, sizes, q.device)
    return q, k, v, describe(kind, (("q", q), ("k", k), ("v", v)), sizes, mask, terms, lse=lse), terms


def _describe_cached(q: Tensor, kv: KVView, mask: Mask, terms: Terms, *, lse: bool):
    """Bind, check and describe a call on a cache."""
    if not isinstance(q, Tensor) or q.is_nested or q.layout is not torch.strided:
        refuse_tensor("q", q)
    if not isinstance(kv, KVView):
        raise TypeError(f"kv: expected the KVView that append() or view() of a cache returned, got {type(kv).__name__}")
    layout, b, width = kv.layout, kv.lengths.shape[0], kv.layout.dim + kv.layout.tail
    sizes = bind(("q", q, "bshd" if kv.cu_seqlens_q is None else "shd"), known={"b": b, "d": width})
    if sizes["h"] == 0 or sizes["h"] % layout.heads:
        raise ValueError(f"q: expected a multiple of the cache's g={layout.heads} KV heads, got h={sizes['h']}")
    if layout.window is not None and isinstance(mask, Mask) and (mask.left is None or mask.left >= layout.window):
        reach = "without bound" if mask.left is None else f"{mask.left} keys"
        raise ValueError(
            f"mask: it reaches back {reach}, and the cache keeps a window of {layout.window}; use sliding()"
        )
    (q,) = _autocast(q)
    terms = check(terms, sizes, q.device)
    sizes.update(g=layout.heads, e=layout.value_dim)
    return q, describe("cached", (("q", q),), sizes, mask, terms, lse=lse, kv=kv), terms


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where autocast is on; fp64 and integers stay, as in torch."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
