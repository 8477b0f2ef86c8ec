"""Show what the attention of a model looked at in a text: maps, largest scores and the mass of each token.

    python examples/look.py FOLDER 'The cat sat on the mat because it was warm.'
    python examples/look.py out/mla.safetensors "$(head -c 200 README.md)" --layers 0 2

The model is a transformers folder of a family that load_hf.py reads, or a file that compose_lm.py wrote. A
picture for each layer shows the attention weights of every head, the mass that each token receives (the sum
of its weights over all queries), and the largest score of each query. The table gives, for each head, its
largest score, the first token's part of the mass, and the mean distance between queries and keys.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import load_hf
import torch
import variants
from decoder import Decoder
from folders import tokens_by
from text import byte_tokens
from torch import Tensor

from attnlib.convert.text.tokens import tokenizer_of

LABELLED = 48  # with more tokens, a picture has no labels
WIDE = 8  # heads in a row of a picture


class Look(NamedTuple):
    """The attention of a layer: weights ``[h, t, t]``; mass of keys and largest scores, ``[h, t]``."""

    weights: Tensor
    mass: Tensor
    maxima: Tensor


@torch.no_grad()
def look(model: Decoder, tokens: Tensor) -> list[Look]:
    """Return what each layer of a model looks at in ``tokens`` ``[t]``."""
    x, rows, found = model.embed(tokens[None]), torch.arange(len(tokens), device=tokens.device), []
    for block in model.blocks:
        layer, normed = block.attention, block.attention_norm(x)
        taken = (
            layer.weights(normed, over="none", rows=rows),
            layer.weights(normed, over="queries"),
            layer.maxima(normed),
        )
        found.append(Look(*(y[0].float().cpu() for y in taken)))
        x = block(x, kv=None, angles=None, cu_seqlens=None)
    return found


def table(looks: Sequence[Look], layers: Sequence[int]) -> str:
    """Return a line for each head of some layers."""
    lines = [f"{'layer':>5} {'head':>4} {'largest score':>13} {'first token':>11} {'distance':>8}"]
    for number in layers:
        weights, mass, maxima = looks[number]
        at = torch.arange(weights.shape[1])
        distances = (weights * (at[:, None] - at).abs()).sum(-1).mean(-1)
        first = mass[:, 0] / mass.sum(1)
        lines += [
            f"{number:5} {head:4} {maxima[head].max():13.2f} {first[head]:11.0%} {distances[head]:8.1f}"
            for head in range(len(weights))
        ]
    return "\n".join(lines)


def draw(shown: Look, names: Sequence[str], title: str, picture: Path) -> None:
    """Write the picture of a layer: a map for each head, and below them masses and largest scores."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heads, tokens = shown.mass.shape
    columns = min(heads, WIDE)
    rows = -(-heads // columns)
    figure = Figure(figsize=(max(8, 2.2 * columns), 2.4 * rows + 3.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    maps, curves = figure.subfigures(2, 1, height_ratios=(2.4 * rows, 2.8))
    maps.suptitle(f"{title}: weights, queries down, keys across")
    for head, axes in enumerate(maps.subplots(rows, columns, squeeze=False).flat):
        if head >= heads:
            axes.set_axis_off()
            continue
        # The root shows small weights, too.
        axes.imshow(shown.weights[head].sqrt().numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(f"head {head}, largest score {shown.maxima[head].max():.1f}", fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    mass, maxima = curves.subplots(1, 2)
    of_queries = torch.arange(tokens, 0, -1)  # how many queries may see each key
    for head in range(heads):
        mass.plot((shown.mass[head] / of_queries).tolist(), linewidth=1, label=f"head {head}")
        maxima.plot(shown.maxima[head].tolist(), linewidth=1)
    mass.set(title="mean weight of a key, over the queries that may see it")
    mass.set_ylim(bottom=0)
    maxima.set(title="largest score of a query")
    for axes in (mass, maxima):
        axes.spines[["top", "right"]].set_visible(False)
        if tokens <= LABELLED:
            axes.set_xticks(range(tokens), names, rotation=90, fontsize=6)
    if heads <= WIDE:
        mass.legend(frameon=False, fontsize=7, ncols=2)
    figure.savefig(picture)


def load(path: Path, text: str, device: str) -> tuple[Decoder, Tensor, list[str]]:
    """Return the model of a folder or a file, the tokens of a text, and the name of each token.

    Raises:
        ValueError: the model or its tokenizer cannot be used, or the text is empty.
    """
    if not text:
        raise ValueError("text: expected some characters, got none")
    if path.is_dir():
        model, checkpoint = load_hf.load(path, device=device)
        tokens = tokens_by(checkpoint)(text.encode()).long()
        is_named = any(file.name.startswith("tokenizer") for file in checkpoint.copied)
        of_token = tokenizer_of(checkpoint).decode if is_named else lambda token: chr(token % 256)
    else:
        model, tokens, of_token = (
            variants.load(path, device=device)[0],
            byte_tokens(text.encode()).long(),
            chr,
        )
    names = [repr(of_token(token))[1:-1].replace("$", r"\$") for token in tokens.tolist()]
    return model, tokens.to(device), names


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder of transformers, or a file of compose_lm.py")
    parser.add_argument("text", help="the text to read")
    parser.add_argument("--layers", type=int, nargs="+", help="layers to show (default: all)")
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/look"), help="folder for pictures (default: out/look)"
    )
    options = parser.parse_args(arguments)
    try:
        model, tokens, names = load(options.model, options.text, options.device)
    except (OSError, ValueError, NotImplementedError) as error:
        raise SystemExit(f"look.py: {error}") from error
    count = len(model.blocks)
    layers = range(count) if options.layers is None else options.layers
    if wrong := [n for n in layers if not 0 <= n < count]:
        parser.error(f"--layers: expected 0 to {count - 1}, got {wrong[0]}")
    looks = look(model, tokens)
    print(table(looks, layers))
    options.out.mkdir(parents=True, exist_ok=True)
    for number in layers:
        draw(looks[number], names, f"layer {number}", options.out / f"layer_{number}.png")
    print(f"\nwrote the pictures to {options.out}")


if __name__ == "__main__":
    main()
