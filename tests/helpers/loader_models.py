"""Small random models, converted, as vLLM and llama.cpp get them; and what transformers says of the same
folder.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from family_models import telling
from loader_rules import Shapes
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from attnlib.checkpoint_files.folder import read_folder
from attnlib.convert.calibration import Calibration
from attnlib.convert.checkpoint import convert
from attnlib.convert.heads.converter import grouped
from attnlib.convert.latent.deepseek import converter

WORDS, WIDTH, HEADS, HEAD_DIM = 512, 256, 4, 64
SIZES = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 384, "num_hidden_layers": 3,
    "head_dim": HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "max_position_embeddings": 256, "pad_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 64}  # shorter than the text
SMALL_SCALE = {"query_pre_attn_scalar": HEAD_DIM}
WINDOWS = {
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "num_hidden_layers": 7,
}
# What is a kind's own, or there to show every part of it: windows, biases, soft caps.
OWN = {
    "mistral": {"sliding_window": None},
    "gemma2": WINDOW | SMALL_SCALE,
    "gemma3_text": WINDOW | SMALL_SCALE | WINDOWS,
}
GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3 |= {"original_max_position_embeddings": 64}
# A ramp from pair 2 of 64 to pair 34, which are pairs of every second too, or between two of these, from pair
# 1 to 26.
RAMP = {"rope_type": "yarn", "rope_theta": 1.2e3, "factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"rope_parameters": RAMP, "max_position_embeddings": 1024}
TURNS = {"beta_fast": 16.0, "beta_slow": 2.0}  # than YaRN's own, 32 and 1: from pair 8 to pair 28
TURNED = YARN | {"rope_parameters": RAMP | TURNS}
BETWEEN = YARN | {"rope_parameters": RAMP | {"rope_theta": 1e4}}
SCALED = {"linear": {"rope_parameters": LINEAR}, "llama3": {"rope_parameters": LLAMA3}, "yarn": YARN}
TOKENS = torch.randint(3, WORDS, (100,), generator=torch.Generator().manual_seed(1)).tolist()


def make(folder: Path, kind: str, **options: object) -> Path:
    """A model whose every parameter shows in what it says, with a word for each token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**SIZES | OWN.get(kind, {}) | options)
    ).float()
    telling(model).save_pretrained(folder)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    return folder


def fewer_heads(folder: Path, kind: str, **options: object) -> Path:
    """A model of this kind with half of its KV heads."""
    source, out = make(folder / "in", kind, **options), folder / "out"
    convert(source, out, grouped(_config(source), HEADS // 2), progress=False)
    return out


def latents(
    folder: Path, *, rank: int, norm: str = "calibrated", q_rank: int | None = None, **options: object
) -> Path:
    """A Llama as a DeepSeek-V3."""
    source, out = make(folder / "in", "llama", **options), folder / "out"
    text = Calibration.of([torch.randn(2, 400, WIDTH) + 1])
    made = converter(
        _config(source), rank, rope_dim=64, norm=norm, q_rank=q_rank, calibrations=lambda _: text
    )
    convert(source, out, made, progress=False)
    return out


def facts(folder: Path) -> tuple[dict, Shapes]:
    """A folder's config.json, and the shapes of its tensors, as rules want them."""
    checkpoint = read_folder(folder)
    return checkpoint.config, {name: stored.entry.shape for name, stored in checkpoint.tensors.items()}


@torch.no_grad()
def said(
    folder: Path, tokens: list[int], *, change: Callable[[nn.Module], object] | None = None
) -> tuple[Tensor, float]:
    """Logits of transformers in fp64, and how far fp32 is from them, after a ``change`` of the model.

    Eager attention: SDPA's passes over Gemma 2's soft cap of scores (transformers 5.23).
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    expected = model(torch.tensor([tokens])).logits[0]
    if change is not None:
        change(model)
    return expected, float((model.float()(torch.tensor([tokens])).logits[0] - expected).abs().max())


class TableGelu(nn.Module):
    """GELU by llama.cpp's table (ggml/src/ggml-cpu/vec.h), whose arguments and values are fp16."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x.half(), approximate="tanh").to(x)


def tabulate(model: nn.Module) -> None:
    """Give a Gemma this GELU."""
    for module in model.modules():
        if hasattr(module, "act_fn") and model.config.model_type.startswith("gemma"):
            module.act_fn = TableGelu()


def _config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
