"""Layers that read the keys of an earlier layer, choose among them, and store index keys only."""

from dataclasses import replace

import pytest
import torch
from layer_helpers import Stack, alone, cache_for, close, feed, feed_dense, make, tokens
from selecting_cases import Reading, T, choosing, keys_of, most, without_branch
from torch import Tensor, nn

from attnlib import CAUSAL, KVCache, KVLayout, cached_attention
from attnlib.sizes import cache_bytes

E4M3 = torch.float8_e4m3fn
NAMES = ("deepseek", "mistral", "minimax", "qwen")


def keys_of_x(owner: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a layer's readers take for the tokens of x."""
    angles = None if owner.rope is None else owner.rope.angles(torch.arange(x.shape[1]))
    return (owner.latent if hasattr(owner, "latent") else owner.key_value)(x, angles)


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_attends_to_the_keys_that_its_own_branch_chooses(name):
    owner, reader = Reading(name, 1).layers
    plain, x = without_branch(reader, name, own_keys=False), tokens(2, T)
    keys = keys_of_x(owner, x)
    mine, theirs = reader.choose(x), owner.choose(x)
    assert not torch.equal(keys_of(mine, T), keys_of(theirs, T))
    close(reader(x, keys=keys), plain(x, keys=keys, mask=mine.mask))
    close(reader(x, keys=keys, selected=theirs), plain(x, keys=keys, mask=theirs.mask))


@pytest.mark.parametrize("page_size", [4, None], ids=["paged", "contiguous"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_choose_as_one_forward(name, page_size, monkeypatch):
    """Dense steps, short and packed ones; nothing that was never written matters."""
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    model, x, y = Reading(name), tokens(T), tokens(30, seed=1)
    cache = cache_for(model, page_size)
    first, second = cache.admit(2)
    got = [
        feed(model, cache, {first: x[:3], second: y[:19]}),
        feed(model, cache, {first: x[3:20], second: y[19:20]}),
    ]
    out = [feed_dense(model, cache, torch.stack((x[20 + n], y[20 + n]))[:, None]) for n in range(10)]
    got += [{first: both[0], second: both[1]} for both in out]
    close(torch.cat([step[second] for step in got]), alone(model, y))
    close(torch.cat([step[first] for step in got]), alone(model, x)[:30])
    close(feed(model, cache, {first: x[30:]})[first], alone(model, x)[30:])


@pytest.mark.parametrize("name", ["deepseek", "minimax"])
def test_short_sequences_are_dense_to_the_bit(name):
    owner, reader = Reading(name, 1).layers
    plain, t = without_branch(reader, name, own_keys=False), most(reader)
    x = tokens(2, t + 1)
    keys = keys_of_x(owner, x)
    short = tuple(part[:, :t] for part in keys)
    assert torch.equal(reader(x[:, :t], keys=short), plain(x[:, :t], keys=short))
    assert not torch.allclose(reader(x, keys=keys), plain(x, keys=keys))


@pytest.mark.parametrize("options", [{}, {"shared_prefixes": 8}], ids=str)
@pytest.mark.parametrize("name", ["deepseek", "minimax"])
def test_forks_and_rollbacks(name, options):
    model, x = Reading(name), tokens(30)
    cache = cache_for(model, **options)
    [handle] = cache.admit(1)
    drafts, others = tokens(4, seed=1), tokens(5, seed=2)
    feed(model, cache, {handle: x})
    feed(model, cache, {handle: drafts})
    cache.truncate(handle, 30)
    [fork] = cache.fork(handle)
    out = feed(model, cache, {handle: others, fork: drafts})
    for of, new in ((handle, others), (fork, drafts)):
        close(out[of], alone(model, torch.cat((x, new)))[30:])


@pytest.mark.parametrize("name", ["mistral", "minimax"])
def test_sequences_are_saved_and_loaded(name, tmp_path):
    model, x = Reading(name), tokens(T)
    cache, other = cache_for(model), cache_for(model, 8)
    [handle] = cache.admit(1)
    feed(model, cache, {handle: x[:30]})
    cache.save(handle, tmp_path / "sequence")
    handle = other.load(tmp_path / "sequence")
    close(feed(model, other, {handle: x[30:]})[handle], alone(model, x)[30:])
    with pytest.raises(ValueError, match="expected layouts like this cache's"):
        cache_for(Stack(*model.layers[:1])).load(tmp_path / "sequence")


def test_left_padding_is_never_chosen():
    model, x = Reading("deepseek"), tokens(2, T)
    cache = cache_for(model)
    cache.admit(2, left_padding=[0, 11])
    got = torch.cat([feed_dense(model, cache, part) for part in x.split([25, 1, 1, 10], 1)], 1)
    close(got[0], alone(model, x[0]))
    close(got[1, 11:], alone(model, x[1, 11:]))


def test_a_compiled_step():
    torch._dynamo.reset()
    model, x = Reading("deepseek"), tokens(1, T)
    cache = cache_for(model)
    cache.admit(1)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    outs = []
    for part in x.split([20, *[1] * (T - 20)], 1):
        with torch.no_grad(), cache.step(part.shape[1]) as kv:
            outs.append(run(part, kv))
    close(torch.cat(outs, 1), model(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["deepseek", "of x"])
def test_the_loss_trains_the_branch_of_a_reader(name):
    owner, reader = choosing(name), choosing(name, own_keys=False)
    x = tokens(2, T).requires_grad_()
    keys = keys_of_x(owner, x)
    for selected in (None, reader.choose(x)):
        loss = reader.index_loss(x, keys=keys, selected=selected)
        loss.backward()
        assert loss > 0
        assert x.grad is None
        for at, parameter in reader.named_parameters():
            assert (parameter.grad is None) != at.startswith("indexer."), at
        reader.zero_grad()
    with pytest.raises(ValueError, match="keys: the layer has own_keys=False"):
        reader.index_loss(x)


def test_a_reader_stores_index_keys_only():
    owner, reader = Reading("mistral", 1).layers
    assert reader.kv_layout == KVLayout.index_only(8, dtype=torch.float64)
    assert reader.kv_layout_as(torch.float32).planes == {"index": (1, 8, torch.float32)}
    assert reader.kv_layout.token_bytes == 64
    layouts, sizes = [owner.kv_layout, reader.kv_layout], {"lengths": [8], "page_size": 4}
    assert cache_bytes(layouts, **sizes) == cache_bytes(layouts[:1], **sizes) + 8 * 64
    cache = KVCache.paged(layouts, pages=6, page_size=4, max_sequences=1, storage_dtype=torch.int8)
    assert set(cache._layers[1].planes) == {"index"}
    assert cache.nbytes == 24 * sum(layout.token_bytes for layout in cache.layouts)


@pytest.mark.parametrize("index_dtype", [None, E4M3])
def test_a_window_drops_pages_of_index_keys(index_dtype, monkeypatch):
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    layout = replace(KVLayout.index_only(3, index_heads=2, index_dtype=index_dtype), window=6)
    cache = KVCache.paged([layout], pages=5, page_size=4, max_sequences=1, max_length=64)
    cache.admit(1)
    keys = torch.randn(1, 40, 2, 3)
    for n in range(40):
        with cache.step(1) as [layer]:
            view = layer.append(None, index=keys[:, n : n + 1])
    found, starts = view.index_keys(40), int(view.starts)
    assert starts == 32  # of whole pages that hold the keys of the window
    torch.testing.assert_close(found[:, starts:], keys[:, starts:], rtol=0.1, atol=0.05)
    assert not found[:, :starts].any()


def test_what_a_layer_of_index_keys_refuses():
    cache = KVCache.paged([KVLayout.index_only(3)], pages=2, page_size=4, max_sequences=1)
    cache.admit(1)
    k, index = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 3)
    with cache.step(2) as [layer]:
        for given in ((k, None), (None, k)):
            with pytest.raises(
                ValueError, match="k, v: expected None, since the layout stores index keys only"
            ):
                layer.append(*given, index=index)
        with pytest.raises(TypeError, match="index: expected a tensor, got NoneType"):
            layer.append(None)
        view = layer.append(None, index=index)
        with pytest.raises(
            ValueError, match="kv: expected a layer with keys, got one that stores index keys"
        ):
            cached_attention(k, view, mask=CAUSAL)
    with pytest.raises(RuntimeError, match="append: only within"):
        layer.append(None, index=index)
    for made in (lambda: KVLayout.index_only(0), lambda: KVLayout.grouped(2, 0, index_dim=3)):
        with pytest.raises(ValueError, match="dim: expected"):
            made()


def test_what_a_reader_refuses():
    model, x = Reading("deepseek", 1), tokens(2, 5)
    owner, reader = model.layers
    cache, other = cache_for(model), cache_for(model)
    plain = make("mla-auto", own_keys=False)
    for of in (cache, other):
        of.admit(2)
    with torch.no_grad(), cache.step(5) as kv, other.step(5) as far:
        with pytest.raises(
            ValueError, match="kv: expected a layer that stores own keys, got one that stores index"
        ):
            owner(x, kv=kv[1])
        owner(x, kv=kv[0])
        owner(x, kv=far[0])
        keys = kv[0].view()
        with pytest.raises(ValueError, match="keys: it excludes context= and kv="):
            reader(x, kv=kv[0], keys=keys)
        with pytest.raises(
            ValueError, match="kv: expected a layer that stores index keys only, got one that"
        ):
            reader.choose(x, kv=kv[0])
        with pytest.raises(ValueError, match="kv: expected a layer that stores own keys"):
            plain(x, kv=kv[1], keys=keys)
        with pytest.raises(ValueError, match="kv: expected the cache of this layer's index keys"):
            reader(x, keys=keys)
        with pytest.raises(ValueError, match="keys: the layer has own_keys=False"):
            reader(x, kv=kv[1])
        with pytest.raises(
            ValueError, match=r"keys: expected the view\(\) of a layer in the same cache step"
        ):
            reader(x, kv=kv[1], keys=far[0].view())
        with pytest.raises(ValueError, match=r"keys: expected the view\(\) .* got another tuple"):
            reader(x, kv=kv[1], keys=keys_of_x(owner, x))
        for of in (kv, far):
            reader(x, kv=of[1], keys=of[0].view())
    with pytest.raises(TypeError, match=r"keys: expected tensors of x's tokens for index_loss\(\)"):
        reader.index_loss(x, keys=keys)
