"""Encoders, and decoders with an encoder, on attnlib's core."""

import copy

import pytest
import torch
from families import lively
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers.replacing import ReplacedAttention
from tests.integrations.test_transformers import agree, gradients

hf.register()
ENCODERS = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "modernbert": {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
        "local_attention": 8, "global_attn_every_n_layers": 2, "attention_dropout": 0.0,
    },
    "embedding_gemma2_text": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "head_dim": 16, "global_head_dim": 8, "sliding_window": 5, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"], "embedding_dim": 24,
    },
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "forced_eos_token_id": None,
}  # fmt: skip
BOTH = {
    "bart": BART,
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}
TOKENS = {
    "vocab_size": 61,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def both(make, config, way):
    torch.manual_seed(0)
    eager = lively(make.from_config(config).float()).eval()
    ours = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("attnlib")
    return eager, hf.replace(ours) if way == "layers" else ours


def padded():
    """Tokens and their mask, padded on the right, as encoders have them."""
    mask = torch.ones(3, 23, dtype=torch.long)
    mask[0, -5:], mask[1, -17:] = 0, 0
    return torch.randint(3, 61, (3, 23)), mask


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("bert", "attention"),
        ("bert", "layers"),
        ("modernbert", "attention"),
        ("embedding_gemma2_text", "attention"),
        ("embedding_gemma2_text", "layers"),
    ],
)
@torch.no_grad()
def test_encoders(family, way, is_padded):
    pair = both(AutoModel, CONFIG_MAPPING[family](**TOKENS | ENCODERS[family]), way)
    ids, mask = padded()
    theirs, mine = (x(ids, attention_mask=mask if is_padded else None).last_hidden_state for x in pair)
    agree(mine, theirs, mask.bool() if is_padded else slice(None))


@torch.no_grad()
def test_layers_of_an_encoder_have_a_window_on_both_sides():
    """The whole model again, of our layers by themselves."""
    family = "embedding_gemma2_text"
    model, _ = both(AutoModel, CONFIG_MAPPING[family](**TOKENS | ENCODERS[family]), "attention")
    seen, ids = [], padded()[0]
    for layer in model.layers:
        keep = lambda module, args, given, out: seen.append((module, given["hidden_states"], out[0]))  # noqa: E731
        layer.self_attn.register_forward_hook(keep, with_kwargs=True)
    model(ids)
    for index, (module, x, expected) in enumerate(seen):
        agree(hf.from_config(model.config, index, weights=module.state_dict())(x), expected)


@pytest.mark.parametrize(("family", "way"), [("bart", "attention"), ("t5", "attention"), ("t5", "layers")])
def test_decoders_with_an_encoder(family, way):
    """Logits, gradients, and tokens by beams; what scores gain by distance (T5) learns too."""
    pair = both(AutoModelForSeq2SeqLM, CONFIG_MAPPING[family](**TOKENS | BOTH[family]), way)
    ids, mask = padded()
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    theirs, mine = (x.generate(ids, **options) for x in pair)
    assert torch.equal(mine, theirs)
    outputs = [x(ids, attention_mask=mask, decoder_input_ids=ids[:, :11]).logits for x in pair]
    agree(*outputs[::-1])
    weights = torch.randn_like(outputs[0])
    for x in outputs:
        (x * weights).sum().backward()
    theirs, mine = (gradients(x) for x in pair)
    assert mine.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("way", ["attention", "layers"])
@torch.no_grad()
def test_speech(way):
    sizes = {
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 32,
        "suppress_tokens": None,
    }
    config = CONFIG_MAPPING["whisper"](**TOKENS | BART | sizes | {"begin_suppress_tokens": None})
    pair = both(AutoModelForSpeechSeq2Seq, config, way)
    features, ids = torch.randn(2, 8, 32), torch.randint(3, 61, (2, 7))
    theirs, mine = (x(features, decoder_input_ids=ids).logits for x in pair)
    agree(mine, theirs)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    theirs, mine = (x.generate(features, decoder_input_ids=ids, **options) for x in pair)
    assert torch.equal(mine, theirs)
    if way == "layers":
        assert sum(isinstance(x, ReplacedAttention) for x in pair[1].modules()) == 6
