"""Models of transformers over latents, which decode from them as they are stored."""

import copy

import pytest
import torch
from families import CACHE, DECODERS, small
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers import attention

LATENT = [family for family, config in DECODERS.items() if "kv_lora_rank" in config]
OPTIONS = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "output_logits": True}


@pytest.fixture
def forms(monkeypatch):
    """How often attention ran absorbed, and how often it expanded."""
    counts = {"absorbed": 0, "expanded": 0}
    for name in counts:
        run = getattr(attention, name)

        def counted(*given, name=name, run=run):
            counts[name] += 1
            return run(*given)

        monkeypatch.setattr(attention, name, counted)
    return counts


def pair_of(family: str):
    """A model on eager attention, and one that absorbs."""
    torch.manual_seed(0)
    eager = small(family).eval()
    ours = hf.absorb(copy.deepcopy(eager))
    eager.set_attn_implementation("eager")
    return eager, ours


def padded():
    ids, mask = torch.randint(3, 61, (3, 12)), torch.ones(3, 12, dtype=torch.long)
    mask[0, :4], mask[1, 3:5] = 0, 0
    return ids, mask


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", LATENT)
@torch.no_grad()
def test_steps_are_absorbed_and_prompts_expanded(family, cache, forms):
    pair, (ids, mask) = pair_of(family), padded()
    options = OPTIONS | {
        "return_dict_in_generate": True,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    theirs, mine = (model.generate(ids, attention_mask=mask, **options, eos_token_id=60) for model in pair)
    assert torch.equal(mine.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(mine.logits), torch.stack(theirs.logits), rtol=2e-5, atol=2e-5)
    layers, steps = pair[1].config.num_hidden_layers, len(mine.logits) - 1
    assert forms == {"absorbed": layers * steps, "expanded": layers}


@pytest.mark.parametrize("queries", [1, 2, 5])
@torch.no_grad()
def test_chunks_over_what_is_stored(queries, forms):
    """Without padding several queries may be absorbed too."""
    pair, ids = pair_of("deepseek_v3"), torch.randint(3, 61, (2, 40))
    outs = []
    for model in pair:
        first = model(ids[:, : 40 - queries])
        outs.append(model(ids[:, 40 - queries :], **{CACHE: first[CACHE]}).logits)
    torch.testing.assert_close(*outs, rtol=2e-5, atol=2e-5)
    assert forms["absorbed"] == pair[1].config.num_hidden_layers * 1


def test_gradients_are_those_of_expanded_layers(forms):
    eager, ours = pair_of("deepseek_v2")
    ids = torch.randint(3, 61, (2, 9))
    grads = [
        torch.autograd.grad(x(ids).logits.sum(), list(x.parameters()), allow_unused=True)
        for x in (eager, ours)
    ]
    for theirs, mine in zip(*grads, strict=True):
        assert (theirs is None) == (mine is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert forms["absorbed"] == 0


class Adapted(nn.Module):
    """A projection with a low-rank term beside its weight, as PEFT's."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.weight = base, base.weight
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("change", ["adapter", "hook", "bias"])
@torch.no_grad()
def test_no_term_beside_the_weight_is_dropped(change, forms):
    pair, (ids, mask) = pair_of("deepseek_v3"), padded()
    for model in pair:
        torch.manual_seed(1)
        for layer in model.model.layers:
            projection = layer.self_attn.kv_b_proj
            if change == "adapter":
                layer.self_attn.kv_b_proj = Adapted(projection)
            elif change == "hook":
                projection.register_forward_hook(lambda module, given, out: out * 1.5)
            else:
                projection.bias = nn.Parameter(torch.randn(projection.out_features))
    theirs, mine = (model.generate(ids, attention_mask=mask, **OPTIONS) for model in pair)
    assert torch.equal(mine, theirs)
    assert forms["absorbed"] == 0


@torch.no_grad()
def test_weights_that_change_are_not_stale():
    pair, (ids, mask) = pair_of("minicpm3"), padded()
    for model in pair:
        model.generate(ids, attention_mask=mask, **OPTIONS)
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(1.5)
    theirs, mine = (model.generate(ids, attention_mask=mask, **OPTIONS) for model in pair)
    assert torch.equal(mine, theirs)


@torch.no_grad()
def test_half_of_the_heads_sharded_alike_runs_and_otherwise_is_refused():
    _, ours = pair_of("deepseek_v3")
    layer = ours.model.layers[0].self_attn
    q, k_rope, latent = (torch.randn(1, *shape) for shape in ((4, 1, 16), (1, 30, 8), (1, 30, 16)))
    out, _ = attention.attention_forward(layer, q, k_rope, latent, None, scaling=layer.scaling)
    weight = layer.kv_b_proj.weight
    layer.kv_b_proj.weight = nn.Parameter(weight[:40])  # of two heads
    half, _ = attention.attention_forward(layer, q[:, :2], k_rope, latent, None, scaling=layer.scaling)
    torch.testing.assert_close(half, out[:, :, :2])
    layer.kv_b_proj.weight = nn.Parameter(weight[:50])
    with pytest.raises(
        ValueError, match=r"kv_b_proj: expected \[80, 16\] for 4 heads like q, got \(50, 16\); shard"
    ):
        attention.attention_forward(layer, q, k_rope, latent, None, scaling=layer.scaling)


def test_other_attentions_still_run():
    eager, ours = pair_of("deepseek_v2")
    ours.set_attn_implementation("sdpa")
    ids = torch.randint(3, 61, (2, 9))
    torch.testing.assert_close(ours(ids).logits, eager(ids).logits)


def test_models_without_latents_and_with_indexers_are_refused():
    with pytest.raises(
        ValueError, match="model: expected one with MLA layers, such as DeepSeek-V3, got LlamaFor"
    ):
        hf.absorb(small("llama"))
    config = CONFIG_MAPPING["axk2"](
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=61, num_attention_heads=4,
        moe_intermediate_size=16, n_routed_experts=4, first_k_dense_replace=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(NotImplementedError, match="model: AXK2Attention selects keys with an indexer"):
        hf.absorb(model)
