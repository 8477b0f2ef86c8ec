"""The conversion report as a chart: what the model had at the start, and the error and size of each layer."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..internal.plots import COLOURS, blank, plain, png
from .check.lost import own_errors
from .checkpoint.model import CheckpointModel
from .checkpoint.writing import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "conversion_report.png"
BEFORE, AFTER = "0.6", COLOURS[0]
UNITS = ((1e9, "billion"), (1e6, "million"), (1e3, "thousand"))


class Start(NamedTuple):
    """The source model: its name, its number of weights, and the KV heads and channels of each layer."""

    name: str
    weights: int
    kv_heads: int
    head_dim: int

    @property
    def title(self) -> str:
        """The name and the number of weights, for the title of a picture."""
        size, unit = next(((n, f" {name}") for n, name in UNITS if self.weights >= n), (1, ""))
        return f"{self.name}, {self.weights / size:.3g}{unit} weights"

    @classmethod
    def of(cls, model: CheckpointModel) -> "Start":
        """Return the facts about ``model`` for a picture."""
        weights = sum(math.prod(stored.entry.shape) for stored in model.checkpoint.tensors.values())
        return cls(_name(model.checkpoint.folder), weights, model.shape.kv_heads, model.shape.head_dim)


def draw(report: Mapping[str, Any], folder: Path, start: Start) -> None:
    """Write a PNG chart of a conversion report into ``folder``.

    It compares cache and perplexity before and after, and shows the errors of each layer. If ``report`` lists
    sizes per layer, it shows them too, with a line at the source's size.

    Raises:
        ImportError: matplotlib is not installed.
    """
    layers, sizes = report["layers"], report["settings"].get("sizes")
    indices = [layer["layer"] for layer in layers]
    figure = blank(11, 5 if sizes is None else 7)
    grid = figure.add_gridspec(2, 3, width_ratios=[6, 1, 1], height_ratios=[3, 2])
    errors = figure.add_subplot(grid[0 if sizes else slice(None), 0])
    _draw_errors(errors, layers, indices)
    rows = [errors]
    if sizes is not None:
        rows.append(figure.add_subplot(grid[1, 0], sharex=errors))
        _draw_sizes(rows[-1], indices, sizes, start, report["settings"])
    rows[-1].set_xlabel("layer")
    cache = report["cache_bytes_per_token"]
    _draw_pair(figure.add_subplot(grid[:, 1]), "cache, bytes per token", cache["before"], cache["after"])
    measures = report.get("measures", {})
    pair = measures.get("perplexity_before"), measures.get("perplexity_after")
    if None not in pair:
        _draw_pair(figure.add_subplot(grid[:, 2]), "perplexity", *pair)
    for axes in rows:
        plain(axes)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(_title(report, start), x=0.01, ha="left")
    write_file(folder, PICTURE, png(figure))


def _title(report: Mapping[str, Any], start: Start) -> str:
    cache = report["cache_bytes_per_token"]
    share = cache["after"] / cache["before"]
    line = f"{start.title}: {share:.0%} of the cache"
    measures = report.get("measures", {})
    if "perplexity_before" not in measures:
        return line
    before, after = (
        "too large" if x is None else f"{x:.3g}"
        for x in (measures["perplexity_before"], measures["perplexity_after"])
    )
    return f"{line}, perplexity {before} before and {after} after"


def _draw_errors(axes: "Axes", layers: list[Mapping[str, Any]], indices: list[int]) -> None:
    names = [name for name in own_errors(layers[0]) if name != "layer"]
    for name, colour in zip(names, COLOURS, strict=False):
        found = [math.nan if layer[name] is None else layer[name] for layer in layers]
        if any(found) or name == names[0]:
            axes.plot(indices, found, color=colour, marker="o", markersize=4, label=name.replace("_", " "))
    axes.set_ylabel("relative RMS error")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_sizes(
    axes: "Axes", indices: list[int], sizes: list[int], start: Start, settings: Mapping[str, Any]
) -> None:
    axes.bar(indices, sizes, color=AFTER)
    if settings["layers"] == "gqa":
        axes.set_ylabel("KV heads")
        axes.axhline(start.kv_heads, color=BEFORE, linestyle="--", label=f"before: {start.kv_heads}")
    else:
        whole = 2 * start.kv_heads * start.head_dim
        axes.set_ylabel("rank")
        axes.axhline(whole, color=BEFORE, linestyle="--", label=f"before: {whole} keys and values")
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # leave space for the legend
    axes.legend(frameon=False)


def _draw_pair(axes: "Axes", title: str, before: float, after: float) -> None:
    bars = axes.bar(("before", "after"), (before, after), color=(BEFORE, AFTER))
    axes.bar_label(bars, [f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in (before, after)], fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _name(folder: Path) -> str:
    """Return the name of a model's folder, or the Hub's name of a snapshot in a download cache."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name
