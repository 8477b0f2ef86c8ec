"""What people type; each ends in an error that names the argument, what was expected, what came, and a
remedy.
"""

import io
import re
import subprocess
import sys

import pytest
import torch

from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    LayoutWarning,
    Mask,
    MultiHeadLatentAttention,
    Rope,
    TraceError,
    attention,
    attention_with_lse,
    cached_attention,
    explain,
    mask_mod,
    masks,
    packing,
    scores,
    sliding,
    varlen_attention,
)
from attnlib.cache.pages import CacheFullError

Q, K = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8)
X = torch.randn(2, 3, 32)
OFFSETS = torch.tensor([0, 6, 12], dtype=torch.int32)


def call(**options):
    q, k, v = (options.pop(name, x) for name, x in (("q", Q), ("k", K), ("v", K)))
    return attention(q, k, v, **{"mask": CAUSAL, **options})


def packed(**options):
    rows = (x.flatten(0, 1) for x in (Q, K, K))
    return varlen_attention(
        *rows, **{"mask": CAUSAL, "cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, **options}
    )


def layer(**options):
    given = {"num_heads": 4, "num_kv_heads": 2, "mask": CAUSAL, "rope": Rope(8), **options}
    return GroupedQueryAttention(32, **given).requires_grad_(False)


def cache(*layouts, **options):
    given = {"pages": 16, "page_size": 4, "max_sequences": 4, **options}
    return KVCache.paged(layouts or [layer().kv_layout], **given)


def step(tokens, x=X, of=None, using=None, given=lambda layers: layers[0], **options):
    """A layer called in a step of a cache with two sequences."""
    of = cache() if of is None else of
    first, second = of.admit(2)
    count = tokens if isinstance(tokens, int) else dict(zip((first, second), tokens, strict=True))
    with of.step(count) as layers:
        return (using or layer())(x, kv=given(layers), **options)


def ended():
    of = cache()
    of.admit(2)
    with of.step(3) as (kv,):
        layer()(X, kv=kv)
    layer()(X, kv=kv)


def unadmitted():
    with cache().step(3) as (kv,):
        layer()(X, kv=kv)


def nested():
    of = cache()
    of.admit()
    with of.step(3), of.step(3):
        pass


def forgotten():
    step(3, of=cache(*[layer().kv_layout] * 2))


def released():
    of = cache()
    (handle,) = of.admit()
    of.release(handle)
    return of.length(handle)


def of_another():
    (handle,) = cache().admit()
    with cache().step({handle: 3}):
        pass


def sent(*arguments):
    """The error of the command line."""
    command = [sys.executable, "-m", "attnlib", *arguments]
    told = subprocess.run(command, capture_output=True, text=True)
    raise SystemExit(told.stderr if told.returncode == 2 else f"status {told.returncode}: {told.stderr}")


DOCUMENTS = torch.zeros(2, 6, dtype=torch.int32)
# What is typed, the error, and what it says in this order.
MISTAKES = {
    # names of other libraries
    "no mask": (lambda: attention(Q, K, K), TypeError, "attention: mask: expected a Mask.*sliding.*got none"),
    "is_causal": (lambda: call(is_causal=True), TypeError, "is_causal: no such argument; use mask=CAUSAL"),
    "causal": (lambda: call(causal=True), TypeError, "causal: no such argument; use mask=CAUSAL"),
    "attn_mask": (lambda: call(attn_mask=None), TypeError, "attn_mask: .*mask_tensor.*bias_tensor"),
    "window_size": (lambda: call(window_size=(3, 0)), TypeError, r"window_size: .*mask=sliding\(n\)"),
    "softmax_scale": (lambda: call(softmax_scale=1.0), TypeError, "softmax_scale: .*use scale="),
    "dropout": (lambda: call(dropout=0.1), TypeError, "dropout: .*use dropout_p="),
    "enable_gqa": (lambda: call(enable_gqa=True), TypeError, "enable_gqa: .*leave it out"),
    "key_padding_mask": (
        lambda: call(key_padding_mask=None),
        TypeError,
        "key_padding_mask: .*key_starts=.*bounds_of",
    ),
    "score_mod=": (lambda: call(score_mod=None), TypeError, "score_mod: .*use score="),
    "return_lse": (lambda: call(return_lse=True), TypeError, "return_lse: .*_with_lse"),
    "need_weights": (lambda: call(need_weights=True), TypeError, "need_weights: .*there are none"),
    "cu_seqlens": (
        lambda: packed(cu_seqlens=OFFSETS),
        TypeError,
        "cu_seqlens: .*cu_seqlens_q= and cu_seqlens_k=",
    ),
    "a slip": (lambda: call(softcp=3.0), TypeError, "softcp: .*did you mean softcap="),
    "nothing like it": (
        lambda: attention_with_lse(Q, K, K, mask=FULL, zz=1),
        TypeError,
        "zz: .*it takes q, k, v, mask",
    ),
    "mask by place": (
        lambda: attention(Q, K, K, CAUSAL),
        TypeError,
        "expected q, k, v by position.*mask=CAUSAL.*4 were",
    ),
    "a layer's n_heads": (
        lambda: layer(n_heads=4),
        TypeError,
        "GroupedQueryAttention: n_heads: .*use num_heads=",
    ),
    "a layer's causal": (
        lambda: layer(is_causal=True),
        TypeError,
        "is_causal: no such argument; use mask=CAUSAL",
    ),
    "a layer's mask": (lambda: GroupedQueryAttention(32, 4), TypeError, "mask: expected a Mask.*got none"),
    "MLA without sizes": (
        lambda: MultiHeadLatentAttention(32, num_heads=4, mask=CAUSAL),
        TypeError,
        "MultiHeadLatentAttention: missing.*kv_lora_rank",
    ),
    # masks and scores
    "a tensor for a mask": (
        lambda: call(mask=torch.ones(6, 6) > 0),
        TypeError,
        r"mask: expected a Mask.*got Tensor; wrap a bool tensor .* in attnlib\.masks\.mask_tensor",
    ),
    "None for a mask": (lambda: call(mask=None), TypeError, "mask: expected a Mask.*got NoneType; mask=FULL"),
    "a word for a mask": (lambda: call(mask="causal"), TypeError, "mask: expected a Mask.*got str"),
    "a function for a mask": (
        lambda: call(mask=lambda b, h, i, j: i >= j),
        TypeError,
        r"mask: .*got function; .* in attnlib\.mask_mod\(function",
    ),
    "a tensor for a layer's mask": (
        lambda: layer(mask=torch.ones(6, 6) > 0),
        TypeError,
        r"mask: .*got Tensor; .*mask_tensor",
    ),
    "a function for the mask of a layer's call": (
        lambda: layer()(torch.randn(2, 6, 32), mask=lambda b, h, i, j: i >= j),
        TypeError,
        r"mask: .*got function; .*mask_mod",
    ),
    "a function for scores": (
        lambda: call(score=lambda s, b, h, i, j: s),
        TypeError,
        "score: .*score_mod.*got function",
    ),
    "a closure over a tensor": (
        lambda: mask_mod(lambda b, h, i, j: DOCUMENTS[b, i] == DOCUMENTS[b, j]),
        TraceError,
        "DOCUMENTS is a tensor.*pass it as an argument",
    ),
    "if in a mask": (
        lambda: mask_mod(lambda b, h, i, j: (i if i > j else j) == 0),
        TraceError,
        "if.*use torch.where",
    ),
    "and in a mask": (lambda: mask_mod(lambda b, h, i, j: i > j and j > 2), TraceError, "and.*use.*&"),
    "float documents": (lambda: masks.documents(DOCUMENTS.float()), TypeError, "numbers: expected .*float32"),
    "an int mask tensor": (
        lambda: masks.mask_tensor(torch.ones(1, 1, 6, 6)),
        TypeError,
        "shown: expected .*bool.*float",
    ),
    "a bool bias": (
        lambda: scores.bias_tensor(torch.ones(1, 1, 6, 6) > 0),
        TypeError,
        "bias: expected .*float.*bool",
    ),
    "blocks of another size": (
        lambda: call(mask=masks.documents(DOCUMENTS).block_mask(2, 4, 5, 5)),
        ValueError,
        "mask: expected a mask for b=2, h=4, s=6, t=6, got tiles .*see block_mask",
    ),
    "a window of none": (
        lambda: sliding(0),
        ValueError,
        "window: expected at least 1 key.*own counts.*got 0",
    ),
    "half a key": (lambda: sliding(4.5), TypeError, "window: expected an int, got 4.5"),
    "a negative reach": (lambda: Mask(left=2.5), TypeError, "mask: expected an int for left, got 2.5"),
    # tensors
    "SDPA's layout": (
        lambda: call(
            q=torch.randn(1, 8, 512, 64), k=torch.randn(1, 2, 512, 64), v=torch.randn(1, 2, 512, 64)
        ),
        LayoutWarning,
        r"q: expected \[b, s, h, d\].*512 heads.*transpose\(1, 2\)",
    ),
    "three dimensions": (lambda: call(q=Q[0]), ValueError, r"q: expected \[b, s, h, d\], got \(6, 4, 8\)"),
    "heads that do not divide": (
        lambda: call(q=Q[:, :, :3]),
        ValueError,
        "k: expected .*divides h=3.*got g=2",
    ),
    "another width": (
        lambda: call(k=torch.randn(2, 6, 2, 16)),
        ValueError,
        r"k: expected \[b=2.*d=8\].*q has d=8",
    ),
    "other values": (lambda: call(v=K[:, :5]), ValueError, r"v: expected \[b=2, t=6.*k has t=6"),
    "mixed dtypes": (lambda: call(k=K.half()), TypeError, "k: expected torch.float32 like q.*cast it"),
    "integers": (
        lambda: call(q=Q.long(), k=K.long(), v=K.long()),
        TypeError,
        "q: expected fp16.*got torch.int64",
    ),
    "numpy": (lambda: call(q=Q.numpy()), TypeError, "q: expected a tensor, got ndarray"),
    "a tensor for a scale": (
        lambda: call(scale=torch.tensor(0.5)),
        TypeError,
        "scale: expected a Python number.*wait",
    ),
    "all dropped": (
        lambda: call(dropout_p=1.5),
        ValueError,
        r"dropout_p: expected a probability in \[0, 1\), got 1.5",
    ),
    "an unknown backend": (
        lambda: call(backend="flash"),
        ValueError,
        "backend: expected None.*'triton'.*got 'flash'",
    ),
    "kernels without a GPU": (
        lambda: call(backend="triton:generic"),
        NotImplementedError,
        "needs a CUDA device, got cpu",
    ),
    "int64 offsets": (
        lambda: packed(cu_seqlens_q=OFFSETS.long()),
        TypeError,
        r"cu_seqlens_q: .*int32.*\.int\(\)",
    ),
    "a list of offsets": (
        lambda: packed(cu_seqlens_k=[0, 6, 12]),
        TypeError,
        "cu_seqlens_k: .*int32 tensor, got list",
    ),
    "offsets beyond": (
        lambda: packed(cu_seqlens_k=OFFSETS + 1),
        ValueError,
        "cu_seqlens_k: expected offsets",
    ),
    "int64 bounds": (lambda: call(key_ends=torch.tensor([6, 6])), TypeError, r"key_ends: .*int32.*\.int\(\)"),
    "bounds of three": (lambda: packing.bounds_of(Q), ValueError, r"attention_mask: expected \[b, t\]"),
    # layers
    "no heads": (lambda: layer(num_heads=0), ValueError, "num_heads: expected at least 1, got 0"),
    "heads to share": (
        lambda: layer(num_kv_heads=3),
        ValueError,
        "num_kv_heads: expected a divisor of num_heads=4.*3",
    ),
    "a number for a rope": (
        lambda: layer(rope=10000.0),
        TypeError,
        r"rope: expected a Rope such as Rope\(64.*float",
    ),
    "a wide rope": (
        lambda: layer(rope=Rope(16)),
        ValueError,
        "rope: expected dim at most head_dim=8, got 16",
    ),
    "x of another width": (
        lambda: layer()(X[..., :30]),
        ValueError,
        r"x: expected \[b, s, m=32\].*got \(2, 3, 30\)",
    ),
    "packed x alone": (lambda: layer()(X[0]), ValueError, r"x: packed \[t, m\] needs cu_seqlens="),
    "positions that begin again": (
        lambda: layer()(X, positions=torch.tensor([[0, 1, 0]])),
        ValueError,
        "positions: they begin again.*from_position_ids.*documents",
    ),
    "positions of floats": (
        lambda: layer()(X, positions=torch.arange(3.0)),
        TypeError,
        r"positions: .*\.long\(\)",
    ),
    # caches
    "KVCache itself": (
        lambda: KVCache([layer().kv_layout], pages=4),
        TypeError,
        r"KVCache\.paged.*contiguous",
    ),
    "a layer for a layout": (
        lambda: cache(layer()),
        TypeError,
        "layouts: expected one KVLayout.*GroupedQuery",
    ),
    "one layout": (
        lambda: KVCache.paged(layer().kv_layout, pages=4, max_sequences=1),
        TypeError,
        "layouts: expected a sequence of KVLayouts",
    ),
    "an int16 store": (
        lambda: KVLayout.grouped(2, 8, storage_dtype=torch.int16),
        TypeError,
        "storage_dtype: .*int8 or.*got torch.int16",
    ),
    "nobody admitted": (unadmitted, ValueError, r"x: expected \[b=0.*no sequence is live: call cache\.admit"),
    "too few tokens": (
        lambda: step(2),
        ValueError,
        r"x: expected \[b=2, s=2, m=32\].*got \(2, 3, 32\); step\(2\)",
    ),
    "dense x, packed step": (
        lambda: step((2, 4)),
        ValueError,
        r"x: expected \[t=6, m=32\].*got \(2, 3, 32\)",
    ),
    "packed x, dense step": (
        lambda: step(3, X.flatten(0, 1)),
        ValueError,
        r"x: expected \[b=2, s=3.*got \(6, 32\)",
    ),
    "too many rows": (
        lambda: step(3, torch.randn(3, 3, 32)),
        ValueError,
        r"x: expected \[b=2, s=3.*got \(3, 3, 32\)",
    ),
    "the cache for a layer of it": (
        lambda: step(3, given=lambda layers: cache()),
        TypeError,
        "kv: .*step.*got KVCache",
    ),
    "all layers of it": (
        lambda: step(3, given=lambda layers: layers),
        TypeError,
        "kv: expected a layer of.*got tuple",
    ),
    "after the step": (ended, RuntimeError, r"kv: takes tokens only within.*kv=layers\[i\] there"),
    "a step in a step": (nested, RuntimeError, r"step: not inside a step; leave the `with cache\.step"),
    "a layer left out": (forgotten, RuntimeError, r"layers \[1\] of 2 did not append.*call every layer"),
    "a released handle": (released, ValueError, "handle: not a live sequence of this cache; it was released"),
    "another cache's handle": (of_another, ValueError, "handle: .*belongs to another cache"),
    "tokens by a list": (lambda: cache().step([3]).__enter__(), TypeError, "tokens: .*got list"),
    "too many sequences": (
        lambda: cache().admit(9),
        CacheFullError,
        "9 new sequences.*4 of max_sequences=4.*release",
    ),
    "no page left": (
        lambda: step(30, torch.randn(2, 30, 32), cache(pages=8)),
        CacheFullError,
        "pages.*release|larger",
    ),
    "gradients through a cache": (
        lambda: step(3, using=GroupedQueryAttention(32, 4, num_kv_heads=2, mask=CAUSAL, rope=Rope(8))),
        NotImplementedError,
        "a cache has no backward; .*no_grad",
    ),
    "half precision": (
        lambda: step(3, X.half(), using=layer().half()),
        TypeError,
        "k: expected torch.float32 like.*cast",
    ),
    "a window's cache": (
        lambda: step(3, of=cache(layer(mask=sliding(4)).kv_layout)),
        ValueError,
        "mask: it reaches back.*window of 4",
    ),
    "torch.save": (
        lambda: torch.save(cache(), io.BytesIO()),
        TypeError,
        r"KVCache cannot be copied or pickled.*save\(\)",
    ),
    "a tensor for a view": (
        lambda: cached_attention(Q, K, mask=CAUSAL),
        TypeError,
        "kv: expected the KVView.*got Tensor",
    ),
    "explain a number": (lambda: explain(3), ValueError, "call: expected a layer or one of attention"),
    # the command line
    "no source": (
        lambda: sent("convert", "nowhere/at/all", "out", "--to", "gqa", "--kv-heads", "2"),
        SystemExit,
        "nowhere/at/all",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("error:q. expected .b, s, h, d.*which says")
def test_a_mistake_is_told(name):
    typed, error, said = MISTAKES[name]
    with pytest.raises(error) as raised:
        typed()
    assert type(raised.value) is error
    assert re.search(said, str(raised.value), re.DOTALL), str(raised.value)


def test_there_are_many():
    assert len(MISTAKES) >= 64


def test_what_is_printed_says_what_it_is():
    of = cache()
    (handle,) = of.admit()
    assert repr(of) == "KVCache(1 layers, pages of 4 tokens; 1 of 4 sequences, 16 of 16 pages free)"
    assert "a sequence of a KVCache" in repr(handle)
    assert (
        layer().extra_repr()
        == "num_heads=4, num_kv_heads=2, head_dim=8, mask=CAUSAL, rope=Rope(8, theta=10,000.0)"
    )
    capped = layer(mask=sliding(4), rope=None, softcap=30.0, dropout_p=0.1).extra_repr()
    assert capped.endswith("mask=sliding(4), softcap=30.0, dropout_p=0.1")
    assert "mask=FULL & a function" in layer(mask=masks.mask_tensor(torch.ones(1, 1, 6, 6) > 0)).extra_repr()
    assert "mask=Mask(left=None, right=0, prefix=3)" in repr(layer(mask=Mask(None, 0, 3)))
