"""Tables as pictures: lines against tokens where rows differ by their length, else bars."""

from collections.abc import Sequence
from pathlib import Path

from .race import Failure
from .report import MISSING, Row, Table

# Okabe and Ito's colours, told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def draw(table: Table, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of the table.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if table.growing:
        _lines(axes, rows, log=not table.more_is_better)
    else:
        _bars(axes, rows)
    axes.set_ylabel(table.unit)
    axes.set_title(table.title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis="y")
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def _columns(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The columns that hold a number, each with its colour."""
    names = dict.fromkeys(
        column for row in rows for column, value in row.cells.items() if not isinstance(value, Failure)
    )
    return [(name, COLOURS[i % len(COLOURS)]) for i, name in enumerate(names)]


def _lines(axes, rows: Sequence[Row], *, log: bool) -> None:
    for name, colour in _columns(rows):
        cells = [(row.tokens, row.cells.get(name, MISSING)) for row in rows]
        points = [(tokens, value) for tokens, value in cells if not isinstance(value, Failure)]
        lost = next(((tokens, why) for tokens, why in cells if isinstance(why, Failure)), None)
        label = name if lost is None else f"{name} ({lost[1].partition(':')[0]} at {lost[0]:,})"
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=2, marker="o", markersize=4, label=label)
    tokens = [row.tokens for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in tokens])
    axes.set_xlabel("tokens")
    axes.set_yscale("log") if log else axes.set_ylim(bottom=0)


def _bars(axes, rows: Sequence[Row]) -> None:
    columns = _columns(rows)
    width = 0.8 / max(1, len(columns))
    for i, (name, colour) in enumerate(columns):
        values = [row.cells.get(name, MISSING) for row in rows]
        heights = [0 if isinstance(value, Failure) else value for value in values]
        axes.bar([n + i * width for n in range(len(rows))], heights, width, color=colour, label=name)
        for n, value in enumerate(values):
            if isinstance(value, Failure):
                axes.text(
                    n + i * width, 0, f" {value.partition(':')[0]}", rotation=90, ha="center", va="bottom", size=7
                )
    middle = width * (len(columns) - 1) / 2
    axes.set_xticks([n + middle for n in range(len(rows))], [row.name for row in rows], rotation=25, ha="right", size=8)
