"""Train the same small language model with MHA, GQA, MQA and MLA, decode from a paged cache, and compare.

Prints one table, and writes the weights and a picture of losses and cache growth. Fails if a greedy
continuation with the cache differs from the one without, if a cache does not use the bytes that the formula
predicts, or if a model learned too little.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import variants
from decoder import Decoder
from decoding import check_same, decode_cached, decode_uncached, paged_cache
from text import Corpus, load
from training import held_out_bits, train
from variants import PRESETS, VARIANTS, Preset

from attnlib.sizes import cache_bytes

PAGE_SIZE = 16
PROMPTS = 8
# Okabe and Ito's colours, which are distinguishable with any colour vision.
COLOURS = {"mha": "#0072B2", "gqa": "#009E73", "mqa": "#D55E00", "mla": "#CC79A7"}
MARKERS = {"mha": "o", "gqa": "s", "mqa": "^", "mla": "D"}
MARKED = 6  # markers per curve of losses


class Result(NamedTuple):
    """The results of one attention variant; ``growth`` lists pairs of context length and cache bytes."""

    variant: str
    parameters: int
    losses: list[float]
    held_out: float
    growth: list[tuple[int, int]]
    bytes_per_token: float
    uncached_rate: float
    cached_rate: float


def study(
    variant: str, corpus: Corpus, preset: Preset, *, device: torch.device, out: Path, new_tokens: int
) -> Result:
    """Train a model with one attention variant, save it, decode with it, and return its measurements.

    Raises:
        SystemExit: the greedy continuation with a cache differs, or the size of the cache is wrong.
    """
    torch.manual_seed(0)
    model = variants.make_model(variant, preset).to(device)
    losses = train(model, corpus, preset, label=variant.upper())
    model.eval()
    variants.save(model, variant, preset, out / f"{variant}.safetensors")
    growth, formula = measure_growth(model, corpus, longest=4 * preset.context)
    uncached_rate, cached_rate = compare_decoding(model, corpus, preset.context, new_tokens, label=variant)
    return Result(
        variant,
        sum(parameter.numel() for parameter in model.parameters()),
        losses,
        held_out_bits(model, corpus, preset),
        growth,
        formula,
        uncached_rate,
        cached_rate,
    )


def measure_growth(model: Decoder, corpus: Corpus, *, longest: int) -> tuple[list[tuple[int, int]], float]:
    """Measure how a paged cache grows: pairs of context length and bytes, and the formula's bytes per token.

    Raises:
        SystemExit: the cache does not use the bytes that the formula predicts.
    """
    cache = paged_cache(model, sequences=1, length=longest, page_size=PAGE_SIZE)
    [handle] = cache.admit()
    text = corpus.held_out.flatten()[:longest].long().to(model.embed.weight.device)
    growth = [(0, cache.used_bytes)]
    for part in text.split(-(-longest // 16)):
        with torch.no_grad(), cache.step({handle: len(part)}) as layers:
            model(part, caches=layers)
        growth.append((cache.length(handle), cache.used_bytes))
    for context, used in growth:
        formula = cache_bytes(model.kv_layouts(), [context], page_size=PAGE_SIZE)
        if used != formula:
            raise SystemExit(
                f"cache of {context} tokens: expected {formula} bytes by formula, measured {used}"
            )
    return growth, cache_bytes(model.kv_layouts(), [PAGE_SIZE], page_size=PAGE_SIZE) / PAGE_SIZE


def compare_decoding(
    model: Decoder, corpus: Corpus, context: int, new_tokens: int, *, label: str
) -> tuple[float, float]:
    """Return the tokens per second of greedy decoding without a cache and with one.

    The prompts are held-out text of different lengths.

    Raises:
        SystemExit: the two continuations differ.
    """
    device = model.embed.weight.device
    lengths = [max(1, context * (i + 1) // PROMPTS) for i in range(PROMPTS)]
    prompts = [corpus.held_out[i % len(corpus.held_out), :n].long().to(device) for i, n in enumerate(lengths)]
    for steps in (2, new_tokens):  # the first round only warms up
        start = time.perf_counter()
        plain, logits = decode_uncached(model, prompts, steps)
        middle = time.perf_counter()
        cached = decode_cached(model, prompts, steps).cpu()
        end = time.perf_counter()
    note = check_same(cached, plain, logits)
    if note:
        print(f"{label}: {note}")
    return cached.numel() / (middle - start), cached.numel() / (end - middle)


def table(results: Sequence[Result], entropy: float) -> str:
    """Format the results as a table with one row per attention variant.

    Bits per byte are measured on held-out text, and tokens per second with PROMPTS sequences at once.
    """
    names = ["variant", "parameters", "bits/byte", "below unigram", "cache B/token", "by formula"]
    names += ["uncached tok/s", "cached tok/s"]
    lines = [names, ["-" * (len(name) - 1) + ":" for name in names]]
    for result in results:
        context, used = result.growth[-1]
        cells = (
            result.variant.upper(),
            f"{result.parameters:,}",
            f"{result.held_out:.3f}",
            f"{1 - result.held_out / entropy:.0%}",
            f"{used / context:,.0f}",
            f"{result.bytes_per_token:,.0f}",
            f"{result.uncached_rate:,.0f}",
            f"{result.cached_rate:,.0f}",
        )
        lines.append([cell.rjust(len(name)) for cell, name in zip(cells, names, strict=True)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(results: Sequence[Result], corpus: Corpus, preset: Preset, entropy: float, path: Path) -> None:
    """Write the picture: losses on the left, cache growth on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_losses(left, results, preset, entropy)
    _draw_growth(right, results)
    left.set_title(f"Learning {corpus.name}", loc="left", fontsize=13)
    right.set_title("Cache memory of one sequence", loc="left", fontsize=13)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=11)
        axes.xaxis.label.set_size(12)
        axes.yaxis.label.set_size(12)
    figure.savefig(path)


def _draw_losses(axes, results: Sequence[Result], preset: Preset, entropy: float) -> None:
    width = max(1, preset.steps // 25)
    per_step = preset.batch * preset.context / 1000
    for i, result in enumerate(results):
        losses = torch.tensor(result.losses)
        smooth = losses.unfold(0, width, 1).mean(1)
        x = (torch.arange(len(smooth)) + width) * per_step
        label = f"{result.variant.upper()}: {result.held_out:.2f} held out"
        # The curves nearly coincide. Their markers take turns, so that none hides another.
        every = max(1, len(smooth) // MARKED)
        style = {"marker": MARKERS[result.variant], "markersize": 8, "linewidth": 1.5}
        style["markevery"] = ((2 * i + 1) * every // (2 * len(results)), every)
        axes.plot(x.tolist(), smooth.tolist(), color=COLOURS[result.variant], label=label, **style)
    axes.axhline(entropy, color="0.35", linestyle="--", linewidth=1.2)
    axes.annotate(
        f"unigram model: {entropy:.2f}",
        (0.99, entropy),
        (0, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        color="0.35",
        fontsize=11,
    )
    axes.set(
        xlabel="text read (thousand bytes)",
        ylabel=f"training loss (bits per byte, mean of {width} step{'s' * (width > 1)})",
    )
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=11, loc="upper right", bbox_to_anchor=(1, 0.88))


def _draw_growth(axes, results: Sequence[Result]) -> None:
    for result in results:
        contexts, used = zip(*result.growth, strict=True)
        kib = [n / 1024 for n in used]
        colour = COLOURS[result.variant]
        axes.plot(contexts, kib, color=colour, linewidth=2, marker=MARKERS[result.variant], markersize=4)
        axes.annotate(
            f"{result.variant.upper()}  {result.bytes_per_token:,.0f} B/token",
            (contexts[-1], kib[-1]),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=11,
            annotation_clip=False,
        )
    axes.set(xlabel="context (tokens)", ylabel=f"cache in use (KiB, measured, pages of {PAGE_SIZE})")
    axes.set_xlim(0, contexts[-1] * 1.02)
    axes.set_xticks([contexts[-1] * i // 4 for i in range(5)])
    axes.set_ylim(bottom=0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", type=Path, help="a text file to learn (default: Python's own standard library)"
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", help="model and training sizes (default: tiny)"
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="variants to compare (default: all)"
    )
    parser.add_argument("--steps", type=int, help="training steps (default: the preset's)")
    parser.add_argument("--new-tokens", type=int, help="tokens to decode (default: the preset's context)")
    parser.add_argument(
        "--margin", type=float, default=0.3, help="required fraction below the unigram entropy (default: 0.3)"
    )
    parser.add_argument("--device", help="where to run (default: a GPU if there is one)")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for weights and picture (default: out)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study from the command line.

    Raises:
        SystemExit: a check failed; the message names it.
    """
    options = parse(arguments)
    preset = PRESETS[options.preset]
    preset = preset._replace(steps=options.steps or preset.steps)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        corpus = load(options.text)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    entropy = corpus.unigram_entropy()
    options.out.mkdir(parents=True, exist_ok=True)
    tokens = preset.steps * preset.batch * preset.context
    print(
        f"{corpus.name}: {corpus.size:,} bytes, a tenth held out; a unigram model needs "
        f"{entropy:.3f} bits/byte"
    )
    print(f"each variant reads {tokens:,} bytes in {preset.steps} steps of {preset.batch} x {preset.context}")
    settings = {"device": device, "out": options.out, "new_tokens": options.new_tokens or preset.context}
    results = [study(variant, corpus, preset, **settings) for variant in options.variants]
    picture = options.out / "compose_lm.png"
    draw(results, corpus, preset, entropy, picture)
    print(f"\n{table(results, entropy)}\n\nwrote {picture} and {len(results)} files of weights")
    enough = (1 - options.margin) * entropy
    poor = [f"{result.variant} {result.held_out:.3f}" for result in results if not result.held_out <= enough]
    if poor:
        raise SystemExit(
            f"held-out bits/byte: expected at most {enough:.3f}, got {', '.join(poor)}; train longer"
        )


if __name__ == "__main__":
    main()
