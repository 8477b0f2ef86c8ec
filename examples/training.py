"""Train a Decoder, and measure how well it predicts held-out text."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from decoder import Decoder
from text import Corpus
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from variants import Preset

WARM_UP = 0.06  # the learning rate rises during this fraction of the steps
FINAL_RATE = 0.05  # the learning rate ends at this fraction of its peak
HELD_OUT_WINDOWS = 512


def train(model: Decoder, corpus: Corpus, preset: Preset, *, label: str, seed: int = 0) -> list[float]:
    """Train ``model`` in place for ``preset.steps`` batches; return the loss of each in bits per byte.

    The batches depend only on the seed, so every model sees the same text in the same order. On a GPU, matrix
    products run in bf16.
    """
    batches = corpus.batches(count=preset.steps, batch=preset.batch, context=preset.context, seed=seed)
    options = {"steps": preset.steps, "rate": preset.learning_rate, "label": label}
    losses = optimise(make_optimizer(model), lambda tokens, _: text_bits(model, tokens), batches, **options)
    return torch.stack(list(losses)).tolist()


def make_optimizer(model: Decoder) -> torch.optim.Optimizer:
    """Return an AdamW optimizer for all parameters, including those that are still frozen."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def optimise(
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Tensor, int], Tensor],
    batches: Iterable[Tensor],
    *,
    steps: int,
    rate: float,
    label: str,
    done: int = 0,
) -> Iterator[Tensor]:
    """Take one optimizer step per batch; after each, yield its loss as a detached scalar.

    ``loss_of`` gets a batch and the number of steps taken so far. If ``done`` of the ``steps`` steps were
    taken in an earlier run, ``batches`` must start after them. ``rate`` is the peak learning rate.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = parameters[0].device
    bar = tqdm(
        batches, label, steps, initial=done, unit="step", mininterval=0.2 if sys.stderr.isatty() else 15
    )
    for step, tokens in enumerate(bar, done):
        for group in optimizer.param_groups:
            group["lr"] = rate * _rate(step, steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(tokens.to(device), step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 10 == 0:
            bar.set_postfix_str(f"{loss.item():.2f} bits", refresh=False)
        yield loss.detach()


@torch.no_grad()
def held_out_bits(model: Decoder, corpus: Corpus, preset: Preset, *, limit: int = HELD_OUT_WINDOWS) -> float:
    """Return the bits per byte of held-out text, over at most ``limit`` windows of the preset's context."""
    windows = corpus.held_out_windows(preset.context, limit=limit).to(model.embed.weight.device)
    parts = windows.split(preset.batch)
    return (
        sum(text_bits(model, part).item() * len(part) for part in parts)
        / len(windows)
        / corpus.bytes_per_token
    )


def text_bits(model: Decoder, tokens: Tensor) -> Tensor:
    """Return the mean bits per token of predicting ``tokens`` ``[b, t]`` from the tokens before them.

    The first token of each sequence is not predicted.
    """
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / math.log(2)


def _rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, relative to the peak: linear warm-up, then cosine decay."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
