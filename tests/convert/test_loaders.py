"""Results as vLLM and llama.cpp read them, by the rules of their sources; tensors and fields are all
needed.
"""

from functools import cache

import pytest
from loader_models import BETWEEN, GROUPED, HEADS, RAMP, YARN, facts, fewer_heads, latents, make
from loader_rules import FIELDS, LATENT_FIELDS, MLA_HEAD_SIZES, OWN_FIELDS, YARN_FIELDS, llama_cpp, vllm

LOADERS = (vllm, llama_cpp)
OF_128 = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
OF_128 |= {"rank": MLA_HEAD_SIZES[0] - 64}
LOW = {"norm": "calibrated", "q_rank": 96}
LATENTS = {
    "exact": {"norm": "exact"},
    "calibrated": {"norm": "calibrated"},
    "low-rank": LOW,
    "yarn": LOW | YARN,
    "yarn between pairs": LOW | BETWEEN,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """config.json and the shapes of what comes of each kind: fewer KV heads, or one of the latents."""

    @cache
    def made(kind):
        folder = tmp_path_factory.mktemp(kind)
        return facts(
            fewer_heads(folder, kind) if kind in GROUPED else latents(folder, **OF_128, **LATENTS[kind])
        )

    return made


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("loader", LOADERS)
def test_fewer_heads_are_read_by_both(results, kind, loader):
    config, shapes = results(kind)
    assert config["num_key_value_heads"] == HEADS // 2
    assert loader(config, shapes) == []


def test_a_calibrated_norm_is_read_by_vllm(results):
    config, shapes = results("calibrated")
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == MLA_HEAD_SIZES[0]
    assert not config["attention_bias"]
    assert vllm(config, shapes) == []


@pytest.mark.parametrize("loader", LOADERS)
def test_queries_of_low_rank_are_read_by_both(results, loader):
    """Whatever the number of layers."""
    config, shapes = results("low-rank")
    assert config["q_lora_rank"] == LOW["q_rank"]
    assert loader(config, shapes) == []


@pytest.mark.parametrize("loader", LOADERS)
def test_yarn_is_read_by_both_from_whole_pairs(results, loader):
    config, shapes = results("yarn")
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert loader(config, shapes) == []
    assert "truncate: not read: the ramp's ends are rounded to whole pairs" in loader(
        *results("yarn between pairs")
    )
    for field in YARN_FIELDS:
        rope = {name: x for name, x in config["rope_parameters"].items() if name != field}
        assert loader(config | {"rope_parameters": rope}, shapes) == [f"{field}: missing"]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("yarn", {"beta_fast": 16.0}, "beta_fast: passed over, taken for 32.0"),
        ("yarn", {"beta_slow": 2.0}, "beta_slow: passed over, taken for 1.0"),
        ("yarn", {"mscale": 0.5, "mscale_all_dim": 1.0}, "mscale: taken for mscale_all_dim, 1.0"),
        ("llama", {"beta_slow": 2.0}, "beta_slow: passed over, taken for 1.0"),
        ("llama", {"attention_factor": 1.0}, "attention_factor: passed over"),
    ],
)
def test_what_llama_cpp_passes_over_of_yarn(results, kind, change, message):
    """Of latents, and of fewer heads of a source that says so."""
    config, shapes = results(kind)
    changed = config | {"rope_parameters": RAMP | change}
    assert vllm(changed, shapes) == []
    assert llama_cpp(changed, shapes) == [message]


def test_what_the_loaders_have_against_latents(results):
    """llama.cpp wants low-rank queries of most models, and neither has biases, which an exact norm is made
    of.
    """
    assert llama_cpp(*results("calibrated")) == ["q_lora_rank: required"]
    config, shapes = results("calibrated")
    lite = {name.replace("layers.1.", f"layers.{n}."): x for name, x in shapes.items() for n in range(1, 26)}
    assert llama_cpp(config | {"num_hidden_layers": 26, "first_k_dense_replace": 26}, lite) == []
    for loader in LOADERS:
        wrong = loader(*results("exact"))
        dropped = [line for line in wrong if line.endswith("bias: dropped in silence, or one too many")]
        assert len(dropped) >= 2 * 2
        assert set(wrong) - set(dropped) <= {"q_lora_rank: required"}
    # 448 + 64, as in the command's own example, and the widths of DeepSeek itself
    for rank, known in ((384, False), (448, True), (512, True), (256, True)):
        wrong = vllm(config | {"kv_lora_rank": rank}, shapes)
        assert any("expected one of (320, 512, 576)" in line for line in wrong) == (not known)
    assert any("got (128, 32, 128)" in line for line in vllm(config | {"qk_rope_head_dim": 32}, shapes))
    scaled = config | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}
    assert vllm(scaled, shapes) == ["rope_type: taken for YaRN: llama3"]
    assert "rope_type: not turned as it says: llama3" in llama_cpp(scaled, shapes)
    assert "n_routed_experts: expected more than n_group" in llama_cpp(
        config | {"n_routed_experts": 1}, shapes
    )


@pytest.mark.parametrize("kind", [*GROUPED, "calibrated", "low-rank"])
@pytest.mark.parametrize("loader", LOADERS)
def test_every_tensor_counts(results, kind, loader):
    config, shapes = results(kind)
    known = set(loader(config, shapes))
    for name, shape in shapes.items():
        others = {other: x for other, x in shapes.items() if other != name}
        for changed in (others, others | {f"{name}_": shape}, shapes | {name: (*shape[:-1], shape[-1] + 1)}):
            assert any(name in line for line in set(loader(config, changed)) - known), name
    assert set(loader(config, shapes | {"model.layers.0.self_attn.sinks": (4,)})) - known


@pytest.mark.parametrize("kind", [*GROUPED, "calibrated", "low-rank"])
@pytest.mark.parametrize("loader", LOADERS)
def test_every_field_counts(results, kind, loader):
    config, shapes = results(kind)
    fields = FIELDS if kind in GROUPED else LATENT_FIELDS
    fields += OWN_FIELDS.get(kind, ()) if loader is vllm else ()
    assert set(fields) <= config.keys()
    for field in fields:
        lacking = {name: x for name, x in config.items() if name != field}
        assert loader(lacking, shapes) == [f"{field}: missing"]
    known = set(loader(config, shapes))
    for field in (
        "num_key_value_heads",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_hidden_layers",
    ):
        if kind in LATENTS and field == "num_key_value_heads" and loader is vllm:
            continue  # which does not read it of a latent
        assert set(loader(config | {field: 2 * config[field]}, shapes)) - known, field
    assert loader(config | {"architectures": ["FooForCausalLM"]}, shapes)


@pytest.mark.parametrize("kind", ["llama", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3"])
def test_which_biases_vllm_knows(results, kind):
    """Of the four that transformers makes of attention_bias; Qwen 2 has three without being asked."""
    config, shapes = results(kind)
    known = {"gemma": "", "qwen2": "qkv", "qwen3": "qkv"}.get(kind, "qkvo")
    weights = {name: x for name, x in shapes.items() if "self_attn" in name and name.endswith("_proj.weight")}
    biased = shapes | {name.replace(".weight", ".bias"): x[:1] for name, x in weights.items()}
    wrong = vllm(config | {"attention_bias": True}, biased)
    assert all(line.endswith("bias: dropped in silence, or one too many") for line in wrong)
    assert len(wrong) == (4 - len(known)) * config["num_hidden_layers"]


MIXED = {"layer_types": ["full_attention", "sliding_attention"], "max_window_layers": 1}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("mistral", {"hidden_act": "gelu"}, "hidden_act: only silu, got gelu"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act: only silu, got gelu"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation: only gelu_pytorch_tanh, got gelu"),
        ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings: there is no head"),
        ("qwen2", MIXED, "layer_types: windows in some layers alone"),
        ("qwen3", MIXED, "layer_types: windows in some layers alone"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: expected those of"),
    ],
)
def test_what_vllm_refuses_of_a_family(results, kind, change, message):
    config, shapes = results(kind)
    assert any(line.startswith(message) for line in vllm(config | change, shapes))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("mistral", {"sliding_window": 64}, "sliding_window: passed over"),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, "sliding_window: passed over"),
        ("gemma2", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar: taken for 64, got 256"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types: every 6th layer is taken"),
    ],
)
def test_what_llama_cpp_misreads(results, kind, change, message):
    config, shapes = results(kind)
    assert [line[: len(message)] for line in llama_cpp(config | change, shapes)] == [message]


def test_neither_takes_a_head_dim_of_qwen2(tmp_path):
    config, shapes = facts(make(tmp_path, "qwen2", head_dim=128))
    for loader in LOADERS:
        assert any(
            "q_proj.weight: expected (256, 256), got (512, 256)" in line for line in loader(config, shapes)
        )
