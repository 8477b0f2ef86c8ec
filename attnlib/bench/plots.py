"""Plot tables whose rows differ only in the number of tokens: one curve for each column."""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..internal.plots import COLOURS, blank, plain, png
from .compare import Failure
from .report import MISSING, Line, Table, digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each implementation has the same colour in every picture.
COLOUR = MappingProxyType(
    dict(zip(("ours", "cuDNN", "FA4", "FA2", "Flex", "efficient", "eager"), COLOURS, strict=False))
    | {"must be held": "0.55"}
)


def draw(table: Table, rows: Sequence[Line], path: Path, where: str) -> None:
    """Plot a table against the number of tokens, as a PNG; ``where`` names the device, torch and the date.

    attnlib's curve is drawn wider, so that it stays visible under another curve.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = blank(8, 5)
    axes = figure.subplots()
    names = [name for row in rows for name, value in row.cells.items() if not isinstance(value, Failure)]
    for name in dict.fromkeys(names):
        cells = [(row.tokens, row.cells.get(name, MISSING)) for row in rows]
        points = [(tokens, value) for tokens, value in cells if not isinstance(value, Failure)]
        lost = next(((tokens, why) for tokens, why in cells if isinstance(why, Failure)), None)
        end = "" if lost is None else f" ({lost[1].partition(':')[0]} at {lost[0]:,})"
        label = name.replace("ours", "attnlib") + end
        style = {"linewidth": 4.5, "markersize": 8} if name == "ours" else {"linewidth": 1.6, "markersize": 4}
        colour = COLOUR.get(name, COLOURS[-1])
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", label=label, **style)
    tokens = [row.tokens for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in tokens])
    axes.set(xlabel="tokens", ylabel="memory" if table.unit == "MiB" else table.unit)
    if table.more_is_better:
        axes.set_ylim(bottom=0)
    else:
        _doublings(axes, table.unit)
    axes.set_title(f"{table.title}\n{where}", loc="left")
    plain(axes, grid="y")
    axes.legend(frameon=False)
    path.write_bytes(png(figure))


def draw_bars(table: Table, rows: Sequence[Line], path: Path, where: str) -> None:
    """Draw a group of bars for each row, as a PNG: the speed of each column relative to attnlib's.

    If attnlib has no result in a row, the fastest column takes its place.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = blank(8, 0.8 + 0.9 * len(rows))
    axes = figure.subplots()
    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    height = 0.8 / max(1, len(names))
    found = [{name: x for name, x in row.cells.items() if isinstance(x, float)} for row in rows]
    units = [cells.get("ours", max(cells.values(), default=1.0)) for cells in found]
    for n, name in enumerate(names):
        values = [(at, cells[name]) for at, cells in enumerate(found) if name in cells]
        places = [at + (n - (len(names) - 1) / 2) * height for at, _ in values]
        label, colour = name.replace("ours", "attnlib"), COLOUR.get(name, COLOURS[-1])
        widths = [value / units[at] for at, value in values]
        bars = axes.barh(places, widths, height * 0.9, label=label, color=colour)
        axes.bar_label(bars, [digits(value) for _, value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"speed / attnlib's speed; numbers are {table.unit}")
    axes.set_title(f"{table.title}\n{where}", loc="left")
    plain(axes, grid="x")
    figure.legend(frameon=False, ncols=len(names), loc="outside lower center")
    path.write_bytes(png(figure))


def _doublings(axes: "Axes", unit: str) -> None:
    """Make the vertical axis logarithmic, with a tick at every power of two, such as 512 MiB and 1 GiB."""
    from matplotlib.ticker import LogLocator, NullLocator

    def text(x: float, _: int) -> str:
        if unit != "MiB":
            return f"{x:g}"
        return f"{x:g} MiB" if x < 1024 else f"{x / 1024:g} GiB"

    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(2, numticks=25))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(text)
