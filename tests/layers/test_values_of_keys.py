"""``values="keys"``: the values are the normalized output of k_proj, as in Gemma 4."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_helpers import HIDDEN, alone, cache_for, close, feed, gradients, grouped, sharing, stack, tokens
from torch import nn
from torch.nn import functional as F

from attnlib import CAUSAL, Gate, GroupedQueryAttention, sliding
from attnlib.convert import gqa_to_mla, mha_to_gqa
from attnlib.sizes import GroupedShape

OPTIONS = {"values": "keys", "qk_norm": True, "sinks": True, "gate": Gate("head"), "norm_eps": 0.1}


def twin(layer: GroupedQueryAttention, **options) -> GroupedQueryAttention:
    """The layer with a v_proj that has the weights of k_proj."""
    other = grouped(layer.num_kv_heads, **OPTIONS | options | {"values": None})
    state = layer.state_dict()
    copies = {name.replace("k_proj", "v_proj"): x for name, x in state.items() if "k_proj" in name}
    other.load_state_dict(state | copies)
    other.v_norm = nn.RMSNorm(layer.head_dim, eps=0.1, elementwise_affine=False)
    return other


@given(
    bias=st.booleans(),
    heads=st.sampled_from((1, 2, 4)),
    late=st.booleans(),
    mask=st.sampled_from((CAUSAL, sliding(3))),
)
def test_values_are_normalized_keys_before_their_norm_and_rope(bias, heads, late, mask):
    """And k_proj gets the gradients of both uses."""
    options = {"bias": bias, "norm_after_rope": late, "mask": mask}
    layer, x = grouped(heads, **OPTIONS | options), tokens(2, 9)
    nn.init.uniform_(layer.k_norm.weight, 0.3, 1.2)
    raw = layer.k_proj(x).unflatten(-1, (heads, 8))
    close(layer.key_value(x)[1], F.rms_norm(raw, (8,), eps=0.1))
    other = twin(layer, **options)
    ours, theirs = gradients(layer, x, layer), gradients(other, x, other)
    for name in ours:
        copy = name.replace("k_proj", "v_proj")
        close(ours[name], theirs[name] + (theirs[copy] if copy != name else 0))


@pytest.mark.parametrize("page_size", [None, 4])
def test_a_cache_stores_keys_and_values(page_size):
    model, x = stack("gqa", (CAUSAL, sliding(3)), **OPTIONS), tokens(20)
    cache = cache_for(model, page_size)
    [handle] = cache.admit(1)
    got = [feed(model, cache, {handle: part})[handle] for part in x.split([11, 1, 1, 7])]
    close(torch.cat(got), alone(model, x))
    assert model.layers[0].kv_layout == twin(model.layers[0]).kv_layout


def test_readers_of_such_values():
    model, x = sharing("gqa", **OPTIONS), tokens(14)
    reader = model.layers[1]
    assert reader.k_proj is reader.v_proj is reader.k_norm is reader.v_norm is None
    cache = cache_for(model)
    [handle] = cache.admit(1)
    got = [feed(model, cache, {handle: part})[handle] for part in x.split([11, 1, 2])]
    close(torch.cat(got), alone(model, x))


def test_a_replaced_norm_of_values():
    """Of a layer with v_proj too, as in Gemma 3n."""
    layer, x = grouped(), tokens(1, 5)
    plain = layer.key_value(x)[1]
    layer.v_norm = nn.RMSNorm(8, dtype=torch.float64)
    nn.init.uniform_(layer.v_norm.weight)
    close(layer.key_value(x)[1], layer.v_norm(plain))


def test_it_has_no_weights_for_values_and_prints_itself():
    layer = grouped(**OPTIONS, bias=True)
    assert not any(name.startswith("v_") for name in layer.state_dict())
    assert "values=keys" in repr(layer)
    shape = GroupedShape(hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=8, values="keys")
    assert shape.parameters == sum(x.numel() for x in grouped(values="keys").parameters())


def test_refusals():
    for make in (
        lambda values: GroupedQueryAttention(HIDDEN, 4, mask=CAUSAL, values=values),
        lambda values: GroupedShape(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, values=values),
    ):
        with pytest.raises(ValueError, match="values: expected \"keys\" or None, got 'queries'"):
            make("queries")
    with pytest.raises(ValueError, match='v_head_dim: expected head_dim=6 with values="keys", got 5'):
        GroupedQueryAttention(HIDDEN, 4, mask=CAUSAL, values="keys", v_head_dim=5)
    normed = grouped(4)
    normed.v_norm = nn.RMSNorm(8)
    for layer in (grouped(4, values="keys"), normed):
        for convert in (
            lambda layer: mha_to_gqa(layer, 2),
            lambda layer: gqa_to_mla(layer, rank=8, rope_dim=4),
        ):
            with pytest.raises(NotImplementedError, match="layer: it normalizes its values"):
                convert(layer)
