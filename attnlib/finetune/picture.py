"""Plot the recovery of a model: bits on held-out text against training steps."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..internal.plots import COLOURS, blank, plain, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHED = tuple(  # reference lines: the original, and a window of keys
    MappingProxyType({"color": colour, "linestyle": "--", "linewidth": 1.2})
    for colour in ("0.35", COLOURS[1])
)
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
    _draw_losses(axes, curves, dict([line]), unit)
    axes.set_title(title, loc="left", fontsize=13)
    path.write_bytes(png(figure))


def draw_sparse(
    name: str,
    losses: Sequence[tuple[int, float]],
    recalls: Sequence[tuple[int, float]],
    lines: Mapping[str, float],
    window: float,
    alone: int,
    path: Path,
) -> None:
    """Write a PNG of a student with index branches: its losses, and the mass recall of what they choose.

    ``lines`` are reference losses, ``window`` is the recall of a window of as many keys, and ``alone`` is the
    number of steps in which branches learn alone.
    """
    figure = blank(13, 5)
    left, right = figure.subplots(1, 2)
    _draw_losses(left, {name: losses}, lines, "bits per byte")
    steps, shares = zip(*recalls, strict=True)
    label = f"chosen keys: {shares[0]:.3f} to {shares[-1]:.3f}"
    right.plot(steps, shares, color=COLOURS[0], linewidth=2, marker="o", markersize=4, label=label)
    right.axhline(1, **DASHED[0], label="all keys")
    right.axhline(window, **DASHED[1], label=f"a window: {window:.3f}")
    right.set_ylim(0, 1.03)
    _label(right, "mass recall: dense attention's probability")
    for axes in (left, right):
        axes.axvline(alone, color="0.8", zorder=0)
        axes.annotate(" index branches alone", (0, 0.02), xycoords=("data", "axes fraction"), color="0.45")
    path.write_bytes(png(figure))


def _draw_losses(
    axes: "Axes", curves: Mapping[str, Sequence[tuple[int, float]]], lines: Mapping[str, float], unit: str
) -> None:
    for (name, curve), colour in zip(curves.items(), cycle(COLOURS), strict=False):
        steps, bits = zip(*curve, strict=True)
        label = f"{name}: {bits[0]:.3f} to {bits[-1]:.3f}"
        axes.plot(steps, bits, color=colour, linewidth=2, marker="o", markersize=4, label=label)
    for (name, bits), style in zip(lines.items(), DASHED, strict=False):
        axes.axhline(bits, **style, label=f"{name}: {bits:.3f}")
    shown = [bits for curve in curves.values() for _, bits in curve[1:] or curve]
    bottom, top = _range([*shown, *lines.values()])
    axes.set_ylim(bottom, top)
    beyond = [(curve[0][1], colour) for curve, colour in zip(curves.values(), cycle(COLOURS), strict=False)]
    for place, (start, colour) in enumerate(sorted((x for x in beyond if x[0] > top), reverse=True)):
        at = (0.01, 0.95 - 0.06 * place)
        axes.annotate(f"{start:.2f} ↑", at, xycoords="axes fraction", color=colour, fontsize=11)
    _label(axes, f"held-out text ({unit})")


def _label(axes: "Axes", text: str) -> None:
    """Label the axes, and add the legend."""
    axes.set_xlabel("steps after the conversion", fontsize=12)
    axes.set_ylabel(text, fontsize=12)
    axes.set_xlim(left=0)
    plain(axes)
    axes.tick_params(labelsize=11)
    axes.legend(frameon=False, fontsize=11)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = MARGIN * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
