"""The table of names against transformers: its models' weights, converted and not, give its models'
outputs.
"""

import pytest
import torch
from checkpoint_helpers import halve
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    CONFIG_MAPPING,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attnlib import CAUSAL, FULL, MultiHeadAttention
from attnlib.convert.checkpoint import CheckpointError, convert, identity
from attnlib.convert.checkpoint.layer import LayerShape
from attnlib.convert.checkpoint.names import family_of, find_layers, join, split, text_of
from attnlib.integrations.transformers.families import FAMILIES, REFUSED
from attnlib.models.families import SEEING, STORED, UNCONVERTED

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = SIZES | {"num_key_value_heads": 4, "intermediate_size": 40, "head_dim": 8}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 20}
MODELS = {
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**DECODER | more)),
    "llama with biases": lambda **more: LlamaForCausalLM(LlamaConfig(**DECODER | more, attention_bias=True)),
    "llama, tied": lambda **more: LlamaForCausalLM(LlamaConfig(**DECODER | more, tie_word_embeddings=True)),
    "wide heads": lambda **more: LlamaForCausalLM(LlamaConfig(**DECODER | {"head_dim": 16} | more)),
    "mistral": lambda **more: MistralForCausalLM(MistralConfig(**DECODER | more)),
    "qwen2": lambda **more: Qwen2ForCausalLM(Qwen2Config(**DECODER | more)),
    "qwen3": lambda **more: Qwen3ForCausalLM(Qwen3Config(**DECODER | more)),
}
OTHERS = {"gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), "bert": lambda: BertModel(BertConfig(**SIZES))}


def randomised(model):
    """The model with all of its parameters random, norms and biases too, and nothing of it random when it
    runs.
    """
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_the_identity_loads_in_transformers(tmp_path, name):
    model = randomised((MODELS | OTHERS)[name]())
    model.save_pretrained(tmp_path / "in", max_shard_size="10KB")
    convert(tmp_path / "in", tmp_path / "out", identity, max_shard_size=12_000, progress=False)
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(x.equal(state[key]) for key, x in loaded.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_merging_equal_heads_changes_no_logit(tmp_path, name):
    model = randomised(MODELS[name]())
    for key, x in model.state_dict().items():
        if "k_proj" in key or "v_proj" in key:
            heads = x.unflatten(0, (2, 2, -1))
            heads[:, 1] = heads[:, 0]
    model.save_pretrained(tmp_path / "in", max_shard_size="10KB")
    convert(tmp_path / "in", tmp_path / "out", halve, progress=False)
    loaded = type(model).from_pretrained(tmp_path / "out").eval()
    assert loaded.config.num_key_value_heads == 2
    tokens = torch.randint(50, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def attention_of(model, name):
    """The first layer's weights by our names, in a layer of ours."""
    family = family_of(name)
    layers, _ = find_layers(family, model.state_dict())
    stored = {tensor: model.state_dict()[layers[0].prefix + tensor] for tensor in layers[0].stored}
    layer = MultiHeadAttention(32, 4, mask=CAUSAL if name == "gpt2" else FULL, bias=True).eval()
    layer.load_state_dict(split(family, stored, LayerShape(0, 32, 4, 4, 8)))
    return layer


def test_gpt2_splits_into_the_attention_that_it_computes():
    model = randomised(OTHERS["gpt2"]())
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        theirs = model.transformer.h[0].attn(x)[0]
        torch.testing.assert_close(attention_of(model, "gpt2")(x), theirs)


def test_bert_splits_into_the_attention_that_it_computes():
    model = randomised(OTHERS["bert"]())
    x, theirs = torch.randn(2, 7, 32), model.encoder.layer[0].attention
    with torch.no_grad():
        torch.testing.assert_close(attention_of(model, "bert")(x), theirs.output.dense(theirs.self(x)[0]))


def test_bert_keeps_the_norm_beside_its_attention(tmp_path):
    randomised(OTHERS["bert"]()).save_pretrained(tmp_path / "in")
    report = convert(tmp_path / "in", tmp_path / "out", halve, progress=False)
    name = "encoder.layer.0.attention.output.LayerNorm.weight"
    assert name in report["attention_tensors_copied_as_they_are"]
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "out"))
    assert after[name].equal(before[name])
    assert after["encoder.layer.1.attention.self.key.weight"].shape == (16, 32)


def test_gpt2_fuses_fewer_heads(tmp_path):
    """q, k, v side by side, k and v half as wide; and what was converted can be converted again."""
    randomised(OTHERS["gpt2"]()).save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", halve, progress=False)
    convert(tmp_path / "out", tmp_path / "again", identity, progress=False)
    before, after, again = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "out", "again")
    )
    weight, name = before["transformer.h.1.attn.c_attn.weight"], "transformer.h.1.attn.c_attn.weight"
    q, k, v = weight.split(32, 1)
    halved = [x.unflatten(1, (2, 2, 8)).mean(2).flatten(1) for x in (k, v)]
    torch.testing.assert_close(after[name], torch.cat([q, *halved], 1), rtol=0, atol=0)
    assert after["transformer.h.1.attn.c_attn.bias"].shape == (64,)
    assert again[name].equal(after[name])


@given(
    kind=st.sampled_from(sorted(STORED)),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.integers(1, 4),
    bias=st.booleans(),
)
def test_joining_undoes_splitting(kind, kv_heads, head_dim, bias):
    family = STORED[kind]
    shape = LayerShape(0, 5, 4, 4 if family.is_by_head else kv_heads, head_dim)
    stored = {}
    for disk, ours in family.weights:
        if ours[0] in shape.rows:
            rows, columns = sum(shape.rows[part] for part in ours), 4 * head_dim if ours == ("o_proj",) else 5
            stored[f"{disk}.weight"] = torch.randn(
                *((columns, rows) if family.is_transposed else (rows, columns))
            )
            stored |= {f"{disk}.bias": torch.randn(rows)} if bias else {}
        else:
            stored[f"{disk}.weight"] = torch.randn(head_dim)
    weights = split(family, stored, shape)
    rows = {name: x for name, x in shape.rows.items() if name != "g_proj" or family.is_gated}
    assert {name: len(weights[f"{name}.weight"]) for name in rows} == rows
    joined = join(family, weights, shape)
    assert joined.keys() == stored.keys()
    assert all(joined[name].equal(x) for name, x in stored.items())


def test_what_a_family_has_no_name_for_keeps_ours():
    new = {"q_proj.weight": torch.ones(2, 3), "kv_b_proj.weight": torch.ones(4, 3)}
    for family in STORED.values():
        joined = join(family, new, LayerShape(0, 3, 1, 1, 2))
        assert joined["kv_b_proj.weight"] is new["kv_b_proj.weight"]
        assert len(joined) == 2


def test_layers_are_found_in_their_order_whatever_the_prefix():
    for prefix in (
        "model.layers.",
        "layers.",
        "model.language_model.layers.",
        "language_model.model.layers.",
    ):
        names = [f"{prefix}{layer}.self_attn.q_proj.weight" for layer in (10, 2, 0)]
        seeing = "vision_tower.encoder.layers.0.self_attn.q_proj.weight"
        layers, unknown = find_layers(STORED["llama"], [*names, "lm_head.weight", f"x.{names[0]}", seeing])
        assert [(layer, found.prefix) for layer, found in layers.items()] == [
            (layer, f"{prefix}{layer}.self_attn.") for layer in (0, 2, 10)
        ]
        assert unknown == []


@pytest.mark.parametrize("number", ["²", "1" * 5000])
def test_no_layer_has_such_a_number(number):
    assert find_layers(STORED["llama"], [f"layers.{number}.self_attn.q_proj.weight"]) == ({}, [])


@pytest.mark.parametrize("kind", ["mamba", None, ["llama"], {}])
def test_a_stranger_is_refused_though_its_names_are_known(kind):
    with pytest.raises(CheckpointError, match=r"model_type: expected a type that docs.* llama, got "):
        family_of(text_of({"model_type": kind}).get("model_type"))


def test_every_family_is_described_or_refused_with_its_reason():
    """Whatever attnlib has layers of, and whatever it refuses layers of; vision encoders are copied."""
    known = {kind for kind, _ in FAMILIES if not kind.endswith("_vision")} | {*REFUSED}
    assert known == {kind for kind in {*STORED, *UNCONVERTED} if kind in known}
    assert not {*STORED, *SEEING} & {*UNCONVERTED}
    for kind, reason in UNCONVERTED.items():
        assert kind in CONFIG_MAPPING or kind in known
        with pytest.raises(CheckpointError) as error:
            family_of(text_of({"model_type": kind}).get("model_type"))
        assert f"model_type: {kind} cannot be converted, because {reason}; docs/conv" in str(error.value)


def test_a_misspelt_type_brings_those_like_it():
    with pytest.raises(CheckpointError, match=r"such as qwen3_next, .*got 'qwen3next'") as error:
        family_of("qwen3next")
    assert len(str(error.value)) < 200


def test_the_text_of_a_model_that_also_sees():
    assert text_of({"model_type": "llama", "text_config": 1})["text_config"] == 1
    for kind, own in (
        ("llava", "qwen2"),
        ("mistral3", "qwen2"),
        ("gemma3", "gemma3_text"),
        ("qwen2_vl", "qwen2_vl_text"),
    ):
        text = text_of({"model_type": kind, "text_config": {"model_type": "qwen2", "x": 1}})
        assert text == {"model_type": own, "x": 1}
    assert text_of({"model_type": "llava", "text_config": {}}) == {"model_type": "llama"}
    assert text_of({"model_type": "qwen2_5_vl", "x": 1}) == {"model_type": "qwen2_5_vl_text", "x": 1}
    for part in ({}, {"text_config": None}, {"text_config": "x"}):
        with pytest.raises(CheckpointError, match="text_config: expected an object"):
            text_of({"model_type": "llava"} | part)
