"""What a conversion cost and what training got back: a table, and curves of bits per byte against steps."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from decoder import Decoder
from decoding import greedy, paged_cache, prefill, stream
from resumable import Curve
from text import Corpus

# Okabe and Ito's colours, told apart with any colour vision.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#CC79A7")
SEQUENCES = 8  # decoded at once
CLOSE = 0.01  # how much worse than its yardstick a recovered model may be


class Result(NamedTuple):
    """What was measured of one model; ``curve`` is a single point of one that was not trained."""

    name: str
    curve: Curve
    bytes_per_token: int
    rate: float | None  # decoded tokens a second

    @property
    def start(self) -> float:
        return self.curve[0][1]

    @property
    def end(self) -> float:
        return self.curve[-1][1]


def decode_rate(model: Decoder, corpus: Corpus, context: int) -> float:
    """Tokens a second of greedy decoding from a paged cache, SEQUENCES at once, from half a context to a whole one."""
    device, half = model.embed.weight.device, context // 2
    prompts = [corpus.held_out[i % len(corpus.held_out), :half].long().to(device) for i in range(SEQUENCES)]
    for steps in (2, context - half):  # the first round warms up
        cache = paged_cache(model, sequences=SEQUENCES, length=context)
        handles, logits = prefill(model, cache, prompts)
        start = time.perf_counter()
        tokens = [row.tolist() for row in stream(model, cache, handles, logits, choose=greedy, steps=steps)]
        seconds = time.perf_counter() - start
    return len(tokens) * SEQUENCES / seconds


def table(results: Sequence[Result]) -> str:
    """One row per model, in Markdown; the first one is what the others are measured against."""
    names = ["model".ljust(20), "cache B/token", "bits/byte at start", "after training", "against the first", "tok/s"]
    lines = [names, [":" + "-" * 19, *("-" * (len(name) - 1) + ":" for name in names[1:])]]
    for result in results:
        trained = len(result.curve) > 1
        cells = (
            result.name.ljust(20),
            f"{result.bytes_per_token:,}",
            f"{result.start:.3f}",
            f"{result.end:.3f}" if trained else "",
            f"{result.end / results[0].end - 1:+.1%}" if trained else "",
            f"{result.rate:,.0f}" if result.rate else "",
        )
        lines.append([cell.rjust(len(name)) for cell, name in zip(cells, names, strict=True)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def better(good: Result, poor: Result) -> str:
    """Whether one conversion starts better than another, as a line."""
    verdict = "better" if good.start < poor.start else "NOT better"
    return f"{good.name} starts at {good.start:.4f} bits/byte, {poor.name} at {poor.start:.4f}: {verdict}"


def close(student: Result, yardstick: Result) -> str:
    """Whether a student came back to within CLOSE of its yardstick, as a line."""
    worse = student.end / yardstick.end - 1
    verdict = f"within {CLOSE:.0%}" if worse <= CLOSE else f"NOT within {CLOSE:.0%}"
    return (
        f"{student.name} ends at {student.end:.4f} bits/byte, {yardstick.name} at {yardstick.end:.4f} after as many "
        f"steps, {worse:+.2%}: {verdict}"
    )


def draw(results: Sequence[Result], untrained: float, title: str, path: Path) -> None:
    """Write the recovery curves as PNG; ``untrained`` is the original, before any of these steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for result, colour in zip(results, COLOURS, strict=True):
        steps, bits = zip(*result.curve, strict=True)
        label = f"{result.name}, {result.bytes_per_token:,} B/token: {result.start:.2f} to {result.end:.3f}"
        axes.plot(steps, bits, color=colour, linewidth=2, marker="o", markersize=4, label=label)
    axes.axhline(untrained, color="0.35", linestyle="--", linewidth=1.2, label=f"the original: {untrained:.3f}")
    axes.set_title(title, loc="left", fontsize=13)
    axes.set_xlabel("steps after the conversion", fontsize=12)
    axes.set_ylabel("held-out text (bits per byte)", fontsize=12)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=11)
    axes.legend(frameon=False, fontsize=11)
    figure.savefig(path)
