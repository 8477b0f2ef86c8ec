"""Redraw the pictures of the benchmark, each from the table above it and with its alt text as caption.

    python docs/pictures/draw.py

docs/measurements.md has the tables of the curves, and docs/performance.md the table of the bars.
`python -m attnlib bench --gpu` draws the same curves for a new run.
"""

import re
from pathlib import Path
from typing import NamedTuple

from attnlib.bench import plots
from attnlib.bench.compare import Failure
from attnlib.bench.report import Line, Table
from attnlib.bench.tables import GPU
from attnlib.internal.plots import blank, plain, png

DOCS = Path(__file__).parents[1]
PICTURE = re.compile(r"^!\[(.*)\]\(pictures/(.*)\.png\)$", re.MULTILINE)
TABLES = {entry.table.name: entry.table for entry in GPU}
BAR = 0.28  # the width of a bar; a case has three
BARS = "training"  # the picture of the table of forward and backward


class Picture(NamedTuple):
    """A table of the page, its rows, and the caption that says what they were measured on."""

    table: Table
    rows: list[Line]
    where: str


def pictures(page: str) -> list[Picture]:
    """Return the page's pictures of curves, in order.

    Raises:
        ValueError: the table above a picture has another unit than the benchmark's table of that name.
    """
    return [
        Picture(TABLES[found[2]], _rows(page[: found.start()], TABLES[found[2]]), found[1])
        for found in PICTURE.finditer(page)
    ]


def _cells(above: str) -> list[list[str]]:
    """Parse the last table of the text into rows of cells, without the line below its head."""
    block = re.findall(r"(?:^\|.*\|\n)+", above, re.MULTILINE)[-1].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block)
    return [head, *rows]


def _rows(above: str, table: Table) -> list[Line]:
    """Parse the last table of the text; ratios in brackets are dropped."""
    (unit, *columns), *lines = _cells(above)
    if unit != table.unit:
        raise ValueError(f"{table.name}: expected a table in {table.unit} above the picture, got {unit}")
    return [
        Line(name, dict(zip(columns, map(_value, cells), strict=True)), _tokens(name))
        for name, *cells in lines
    ]


def _value(cell: str) -> float | Failure:
    number = cell.partition(" ")[0]
    return float(number) if re.fullmatch(r"\d+(\.\d+)?", number) else Failure(cell)


def _tokens(name: str) -> int:
    return int(name[:-1]) * 1024 if name.endswith("k") else int(name)


def bars(page: str, path: Path) -> None:
    """Draw the training table above the page's picture: a panel for each pass, a bar for each library.

    Each half of the table is one pass: a column named after it with attnlib's numbers, then the others.
    """
    [found] = [found for found in PICTURE.finditer(page) if found[2] == BARS]
    (unit, *columns), *lines = _cells(page[: found.start()])
    figure = blank(9, 7)
    panels, half = figure.subplots(2, 1, sharex=True), len(columns) // 2
    for axes, first in zip(panels, (0, half), strict=True):
        names = ["ours", *columns[first + 1 : first + half]]
        for i, name in enumerate(names):
            heights = [_value(cells[1 + first + i]) for cells in lines]
            label = name.replace("ours", "attnlib")
            at = [row + (i - 1) * BAR for row in range(len(lines))]
            axes.bar(at, heights, BAR, color=plots.COLOUR[name], label=label)
        axes.set_ylabel(f"{columns[first]}, {unit}")
        plain(axes, grid="y")
        axes.set_axisbelow(True)
    panels[-1].set_xticks(range(len(lines)), [_wrapped(cells[0]) for cells in lines], fontsize=8)
    panels[0].set_title(f"Training, bf16\n{found[1]}", loc="left")
    panels[0].legend(frameon=False, ncols=half, loc="lower right", bbox_to_anchor=(1, 1))
    path.write_bytes(png(figure))


def _wrapped(name: str) -> str:
    """Break the name of a case before its last two words, so that it fits under its bars."""
    *first, mask, length = name.split()
    return "\n".join((" ".join(first), f"{mask} {length}"))


def main(folder: Path = DOCS / "pictures") -> None:
    """Redraw all pictures."""
    for picture in pictures((DOCS / "measurements.md").read_text()):
        path = folder / f"{picture.table.name}.png"
        plots.draw(picture.table, picture.rows, path, picture.where)
        print(f"wrote {path}")
    path = folder / f"{BARS}.png"
    bars((DOCS / "performance.md").read_text(), path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
