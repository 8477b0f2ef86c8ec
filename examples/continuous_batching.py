"""Serve the same requests from a paged cache, and from rows of the maximum length in the same memory.

    python examples/continuous_batching.py
    python examples/continuous_batching.py --variant mla --requests 200 --rows 16

A seeded trace of requests, most of them short and a few long, arrives in bursts. The same scheduler and the
same cache class serve it twice; only the cache's constructor differs. The example prints how many requests
ran at once and how the memory was used, and draws both. Then it forks one stored prompt to many requests. The
weights are random, because neither pages nor schedules depend on the content. The example fails if an answer
differs from the one that the request gets on its own, or if the shared prompt is stored twice.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import variants
from decoder import Decoder
from decoding import check_same, prefill
from scheduler import Request, Scheduler
from serving import Run, Sample, first_fit, serve
from torch import nn
from variants import PRESETS, VARIANTS

from attnlib import KVCache
from attnlib.sizes import cache_bytes

MAX_LENGTH = 512  # maximum length of a request in tokens (prompt and answer), and the size of a cache row
BUDGET = 128  # a step processes at most this many tokens
END = 0  # the token that ends an answer early
SHARED = 200  # length of the shared prompt in tokens; it does not fill its last page
ROUNDS = 2  # each cache serves the trace twice, in turns, and its faster run counts
# Okabe and Ito's colours, which are distinguishable with any colour vision.
COLOURS = {"rows": "#D55E00", "pages": "#0072B2", "first fit": "0.45"}


def make_trace(count: int, *, seed: int) -> list[Request]:
    """Return ``count`` requests that arrive in bursts: lengths are log-normal, and one in ten is urgent."""
    draw, requests, arrival = random.Random(seed), [], 0
    while len(requests) < count:
        for _ in range(min(1 + int(draw.expovariate(1 / 8)), count - len(requests))):
            length = _length(draw, median=40)
            prompt = [draw.randrange(1, 256) for _ in range(length)]
            urgent = draw.random() < 0.1
            requests.append(Request(prompt, _length(draw, median=32), arrival, int(urgent), END))
        arrival += 1 + int(draw.expovariate(1 / 3))
    return requests


def _length(draw: random.Random, *, median: int) -> int:
    return max(4, min(int(median * draw.lognormvariate(0, 0.8)), MAX_LENGTH // 2))


def make_model(variant: str, *, seed: int) -> Decoder:
    """Make a model with random weights that does not repeat its input, as small, tied embeddings would."""
    torch.manual_seed(seed)
    model = variants.make_model(variant, PRESETS["tiny"]).eval()
    nn.init.normal_(model.embed.weight)
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def make_caches(model: Decoder, *, rows: int, page_size: int) -> dict[str, KVCache]:
    """Make a cache of ``rows`` rows of the maximum length, and a paged cache of the same size."""
    layouts, pages = model.kv_layouts(), rows * MAX_LENGTH // page_size
    sizes = {"max_length": MAX_LENGTH, "device": model.embed.weight.device}
    caches = {
        "rows": KVCache.contiguous(layouts, max_sequences=rows, **sizes),
        "pages": KVCache.paged(layouts, pages=pages, page_size=page_size, max_sequences=pages, **sizes),
    }
    assert caches["rows"].nbytes == caches["pages"].nbytes
    return caches


@torch.no_grad()
def check_alone(
    model: Decoder, requests: Sequence[Request], answers: Sequence[list[int]], *, before=()
) -> str:
    """Check that every answer is what its request gets when it is served alone; return a note on ties.

    The model reads each sequence in one pass, without a cache or a batch. ``before`` holds the tokens that
    precede every prompt. An answer is correct if each of its tokens is the most likely one. If a token
    differs, :func:`decoding.check_same` decides if the two tokens are tied.

    Raises:
        SystemExit: an answer ends in the wrong place, or differs by more than a tie.
    """
    longest = max(map(len, answers))
    plain, ours = torch.zeros(2, len(answers), longest, dtype=torch.int64)
    logits = torch.zeros(len(answers), longest, model.lm_head.out_features)
    for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        ended = len(answer) == request.new_tokens or answer[-1:] == [request.end]
        if not ended or len(answer) > request.new_tokens or request.end in answer[:-1]:
            raise SystemExit(f"request {i}: an answer of {len(answer)} tokens does not end where it should")
        text = torch.tensor([*before, *request.prompt, *answer[:-1]], device=model.embed.weight.device)
        logits[i, : len(answer)] = model(text[None])[0, -len(answer) :]
        ours[i, : len(answer)] = torch.tensor(answer)
        plain[i, : len(answer)] = logits[i, : len(answer)].argmax(-1)
    return check_same(ours, plain, logits)


def compare(model: Decoder, requests: Sequence[Request], *, rows: int, page_size: int) -> dict[str, Run]:
    """Serve all requests from a cache of rows and one of pages, in turns; check the answers.

    Return the fastest run of each cache.
    """
    runs: dict[str, Run] = {}
    for round_ in range(ROUNDS):
        for name, cache in make_caches(model, rows=rows, page_size=page_size).items():
            scheduler = Scheduler(cache, max_length=MAX_LENGTH, budget=BUDGET)
            run = serve(model, scheduler, requests, label=f"{name}, round {round_ + 1}")
            note = check_alone(model, requests, run.answers)
            if note:
                print(f"{name}: {note}")
            if name not in runs or run.seconds < runs[name].seconds:
                runs[name] = run
    return runs


def busy(samples: Sequence[Sample]) -> list[Sample]:
    """Return the steps in which a request had to wait, or all steps if no request ever waited."""
    return [sample for sample in samples if sample.waiting] or list(samples)


def sustained(samples: Sequence[Sample]) -> float:
    """Return the average number of requests that ran at once while other requests were waiting."""
    return sum(sample.live for sample in busy(samples)) / len(busy(samples))


def table(runs: dict[str, Run], fitted: Sequence[Sample], *, nbytes: int, memory: int) -> str:
    """Format a table with one row for each memory layout: rows, pages, or contiguous extents.

    Fractions of the memory are averages over the steps in which a request waited.
    """
    names = ["memory in", "at once", "peak", "steps", "tokens/s", "filled", "internal", "free"]
    names += ["external", "preempted", "stored twice"]
    lines = [names, ["-" * (len(name) - 1) + ":" for name in names]]
    for name, run in runs.items():
        tokens, answered = sum(sample.tokens for sample in run.samples), sum(map(len, run.answers))
        needed = sum(len(stream.text) - 1 for stream in run.streams)
        shares = _shares(run.samples, nbytes)
        rate, again = f"{answered / run.seconds:,.0f}", f"{tokens / needed - 1:.1%}"
        lines.append([name, *_concurrency(run.samples), rate, *shares, str(run.preemptions), again])
    at_once, peak, steps = _concurrency(fitted)
    *_, free, external = _shares(fitted, memory)
    lines.append(["first fit", at_once, peak, steps, "", "", "", free, external, "", ""])
    rows = [[cell.rjust(len(name)) for cell, name in zip(cells, names, strict=True)] for cells in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _concurrency(samples: Sequence[Sample]) -> list[str]:
    return [f"{sustained(samples):.1f}", str(max(sample.live for sample in samples)), str(len(samples))]


def _shares(samples: Sequence[Sample], nbytes: int) -> list[str]:
    """Return percentages of the memory: filled with tokens, allocated but empty, free, and fragmented."""
    chosen = busy(samples)
    total = nbytes * len(chosen)
    filled, used, external = (
        sum(getattr(s, name) for s in chosen) for name in ("filled", "used", "external")
    )
    return [f"{part / total:.1%}" for part in (filled, used - filled, total - used, external)]


def share_prompt(model: Decoder, *, requests: int, page_size: int, seed: int) -> str:
    """Fork one stored prompt to many requests; describe the memory used with and without sharing.

    Raises:
        SystemExit: the prompt was stored more than once, or an answer is wrong.
    """
    draw = random.Random(seed)
    system = [draw.randrange(1, 256) for _ in range(SHARED)]
    trace = [Request([draw.randrange(1, 256) for _ in range(4 + i % 13)], 24) for i in range(requests)]
    pages = (1 + requests) * MAX_LENGTH // page_size
    device = model.embed.weight.device
    sizes = {"page_size": page_size, "max_sequences": pages, "max_length": MAX_LENGTH, "device": device}
    cache = KVCache.paged(model.kv_layouts(), pages=pages, **sizes)
    [shared], _ = prefill(model, cache, [torch.tensor(system, device=device)])
    once = cache.used_bytes
    scheduler = Scheduler(cache, max_length=MAX_LENGTH, budget=BUDGET, shared=shared)
    run = serve(model, scheduler, trace)
    note = check_alone(model, trace, run.answers, before=system)
    peak = max(run.samples, key=lambda sample: sample.used)
    alone = peak.used - once + peak.live * (SHARED // page_size) * scheduler.page_bytes
    if note:
        print(f"shared prompt: {note}")
    return (
        f"a prompt of {SHARED} tokens is stored once, in {once:,} bytes, and forked to {requests} requests: "
        f"{peak.used:,} bytes in all for {peak.live} at once, {alone:,} if each stored its own copy"
    )


def draw(runs: dict[str, Run], fitted: Sequence[Sample], nbytes: int, path: Path) -> None:
    """Write the picture: concurrent requests on the left, memory use on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["live", name] for name in runs], width_ratios=(1.1, 1))
    steps = max(len(run.samples) for run in runs.values())
    series = {name: run.samples for name, run in runs.items()} | {"first fit": fitted}
    for name, samples in series.items():
        style = {"color": COLOURS[name], "linestyle": "--" if name == "first fit" else "-"}
        label = f"{name}: {sustained(samples):.1f} while others wait"
        axes["live"].plot([sample.live for sample in samples], label=label, linewidth=2, **style)
    axes["live"].set_title("Requests served at once, in the same memory", loc="left", fontsize=13)
    axes["live"].set(xlabel="step", ylabel="live requests", xlim=(0, steps))
    axes["live"].set_ylim(bottom=0)
    axes["live"].legend(frameon=False, fontsize=11)
    for name, run in runs.items():
        _draw_memory(axes[name], run, nbytes, COLOURS[name])
        axes[name].set_title(f"Memory use of the {name}", loc="left", fontsize=13)
        axes[name].set(xlim=(0, steps), ylim=(0, 100), ylabel="% of bytes")
    axes[name].set_xlabel("step")
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=11)
    figure.savefig(path)


def _draw_memory(axes, run: Run, nbytes: int, colour: str) -> None:
    filled = [100 * sample.filled / nbytes for sample in run.samples]
    used = [100 * sample.used / nbytes for sample in run.samples]
    steps = range(len(filled))
    axes.fill_between(steps, filled, color=colour, label="tokens", linewidth=0)
    axes.fill_between(
        steps, filled, used, color=colour, alpha=0.35, label="allocated, but empty", linewidth=0
    )
    axes.fill_between(steps, used, [100] * len(used), color="0.92", label="free", linewidth=0)
    axes.legend(frameon=False, fontsize=10, loc="center left", bbox_to_anchor=(1, 0.5))


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=_at_least_one, default=128, help="requests in the trace (default: 128)"
    )
    parser.add_argument(
        "--rows", type=_at_least_one, default=6, help=f"memory, in rows of {MAX_LENGTH} tokens (default: 6)"
    )
    sizes = [1 << n for n in range(MAX_LENGTH.bit_length())]
    parser.add_argument(
        "--page-size", type=int, choices=sizes, default=16, help="tokens per page (default: 16)"
    )
    parser.add_argument("--variant", choices=VARIANTS, default="gqa", help="attention variant (default: gqa)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the trace (default: 0)")
    parser.add_argument("--device", help="where to run (default: a GPU if there is one)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default: out)")
    options = parser.parse_args(arguments)
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, compare and draw as the command line says.

    Raises:
        SystemExit: a check failed; the message names it.
    """
    options = parse(arguments)
    model = make_model(options.variant, seed=options.seed).to(options.device)
    requests = make_trace(options.requests, seed=options.seed)
    declared = sum(len(request.prompt) + request.new_tokens for request in requests) / len(requests)
    memory = options.rows * MAX_LENGTH
    nbytes = cache_bytes(model.kv_layouts(), [memory], page_size=MAX_LENGTH)
    name = options.variant.upper()
    print(f"{name}: {len(requests)} requests of up to {MAX_LENGTH} tokens, {declared:.0f} on average")
    print(
        f"memory: {nbytes:,} bytes, {options.rows} rows of {MAX_LENGTH} tokens or pages of "
        f"{options.page_size} tokens\n"
    )
    runs = compare(model, requests, rows=options.rows, page_size=options.page_size)
    fitted = first_fit(requests, runs["pages"].answers, memory=memory, budget=BUDGET)
    print(table(runs, fitted, nbytes=nbytes, memory=memory))
    ratio = sustained(runs["pages"].samples) / sustained(runs["rows"].samples)
    print(f"\npages serve {ratio:.1f} times as many requests at once as rows do")
    print(f"all {len(requests)} answers of both caches equal those of each request on its own")
    print(share_prompt(model, requests=16, page_size=options.page_size, seed=options.seed))
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "continuous_batching.png"
    draw(runs, fitted, nbytes, picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
