"""Results as vLLM and llama.cpp read them, by the rules of their sources; tensors and fields are all needed."""

import json
from functools import cache

import pytest
import torch
from family_models import HEADS, KV_HEADS, make
from family_models import SIZES as SMALL
from loader_rules import FIELDS, LATENT_FIELDS, MLA_HEAD_SIZES, OWN_FIELDS, YARN_FIELDS, llama_cpp, vllm
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from attnlib.convert.calibration import Calibration
from attnlib.convert.checkpoint import convert
from attnlib.convert.checkpoint.folder import read_folder
from attnlib.convert.heads.converter import grouped
from attnlib.convert.latent.deepseek import converter

GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
LOADERS = (vllm, llama_cpp)
LOW, YARN, BETWEEN = "calibrated, low-rank", "calibrated, yarn", "calibrated, yarn between pairs"
TURNS = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
TURNS |= {"beta_fast": 18.0, "beta_slow": 1.5}  # from pair 20 to pair 38 of 64
LATENTS = {"exact": ("exact", None, {}), "calibrated": ("calibrated", None, {}), LOW: ("calibrated", 96, {})} | {
    YARN: ("calibrated", 96, {"rope_parameters": TURNS, "max_position_embeddings": 8192}),
    BETWEEN: ("calibrated", 96, {"rope_parameters": TURNS | {"beta_slow": 1.7}, "max_position_embeddings": 8192}),
}
SIZES = {"vocab_size": 61, "hidden_size": 256, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """config.json and the shapes of what comes of each kind: fewer KV heads, or a latent by its norm."""

    @cache
    def made(kind):
        source, out = (tmp_path_factory.mktemp(kind) / name for name in ("in", "out"))
        if kind in GROUPED:
            # vLLM knows no other heads of Qwen 2 than the width over their number.
            model = Qwen2ForCausalLM(Qwen2Config(**SMALL)) if kind == "qwen2" else make(kind)
            model.save_pretrained(source)
            made = grouped(json.loads((source / "config.json").read_text()), KV_HEADS // 2)
        else:
            torch.manual_seed(0)
            norm, q_rank, options = LATENTS[kind]
            LlamaForCausalLM(LlamaConfig(**SIZES | options)).save_pretrained(source)
            text = Calibration.of([torch.randn(2, 400, SIZES["hidden_size"]) + 1])
            config = json.loads((source / "config.json").read_text())
            made = converter(config, 320 - 64, rope_dim=64, norm=norm, q_rank=q_rank, calibrations=lambda _: text)
        convert(source, out, made, progress=False)
        checkpoint = read_folder(out)
        return checkpoint.config, {name: stored.entry.shape for name, stored in checkpoint.tensors.items()}

    return made


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("loader", LOADERS)
def test_fewer_heads_are_read_by_both(results, kind, loader):
    config, shapes = results(kind)
    assert config["num_key_value_heads"] == KV_HEADS // 2
    assert loader(config, shapes) == []


def test_a_calibrated_norm_is_read_by_vllm(results):
    config, shapes = results("calibrated")
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == MLA_HEAD_SIZES[0]
    assert not config["attention_bias"]
    assert vllm(config, shapes) == []


@pytest.mark.parametrize("loader", LOADERS)
def test_yarn_is_read_by_both_from_whole_pairs(results, loader):
    config, shapes = results(YARN)
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert loader(config, shapes) == []
    assert loader(*results(BETWEEN)) == ["truncate: not read: the ramp's ends are rounded to whole pairs"]
    for field in YARN_FIELDS:
        rope = {name: x for name, x in config["rope_parameters"].items() if name != field}
        assert loader(config | {"rope_parameters": rope}, shapes) == [f"{field}: missing"]
    apart = config["rope_parameters"] | {"mscale": 0.5}
    assert loader(config | {"rope_parameters": apart}, shapes)[0].startswith("mscale: expected mscale_all_dim")


@pytest.mark.parametrize("loader", LOADERS)
def test_queries_of_low_rank_are_read_by_both(results, loader):
    """Whatever the number of layers."""
    config, shapes = results(LOW)
    assert config["q_lora_rank"] == 96
    assert loader(config, shapes) == []


def test_what_the_loaders_have_against_latents(results):
    """llama.cpp wants low-rank queries of most models, and neither has biases, which an exact norm is made of."""
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
    assert llama_cpp(scaled | {"q_lora_rank": 1}, shapes)[-1] == "rope_type: passed over: llama3"


@pytest.mark.parametrize("kind", [*GROUPED, "calibrated", LOW])
@pytest.mark.parametrize("loader", LOADERS)
def test_every_tensor_counts(results, kind, loader):
    config, shapes = results(kind)
    known = set(loader(config, shapes))
    for name, shape in shapes.items():
        others = {other: x for other, x in shapes.items() if other != name}
        for changed in (others, others | {f"{name}_": shape}, shapes | {name: (*shape[:-1], shape[-1] + 1)}):
            assert any(name in line for line in set(loader(config, changed)) - known), name
    assert set(loader(config, shapes | {"model.layers.0.self_attn.sinks": (4,)})) - known


@pytest.mark.parametrize("kind", [*GROUPED, "calibrated", LOW])
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
    for field in ("num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"):
        if kind in ("calibrated", LOW) and field == "num_key_value_heads" and loader is vllm:
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


def test_vllm_takes_no_head_dim_of_qwen2(tmp_path):
    make("qwen2").save_pretrained(tmp_path)
    checkpoint = read_folder(tmp_path)
    shapes = {name: stored.entry.shape for name, stored in checkpoint.tensors.items()}
    assert checkpoint.config["head_dim"] == 2 * SMALL["hidden_size"] // HEADS
    assert llama_cpp(checkpoint.config, shapes) == []
    assert any("q_proj.weight: expected (32, 32), got (64, 32)" in line for line in vllm(checkpoint.config, shapes))
