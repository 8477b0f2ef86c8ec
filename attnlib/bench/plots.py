"""Tables whose rows differ by their tokens, as pictures: a line for each column."""

from collections.abc import Sequence
from pathlib import Path

from .compare import Failure
from .report import MISSING, Row, Table

# Okabe and Ito's colours, told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def draw(table: Table, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of a growing table.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = [name for row in rows for name, value in row.cells.items() if not isinstance(value, Failure)]
    for i, name in enumerate(dict.fromkeys(names)):
        cells = [(row.tokens, row.cells.get(name, MISSING)) for row in rows]
        points = [(tokens, value) for tokens, value in cells if not isinstance(value, Failure)]
        lost = next(((tokens, why) for tokens, why in cells if isinstance(why, Failure)), None)
        label = name if lost is None else f"{name} ({lost[1].partition(':')[0]} at {lost[0]:,})"
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=2, marker="o", markersize=4, label=label)
    tokens = [row.tokens for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in tokens])
    axes.set_xlabel("tokens")
    axes.set_ylim(bottom=0) if table.more_is_better else axes.set_yscale("log")
    axes.set_ylabel(table.unit)
    axes.set_title(table.title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis="y")
    axes.legend(frameon=False)
    figure.savefig(path, format="png")
