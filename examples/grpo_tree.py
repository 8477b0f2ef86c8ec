"""Train a small language model by GRPO, on trees that hold each prompt once and on copies of the prompts.

Each step samples several answers to each prompt, and rewards lower-case letters (GRPO: Shao et al., 2024,
arXiv 2402.03300). One model learns from trees: tokens that answers share are computed once. Another one,
which begins with the same weights, learns from the same answers with a copy of the prompt before each. The
program fails if their losses differ by more than rounding. It prints the tokens, memory and time that trees
save, and writes ``grpo_tree.png``.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import torch
from decoder import Decoder
from decoding import paged_cache, prefill, stream
from text import Corpus, load
from torch import Tensor
from tqdm import tqdm
from training import make_optimizer
from variants import PRESETS, VARIANTS, make_model

from attnlib import masks, packing

ROUNDING = 1e-3  # by how much the losses of the two models may differ


class Batch(NamedTuple):
    """Prompts with answers: tokens ``[n, prompt + answer]``, and the advantage of each answer, ``[n]``."""

    tokens: Tensor
    advantages: Tensor
    reward: float


class Cost(NamedTuple):
    """The cost of a step: rows of the model's input, bytes kept for the backward, and seconds."""

    tokens: int
    kept: int
    seconds: float


class Run(NamedTuple):
    """The losses of a model, one a step, and the cost of each step."""

    losses: list[float]
    costs: list[Cost]

    def median(self) -> Cost:
        """Return the median of each cost over the steps."""
        return Cost(*(sorted(values)[len(values) // 2] for values in zip(*self.costs, strict=True)))


def lower_case(answers: Tensor) -> Tensor:
    """Return the reward of answers ``[n, t]``: the fraction of their bytes that are lower-case letters."""
    return ((answers >= ord("a")) & (answers <= ord("z"))).float().mean(-1)


def sample(model: Decoder, prompts: Tensor, options: argparse.Namespace, generator: torch.Generator) -> Batch:
    """Sample ``options.answers`` answers to each of ``prompts`` ``[n, t]`` from forks in one paged cache."""
    answers, length = options.answers, prompts.shape[1] + options.new_tokens
    cache = paged_cache(model, sequences=len(prompts) * answers, length=length)
    first, logits = prefill(model, cache, prompts)
    handles = [x for handle in first for x in (handle, *cache.fork(handle, answers - 1))]

    def choose(logits: Tensor) -> Tensor:
        return torch.multinomial(logits.float().softmax(-1).cpu(), 1, generator=generator)[:, 0].to(
            logits.device
        )

    logits = logits.repeat_interleave(answers, 0)
    steps = stream(model, cache, handles, logits, choose=choose, steps=options.new_tokens)
    found = torch.stack(list(steps), 1)
    rewards = lower_case(found).view(-1, answers)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    tokens = torch.cat((prompts.repeat_interleave(answers, 0), found), 1)
    return Batch(tokens, advantages.flatten(), rewards.mean().item())


def log_probs_of_tree(model: Decoder, tokens: Tensor, prompt: int) -> tuple[Tensor, int]:
    """Return the log-probability of each token after the prompt, ``[n, answer]``, and the rows computed."""
    tree = packing.tree(list(tokens))
    mask = masks.until(tree.ends[None], tree.positions[None])
    logits = model(tree.tokens[None], mask=mask)[0]
    rows = torch.stack(tree.rows)[:, prompt - 1 : -1]  # the rows that predict the answers
    return chosen(logits[rows], tokens[:, prompt:]), len(tree.tokens)


def log_probs_of_copies(model: Decoder, tokens: Tensor, prompt: int) -> tuple[Tensor, int]:
    """Return what :func:`log_probs_of_tree` does, computed from a copy of the prompt for each answer."""
    logits = model(tokens[:, :-1])
    return chosen(logits[:, prompt - 1 :], tokens[:, prompt:]), tokens[:, :-1].numel()


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability that logits ``[n, t, vocab]`` give to tokens ``[n, t]``."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def learn(
    model: Decoder, optimizer: torch.optim.Optimizer, batch: Batch, prompt: int, log_probs: Callable
) -> tuple[float, Cost]:
    """Take one step of GRPO; return its loss and its cost.

    The model has just sampled the answers, so the ratio to the old probabilities is 1 and needs no clipping.
    Its gradient is that of the log-probability.
    """
    start, weights, kept = time.perf_counter(), {x.data_ptr() for x in model.parameters()}, {}

    def keep(x: Tensor) -> Tensor:
        if (storage := x.untyped_storage()).data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found, rows = log_probs(model, batch.tokens, prompt)
        loss = -(batch.advantages[:, None] * found).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), Cost(rows, sum(kept.values()), time.perf_counter() - start)


def train(model: Decoder, corpus: Corpus, options: argparse.Namespace) -> tuple[Run, Run, list[float]]:
    """Train ``model`` on trees and a copy of it on copies; return both runs and the mean rewards.

    Raises:
        SystemExit: the losses differ by more than rounding.
    """
    models, ways = (model, deepcopy(model)), (log_probs_of_tree, log_probs_of_copies)
    optimizers = [make_optimizer(x) for x in models]
    runs, rewards = (Run([], []), Run([], [])), []
    generator = torch.Generator().manual_seed(options.seed)
    size = {"batch": options.prompts, "context": options.prompt_tokens - 1}
    batches = corpus.batches(count=options.steps, seed=options.seed, **size)
    for prompts in tqdm(batches, "training", options.steps, unit="step"):
        batch = sample(model, prompts.to(options.device), options, generator)
        rewards.append(batch.reward)
        for run, learner, optimizer, way in zip(runs, models, optimizers, ways, strict=True):
            loss, cost = learn(learner, optimizer, batch, options.prompt_tokens, way)
            run.losses.append(loss)
            run.costs.append(cost)
        trees, copies = (run.losses[-1] for run in runs)
        if not abs(trees - copies) <= ROUNDING:
            raise SystemExit(
                f"step {len(rewards)}: expected equal losses, got {trees:.6f} from trees and {copies:.6f} "
                f"from copies; rounding explains at most {ROUNDING}"
            )
    return *runs, rewards


def draw(trees: Run, copies: Run, rewards: Sequence[float], picture: Path) -> None:
    """Write the picture: losses of both models, rewards, and what a tree costs relative to copies."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    losses, reward, costs = figure.subplots(1, 3)
    losses.plot(copies.losses, color="0.6", linewidth=5, label="copies")
    losses.plot(trees.losses, color="#1b6ca8", linewidth=1.5, label="trees")
    losses.set(title="The same losses", xlabel="step", ylabel="loss of GRPO")
    losses.legend(frameon=False)
    reward.plot(rewards, color="#1b6ca8")
    reward.set(title="Rewards", xlabel="step", ylabel="lower-case letters in the answers", ylim=(0, 1))
    names, (tree, copy) = ("tokens", "memory", "time"), (run.median() for run in (trees, copies))
    shares = [100 * a / b for a, b in zip(tree, copy, strict=True)]
    bars = costs.bar(names, shares, color="#1b6ca8")
    costs.bar_label(bars, [f"{share:.0f} %" for share in shares])
    costs.axhline(100, color="0.6", linewidth=2)
    costs.set(title="A step on trees", ylabel="percent of a step on copies", ylim=(0, 112))
    for axes in (losses, reward, costs):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    counts = {
        "steps": (40, "training steps"),
        "prompts": (2, "prompts in a step"),
        "answers": (8, "answers to each prompt"),
        "prompt-tokens": (256, "tokens of a prompt"),
        "new-tokens": (32, "tokens of an answer"),
        "seed": (0, "seed of weights, prompts and answers"),
    }
    for name, (default, meaning) in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    parser.add_argument("--variant", choices=VARIANTS, default="gqa", help="attention (default: gqa)")
    parser.add_argument("--device", help="where to run (default: a GPU if there is one)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default: out)")
    options = parser.parse_args(arguments)
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for name, least in (
        ("steps", 1),
        ("prompts", 1),
        ("answers", 2),
        ("prompt-tokens", 2),
        ("new-tokens", 1),
    ):
        if getattr(options, name.replace("-", "_")) < least:
            parser.error(f"--{name}: expected at least {least}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example from the command line.

    Raises:
        SystemExit: the losses of trees and copies differ.
    """
    options = parse(arguments)
    torch.manual_seed(options.seed)
    model = make_model(options.variant, PRESETS["tiny"]).to(options.device)
    trees, copies, rewards = train(model, load(), options)
    print(f"{'each step, median':20} {'trees':>12} {'copies':>12}")
    tree, copy = trees.median(), copies.median()
    print(f"{'tokens':20} {tree.tokens:12,} {copy.tokens:12,}")
    print(f"{'kept for backward':20} {tree.kept / 2**20:8.1f} MiB {copy.kept / 2**20:8.1f} MiB")
    print(f"{'time':20} {tree.seconds * 1e3:9.0f} ms {copy.seconds * 1e3:9.0f} ms")
    apart = max(abs(a - b) for a, b in zip(trees.losses, copies.losses, strict=True))
    print(
        f"\nthe losses differ by at most {apart:.1e}; rewards rose from {rewards[0]:.2f} to {rewards[-1]:.2f}"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "grpo_tree.png"
    draw(trees, copies, rewards, picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
