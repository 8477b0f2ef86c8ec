"""Redraw the pictures of docs/performance.md, each from the table above it and with its alt text as caption.

    python docs/pictures/draw.py

`python -m attnlib bench --gpu` draws the same pictures for a new run.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attnlib.bench import plots
from attnlib.bench.compare import Failure
from attnlib.bench.report import Line, Table
from attnlib.bench.tables import GPU

DOCS = Path(__file__).parents[1]
PICTURE = re.compile(r"^!\[(.*)\]\(pictures/(.*)\.png\)$", re.MULTILINE)
TABLES = {entry.table.name: entry.table for entry in GPU}


class Picture(NamedTuple):
    """A table of the page, its rows, and the caption that says what they were measured on."""

    table: Table
    rows: list[Line]
    where: str


def pictures(page: str) -> list[Picture]:
    """Return the page's pictures, in order.

    Raises:
        ValueError: the table above a picture has another unit than the benchmark's table of that name.
    """
    return [
        Picture(TABLES[found[2]], _rows(page[: found.start()], TABLES[found[2]]), found[1])
        for found in PICTURE.finditer(page)
    ]


def _rows(above: str, table: Table) -> list[Line]:
    """Parse the last table of the text; ratios in brackets are dropped."""
    block = re.findall(r"(?:^\|.*\|\n)+", above, re.MULTILINE)[-1].splitlines()
    (unit, *columns), _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in block)
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


def main(pages: Sequence[Path] = (DOCS / "performance.md",), folder: Path = DOCS / "pictures") -> None:
    """Redraw the pictures of all pages."""
    for page in pages:
        for picture in pictures(page.read_text()):
            path = folder / f"{picture.table.name}.png"
            plots.draw(picture.table, picture.rows, path, picture.where)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
