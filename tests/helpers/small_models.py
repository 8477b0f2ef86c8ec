"""A small model of each variant, with weights that make its greedy text wander."""

import torch
import variants
from torch import nn
from variants import Preset

SMALL = Preset(
    hidden_size=32,
    layers=2,
    heads=4,
    head_dim=8,
    kv_heads=2,
    kv_lora_rank=16,
    rope_dim=4,
    context=32,
    batch=2,
    steps=2,
    learning_rate=1e-2,
)


def make(variant: str) -> nn.Module:
    """A random model of the variant."""
    model = variants.make_model(variant, SMALL)
    nn.init.normal_(model.embed.weight)
    model.lm_head.weight = nn.Parameter(
        torch.randn_like(model.lm_head.weight)
    )  # untied, or it repeats its input
    return model.eval()
