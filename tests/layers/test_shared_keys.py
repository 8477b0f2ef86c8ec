"""Layers that attend to the keys of another layer, in training and over its cache."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_helpers import (
    BOTH,
    HIDDEN,
    KINDS,
    alone,
    cache_for,
    close,
    feed,
    feed_dense,
    gradients,
    grouped,
    make,
    sharing,
    tokens,
)
from torch import nn

from attnlib import CAUSAL, FULL, Gate, GroupedQueryAttention, KVCache, sliding
from attnlib.convert import mha_to_gqa
from attnlib.sizes import GroupedShape, Model, cache_bytes

OPTIONS = {
    "gqa": {"qk_norm": True, "sinks": True, "softcap": 3.0, "gate": Gate("head")},
    "mla": {"q_lora_rank": 7, "gate": Gate("channel")},
}
CU = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
WINDOWS = (sliding(3), CAUSAL, sliding(3), CAUSAL, sliding(2))
SOURCES = (0, 1, 0, 1, 0)


def of_kind(kind: str) -> dict:
    return OPTIONS["mla" if kind.startswith("mla") else "gqa"]


def keys_of(source: nn.Module, x, angles=None):
    angles = source.rope.angles(torch.arange(x.shape[-2])) if angles is None else angles
    return (source.latent if hasattr(source, "latent") else source.key_value)(x, angles)


def merged(reader: nn.Module, source: nn.Module, kind: str, **options) -> nn.Module:
    """The layer with the queries of ``reader`` and the keys of ``source``, as tied parameters."""
    layer = make(kind, **options)
    for name in ("k_proj", "v_proj", "k_norm", "kv_a_proj_with_mqa", "kv_a_layernorm"):
        if hasattr(layer, name):
            setattr(layer, name, getattr(source, name))
    for name in (
        "q_proj",
        "q_norm",
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_b_proj",
        "o_proj",
        "g_proj",
        "sinks",
    ):
        if hasattr(layer, name):
            setattr(layer, name, getattr(reader, name))
    return layer


@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(4)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_is_a_layer_with_the_keys_of_its_source(kind, mask):
    """Dense, packed and padded, with gradients for both."""
    torch.manual_seed(0)
    options = of_kind(kind)
    source, reader = make(kind, **options), make(kind, mask=mask, own_keys=False, **options)
    whole, x = merged(reader, source, kind, mask=mask, **options), tokens(2, 11)
    ours = gradients(whole, x, lambda x: reader(x, keys=keys_of(source, x)))
    theirs = gradients(whole, x, whole)
    for name, expected in theirs.items():
        close(ours[name], expected)
    there = torch.arange(11) < torch.tensor([[9], [11]])
    close(reader(x, keys=keys_of(source, x), attention_mask=there), whole(x, attention_mask=there))
    angles = reader.rope.angles(torch.arange(11) - torch.tensor([0] * 4 + [4] * 7))
    packed = reader(x[0], keys=keys_of(source, x[0], angles), cu_seqlens=CU)
    close(packed, whole(x[0], cu_seqlens=CU))


@pytest.mark.parametrize("kind", KINDS)
def test_an_owner_takes_its_own_keys(kind):
    layer, x = make(kind, **of_kind(kind)), tokens(2, 9)
    close(layer(x, keys=keys_of(layer, x)), layer(x))


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_readers_decode_what_they_compute_at_once(kind, page_size):
    """Prompts, single tokens and both in one step, with windows."""
    torch.manual_seed(0)
    model, x, y = sharing(kind, WINDOWS, SOURCES, **of_kind(kind)), tokens(40), tokens(33, seed=1)
    cache = cache_for(model, page_size)
    first, second = cache.admit(2)
    got = [
        feed(model, cache, {first: x[:18], second: y[:2]}),
        feed(model, cache, {first: x[18:19], second: y[2:30]}),
    ]
    got += [feed(model, cache, {first: x[19 + n :][:1], second: y[30 + n :][:1]}) for n in range(3)]
    close(torch.cat([step[first] for step in got]), alone(model, x)[:22])
    close(torch.cat([step[second] for step in got]), alone(model, y))
    got = feed(model, cache, {first: x[22:]})
    close(got[first], alone(model, x)[22:])


@pytest.mark.parametrize("kind", BOTH)
def test_dense_steps_with_left_padding(kind):
    model, x = sharing(kind), tokens(2, 9)
    cache = cache_for(model)
    cache.admit(2, left_padding=[0, 4])
    got = torch.cat([feed_dense(model, cache, x[:, :6]), feed_dense(model, cache, x[:, 6:])], 1)
    close(got[0], alone(model, x[0]))
    close(got[1, 4:], alone(model, x[1, 4:]))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn])
def test_readers_of_bytes_read_what_their_source_stored(kind, store):
    model, x = sharing(kind).float(), tokens(20, dtype=torch.float32)
    cache = cache_for(model, store=store, dtype=torch.float32)
    [handle] = cache.admit(1)
    got = torch.cat([feed(model, cache, {handle: part})[handle] for part in x.split([17, 1, 2])])
    torch.testing.assert_close(got, alone(model, x), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("options", [{"shared_prefixes": 8}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("kind", BOTH)
def test_forks_and_batch_invariant_caches(kind, options):
    model, x = sharing(kind), tokens(30)
    cache = cache_for(model, **options)
    [root] = cache.admit(1)
    start = feed(model, cache, {root: x[:20]})[root]
    [branch] = cache.fork(root)
    got = feed(model, cache, {root: x[20:23], branch: x[23:26]})
    close(torch.cat((start, got[root])), alone(model, x[:23]))
    close(got[branch], alone(model, torch.cat((x[:20], x[23:26])))[20:])


@given(
    owners=st.lists(st.booleans(), min_size=2, max_size=5),
    kind=st.sampled_from(("gqa", "mla-auto")),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_any_readers_after_any_owners(owners, kind, lengths, seed):
    """Each reader reads an owner before it, drawn by ``seed``."""
    torch.manual_seed(seed)
    owners, sources = [True, *owners[1:]], []
    for i, own in enumerate(owners):
        before = [n for n in range(i) if owners[n]]
        sources.append(i if own else before[seed % len(before)])
    model, x = sharing(kind, (CAUSAL,) * len(owners), sources), tokens(sum(lengths), seed=seed)
    cache = cache_for(model, length=80)
    [handle] = cache.admit(1)
    got = torch.cat([feed(model, cache, {handle: part})[handle] for part in x.split(lengths)])
    close(got, alone(model, x))


def test_a_stack_like_gemma_4_stores_what_its_owners_do():
    """E2B: 35 layers, every fifth of full attention, and the last 20 read those of layers 13 and 14."""
    kinds = ([True] * 4 + [False]) * 7  # True if windowed
    shapes = [
        GroupedShape(
            hidden_size=1536,
            num_heads=8,
            num_kv_heads=1,
            head_dim=256 if windowed else 512,
            window=512 if windowed else None,
            own_keys=i < 15,
        )
        for i, windowed in enumerate(kinds)
    ]
    whole = Model("all own", tuple(replace(shape, own_keys=True) for shape in shapes))
    model = Model("E2B", tuple(shapes))
    stored = {"dtype": torch.bfloat16}
    assert len(model.layouts(**stored)) == 15
    sizes = {"page_size": 64}
    share = [cache_bytes(each.layouts(**stored), [8192], **sizes) for each in (model, whole)]
    caches = [
        KVCache.paged(each.layouts(**stored), pages=128, **sizes, max_sequences=1, device="meta")
        for each in (model, whole)
    ]
    assert round(share[0] / share[1], 2) == 0.43
    assert round(caches[0].nbytes / caches[1].nbytes, 2) == 0.43
    removed = whole.parameters - model.parameters
    assert removed == sum(2 * 1536 * shape.head_dim for shape in shapes if not shape.own_keys)


# Refusals


def test_a_view_before_the_owner_appends_is_refused():
    model, x = sharing("gqa"), tokens(1, 3)
    cache = cache_for(model)
    cache.admit(1)
    with (
        pytest.raises(
            RuntimeError, match="view: this layer has not appended in this step; call the layer that owns"
        ),
        torch.no_grad(),
        cache.step(3) as [kv],
    ):
        model.layers[1](x, keys=kv.view())


@pytest.mark.parametrize("kind", BOTH)
def test_a_reader_that_reaches_further_than_its_source_keeps_is_refused(kind):
    model, x = sharing(kind, (sliding(3), CAUSAL), (0, 0)), tokens(5)
    cache = cache_for(model)
    [handle] = cache.admit(1)
    with pytest.raises(
        ValueError, match="mask: it reaches back without bound, and the cache keeps a window of 3"
    ):
        feed(model, cache, {handle: x})


@pytest.mark.parametrize("kind", BOTH)
def test_what_a_reader_has_not_is_refused(kind):
    reader, x = make(kind, own_keys=False), tokens(1, 3)
    latent = kind != "gqa"
    for ask in (
        lambda: reader.kv_layout,
        lambda: keys_of(reader, x),
        lambda: reader.append_context(x, None),
    ):
        with pytest.raises(
            ValueError, match="own_keys: expected a layer with keys of its own, got own_keys=False"
        ):
            ask()
    name = "latent" if latent else "key_value"
    with pytest.raises(
        ValueError, match=rf"keys: the layer has own_keys=False .* keys=source.{name}\(x, angles\), or"
    ):
        reader(x)


@pytest.mark.parametrize("kind", BOTH)
def test_wrong_keys_are_refused(kind):
    source, other = make(kind), make("gqa" if kind != "gqa" else "mla-auto")
    reader, x = make(kind, own_keys=False), tokens(1, 3)
    keys = keys_of(source, x)
    cache = KVCache.paged([source.kv_layout, other.kv_layout], pages=4, page_size=4, max_sequences=1)
    cache.admit(1)
    with torch.no_grad(), cache.step(3) as (kv, kv_of_other):
        source(x, kv=kv)
        other(x, kv=kv_of_other)
        view, wrong = kv.view(), kv_of_other.view()
        close(reader(x, keys=view), reader(x, keys=keys))
        for given, error, message in (
            ({"keys": wrong}, ValueError, "keys: expected a view of .* channels, got KVLayout"),
            ({"keys": kv}, TypeError, r"or a KVView, got LayerCache; pass its view\(\)"),
            ({"keys": keys[0]}, TypeError, "keys: expected source.* or a KVView, got Tensor"),
            ({"keys": (keys[0][..., :-1], keys[1])}, ValueError, "keys: expected .* of .* channels"),
            ({"keys": (keys[0][:, 1:], keys[1])}, ValueError, r"channels for x \(1, 3, 24\), got"),
            ({"keys": keys, "kv": kv}, ValueError, "keys: it excludes context= and kv="),
            ({"keys": view, "kv": kv}, ValueError, "keys: it excludes context= and kv="),
            ({"keys": view, "cu_seqlens": CU}, ValueError, "keys: a view of a cache excludes cu_seqlens="),
            (
                {"keys": view, "attention_mask": torch.ones(1, 3)},
                ValueError,
                "expected None with a view of a cache",
            ),
        ):
            with pytest.raises(error, match=message):
                reader(x, **given)
        with pytest.raises(ValueError, match=r"x: expected \[b=1, s=3, .* in this step"):
            reader(x[:, :2], keys=view)
    with cache.read(3) as (kv, _), pytest.raises(ValueError, match="positions: a view outside a cache step"):
        reader(x, keys=kv.view())


def test_a_reader_prints_itself_and_is_not_converted():
    reader = grouped(own_keys=False)
    assert "own_keys=False" in repr(reader)
    assert "own_keys" not in repr(grouped())
    with pytest.raises(NotImplementedError, match="layer: it reads the keys of another layer"):
        mha_to_gqa(reader, 1)
    with pytest.raises(TypeError, match="own_keys: expected a bool, got int"):
        GroupedQueryAttention(HIDDEN, 4, mask=CAUSAL, own_keys=0)
