"""Plot the recovery of a model: bits on held-out text against training steps."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from ..internal.plots import COLOURS, blank, plain, png

MARGIN = 0.15  # margin above and below the curves, as a fraction of their height


def draw(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    line: tuple[str, float],
    title: str,
    unit: str,
    path: Path,
) -> None:
    """Write a PNG of ``curves``, each a list of (steps, bits), with a horizontal reference ``line``.

    The first point of a curve is often so high that the rest would look flat. The axis therefore covers only
    the later points, and a first point above the axis is written as a number.
    """
    figure = blank(9, 5)
    axes = figure.subplots()
    for (name, curve), colour in zip(curves.items(), cycle(COLOURS), strict=False):
        steps, bits = zip(*curve, strict=True)
        label = f"{name}: {bits[0]:.3f} to {bits[-1]:.3f}"
        axes.plot(steps, bits, color=colour, linewidth=2, marker="o", markersize=4, label=label)
    axes.axhline(line[1], color="0.35", linestyle="--", linewidth=1.2, label=f"{line[0]}: {line[1]:.3f}")
    bottom, top = _range([bits for curve in curves.values() for _, bits in curve[1:] or curve] + [line[1]])
    axes.set_ylim(bottom, top)
    beyond = [(curve[0][1], colour) for curve, colour in zip(curves.values(), cycle(COLOURS), strict=False)]
    for place, (start, colour) in enumerate(sorted((x for x in beyond if x[0] > top), reverse=True)):
        at = (0.01, 0.95 - 0.06 * place)
        axes.annotate(f"{start:.2f} ↑", at, xycoords="axes fraction", color=colour, fontsize=11)
    axes.set_title(title, loc="left", fontsize=13)
    axes.set_xlabel("steps after the conversion", fontsize=12)
    axes.set_ylabel(f"held-out text ({unit})", fontsize=12)
    axes.set_xlim(left=0)
    plain(axes)
    axes.tick_params(labelsize=11)
    axes.legend(frameon=False, fontsize=11)
    path.write_bytes(png(figure))


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = MARGIN * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
