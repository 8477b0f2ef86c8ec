"""Decoding in low precision, and from caches that store one byte a value."""

import copy

import pytest
import torch
from layer_helpers import (
    KINDS,
    Stack,
    assert_twice_as_good,
    cache_for,
    close,
    feed_dense,
    make,
    stack,
    tokens,
)

from attnlib import FULL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_as_exact_as_the_prompt_at_once(kind, dtype):
    model, x = stack(kind, dtype=dtype), tokens(2, 40, dtype=dtype)
    cache = cache_for(model)
    cache.admit(2)
    decoded = torch.cat([feed_dense(model, cache, chunk) for chunk in x.split((20, 1, 1, 18), 1)], 1)
    at_once = model(x).detach()
    truth = copy.deepcopy(model).double()(x.double()).detach()
    assert_twice_as_good({"out": decoded}, {"out": at_once}, {"out": truth})


@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("kind", ["mha", "gqa", "mla-expanded", "mla-absorbed"])
def test_a_quantised_cache_is_a_cache_of_rounded_values(kind, page_size, store):
    """Each stored value is within half a step of its own, and what is read from there on is exact."""
    layer, x = make(kind, rope=False, dtype=torch.float32), tokens(2, 21, dtype=torch.float32)
    exact = cache_for(Stack(layer), page_size)
    rounded = cache_for(Stack(layer), page_size, store=store)
    outs = {}
    with torch.no_grad():
        for cache in (exact, rounded):
            cache.admit(2)
            with cache.step(21) as (kv,):
                layer.append_context(x, kv)
            with cache.read(2) as (kv,):
                outs[cache] = layer(x[:, -2:], context=kv.view())
        with rounded.read(2) as (kv,), exact.read(2) as (other,):
            rounded_view, view = kv.view(), other.view()
            for name in ("k",) if view.v is view.k else ("k", "v"):
                scale = getattr(rounded_view, f"{name}_scale")[..., None]
                values, plane = getattr(rounded_view, name).float() * scale, getattr(view, name)
                half = scale / 2 if store == torch.int8 else (plane.abs() / 16).maximum(scale * 2**-10)
                stored = ~plane.isnan()
                assert ((values - plane).abs() <= half * 1.0001)[stored].all()
                plane.copy_(values)
            torch.testing.assert_close(layer(x[:, -2:], context=rounded_view), layer(x[:, -2:], context=view))
            layer.backend = "reference"
            torch.testing.assert_close(layer(x[:, -2:], context=rounded_view), outs[rounded])
    error = (outs[rounded] - outs[exact]).norm() / outs[exact].norm()
    assert 0 < error <= (4 / 254 if store == torch.int8 else 4 / 16)
    assert rounded.nbytes < exact.nbytes


@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)  # torch's RMSNorm, once
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_under_autocast_takes_a_cache_of_its_dtype(kind):
    model, x = stack(kind, dtype=torch.float32), tokens(2, 24, dtype=torch.float32)
    chunks = x.split((3, 20, 1), 1)
    with torch.autocast("cpu", torch.bfloat16):
        cache = cache_for(model)
        cache.admit(2)
        decoded = torch.cat([feed_dense(model, cache, chunk) for chunk in chunks], 1)
        at_once = model(x).detach()
    assert {layout.dtype for layout in cache.layouts} == {torch.bfloat16}
    assert_twice_as_good({"out": decoded}, {"out": at_once}, {"out": model(x).detach()})
    narrow = cache_for(model)
    narrow.admit(2)
    words = (
        r"kv: expected a cache of torch.bfloat16, .* got torch.float32; "
        r".*kv_layout read within torch.autocast"
    )
    with pytest.raises(TypeError, match=words), torch.autocast("cpu", torch.bfloat16):
        feed_dense(model, narrow, chunks[0])
    assert not any(narrow.length(handle) for handle in narrow._sequences.handles)
    with pytest.raises(TypeError, match=r"expected torch.bfloat16 like the cache, got torch.float32"):
        feed_dense(model, cache, chunks[2])


@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)  # torch's RMSNorm, once
@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_context_under_autocast_is_of_its_dtype(kind):
    layer, context = make(kind, rope=False, mask=FULL, dtype=torch.float32), tokens(2, 6, dtype=torch.float32)
    x = tokens(2, 3, seed=1, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cache = cache_for(Stack(layer))
        cache.admit(2)
        with cache.step(6) as (kv,):
            layer.append_context(context, kv)
        with cache.read(3) as (kv,):
            stored = layer(x, context=kv.view())
        at_once = layer(x, context=context)
    assert_twice_as_good({"out": stored}, {"out": at_once}, {"out": layer(x, context=context).detach()})
    narrow = cache_for(Stack(layer))
    narrow.admit(2)
    bf16, words = (
        torch.autocast("cpu", torch.bfloat16),
        "expected a cache of torch.bfloat16, .* got torch.float32",
    )
    with pytest.raises(TypeError, match=f"kv: {words}"), bf16, torch.no_grad(), narrow.step(6) as (kv,):
        layer.append_context(context, kv)
    with torch.no_grad(), narrow.step(6) as (kv,):
        layer.append_context(context, kv)
    with pytest.raises(TypeError, match=f"context: {words}"), bf16, torch.no_grad(), narrow.read(3) as (kv,):
        layer(x, context=kv.view())


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_leaves_fp64_and_its_cache(kind):
    model, x = stack(kind, dtype=torch.float64), tokens(2, 5)
    cache = cache_for(model)
    cache.admit(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert [layer.kv_layout for layer in model.layers] == list(cache.layouts)
        out = feed_dense(model, cache, x)
    close(out, model(x).detach())
