"""Report how much quality a conversion lost and how much training recovered, in a table and in sentences."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from decoder import Decoder
from decoding import greedy, paged_cache, prefill, stream
from text import Corpus

from attnlib.finetune.state import Curve

SEQUENCES = 8  # decoding speed is measured with this many sequences at once
CLOSE = 0.01  # a model has recovered if it is at most this fraction worse than its baseline


class Result(NamedTuple):
    """The measurements of one model; the ``curve`` of a model without training is a single point."""

    name: str
    curve: Curve
    bytes_per_token: int
    rate: float | None  # decoded tokens per second

    @property
    def start(self) -> float:
        return self.curve[0][1]

    @property
    def end(self) -> float:
        return self.curve[-1][1]


def decode_rate(model: Decoder, corpus: Corpus, context: int) -> float:
    """Measure greedy decoding from a paged cache, in tokens per second over SEQUENCES sequences at once.

    The sequences grow from half the context length to the whole.
    """
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
    """Format a Markdown table with a row per model; all models are compared with the first one."""
    names = [
        "model".ljust(20),
        "cache B/token",
        "bits/byte at start",
        "after training",
        "against the first",
        "tok/s",
    ]
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
    """Return a line that says if one conversion loses less quality than another before any training."""
    verdict = "better" if good.start < poor.start else "NOT better"
    return f"{good.name} starts at {good.start:.4f} bits/byte, {poor.name} at {poor.start:.4f}: {verdict}"


def close(student: Result, yardstick: Result) -> str:
    """Return a line that says if a trained conversion ends as good as its baseline, up to CLOSE."""
    worse = student.end / yardstick.end - 1
    verdict = f"within {CLOSE:.0%}" if worse <= CLOSE else f"NOT within {CLOSE:.0%}"
    return (
        f"{student.name} ends at {student.end:.4f} bits/byte, {yardstick.name} at {yardstick.end:.4f} after "
        f"as many steps, {worse:+.2%}: {verdict}"
    )
