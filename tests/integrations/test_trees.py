"""transformers models over trees of sequences compute what they compute for each sequence alone."""

import pytest
import torch
from families import lively
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from attnlib import packing
from attnlib.integrations import transformers as hf

hf.register()
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
MODELS = {
    "llama": lambda **x: LlamaForCausalLM._from_config(LlamaConfig(**SMALL), **x),
    "a window": lambda **x: MistralForCausalLM._from_config(MistralConfig(**SMALL, sliding_window=6), **x),
    "windows and softcaps": lambda **x: Gemma2ForCausalLM._from_config(
        Gemma2Config(**SMALL, sliding_window=6), **x
    ),
    "latents": lambda **x: DeepseekV3ForCausalLM._from_config(DeepseekV3Config(**SMALL | LATENT), **x),
}


def made(name: str, implementation: str):
    torch.manual_seed(0)
    dtype = torch.float32 if name == "latents" else torch.float64  # its experts multiply no fp64
    return lively(MODELS[name](attn_implementation=implementation, dtype=dtype)).eval()


def sequences() -> list[torch.Tensor]:
    """Two prompts with branches at several depths, a sequence twice, and one that is another's prefix."""
    a, b, c, d = torch.randint(100, (4, 9), generator=torch.Generator().manual_seed(1))
    return [
        torch.cat(x) for x in ((a, b), (a, b[:4], c), (a, b[:4], c[:2], d), (a, b), (a, b[:2]), (d, a), (d,))
    ]


def one_by_one(model) -> list[torch.Tensor]:
    return [model(x[None], use_cache=False).logits[0] for x in sequences()]


def in_a_tree(model) -> list[torch.Tensor]:
    tree = packing.tree(sequences())
    logits = model(**hf.tree_inputs(tree)).logits[0]
    return [logits[rows] for rows in tree.rows]


def gradients(model, logits: list[torch.Tensor]) -> list[torch.Tensor]:
    seeded = torch.Generator().manual_seed(2)
    loss = sum((x * torch.randn(x.shape, generator=seeded, dtype=x.dtype)).sum() for x in logits)
    return list(torch.autograd.grad(loss, [x for x in model.parameters() if x.requires_grad]))


@pytest.mark.parametrize("change", [None, hf.replace, hf.absorb], ids=["model", "replaced", "absorbed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_tree_is_its_sequences(name, change):
    """With attnlib to rounding, since eager's softmax is always fp32; and with eager to fp32."""
    if change is not None and (change is hf.absorb) != (name == "latents"):
        pytest.skip("not for this model")
    eager, plain, ours = (made(name, x) for x in ("eager", "attnlib", "attnlib"))
    for model in (plain, ours) if change else ():
        change(model)
    expected, found = one_by_one(plain), in_a_tree(ours)
    near = (
        {"atol": 1e-10, "rtol": 1e-8} if expected[0].dtype == torch.float64 else {"atol": 1e-5, "rtol": 1e-4}
    )
    for x, y, z in zip(found, expected, one_by_one(eager), strict=True):
        torch.testing.assert_close(x, y, **near)
        torch.testing.assert_close(x, z, atol=1e-5, rtol=1e-4)
    for x, y in zip(gradients(ours, found), gradients(plain, expected), strict=True):  # through fp32 norms
        assert (x - y).norm() < 1e-5 * y.norm() + 1e-8


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_implementation_is_refused(implementation):
    model = made("llama", implementation)
    with pytest.raises(NotImplementedError, match='select attn_implementation="attnlib"'):
        model(**hf.tree_inputs(packing.tree(sequences())))


def test_recurrent_layers_are_refused():
    config = RecurrentGemmaConfig(
        **SMALL | {"lru_width": 32, "attention_window_size": 8}, block_types=["recurrent", "attention"]
    )
    model = RecurrentGemmaForCausalLM._from_config(config, attn_implementation="attnlib")
    with pytest.raises(NotImplementedError, match="recurrent layers"):
        model(**hf.tree_inputs(packing.tree(sequences())))


def test_attention_that_is_not_causal_is_refused():
    config = BertConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = BertLMHeadModel._from_config(config, attn_implementation="attnlib")
    inputs = hf.tree_inputs(packing.tree(sequences()))
    with pytest.raises(NotImplementedError, match="not causal"):
        model(**inputs)


def test_a_second_step_over_a_cache_is_refused():
    model, inputs = made("llama", "attnlib"), hf.tree_inputs(packing.tree(sequences()))
    cache = model(**inputs | {"use_cache": True}).cache
    with pytest.raises(NotImplementedError, match="tree"):
        model(**inputs | {"use_cache": True, "cache": cache})


def test_compiled_models_are_refused():
    model = torch.compile(made("llama", "attnlib"), backend="eager")
    with pytest.raises(Exception, match="tree"):
        model(**hf.tree_inputs(packing.tree(sequences())))


def test_only_trees_are_taken():
    with pytest.raises(TypeError, match=r"tree: expected what packing.tree\(\) returned, got list"):
        hf.tree_inputs(sequences())
