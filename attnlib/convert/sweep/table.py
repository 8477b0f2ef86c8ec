"""The table of a sweep: which points are on the Pareto front, and the table in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..check.by_text import shown

HEAD = ("cache bytes per token", "of source", "size", "store", "KL, nats", "worst text", "perplexity", "")
FRONT = "front"


def with_front(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with its points sorted by size, largest first, and ``on_front`` for each.

    A point is on the front unless another one is at least as good in bytes and in KL divergence, and better
    in one of them.
    """
    points = sorted(table["points"], key=lambda x: (-x["cache_bytes_per_token"], x["kl_nats"], x["name"]))
    return {**table, "points": [{**x, "on_front": not any(_better(y, x) for y in points)} for x in points]}


def _better(x: Mapping[str, Any], y: Mapping[str, Any]) -> bool:
    one, other = ((p["cache_bytes_per_token"], p["kl_nats"]) for p in (x, y))
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def markdown(table: Mapping[str, Any]) -> str:
    """Return the points of a table as Markdown, and the options of ``convert`` for each size."""
    points = table["points"]
    whole = max(table["source_bytes_per_token"].values())
    rows = [_row(point, whole) for point in points]
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = [_line(HEAD, widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
    lines += [_line(row, widths) for row in rows]
    options = {point["name"]: point["options"] for point in points if point["options"]}
    lines += ["", "Options of `convert` for each size:", ""]
    lines += [f"- {name}: `{given}`" for name, given in options.items()]
    return "\n".join(lines) + "\n"


def _row(point: Mapping[str, Any], whole: int) -> tuple[str, ...]:
    worst, size = point["by_text"][0], point["cache_bytes_per_token"]
    return (
        f"{size:,}",
        f"{size / whole:.0%}",
        point["name"],
        point["store"],
        f"{point['kl_nats']:.3g}",
        f"{worst['name']} {worst['kl_nats']:.3g}",
        shown(point["perplexity_after"]),
        FRONT if point["on_front"] else "",
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a row of a table; numbers are right-aligned."""
    padded = [
        cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
        for cell, width in zip(cells, widths, strict=True)
    ]
    return f"| {' | '.join(padded)} |"
