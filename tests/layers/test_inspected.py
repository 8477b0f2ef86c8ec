"""The probabilities that a layer returns are those that its output is made of."""

import pytest
import torch
from layer_helpers import HIDDEN, grouped, latent
from torch import Tensor, nn

from attnlib import (
    CAUSAL,
    FULL,
    Gate,
    KVCache,
    MultiHeadAttention,
    QueryTemperature,
    mask_mod,
    scores,
    sliding,
)
from attnlib.layers import latent_forms
from attnlib.parallel import ContextParallel
from attnlib.qk_clip import QKClip

T = 11
LAYERS = {
    "mha": lambda: grouped(4, bias=True),
    "gqa, options": lambda: grouped(2, mask=sliding(4), softcap=0.3, sinks=True, alibi=True, rope=False),
    "gqa, norms and gate": lambda: grouped(2, qk_norm=True, gate=Gate("head")),
    "gqa, functions": lambda: grouped(
        mask=CAUSAL & mask_mod(lambda b, h, i, j: (i + j + h) % 3 != 0),
        score=scores.distance_bias(torch.randn(4, 5)),
    ),
    "mqa, temperature": lambda: grouped(1, temperature=QueryTemperature(0.5, 4), dropout_p=0.5),
    "gqa, values of keys": lambda: grouped(2, values="keys"),
    "mla, expanded": lambda: latent("expanded"),
    "mla, absorbed": lambda: latent("absorbed", q_lora_rank=7, mask=sliding(5)),
    "mla, no rope": lambda: latent(rope=False),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    if getattr(layer, "sinks", None) is not None:
        nn.init.normal_(layer.sinks)
    return layer.eval()


def tokens(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, HIDDEN, dtype=torch.float64, generator=generator)


def values_of(layer: nn.Module, x: Tensor) -> Tensor:
    """The values of tokens for each query head, ``[..., t, h, e]``; rotations do not change them."""
    if hasattr(layer, "kv_b_proj"):
        return layer.expand(*layer.latent(x, None))[1]
    v = layer.key_value(x)[1]
    return v.repeat_interleave(4 // v.shape[-2], -2)


def output(layer: nn.Module, weights: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """What the layer makes of probabilities ``[..., h, s, t]`` and values."""
    out = torch.einsum("...hst,...the->...she", weights, v)
    out = out if layer.gate is None else layer.gate.apply(out, layer.g_proj(x))
    return layer.o_proj(out.flatten(-2))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_the_output_is_probabilities_times_values(name):
    layer, x = make(name), tokens(2, T)
    weights = layer.weights(x, over="none", rows=torch.arange(T))
    assert weights.shape == (2, 4, T, T)
    assert not weights.requires_grad
    close(output(layer, weights, values_of(layer, x), x), layer(x))
    close(layer.weights(x, over="queries"), weights.sum(2))
    at = torch.tensor([0, 5, -1]).expand(2, T, -1).contiguous()
    means = weights.mean(1).gather(2, at.clamp(min=0)).masked_fill(at < 0, 0)
    close(layer.weights(x, over="heads", at=at), means)
    state = torch.get_rng_state()
    close(layer.train().weights(x, over="none", rows=torch.arange(T)), weights)  # before dropout
    layer.maxima(x)
    assert torch.equal(torch.get_rng_state(), state)
    rows = torch.tensor([[1, 4], [10, 0]])
    of_rows = layer.weights(x, over="none", rows=rows)
    close(of_rows, torch.stack([weights[n][:, rows[n]] for n in range(2)]))


@pytest.mark.parametrize("name", LAYERS)
def test_maxima_are_those_of_scores_or_products(name):
    layer, x = make(name), tokens(2, T)
    maxima, products = layer.maxima(x), layer.maxima(x, of="products")
    weights = layer.weights(x, over="none", rows=torch.arange(T)).amax(-1)
    assert torch.equal(weights > 0, maxima > -torch.inf)
    if name in ("gqa, options", "gqa, functions"):
        assert not torch.allclose(products, maxima)
    else:
        close(products, maxima)
    if getattr(layer, "q_norm", None) is None:
        qk_clip = QKClip(layer)
        with qk_clip.record():
            layer(x)
        close(products.amax((0, 2)), qk_clip.step()["model"])


def test_softcap_of_the_largest_product_is_the_largest_score():
    layer, x = grouped(2, softcap=0.2), tokens(2, T)
    close(layer.maxima(x), 0.2 * torch.tanh(layer.maxima(x, of="products") / 0.2))


@pytest.mark.parametrize("name", LAYERS)
def test_packed_and_padded_rows_are_those_of_sequences_alone(name):
    layer, x = make(name), tokens(2, T)
    rows = torch.arange(T)
    alone = [layer.weights(part, over="none", rows=rows[: part.shape[1]]) for part in (x[:1, :4], x[1:])]
    packed = torch.cat((x[0, :4], x[1], torch.full((2, HIDDEN), torch.nan, dtype=torch.float64)))
    cu_seqlens = torch.tensor([0, 4, 4 + T], dtype=torch.int32)
    found = layer.weights(packed, over="none", rows=torch.arange(4 + T), cu_seqlens=cu_seqlens)
    close(found[:, :4, :4], alone[0][0])
    close(found[:, 4:], alone[1][0])
    assert not found[:, :4, 4:].any()
    maxima = layer.maxima(packed, cu_seqlens=cu_seqlens)
    close(maxima[:, 4 : 4 + T], layer.maxima(x[1:])[0])
    assert maxima[:, 4 + T :].eq(-torch.inf).all()
    padded = x.clone()
    padded[0, 4:] = torch.nan
    there = torch.ones(2, T, dtype=torch.bool)
    there[0, 4:] = False
    found = layer.weights(padded, over="none", rows=rows, attention_mask=there)
    close(found[0, :, :4, :4], alone[0][0])
    close(found[1], alone[1][0])


@pytest.mark.parametrize("name", LAYERS)
def test_steps_of_a_cache_have_the_rows_of_the_whole_sequence(name, monkeypatch):
    monkeypatch.setattr(latent_forms, "CHUNK", 2)  # the expanded form would make a call for every token
    layer, x = make(name), tokens(2, T)
    whole = layer.weights(x, over="none", rows=torch.arange(T))
    cache = KVCache.paged([layer.kv_layout], pages=12, page_size=4, max_sequences=2)
    cache.admit(2)
    first = 0
    with torch.no_grad():
        for part in x.split((6, 1, 4), 1):
            last = first + part.shape[1]
            rows = torch.arange(part.shape[1])
            with cache.step(len(rows)) as (kv,):
                found = layer.weights(part, kv=kv, over="none", rows=rows)
                maxima = layer.maxima(part, kv=kv)
                mass = layer.weights(part, kv=kv, over="queries")
                out = layer(part, kv=kv)
            close(found, whole[:, :, first:last, :last])
            close(mass, found.sum(2))
            close(maxima, layer.maxima(x)[:, :, first:last])
            close(out, layer(x)[:, first:last])
            first = last


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_contexts_and_keys_of_other_layers_are_looked_at(kind):
    torch.manual_seed(0)
    make_one = grouped if kind == "gqa" else latent
    x, context = tokens(2, T), tokens(2, 7).flip(0)
    layer = make_one(rope=False, mask=FULL)
    weights = layer.weights(x, context=context, over="none", rows=torch.arange(T))
    close(output(layer, weights, values_of(layer, context), x), layer(x, context=context))
    cache = KVCache.paged([layer.kv_layout], pages=8, page_size=4, max_sequences=2)
    cache.admit(2)
    with torch.no_grad(), cache.step(7) as (kv,):
        layer.append_context(context, kv)
    with torch.no_grad(), cache.read(T) as (kv,):
        close(layer.weights(x, context=kv.view(), over="none", rows=torch.arange(T)), weights)
        close(layer.maxima(x, context=kv.view()), layer.maxima(x, context=context))
    owner, reader = make_one(), make_one(own_keys=False)
    angles = owner.rope.angles(torch.arange(T))
    keys = owner.latent(x, angles) if kind == "mla" else owner.key_value(x, angles)
    weights = reader.weights(x, keys=keys, over="none", rows=torch.arange(T))
    v = reader.expand(*keys)[1] if kind == "mla" else keys[1].repeat_interleave(2, 2)
    close(output(reader, weights, v, x), reader(x, keys=keys))


def test_a_layer_is_as_it_was():
    layer, x = MultiHeadAttention(8, 2, mask=CAUSAL, backend="torch"), torch.randn(1, 3, 8)
    out = layer(x)
    layer.compile(backend="aot_eager")
    weights = layer.weights(x, over="queries")
    assert layer.backend == "torch"
    assert torch.equal(layer(x), out)
    with QKClip(layer).record():
        assert torch.equal(layer.weights(x, over="queries"), weights)


def test_masks_of_a_call_count():
    layer, x = grouped(), tokens(1, T)
    found = layer.weights(x, over="none", rows=torch.arange(T), mask=sliding(1))
    close(found, torch.eye(T, dtype=torch.float64).expand(1, 4, T, T))


REFUSED = {
    "over": ({"over": "keys"}, ValueError, "over: expected 'none', 'queries', 'heads', got 'keys'"),
    "no rows": ({"over": "none"}, ValueError, "rows: expected the numbers of queries"),
    "no at": ({"over": "heads"}, ValueError, "at: expected the numbers of keys"),
    "no over": ({}, TypeError, "missing over; call it as GroupedQueryAttention.weights"),
    "an argument of forward": (
        {"over": "queries", "positions": torch.arange(3)},
        ValueError,
        r"positions: expected .*s=11",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_refused(name):
    given, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        grouped().weights(tokens(1, T), **given)


def test_of_is_validated_and_ranks_that_share_tokens_are_refused(monkeypatch):
    layer = grouped()
    with pytest.raises(ValueError, match="of: expected 'scores' or 'products', got 'keys'"):
        layer.maxima(tokens(1, T), of="keys")
    monkeypatch.setattr(ContextParallel, "__post_init__", lambda self: None)
    layer.context_parallel = ContextParallel(None)
    for call in (layer.maxima, lambda x: layer.weights(x, over="queries")):
        with pytest.raises(ValueError, match=r"context_parallel: expected None, .*pass whole sequences"):
            call(tokens(1, T))
