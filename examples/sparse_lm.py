"""Train a small dense language model, add index branches, warm them up, train sparse, and decode over pages.

The sparse model begins with the dense weights, and its index branches choose a quarter of the keys for each
query. For comparison, the dense model trains on for as many steps, with all keys, and with a window and the
first keys. Prints a table, and writes ``sparse_lm.png``. Fails if the logits over a paged cache differ from
those of the whole text.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from decoder import Decoder
from decoding import greedy, paged_cache, prefill
from text import VOCAB_SIZE, Corpus, load
from torch import Tensor, nn
from torch.nn import functional as F
from training import make_optimizer, optimise
from variants import PRESETS, Preset

from attnlib import CAUSAL, GroupedQueryAttention, Indexer, Rope
from attnlib.indexing import Chosen

ALL = Chosen(None)
ROUNDING = 1e-4  # by how much logits over pages may differ, relative to the largest
POINTS = 8  # points of each curve in each stage

Choose = Callable[[nn.Module, Tensor], Chosen]  # the keys of a layer for its input


class Measured(NamedTuple):
    """Held-out loss in bits per byte, and the mass recall of the chosen keys."""

    loss: float
    recall: float


def make_model(preset: Preset, select: Indexer | None = None) -> Decoder:
    """Make a model of grouped heads, with index branches if ``select`` describes them."""
    hidden, dim = preset.hidden_size, preset.head_dim
    options = {"num_kv_heads": preset.kv_heads, "head_dim": dim, "mask": CAUSAL, "rope": Rope(dim)}

    def attention(_: int) -> nn.Module:
        return GroupedQueryAttention(hidden, preset.heads, select=select, **options)

    return Decoder(VOCAB_SIZE, hidden, preset.layers, attention=attention)


def dense(layer: nn.Module, x: Tensor) -> Chosen:
    """Choose all keys."""
    return ALL


def by_index(layer: nn.Module, x: Tensor) -> Chosen:
    """Choose by the index branch of the layer."""
    return layer.choose(x)


def window(top: int) -> Choose:
    """Return a choice of ``top`` keys by position: a quarter are the first keys, the others the last ones."""
    first = max(1, top // 4)

    def choose(layer: nn.Module, x: Tensor) -> Chosen:
        queries = torch.arange(x.shape[1], device=x.device)[:, None]
        last = queries - torch.arange(top - first, device=x.device)
        begin = torch.arange(first, device=x.device).expand(len(queries), -1)
        last, begin = last.where(last >= first, -1), begin.where(begin <= queries, -1)
        return Chosen(torch.cat((begin, last), 1).int().expand(len(x), -1, -1)[:, :, None])

    return choose


def run(model: Decoder, tokens: Tensor, choose: Choose) -> tuple[Tensor, list[tuple]]:
    """Return logits ``[b, t, vocab]``; and each layer with its input and its choice."""
    x, calls = model.embed(tokens), []
    for block in model.blocks:
        layer, normed = block.attention, block.attention_norm(x)
        chosen = choose(layer, normed)
        calls.append((layer, normed, chosen))
        x = x + layer(normed, selected=chosen)
        x = x + block.mlp(block.mlp_norm(x))
    return model.lm_head(model.norm(x)), calls


def bits(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean bits per byte of predicting tokens ``[b, t + 1]`` by logits ``[b, t, vocab]``."""
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / math.log(2)


def loss_of(model: Decoder, choose: Choose) -> Callable[[Tensor, int], Tensor]:
    """Return the function that computes the language loss, and adds the losses of index branches."""

    def loss(tokens: Tensor, _: int) -> Tensor:
        logits, calls = run(model, tokens[:, :-1], choose)
        followed = [call for call in calls if call[0].indexer is not None]
        return bits(logits, tokens) + sum(layer.index_loss(x, selected=keys) for layer, x, keys in followed)

    return loss


@torch.no_grad()
def measure(model: Decoder, windows: Tensor, choose: Choose, top: int) -> Measured:
    """Measure a model on held-out ``windows`` ``[n, t + 1]``.

    The mass recall is the share of the dense attention's probability that falls on the chosen keys. It is the
    mean over layers and over the queries that see more than ``top`` keys; dense attention runs on the input
    that the layer has in this model.
    """
    losses, recalls = [], []
    for tokens in windows.split(4):
        logits, calls = run(model, tokens[:, :-1], choose)
        losses.append(bits(logits, tokens) * len(tokens))
        for layer, x, chosen in calls:
            if chosen.indices is not None:
                at = chosen.indices[:, :, 0]
                mass = layer.weights(x, selected=ALL, over="heads", at=at).sum(-1)
                recalls.append(mass[:, top:].mean(1))
    recall = torch.cat(recalls).mean().item() if recalls else 1.0
    return Measured(sum(losses).item() / len(windows), recall)


def learn(
    label: str,
    trained: nn.Module,
    loss: Callable[[Tensor, int], Tensor],
    corpus: Corpus,
    options: argparse.Namespace,
    *,
    steps: int,
    rate: float,
    seed: int,
    measured: Callable[[], Measured] | None = None,
) -> list[tuple[int, Measured]]:
    """Train the parameters of ``trained``; return measurements after some of the steps."""
    batches = corpus.batches(count=steps, batch=options.batch, context=options.length, seed=seed)
    points, done = [], optimise(make_optimizer(trained), loss, batches, steps=steps, rate=rate, label=label)
    for step, _ in enumerate(done, 1):
        if measured and step * POINTS // steps > (step - 1) * POINTS // steps:
            points.append((step, measured()))
    return points


@torch.no_grad()
def decode(model: Decoder, text: Tensor, prompt: int, steps: int) -> tuple[Tensor, float]:
    """Continue the first ``prompt`` tokens of ``text`` ``[t]`` over pages, and compare with whole forwards.

    Return all tokens, and the largest difference of logits, relative to the largest logit.
    """
    tokens, cache, apart = text[:prompt], paged_cache(model, sequences=1, length=prompt + steps), 0.0
    [handle], logits = prefill(model, cache, [tokens])
    for _ in range(steps):
        tokens = torch.cat((tokens, greedy(logits)))
        with cache.step({handle: 1}) as layers:
            logits = model(tokens[-1:], caches=layers)
        whole = model(tokens[None])[0, -1:]
        apart = max(apart, ((logits - whole).abs().max() / whole.abs().max()).item())
    return tokens, apart


def table(rows: dict[str, Measured], base: float) -> str:
    """Return a line for each measured model; ``base`` is the loss of the dense model that trained as long."""
    lines = [f"{'':28} {'bits/byte':>9} {'nats over dense':>15} {'mass recall':>11}"]
    for name, (loss, recall) in rows.items():
        lines.append(f"{name:28} {loss:9.3f} {(loss - base) * math.log(2):+15.3f} {recall:11.3f}")
    return "\n".join(lines)


def draw(points: Sequence[tuple[int, Measured]], rows: dict[str, Measured], warm: int, picture: Path) -> None:
    """Write the picture: loss and recall of the sparse model by step, with lines for dense and window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    steps = [step for step, _ in points]
    for axes, field in zip(figure.subplots(1, 2), Measured._fields, strict=True):
        axes.plot(steps, [getattr(x, field) for _, x in points], "o-", color="#1b6ca8", label="sparse")
        for name, colour in (("dense, trained as long", "0.35"), ("window, trained as long", "#D55E00")):
            axes.axhline(getattr(rows[name], field), color=colour, linestyle="--", label=name)
        axes.axvline(warm, color="0.8", label="end of warm-up")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("step")
    left, right = figure.axes
    losses = [x.loss for _, x in points[1:]] + [rows["dense, trained as long"].loss]
    left.set_ylim(min(losses) - 0.02, max(losses) + 0.02)
    left.set(title=f"begins at {points[0][1].loss:.2f}", ylabel="held-out bits per byte")
    right.set(ylabel="mass recall of the chosen keys", ylim=(0, 1.03))
    right.legend(frameon=False, loc="lower right")
    figure.savefig(picture)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=400, help="steps of dense training")
    parser.add_argument("--warm-up", type=int, default=80, help="steps in which only index branches learn")
    parser.add_argument("--sparse", type=int, default=80, help="steps of sparse training")
    parser.add_argument(
        "--length", type=int, default=256, help="tokens of a sequence; a query sees a quarter"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--windows", type=int, default=16, help="held-out sequences that are measured")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens to decode")
    parser.add_argument("--text", type=Path, help="a text file; None is Python's own standard library")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    if options.length < max(8, 2 * options.new_tokens):
        parser.error(f"--length: expected at least 8, and twice the new tokens, got {options.length}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example from the command line.

    Raises:
        SystemExit: logits over pages differ from those of the whole text.
    """
    options = parse(arguments)
    torch.manual_seed(0)
    corpus, preset, top = load(options.text), PRESETS["tiny"], options.length // 4
    windows = corpus.held_out_windows(options.length, limit=options.windows)
    learning = partial(learn, corpus=corpus, options=options)
    rate = preset.learning_rate
    last = {"steps": options.sparse, "rate": rate / 4, "seed": 2}  # of every model that trains on

    # 1. Train the dense model.
    plain = make_model(preset)
    learning("dense", plain, loss_of(plain, dense), steps=options.steps, rate=rate, seed=0)
    rows = {"dense": measure(plain, windows, dense, top)}
    rows["window"] = measure(plain, windows, window(top), top)

    # 2. Make the sparse model from its weights; the index branches are new.
    select = Indexer(heads=4, head_dim=preset.head_dim, top=top, rope=Rope(preset.head_dim))
    sparse = make_model(preset, select)
    sparse.load_state_dict({**sparse.state_dict(), **plain.state_dict()})
    measured = partial(measure, sparse, windows, by_index, top)
    rows["sparse, new index branches"] = measured()

    # 3. Warm up: only the index branches learn, from dense attention.
    branches = nn.ModuleList(block.attention.indexer for block in sparse.blocks)
    sparse.requires_grad_(False)
    branches.requires_grad_(True)
    warm = {"steps": options.warm_up, "rate": rate, "seed": 1, "measured": measured}
    points = [(0, rows["sparse, new index branches"])]
    points += learning("warm-up", branches, loss_of(sparse, dense), **warm)
    rows["sparse, warmed up"] = points[-1][1]

    # 4. Train everything over the chosen keys, and the other models as long.
    sparse.requires_grad_(True)
    found = learning("sparse", sparse, loss_of(sparse, by_index), **last, measured=measured)
    points += [(options.warm_up + step, x) for step, x in found]
    rows["sparse, trained"] = points[-1][1]
    for name, choose in {"dense": dense, "window": window(top)}.items():
        model = deepcopy(plain)
        learning(name, model, loss_of(model, choose), **last)
        rows[f"{name}, trained as long"] = measure(model, windows, choose, top)
    print(f"{corpus.name}; {top} of {options.length} keys")
    print(table(rows, rows["dense, trained as long"].loss))

    # 5. Draw, and decode over pages.
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "sparse_lm.png"
    draw(points, rows, options.warm_up, picture)
    print(f"wrote {picture}")
    tokens, apart = decode(sparse, windows[0], options.length - options.new_tokens, options.new_tokens)
    print(f"decoded over pages: {bytes(tokens[-options.new_tokens :].tolist())!r}")
    print(f"logits over pages and of the whole text differ by at most {apart:.0e} of the largest")
    if not apart <= ROUNDING:
        raise SystemExit(f"logits over pages: expected a difference of at most {ROUNDING}, got {apart:.1e}")


if __name__ == "__main__":
    main()
