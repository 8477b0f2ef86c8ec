"""The example that runs a folder of transformers with pages."""

import load_hf
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
FIELDS = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 7, "tie_word_embeddings": False},
    "qwen2": WINDOWS,
    "qwen3": WINDOWS | {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
}


def folder_of(family: str, path, **fields):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | FIELDS[family] | fields)).eval()
    for x in model.parameters():
        if x.dim() > 1:
            torch.nn.init.normal_(x, std=x.shape[-1] ** -0.5)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("family", FIELDS)
@torch.no_grad()
def test_logits_are_those_of_transformers(family, tmp_path):
    theirs = folder_of(family, tmp_path)
    ours, _ = load_hf.load(tmp_path)
    ids = torch.randint(256, (2, 23))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", FIELDS)
def test_texts_are_continued_and_checked(family, tmp_path, capsys):
    folder_of(family, tmp_path)
    assert (
        load_hf.main([str(tmp_path), "The capital", "def", "--new", "12", "--check", "--device", "cpu"]) == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("The capital")
    assert out.endswith("transformers' own model chooses the same tokens\n")


def test_a_check_fails_where_tokens_differ(tmp_path):
    folder_of("llama", tmp_path)
    model, checkpoint = load_hf.load(tmp_path)
    prompt = torch.tensor([5, 6, 7])
    found = load_hf.decode_cached(model, [prompt], 4)
    with pytest.raises(SystemExit, match="prefers another token"):
        load_hf.check(model, checkpoint, [prompt], (found + 1) % 256)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
        ({"mlp_bias": True}, "mlp_bias: expected False"),
        ({"tie_word_embeddings": False, "num_hidden_layers": 3}, None),
    ],
)
def test_what_a_decoder_has_not_is_refused(fields, message, tmp_path):
    folder_of("llama", tmp_path, **fields)
    if message is None:  # the config says fewer layers than the weights have
        text = (
            (tmp_path / "config.json").read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 2')
        )
        (tmp_path / "config.json").write_text(text)
        message = "model.layers.2.* a Decoder has no such weight"
    with pytest.raises(SystemExit, match=message):
        load_hf.main([str(tmp_path), "x"])


def test_another_family_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma2"](**SIZES | {"head_dim": 8}))
    model.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=r"model_type: expected one of llama.*got 'gemma2'"):
        load_hf.main([str(tmp_path), "x"])
