"""A config.json's rope against the frequencies that transformers makes of the same file."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, Gemma3TextConfig, LlamaConfig, MiniMaxM2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RotaryEmbedding

from attnlib.convert.checkpoint.errors import CheckpointError
from attnlib.convert.checkpoint.source_rope import rope_of
from attnlib.integrations.transformers.building import rope_of as layer_rope
from attnlib.integrations.transformers.families import FAMILIES
from attnlib.rope.rope import LinearScaling, Rope

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
KINDS = {
    "none": {},
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3"} | LLAMA3,
    "yarn": {"rope_type": "yarn"} | YARN,
    "yarn betas": {"rope_type": "yarn", "beta_fast": 20, "beta_slow": 2, "truncate": False} | YARN,
    "yarn mscale": {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5} | YARN,
    "yarn attention": {"rope_type": "yarn", "attention_factor": 1.25} | YARN,
    "yarn null": {"rope_type": "yarn", "beta_fast": None, "attention_factor": None, "factor": None}
    | {"original_max_position_embeddings": 512},
    "yarn without original": {"rope_type": "yarn", "factor": 4.0},
}


def theirs(config, length):
    """Frequencies and amplitude by transformers, for sequences of ``length``."""
    read = LlamaConfig(**json.loads(json.dumps(config)))
    if read.rope_parameters["rope_type"] == "default":
        return LlamaRotaryEmbedding(read).inv_freq, 1.0
    return ROPE_INIT_FUNCTIONS[read.rope_parameters["rope_type"]](read, seq_len=length)


def same(config, length=9000):
    rope = rope_of(config)
    kind = (config.get("rope_scaling") or config.get("rope_parameters") or {}).get("rope_type")
    frequencies, amplitude = theirs(config, length)
    ours = rope.inverse_frequencies(length=length if kind == "dynamic" else None)
    torch.testing.assert_close(ours, frequencies, rtol=1e-6, atol=0)
    assert rope.amplitude == pytest.approx(amplitude)
    assert not rope.interleaved


@pytest.mark.parametrize("kind", KINDS)
def test_rope_parameters_of_transformers_5(kind):
    same(CONFIG | {"rope_parameters": {"rope_theta": 500_000.0} | KINDS[kind]})


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_file_has_theta_beside_the_scaling(kind):
    same(CONFIG | {"rope_theta": 250_000, "rope_scaling": KINDS[kind] or None})


def test_a_file_that_says_nothing():
    same(CONFIG)
    assert rope_of(CONFIG).dim == 64
    assert rope_of(CONFIG | {"head_dim": 32}).dim == 32


@pytest.mark.parametrize(
    "twice",
    [
        {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 99.0, "rope_type": "default"}},
        {"rope_scaling": KINDS["linear"], "rope_parameters": KINDS["llama3"]},
        {"rope_parameters": {"type": "linear", "rope_type": "default", "factor": 3.0}},
        {"original_max_position_embeddings": 256, "rope_parameters": KINDS["yarn"]},
        {"original_max_position_embeddings": 256, "rope_scaling": KINDS["llama3"]},
    ],
    ids=["theta", "scaling", "type", "yarn", "llama3"],
)
def test_what_is_said_twice_is_read_as_transformers_reads_it(twice):
    same(CONFIG | twice)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "dynamic"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_part_of_each_head(kind, inside):
    share = {"partial_rotary_factor": 0.5}
    config = CONFIG | {"rope_parameters": KINDS[kind] | (share if inside else {})} | ({} if inside else share)
    same(config)
    assert rope_of(config).dim == 32


def test_an_old_name_of_the_kind():
    old = CONFIG | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    assert rope_of(old) == rope_of(CONFIG | {"rope_parameters": {"rope_type": "linear", "factor": 4.0}})


def test_released_files_of_minimax_count_the_rotated_channels():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    sizes |= {"rotary_dim": 24}
    read = MiniMaxM2Config(**sizes)
    rope = rope_of({"model_type": "minimax_m2"} | sizes)
    assert rope.dim == 32 * read.rope_parameters["partial_rotary_factor"] == 24
    torch.testing.assert_close(rope.inverse_frequencies(), MiniMaxM2RotaryEmbedding(read).inv_freq)
    assert rope_of({"model_type": "llama"} | sizes).dim == 32  # where transformers reads no such key
    with pytest.raises(CheckpointError, match="rotary_dim: expected a count, got half"):
        rope_of({"model_type": "minimax_m2"} | sizes | {"rotary_dim": "half"})


@pytest.mark.parametrize("kind", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_alpha_of_hunyuan_stretches_theta_at_any_length(kind):
    scaling = {"type": "dynamic", "factor": 1.0, "alpha": 1000.0, "mscale": 1.0, "beta_fast": 32}
    config = {"model_type": kind} | {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    read = CONFIG_MAPPING[kind](**config | {"rope_scaling": scaling})
    rope = rope_of(config | {"rope_scaling": scaling})
    theirs = HunYuanDenseV1RotaryEmbedding(read).inv_freq
    torch.testing.assert_close(rope.inverse_frequencies(), theirs, rtol=1e-5, atol=0)
    with pytest.raises(CheckpointError, match="rope_scaling"):
        rope_of(config | {"rope_scaling": scaling | {"alpha": "x"}})


@pytest.mark.parametrize(
    ("kind", "fields", "rotating"),
    [
        ("exaone4", {}, [0, 1, 2, 4, 5, 6]),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 8}, range(8)),
        ("exaone_moe", {"sliding_window_pattern": 2}, [0, 2, 4, 6]),
        ("afmoe", {}, [0, 1, 2, 4, 5, 6]),
        ("afmoe", {"global_attn_every_n_layers": 2}, [0, 2, 4, 6]),
        ("granitemoehybrid", {}, []),
        ("granitemoehybrid", {"position_embedding_type": "rope"}, range(8)),
    ],
)
def test_layers_that_rotate_are_those_of_transformers(kind, fields, rotating):
    config = {"num_hidden_layers": 8} | fields
    read = CONFIG_MAPPING[kind](**config)
    family = FAMILIES[kind, "self"]
    for index in range(8):
        assert (rope_of({"model_type": kind} | config, index) is not None) == (index in rotating)
        assert (layer_rope(family, read, index) is not None) == (index in rotating)


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "opt"])
def test_learned_positions_are_no_rope(model_type):
    assert rope_of({"model_type": model_type}) is None


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rope_parameters": {"rope_type": "x"}}, r"rope_parameters: expected a rope_type of .*got 'x'"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            r"rope_parameters: expected short_factor with 'longrope'",
        ),
        ({"rope_scaling": {"type": "su"}}, r"rope_scaling: expected short_factor with 'longrope'"),
        ({"rope_scaling": {"type": ["x"]}}, r"got .*x"),
        ({"rope_scaling": "linear"}, r"rope_scaling: expected an object, got linear"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"got one for each layer type",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"expected factor with 'linear', and it is missing"),
        (
            {"rope_scaling": {"type": "llama3"} | LLAMA3 | {"low_freq_factor": None}},
            r"expected low_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": "4"}},
            r"LinearScaling\.factor: expected a number, got '4'",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            r"LinearScaling\.factor: expected a finite number of at least",
        ),
        ({"rope_theta": -1}, r"rope\.theta: expected a finite number above 0, got -1"),
        ({"rope_theta": "big"}, r"rope\.theta"),
        ({"partial_rotary_factor": 1.5}, r"factor: expected a share above 0 and up to 1, got 1\.5"),
        ({"partial_rotary_factor": "all"}, r"partial_rotary_factor"),
        ({"partial_rotary_factor": 0.02}, r"rope\.dim"),
        ({"head_dim": 7}, r"rope\.dim: expected a positive even"),
        (
            {"max_position_embeddings": None, "rope_scaling": KINDS["dynamic"]},
            r"expected max_position_embeddings",
        ),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": "x"}}, r"rope_scaling"),
        ({"original_max_position_embeddings": 0, "rope_scaling": {"type": "yarn"}}, r"rope_scaling: .*zero"),
        ({"model_type": "bloom"}, r"model_type: expected a type that docs"),
    ],
)
def test_what_is_no_rope_of_ours(fields, match):
    with pytest.raises(CheckpointError, match=match):
        rope_of(CONFIG | fields)


GEMMA3 = {"model_type": "gemma3_text", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 12}


@pytest.mark.parametrize(
    ("fields", "window", "full"),
    [
        ({}, Rope(256, 1e4), Rope(256, 1e6)),
        ({"rope_theta": 5e5, "rope_local_base_freq": 100.0}, Rope(256, 100.0), Rope(256, 5e5)),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            Rope(256, 1e4),
            Rope(256, 1e6, LinearScaling(8.0)),
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 9.0},
                    "full_attention": {"rope_theta": 8.0},
                }
            },
            Rope(256, 9.0),
            Rope(256, 8.0),
        ),
        ({"rope_parameters": {"full_attention": None}}, Rope(256, 1e4), Rope(256, 1e6)),
        (
            {"head_dim": 32, "layer_types": ["full_attention", "sliding_attention"] * 6},
            Rope(32, 1e6),
            Rope(32, 1e4),
        ),
    ],
)
def test_layers_with_a_window_have_a_rope_of_their_own(fields, window, full):
    """By default five of six have one, of which the fifth and the sixth are asked for."""
    assert (rope_of(GEMMA3 | fields, 4), rope_of(GEMMA3 | fields, 5)) == (window, full)
    assert rope_of(GEMMA3 | fields) == rope_of(GEMMA3 | fields, 0)
    assert rope_of({"model_type": "gemma3", "text_config": GEMMA3 | fields}, 5) == full


def test_ropes_of_gemma_3_are_transformers():
    read = Gemma3TextConfig(**GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    theirs = Gemma3RotaryEmbedding(read)
    for index, kind in ((4, "sliding_attention"), (5, "full_attention")):
        ours = rope_of(GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, index)
        torch.testing.assert_close(
            ours.inverse_frequencies(), getattr(theirs, f"{kind}_inv_freq"), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize(
    ("kind", "fields", "rotating"),
    [
        ("smollm3", {}, [0, 1, 2, 4]),
        ("smollm3", {"no_rope_layer_interval": 2}, [0, 2, 4]),
        ("smollm3", {"no_rope_layers": [0, 0, 1, 0, 1]}, [2, 4]),
        ("cohere2", {}, [0, 1, 2, 4]),
        ("cohere2", {"sliding_window_pattern": 2}, [0, 2, 4]),
        ("cohere2", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 2}, [3, 4]),
    ],
)
def test_some_layers_have_no_rope(kind, fields, rotating):
    config = {
        "model_type": kind,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 5,
    } | fields
    assert [index for index in range(5) if rope_of(config, index)] == rotating
    assert rope_of(config) == rope_of(config, rotating[0])


def test_names_of_gpt_neox():
    config = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4}
    assert rope_of(config) == Rope(4)
    assert rope_of(config | {"rotary_pct": 0.5, "rotary_emb_base": 7.0, "rope_theta": 3.0}) == Rope(8, 7.0)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "expected one rope for each layer type"),
        (GEMMA3 | {"layer_types": "sliding_attention"}, "layer_types: expected an entry for layer 0"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern: expected a count"),
        ({"model_type": "smollm3", "no_rope_layers": []}, "no_rope_layers: expected an entry for layer 0"),
    ],
)
def test_what_layers_are_not_told(config, match):
    with pytest.raises(CheckpointError, match=match):
        rope_of(config)
