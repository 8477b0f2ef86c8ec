"""The language models that the examples compare: four attention variants in several sizes."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from decoder import Decoder
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from text import VOCAB_SIZE
from torch import nn

from attnlib import (
    CAUSAL,
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    Rope,
)

VARIANTS = ("mha", "gqa", "mqa", "mla")


class Preset(NamedTuple):
    """Sizes of a model and of its training."""

    hidden_size: int
    layers: int
    heads: int
    head_dim: int
    kv_heads: int  # GQA only
    kv_lora_rank: int  # MLA only: size of the latent; values and unrotated keys have head_dim channels
    rope_dim: int  # MLA only: number of rotary channels; the other variants rotate whole heads
    context: int
    batch: int
    steps: int
    learning_rate: float


#                        hidden layers heads dim kv rank rope context batch steps rate
PRESETS = {
    "tiny": Preset(128, 3, 4, 32, 2, 64, 16, 128, 4, 800, 2e-3),
    "small": Preset(512, 8, 8, 64, 2, 256, 32, 512, 32, 2_000, 1e-3),
    "base": Preset(1024, 16, 16, 64, 4, 512, 64, 1024, 32, 10_000, 6e-4),
}


def make_model(variant: str, preset: Preset) -> Decoder:
    """Make a freshly initialised model of the variant, in fp32 on the CPU.

    Raises:
        ValueError: the variant is unknown.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant: expected one of {VARIANTS}, got {variant!r}")
    return Decoder(
        VOCAB_SIZE, preset.hidden_size, preset.layers, attention=lambda i: _attention(variant, preset)
    )


def _attention(variant: str, preset: Preset) -> nn.Module:
    hidden_size, heads, dim = preset.hidden_size, preset.heads, preset.head_dim
    if variant == "mla":
        return MultiHeadLatentAttention(
            hidden_size,
            heads,
            mask=CAUSAL,
            q_lora_rank=None,
            kv_lora_rank=preset.kv_lora_rank,
            qk_nope_head_dim=dim,
            qk_rope_head_dim=preset.rope_dim,
            v_head_dim=dim,
            rope=Rope(preset.rope_dim, interleaved=True),
        )
    options = {"mask": CAUSAL, "head_dim": dim, "rope": Rope(dim)}
    if variant == "gqa":
        return GroupedQueryAttention(hidden_size, heads, num_kv_heads=preset.kv_heads, **options)
    return {"mha": MultiHeadAttention, "mqa": MultiQueryAttention}[variant](hidden_size, heads, **options)


def save(model: Decoder, variant: str, preset: Preset, path: Path) -> None:
    """Save the weights as safetensors, with the metadata from which :func:`load` rebuilds the model."""
    # Leave out lm_head.weight, because it is tied to the embedding.
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, path, metadata={"variant": variant, "preset": json.dumps(preset._asdict())})


def load(path: Path, *, device: torch.device | str = "cpu") -> tuple[Decoder, str, Preset]:
    """Load a model that :func:`save` wrote; return it with its variant and preset.

    Raises:
        ValueError: the file was not written by :func:`save`.
    """
    with safe_open(path, framework="pt") as file:
        about = file.metadata() or {}
    if "variant" not in about or "preset" not in about:
        raise ValueError(f"{path}: expected weights that compose_lm.py saved, got metadata {sorted(about)}")
    preset = Preset(**json.loads(about["preset"]))
    model = make_model(about["variant"], preset)
    weights = load_file(path)
    model.load_state_dict({**weights, "lm_head.weight": weights["embed.weight"]})
    return model.to(device).eval(), about["variant"], preset
