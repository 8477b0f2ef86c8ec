"""Resumable training, with a teacher or on text only: interruptions do not change the final weights."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..convert.checkpoint.errors import VerificationError
from . import sparse
from .distillation import Speaker, differences, layerwise, text_bits
from .log import Log
from .pace import Pace
from .ranks import WorkerGroup, whole
from .recipe import Recipe
from .state import Curve, load_state, save_state


class TrainingRun(NamedTuple):
    """A training run: its state's file, its name, the ranks that take part, its log, and its pace."""

    state: Path
    label: str
    ranks: WorkerGroup
    log: Log | None = None
    bar: bool = True
    pace: Pace | None = None


def train(
    student: Speaker,
    teacher: Speaker | None,
    batches: Iterable[Tensor],
    recipe: Recipe,
    score: Callable[[], tuple[float, ...]],
    run: TrainingRun,
) -> Curve:
    """Train ``student`` in place, from a saved state if there is one; return its curve of (steps, *scores).

    ``batches`` yields one batch ``[batch, context + 1]`` per step, starting with the first step even if the
    run resumes, and must yield the same batches each time. Without a teacher, the student learns the text.
    All parameters that require gradients train. On one device, with the same torch and the same number of
    ranks, a resumed run ends with bitwise the same weights as an uninterrupted one.

    Raises:
        VerificationError: the loss is not finite.
        CheckpointError: the state belongs to another model.
    """
    optimizer = make_optimizer(student.model, recipe)
    curve = load_state(run.state, student.model, optimizer) if run.state.exists() else []
    done = curve[-1][0] if curve else 0
    if not curve:
        curve.append((0, *score()))
    if run.log is not None:
        run.log.begin(done)
    for step, tokens in enumerate(_bar(islice(batches, done, None), recipe, done, run), done):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        since = monotonic()
        losses = take_step(student, teacher, optimizer, tokens, recipe, step, run.ranks)
        if run.pace is not None:
            run.pace.add(recipe.batch * recipe.context, since)
        if not math.isfinite(losses["loss"]):
            raise VerificationError(
                f"loss: expected a number, got {losses['loss']} in step {step + 1}; lower the rate"
            )
        if run.log is not None:
            run.log.write(step + 1, losses | {"rate": recipe.rate_at(step)})
        if recipe.is_point(step + 1):
            curve.append((step + 1, *score()))
            if run.log is not None:
                run.log.score(*curve[-1])
            save_state(run.state, student.model, optimizer, curve, run.ranks)
    return curve


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW over all trainable parameters, with weight decay only on matrices."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [x for x in trained if x.ndim >= 2], "weight_decay": recipe.decay},
        {"params": [x for x in trained if x.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95), fused=True)


def take_step(
    student: Speaker,
    teacher: Speaker | None,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    recipe: Recipe,
    step: int,
    ranks: WorkerGroup,
) -> dict[str, float]:
    """Take one optimizer step; return its losses and its gradient norm by name. Steps count from 0."""
    optimizer.zero_grad()
    total: dict[str, Tensor] = {}
    for part in ranks.own(tokens).chunk(recipe.accumulate):
        with autocast(ranks.device, recipe):
            losses = _losses(student, teacher, part, recipe, step)
        (losses["loss"] / recipe.accumulate).backward()
        for name, loss in losses.items():
            total[name] = total.get(name, 0) + loss.detach().float() / recipe.accumulate
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = whole(nn.utils.clip_grad_norm_(trained, recipe.clip))
    optimizer.step()
    means = ranks.mean(torch.stack(list(total.values()))).tolist()
    return dict(zip(total, means, strict=True)) | {"gradient": float(norm)}


def autocast(device: torch.device, recipe: Recipe) -> torch.autocast:
    """Return the autocast context for the precision of the recipe."""
    # Index branches choose without gradients before they learn. Some versions of torch would go on with the
    # cached bf16 copies of their weights, which have no gradients then.
    cached = recipe.index_rate is None
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.half, cache_enabled=cached)


def held_out_means(
    measure: Callable[[Tensor], Tensor],
    windows: Tensor,
    recipe: Recipe,
    ranks: WorkerGroup,
    advance: Callable[[int], object] = lambda count: None,
) -> tuple[float, ...]:
    """Return the means over ``windows`` ``[n, t + 1]`` of what ``measure`` returns for some, ``[k, b]``.

    Each rank measures some windows. ``advance`` is called with the number of windows after each batch, over
    all ranks.
    """
    size = max(1, recipe.batch // (ranks.size * recipe.accumulate))
    missing = -len(windows) % ranks.size  # pad, because every rank must call the model equally often
    weights = torch.ones(len(windows) + missing)
    weights[len(windows) :] = 0
    padded, sums = torch.cat((windows, windows[:1].expand(missing, -1))), torch.zeros((), device=ranks.device)
    with torch.no_grad():
        for rows, counted in zip(ranks.own(padded).split(size), ranks.own(weights).split(size), strict=True):
            with autocast(ranks.device, recipe):
                found = measure(rows)
            sums = sums + (found * counted).sum(1)
            advance(len(rows) * ranks.size)
    return tuple(x * ranks.size / len(windows) for x in ranks.mean(sums).tolist())


def bits_of(model: Speaker, rows: Tensor) -> Tensor:
    """Return a model's mean bits per token on each of ``rows`` ``[b, t + 1]``, as ``[1, b]``."""
    return text_bits(model(rows[:, :-1]), rows).mean(1)[None]


def _losses(
    student: Speaker, teacher: Speaker | None, tokens: Tensor, recipe: Recipe, step: int
) -> dict[str, Tensor]:
    if teacher is None:
        text = text_bits(student(tokens[:, :-1]), tokens).mean()
        return {"loss": text, "text": text}
    if student.branches:
        return sparse.losses(student, teacher, tokens, recipe, step)
    if step < recipe.alone:
        attention = layerwise(student, teacher, tokens)
        return {"loss": attention, "attention": attention}
    found = differences(student, teacher, tokens)
    return {"loss": found.loss(recipe.progress(step), recipe.objective), **found._asdict()}


def _bar(batches: Iterator[Tensor], recipe: Recipe, done: int, run: TrainingRun) -> Iterator[Tensor]:
    from tqdm import tqdm

    return tqdm(
        batches,
        run.label,
        recipe.steps,
        initial=done,
        unit="step",
        mininterval=0.2 if sys.stderr.isatty() else 15,
        disable=not (run.bar and run.ranks.is_first),
    )
