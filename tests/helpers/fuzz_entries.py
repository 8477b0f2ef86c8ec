"""Every public function, constructor and method: a legal call, its contract restated, and what a right answer
is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from fuzz_values import DTYPES, finite, is_int, is_mask, is_number, is_tensor
from torch import Tensor

import attnlib
from attnlib import CAUSAL, KVCache, KVLayout, ScoreFunction, score_mod

H, G, D, E = 4, 2, 8, 5


class Entry(NamedTuple):
    """One public callable.

    ``target`` makes what a method is called on (None for functions), ``arguments`` a legal call's arguments
    on it, ``legal`` says of any arguments whether they are allowed, and ``right`` asserts what an allowed
    call gives. A target with ``state()`` and ``assert_unchanged(state)`` is asked whether a refusal left it
    alone. An error starts with the name of an argument, or with one of ``words``.
    """

    call: Callable[..., Any]
    arguments: Callable[..., dict[str, Any]]
    legal: Callable[..., bool]
    right: Callable[..., None]
    target: Callable[[], Any] = lambda: None
    words: tuple[str, ...] = ()


def exists(target, args, result):
    """A constructor's right answer is an object; what it then does is for other tests."""
    assert result is not None


def a_call(call, legal_call: dict[str, Any], legal, right=exists, **more) -> Entry:
    """An entry of its own, without a target."""
    return Entry(lambda _, **a: call(**a), lambda _: dict(legal_call), lambda _, a: legal(a), right, **more)


# Attention over tensors


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def numbers(*shape):
    """The same random numbers at every call (torch.manual_seed would write down the whole stack, for
    CUDA).
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def halved(score, b, h, i, j, bias):
    return score / 2 + bias[h]


def dense(target):
    return {
        "q": numbers(2, 3, H, D), "k": numbers(2, 5, G, D), "v": numbers(2, 5, G, E), "mask": CAUSAL,
        "scale": 0.3, "softcap": 3.0, "alibi_slopes": numbers(H).abs(), "sinks": numbers(H),
        "score": score_mod(halved, numbers(H)),
        "key_starts": ints(0, 1), "key_ends": ints(5, 4), "dropout_p": 0.3, "dropout_seed": torch.tensor([5]),
        "backend": None,
    }  # fmt: skip


def dense_plain(target):
    names = ("q", "k", "v", "mask", "scale", "backend")
    return {name: x for name, x in dense(None).items() if name in names}


def varlen(target):
    full = dense(None)
    packed = {name: full[name][0] for name in "qkv"} | {
        "cu_seqlens_q": ints(0, 2, 3),
        "cu_seqlens_k": ints(0, 3, 5),
    }
    rest = {name: x for name, x in full.items() if name not in (*"qkv", "key_starts", "key_ends")}
    return packed | {"max_seqlen_q": 2, "max_seqlen_k": 3} | rest


def shapes_agree(q, k, v, rank):
    if not all(is_tensor(x) and x.dim() == rank for x in (q, k, v)) or not q.dtype == k.dtype == v.dtype:
        return False
    (*b, _, h, d), (*bk, t, g, dk), (*bv, tv, gv, _) = q.shape, k.shape, v.shape
    return b == bk == bv and t == tv and g == gv > 0 and d == dk and h > 0 and h % g == 0


def terms_agree(a, b, h):
    """The options that every attention function shares, for ``b`` sequences and ``h`` heads."""

    def absent_or(name, test):
        return a.get(name) is None or test(a[name])

    seed, p = a.get("dropout_seed"), a.get("dropout_p", 0.0)
    return (
        is_mask(a["mask"])
        and all(absent_or(name, is_number) for name in ("scale", "softcap"))
        and absent_or("alibi_slopes", lambda x: is_floats(x) and tuple(x.shape) in ((h,), (b, h)))
        and absent_or("sinks", lambda x: is_floats(x) and tuple(x.shape) == (h,))
        and absent_or("score", lambda x: isinstance(x, ScoreFunction))
        and isinstance(p, int | float) and not isinstance(p, bool) and 0 <= p < 1
        and (seed is None or (is_tensor(seed, torch.int64) and tuple(seed.shape) == (1,)))
        and a["backend"] is None
    )  # fmt: skip


def is_floats(x):
    return is_tensor(x, *DTYPES, torch.float8_e4m3fn)


def dense_is_legal(a):
    if not shapes_agree(a["q"], a["k"], a["v"], 4):
        return False
    b, _, h, _ = a["q"].shape
    bounds = [a[name] for name in ("key_starts", "key_ends") if a.get(name) is not None]
    bounds = all(is_tensor(x, torch.int32) and tuple(x.shape) == (b,) for x in bounds)
    return bounds and terms_agree(a, b, h)


def varlen_is_legal(a):
    if not shapes_agree(a["q"], a["k"], a["v"], 3):
        return False
    offsets = [a["cu_seqlens_q"], a["cu_seqlens_k"]]
    if not all(is_tensor(x, torch.int32) and x.dim() == 1 and len(x) for x in offsets):
        return False
    if len(offsets[0]) != len(offsets[1]) or not terms_agree(a, len(offsets[0]) - 1, a["q"].shape[1]):
        return False
    for cu, tokens, limit in zip(
        offsets, (len(a["q"]), len(a["k"])), (a["max_seqlen_q"], a["max_seqlen_k"]), strict=True
    ):
        lengths = cu.long().diff()
        if cu[0] != 0 or (lengths < 0).any() or cu[-1] > tokens:
            return False
        if not (limit is None or (is_int(limit, 0) and limit >= max([0, *lengths.tolist()]))):
            return False
    return True


def attention_is_right(call):
    """The result is that of the definition in fp64 on the same numbers."""

    def right(target, args, result):
        wide = {name: widened(x) for name, x in args.items()} | {"backend": "reference"}
        if args.get("dropout_p") and args["dropout_seed"] is None:
            wide |= {"dropout_p": 0.0}  # drawn: only the shape is known
        wanted = call(**wide)
        for ours, theirs in zip(
            *((x if isinstance(x, tuple) else (x,)) for x in (result, wanted)), strict=True
        ):
            assert ours.shape == theirs.shape
            if finite(args) and not (args.get("dropout_p") and args["dropout_seed"] is None):
                error = 0.03 if args["q"].dtype.itemsize == 2 else 1e-4
                torch.testing.assert_close(ours.detach().double(), theirs, rtol=error, atol=error)

    return right


def widened(x):
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().as_subclass(Tensor).double()


def function(name, arguments, legal, **more):
    call = getattr(attnlib, name)
    words = ("q_descale",)  # which e4m3 alone needs, and which is not among the arguments
    return Entry(
        lambda target, **a: call(**a),
        arguments,
        lambda _, a: legal(a),
        attention_is_right(call),
        words=words,
        **more,
    )


# Attention over a cache


def a_view():
    cache = KVCache.paged([KVLayout.grouped(G, D, E)], pages=4, page_size=4, max_sequences=2)
    cache.admit(2)
    with cache.step(5) as (kv,):
        return kv.append(numbers(2, 5, G, D), numbers(2, 5, G, E))


def cached(target):
    names = ("q", "mask", "scale", "softcap", "alibi_slopes", "sinks", "backend")
    return {"kv": target} | {name: dense(None)[name] for name in names}


def cached_is_legal(a):
    q = a["q"]
    if not isinstance(a["kv"], attnlib.KVView) or not is_tensor(q, torch.float32) or q.requires_grad:
        return False
    fits = q.dim() == 4 and q.shape[0] == 2 and q.shape[2] > 0 and q.shape[2] % G == 0 and q.shape[3] == D
    if not fits or not terms_agree(a, 2, q.shape[2]):
        return False
    return not any(x.requires_grad for x in a.values() if isinstance(x, Tensor))


def cached_is_right(call):
    def right(target, args, result):
        wanted = call(**(args | {"backend": "reference"}))
        for ours, theirs in zip(
            *((x if isinstance(x, tuple) else (x,)) for x in (result, wanted)), strict=True
        ):
            assert ours.shape == theirs.shape
            if finite(args):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    return right


def over_cache(name):
    call = getattr(attnlib, name)
    words = ("no backend can run this call", "q_descale")  # a gradient is asked for
    return Entry(
        lambda target, **a: call(**a),
        cached,
        lambda _, a: cached_is_legal(a),
        cached_is_right(call),
        a_view,
        words,
    )


# Recomputed probabilities and largest scores


def recomputed(target):
    taken = (
        "q",
        "k",
        "mask",
        "scale",
        "softcap",
        "alibi_slopes",
        "score",
        "key_starts",
        "key_ends",
        "backend",
    )
    rows = {"over": "none", "rows": torch.tensor([2, 0, -1])}
    return {name: dense(None)[name] for name in taken} | {"lse": numbers(2, H, 3)} | rows


def recomputed_heads(target):
    given = {name: x for name, x in recomputed(None).items() if name != "rows"}
    return given | {"over": "heads", "at": torch.tensor([0, -1, 4]).expand(2, 3, 3)}


def recomputed_packed(target):
    taken = (*"qk", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    given = {
        name: x for name, x in recomputed(None).items() if name not in ("key_starts", "key_ends", "rows")
    }
    return given | {name: varlen(None)[name] for name in taken} | {"lse": numbers(H, 3), "over": "queries"}


def largest(target):
    return {name: x for name, x in recomputed(None).items() if name not in ("lse", "over", "rows")} | {
        "of": "products"
    }


def recomputed_is_legal(a):
    packed = "cu_seqlens_q" in a
    if not is_tensor(a["k"]) or (packed and not varlen_is_legal(a | {"v": a["k"]})):
        return False
    if not packed and not dense_is_legal(a | {"v": a["k"]}):
        return False
    *b, s, h, _ = a["q"].shape
    if "of" in a:
        return a["of"] in ("scores", "products") if isinstance(a["of"], str) else False
    ints, lse, over = (torch.int32, torch.int64), a["lse"], a["over"]
    if not is_tensor(lse, torch.float32, torch.float64) or list(lse.shape) != [*b, h, s]:
        return False
    rows, at = a.get("rows"), a.get("at")
    rows_fit = rows is None or (is_tensor(rows, *ints) and (rows.dim() == 1 or [*rows.shape[:-1]] == b))
    at_fits = at is None or (is_tensor(at, *ints) and at.dim() == len(b) + 2 and [*at.shape[:-1]] == [*b, s])
    if not isinstance(over, str) or not (rows_fit and at_fits):
        return False
    needs = {"none": rows is not None and at is None, "queries": at is None}
    return (needs | {"heads": rows is None and at is not None}).get(over, False)


def recomputed_over_view(target):
    taken = ("q", "mask", "scale", "softcap", "alibi_slopes", "backend")
    given = {name: dense(None)[name] for name in taken}
    return given | {
        "k": target,
        "lse": numbers(2, H, 3),
        "over": "queries",
        "rows": torch.tensor([[2], [-1]]),
    }


def recomputed_over_view_is_legal(a):
    if not isinstance(a["k"], attnlib.KVView):
        return recomputed_is_legal(a)
    if isinstance(a["q"], Tensor) and a["q"].requires_grad:  # there is no gradient, so none is refused
        a = a | {"q": a["q"].detach()}
    given = {name: x.detach() if isinstance(x, Tensor) else x for name, x in a.items()}
    if not cached_is_legal(given | {"kv": a["k"], "sinks": None}):
        return False
    return recomputed_is_legal(given | {"k": numbers(2, 5, G, D)})


# fp8 inputs


def attention_of_bytes(**given):
    """Attention over the same bytes at every call."""
    x = attnlib.quantize_fp8(*(dense(None)[name] for name in "qkv"))
    return attnlib.attention(x.q, x.k, x.v, **given)


def descales_are_legal(a):
    shapes = {"q_descale": (2, H), "k_descale": (2, G), "v_descale": (2, G)}
    fit = all(is_tensor(a[name], torch.float32) and tuple(a[name].shape) == x for name, x in shapes.items())
    return fit and is_mask(a["mask"]) and not any(a[name].requires_grad for name in shapes)


def quantize_is_legal(a):
    q, k, v, cu = a["q"], a["k"], a["v"], [a.get("cu_seqlens_q"), a.get("cu_seqlens_k")]
    packed = not cu[0] is cu[1] is None
    rank = 3 if packed else 4
    if not all(is_tensor(x) and x.dim() == rank for x in (q, k, v)) or not isinstance(
        a.get("incoherent", False), bool
    ):
        return False
    if packed and not all(is_tensor(x, torch.int32) and x.dim() == 1 and len(x) for x in cu):
        return False
    (*b, _, _, d), (*bk, t, g, dk), (*bv, tv, gv, _) = q.shape, k.shape, v.shape
    return b == bk == bv and (t, g, d) == (tv, gv, dk) and (not packed or len(cu[0]) == len(cu[1]))


ATTENTION = {
    "attention_weights": function("attention_weights", recomputed, recomputed_is_legal),
    "attention_weights, heads": function("attention_weights", recomputed_heads, recomputed_is_legal),
    "attention_weights, packed": function("attention_weights", recomputed_packed, recomputed_is_legal),
    "attention_weights, cached": Entry(
        lambda target, **a: attnlib.attention_weights(**a),
        recomputed_over_view,
        lambda _, a: recomputed_over_view_is_legal(a),
        cached_is_right(attnlib.attention_weights),
        a_view,
        ("q_descale",),
    ),
    "attention_maxima": function("attention_maxima", largest, recomputed_is_legal),
    "attention": function("attention", dense, dense_is_legal),
    "attention, plain": function("attention", dense_plain, dense_is_legal),
    "attention_with_lse": function("attention_with_lse", dense, dense_is_legal),
    "varlen_attention": function("varlen_attention", varlen, varlen_is_legal),
    "varlen_attention_with_lse": function("varlen_attention_with_lse", varlen, varlen_is_legal),
    "cached_attention": over_cache("cached_attention"),
    "cached_attention_with_lse": over_cache("cached_attention_with_lse"),
    "explain": Entry(
        lambda _, call, **a: attnlib.explain(call, **a),
        lambda _: {"call": attnlib.attention} | dense(None),
        lambda _, a: a["call"] is attnlib.attention and dense_is_legal(a),
        lambda _, args, told: told.chosen == "torch" or pytest.fail(str(told)),
        words=("q_descale",),
    ),
    "attention, fp8": a_call(
        attention_of_bytes,
        {
            "q_descale": torch.ones(2, H),
            "k_descale": torch.ones(2, G),
            "v_descale": torch.ones(2, G),
            "mask": CAUSAL,
        },
        descales_are_legal,
        words=("no backend can run this call",),  # a gradient is asked for
    ),
    "quantize_fp8": a_call(
        attnlib.quantize_fp8,
        {name: dense(None)[name] for name in "qkv"} | {"incoherent": True},
        quantize_is_legal,
    ),
    "quantize_fp8, packed": a_call(
        attnlib.quantize_fp8,
        {name: varlen(None)[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")},
        quantize_is_legal,
    ),
}
