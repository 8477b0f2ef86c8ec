"""Results as llama.cpp converts, loads and runs them, and the rules of `loader_rules.py` held against that.

It is run where llama-cpp-python is installed, and LLAMA_CPP names the sources of llama.cpp, whose converter
is in no package; those of the same release are in its source distribution:

    pip install llama-cpp-python sentencepiece
    pip download --no-deps --no-binary :all: llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    LLAMA_CPP=$(echo llama_cpp_python-*/vendor/llama.cpp) python -m pytest tests/convert/test_llama_cpp.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loader_models import (
    BETWEEN,
    GROUPED,
    HEADS,
    RAMP,
    SCALED,
    TOKENS,
    TURNED,
    TURNS,
    WINDOW,
    YARN,
    facts,
    fewer_heads,
    latents,
    said,
    tabulate,
)
from loader_rules import llama_cpp
from safetensors.torch import load_file

pytest.importorskip("llama_cpp")
SOURCES = os.environ.get("LLAMA_CPP")
if SOURCES is None:
    pytest.skip("LLAMA_CPP: expected the sources of llama.cpp", allow_module_level=True)
HERE = Path(__file__).parent
DEEP = {"rank": 192, "num_hidden_layers": 26}
LOW = {"rank": 192, "q_rank": 96}
ANY_DEPTH = {"kv_overrides": {"deepseek2.attention.q_lora_rank": 0}}


@pytest.fixture
def says(tmp_path):
    """What llama.cpp says of a folder, or how it refuses it."""

    def run(folder, **options):
        gguf, out = tmp_path / "it.gguf", tmp_path / "logits.safetensors"
        _run("gguf_of.py", SOURCES, folder, gguf)
        log = _run("llama_cpp_says.py", gguf, out, json.dumps(options), *TOKENS)
        return load_file(out)["logits"] if out.exists() else log

    return run


def _run(script, *arguments):
    ran = subprocess.run(
        [sys.executable, HERE / script, *map(str, arguments)], capture_output=True, text=True
    )
    assert ran.returncode == 0 or script != "gguf_of.py", ran.stderr
    return ran.stderr


def agrees(logits, folder):
    """Whether an error is at most twice that of transformers with the same arithmetic."""
    expected, error = said(folder, TOKENS, change=tabulate)
    return float((logits - expected).abs().max()) <= 2 * error


@pytest.mark.parametrize("kind", GROUPED)
def test_fewer_heads_say_what_they_say_to_transformers(tmp_path, says, kind):
    folder = fewer_heads(tmp_path, kind)
    assert facts(folder)[0]["num_key_value_heads"] == HEADS // 2
    assert llama_cpp(*facts(folder)) == []
    assert agrees(says(folder), folder)


@pytest.mark.parametrize("depth", [26, 27])
def test_latents_of_two_depths_do_too(tmp_path, says, depth):
    folder = latents(tmp_path, **DEEP | {"num_hidden_layers": depth})
    assert llama_cpp(*facts(folder)) == []
    assert agrees(says(folder), folder)


def test_latents_of_any_depth_want_an_option(tmp_path, says):
    folder = latents(tmp_path, rank=192)
    assert llama_cpp(*facts(folder)) == ["q_lora_rank: required"]
    assert "key not found in model: deepseek2.attention.q_lora_rank" in says(folder)
    assert agrees(says(folder, **ANY_DEPTH), folder)


def test_queries_of_low_rank_want_none(tmp_path, says):
    folder = latents(tmp_path, **LOW)
    assert llama_cpp(*facts(folder)) == []
    assert agrees(says(folder), folder)


@pytest.mark.parametrize(("head_dim", "yarn"), [(64, BETWEEN), (128, YARN)])
def test_yarn_of_latents_is_read_from_whole_pairs(tmp_path, says, head_dim, yarn):
    """As it was, or of every second pair."""
    folder = latents(tmp_path, **LOW, head_dim=head_dim, **yarn)
    assert llama_cpp(*facts(folder)) == []
    assert agrees(says(folder), folder)


def test_other_turns_of_yarn_want_options(tmp_path, says):
    folder = latents(tmp_path, **LOW, **TURNED)
    assert [line.split(":")[0] for line in llama_cpp(*facts(folder))] == [*TURNS]
    assert not agrees(says(folder), folder)
    assert agrees(says(folder, **{f"yarn_{name}": turns for name, turns in TURNS.items()}), folder)


def test_yarn_between_pairs_is_rounded_in_silence(tmp_path, says):
    """Even with its turns as options."""
    folder = latents(tmp_path, **LOW, head_dim=128, **BETWEEN)
    config, shapes = facts(folder)
    assert "truncate" in [line.split(":")[0] for line in llama_cpp(config, shapes)]
    told = {f"yarn_{name}": config["rope_parameters"][name] for name in TURNS}
    assert not agrees(says(folder, **told), folder)


def test_biases_of_latents_are_not_loaded(tmp_path, says):
    folder = latents(tmp_path, norm="exact", **DEEP)
    assert any("bias" in line for line in llama_cpp(*facts(folder)))
    assert "wrong number of tensors" in says(folder)


@pytest.mark.parametrize("kind", ["qwen3", "gemma", "gemma2", "gemma3_text"])
def test_biases_of_some_kinds_are_not_loaded(tmp_path, says, kind):
    folder = fewer_heads(tmp_path, kind, attention_bias=True)
    assert any("bias" in line for line in llama_cpp(*facts(folder)))
    assert "wrong number of tensors" in says(folder)


def test_heads_of_another_size_of_qwen2_are_not_loaded(tmp_path, says):
    folder = fewer_heads(tmp_path, "qwen2", head_dim=128)
    assert any("expected (256, 256)" in line for line in llama_cpp(*facts(folder)))
    assert "wrong shape" in says(folder)


def test_as_many_groups_as_experts_abort_it(tmp_path, says):
    folder = latents(tmp_path, **DEEP)
    config = facts(folder)[0] | {"n_routed_experts": 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert llama_cpp(*facts(folder)) == ["n_routed_experts: expected more than n_group"]
    assert "n_expert_groups < hparams.n_expert" in says(folder)


@pytest.mark.parametrize(
    ("kind", "options", "rule"),
    [
        ("latents", SCALED["linear"], "rope_type"),
        ("latents", SCALED["llama3"], "rope_type"),
        ("llama", YARN | {"rope_parameters": RAMP | {"beta_slow": 2.0}}, "beta_slow"),
        ("llama", YARN | {"rope_parameters": RAMP | {"attention_factor": 1.0}}, "attention_factor"),
        ("mistral", WINDOW, "sliding_window"),
        ("gemma2", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        ("gemma3_text", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        ("gemma3_text", {"layer_types": ["full_attention"] + 6 * ["sliding_attention"]}, "layer_types"),
    ],
)
def test_what_is_misread_in_silence(tmp_path, says, kind, options, rule):
    """Of any model of the kind, converted or not."""
    folder = (
        latents(tmp_path, **DEEP | options) if kind == "latents" else fewer_heads(tmp_path, kind, **options)
    )
    assert [line.split(":")[0] for line in llama_cpp(*facts(folder))] == [rule]
    assert not agrees(says(folder), folder)


@pytest.mark.parametrize("name", SCALED)
def test_fewer_heads_under_scaled_ropes_are_read(tmp_path, says, name):
    folder = fewer_heads(tmp_path, "llama", **SCALED[name])
    assert llama_cpp(*facts(folder)) == []
    assert agrees(says(folder), folder)
