"""The picture of a sweep: KL divergence against cache bytes per token, on average and by text."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...internal.plots import COLOURS, blank, plain, svg
from ..picture import Start

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "sweep.svg"
MARKERS = ("o", "s", "^", "D", "v")  # one for each store
LEAST = 1e-4  # nats; a smaller divergence, which nobody notices, is drawn here on the logarithmic axis


def picture(table: Mapping[str, Any], start: Start) -> bytes:
    """Return an SVG of a table with fronts: all points and their front, and the points of the front by text.

    Raises:
        ImportError: matplotlib is not installed.
    """
    points = table["points"]
    by_text = len(points[0]["by_text"]) > 1
    figure = blank(12 if by_text else 7, 5.5)
    rows = figure.subplots(1, 2 if by_text else 1, sharey=True, squeeze=False)[0]
    _draw_points(rows[0], points)
    if by_text:
        _draw_texts(rows[1], [point for point in points if point["on_front"]])
    for axes in rows:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted({point["cache_bytes_per_token"] for point in points})
        axes.set_xticks(_apart(sizes), [f"{size:,}" for size in _apart(sizes)], rotation=30, fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("cache, bytes per token")
        plain(axes)
    rows[0].set_ylabel(f"KL divergence from the source, nats per token (at least {LEAST})")
    figure.suptitle(f"{start.title}: what a smaller cache costs", x=0.01, ha="left")
    return svg(figure)


def _draw_points(axes: "Axes", points: Sequence[Mapping[str, Any]]) -> None:
    front = [point for point in points if point["on_front"]]
    steps = {"drawstyle": "steps-post", "color": "0.6", "linewidth": 1.2, "zorder": 1}
    axes.plot(*_places(front[::-1]), label="front", **steps)
    stores = dict.fromkeys(point["store"] for point in points)
    for store, colour, marker in zip(stores, COLOURS, MARKERS, strict=False):
        some = [point for point in points if point["store"] == store]
        axes.scatter(*_places(some), color=colour, marker=marker, label=f"{store} cache", zorder=2)
    for point in points:
        place = point["cache_bytes_per_token"], max(point["kl_nats"], LEAST)
        right = not point["on_front"]  # points off the front lie above it
        lift = 4 + 9 * [*stores].index(point["store"])  # labels of one size in two stores do not overlap
        axes.annotate(
            point["name"],
            place,
            xytext=(6, lift) if right else (-6, -4),
            textcoords="offset points",
            ha="left" if right else "right",
            va="bottom" if right else "top",
            fontsize=8,
        )
    axes.margins(x=0.2, y=0.1)
    axes.set_title("all texts", loc="left", fontsize=9)
    axes.legend(frameon=False, loc="upper right")


def _draw_texts(axes: "Axes", front: Sequence[Mapping[str, Any]]) -> None:
    """Draw a line for each text over the points of the front; of many texts, those that lose most."""
    worst = min(front, key=lambda point: point["cache_bytes_per_token"])["by_text"]
    for row, colour in zip(worst, COLOURS, strict=False):
        found = [
            (point["cache_bytes_per_token"], max(text["kl_nats"], LEAST))
            for point in front
            for text in point["by_text"]
            if text["name"] == row["name"]
        ]
        axes.plot(*zip(*found, strict=True), color=colour, marker="o", markersize=4, label=row["name"])
    left_out = len(worst) - len(COLOURS)
    axes.set_title(
        "the front, by text" + (f" (without {left_out})" if left_out > 0 else ""), loc="left", fontsize=9
    )
    axes.legend(frameon=False, fontsize=8)


def _places(points: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    return [x["cache_bytes_per_token"] for x in points], [max(x["kl_nats"], LEAST) for x in points]


def _apart(sizes: Sequence[int]) -> list[int]:
    """Return the sizes of ``sizes``, in ascending order, whose labels do not overlap on a log axis."""
    kept = list(sizes[:1])
    for _, size in pairwise(sizes):
        if size > 1.12 * kept[-1]:
            kept.append(size)
    return kept
