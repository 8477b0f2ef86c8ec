"""A layer tells what its attention would run on, and runs as if nobody had asked."""

from unittest import mock

import pytest
import torch

from attnlib import CAUSAL, GroupedQueryAttention, KVCache, MultiHeadLatentAttention, Rope, explain, sliding
from attnlib.call.call import checked
from attnlib.dispatch import run as running

LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
LAYERS = {
    "grouped": lambda: GroupedQueryAttention(32, 4, num_kv_heads=2, mask=CAUSAL, rope=Rope(8), v_head_dim=6),
    "latent": lambda: MultiHeadLatentAttention(32, 4, mask=sliding(9), rope=Rope(4), **LATENT),
    "reference": lambda: GroupedQueryAttention(32, 4, mask=CAUSAL, backend="reference"),
}


def ran(layer, *args, **kwargs):
    """The specs of the calls that a layer makes, and its output."""
    calls = []
    with mock.patch.object(running, "checked", side_effect=lambda x: calls.append(checked(x)) or calls[-1]):
        out = layer(*args, **kwargs)
    return [x.spec for x in calls], out


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_what_is_told_runs(name, packed):
    layer, x = LAYERS[name](), torch.randn(2, 7, 32)
    given = {"cu_seqlens": torch.tensor([0, 5, 14], dtype=torch.int32)} if packed else {}
    x = x.flatten(0, 1) if packed else x
    before = layer(x, **given)
    told = explain(layer, x, **given)
    specs, out = ran(layer, x, **given)
    assert told.spec == specs[0]
    assert told.chosen == layer.backend or (layer.backend is None and told.chosen == "torch")
    assert torch.equal(out, before)
    out.sum().backward()


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_step_goes_on_as_it_would(name):
    """In steps of a prompt, of a token and of a chunk."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    asked, plain = (
        KVCache.paged([layer.kv_layout], pages=40, page_size=4, max_sequences=2) for _ in range(2)
    )
    for cache in (asked, plain):
        cache.admit(2)
    for tokens in (7, 1, 20):
        x = torch.randn(2, tokens, 32)
        with plain.step(tokens) as (kv,):
            expected = layer(x, kv=kv)
        with asked.step(tokens) as (kv,):
            told = explain(layer, x, kv=kv)
            specs, out = ran(layer, x, kv=kv)
        assert told.spec == specs[0]
        assert torch.equal(out, expected)


def test_a_module_without_attention_is_refused():
    other = torch.nn.Linear(2, 2)
    other.backend = None
    with pytest.raises(ValueError, match=r"call: expected a layer or one of attention, .* got Linear"):
        explain(other, torch.randn(1, 2))


def test_a_layer_that_refuses_refuses_here():
    with pytest.raises(ValueError, match=r"x: packed \[t, m\] needs cu_seqlens="):
        explain(LAYERS["grouped"](), torch.randn(7, 32))
