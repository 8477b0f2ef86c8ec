"""Training a Decoder on bytes, and how well it predicts text that it has not seen."""

import math
import sys

import torch
from decoder import Decoder
from text import Corpus
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from variants import Preset

WARM_UP = 0.06  # of all steps
FINAL_RATE = 0.05  # of the peak rate
HELD_OUT_WINDOWS = 512


def train(model: Decoder, corpus: Corpus, preset: Preset, *, label: str, seed: int = 0) -> list[float]:
    """Train ``model`` in place for ``preset.steps`` batches; returns the loss of each in bits per byte.

    The batches depend on the seed alone, so that every model sees the same text in the same order. On a GPU the matrix
    products run in bf16.
    """
    device = model.embed.weight.device
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = corpus.batches(count=preset.steps, batch=preset.batch, context=preset.context, seed=seed)
    losses = []
    bar = tqdm(batches, label, preset.steps, unit="step", mininterval=0.2 if sys.stderr.isatty() else 15)
    for step, tokens in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = preset.learning_rate * _rate(step, preset.steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = _bits(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % 10 == 0:
            bar.set_postfix_str(f"{loss.item():.2f} bits/byte", refresh=False)
    return torch.stack(losses).tolist()


@torch.no_grad()
def held_out_bits(model: Decoder, corpus: Corpus, preset: Preset) -> float:
    """Bits per byte that the model needs for held-out text, over windows of its context."""
    windows = corpus.held_out_windows(preset.context, limit=HELD_OUT_WINDOWS).to(model.embed.weight.device)
    parts = windows.split(preset.batch)
    return sum(_bits(model, part).item() * len(part) for part in parts) / len(windows)


def _bits(model: Decoder, tokens: Tensor) -> Tensor:
    """Mean bits per byte of predicting each of ``tokens`` ``[b, t]`` from those before it, the first excepted."""
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / math.log(2)


def _rate(step: int, steps: int) -> float:
    """The share of the peak learning rate: a linear warm-up, then a cosine down to FINAL_RATE."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
