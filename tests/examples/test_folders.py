"""Folders: a Decoder is the Llama that transformers reads, there and back, and what it is not is refused."""

import json

import pytest
import torch
from decoder import Decoder
from folders import llama_config, load_llama, save_folder, tokens_by
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from attnlib import CAUSAL, GroupedQueryAttention, Rope

TOKENS = torch.arange(30).reshape(2, 15) * 7 % 100
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 100}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
KINDS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "wide heads": {"head_dim": 10},
    "other numbers": {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "llama 3": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8}},
}


def make(folder, **options) -> LlamaForCausalLM:
    """A random Llama, saved in two or more shards."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES | options))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, max_shard_size="10KB")
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_llama_is_read_and_written(tmp_path, kind):
    theirs = make(tmp_path / "in", **KINDS[kind])
    ours, source = load_llama(tmp_path / "in")
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-4, atol=1e-5)
        save_folder(ours, tmp_path / "out", llama_config(ours, context=64, source=source.config))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(again(TOKENS).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_of_our_own_is_a_llama(tmp_path, tied):
    options = {"mask": CAUSAL, "num_kv_heads": 2, "rope": Rope(6, theta=99.0)}
    model = Decoder(
        100,
        24,
        2,
        attention=lambda i: GroupedQueryAttention(24, 4, **options),
        tie_embeddings=tied,
        norm_eps=1e-3,
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_folder(model, tmp_path, llama_config(model, context=64))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), rtol=1e-4, atol=1e-5)
        ours, _ = load_llama(tmp_path)
        torch.testing.assert_close(ours(TOKENS), model(TOKENS), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type: expected 'llama' for a Decoder, got 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu' for .* got 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias: expected False for .* got True"),
        ({"vocab_size": "many"}, "vocab_size: expected a positive int, got 'many'"),
        ({"vocab_size": 99}, r"lm_head.weight: expected \(99, 24\), as config.json says, got \(100, 24\)"),
        ({"num_key_value_heads": 4}, r"k_proj.weight: expected \[24, 24\], .*, got \[12, 24\]"),
        ({"attention_bias": True}, r"bias: expected \(12,\), as config.json says, got none"),
        (
            {"tie_word_embeddings": True, "intermediate_size": 41},
            r"mlp.down_proj.weight: expected \(24, 41\)",
        ),
    ],
)
def test_what_is_no_such_llama_is_refused(tmp_path, changes, message):
    make(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        load_llama(tmp_path)


def test_a_tensor_that_nothing_reads_is_refused(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.layers.0.extra": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"model.layers.0.extra: expected none, as config.json says, got \(3,\)"
    ):
        load_llama(tmp_path)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    make(tmp_path)
    _, source = load_llama(tmp_path)
    assert tokens_by(source)(b"abc").tolist() == [97, 98, 99]
    with pytest.raises(ValueError, match="text: expected tokens below vocab_size=100, got 122"):
        tokens_by(source)(b"xyz")
