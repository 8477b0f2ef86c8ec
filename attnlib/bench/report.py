"""Tables of measurements, formatted for a terminal, as Markdown and as JSON."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from .compare import Cells, Failure

MISSING = Failure("")


class Line(NamedTuple):
    """A row of a table of measurements: its name, its cells, and its token count if the table plots it."""

    name: str
    cells: Cells
    tokens: int | None = None


class Table(NamedTuple):
    """The layout of a table of measurements; larger numbers are better if the unit is per second.

    The first ``ours`` columns are attnlib's. A single attnlib column is compared with each of the other
    columns; several are each compared with the best other library. ``what`` is the timed pass ("forward",
    "backward" or "both") if it is the same in all rows. The rows of a ``growing`` table differ only in their
    tokens, and its picture has curves; that of a table with ``bars`` has a bar for each cell.
    """

    name: str
    title: str
    unit: str
    what: str = ""
    growing: bool = False
    bars: bool = False
    ours: int = 1

    @property
    def more_is_better(self) -> bool:
        return self.unit.endswith("/s")

    def best(self, cells: Cells) -> str:
        """Return the name of the best column that is not attnlib's, or "" if none of them has a number."""
        numbers = {column: x for column, x in list(cells.items())[self.ours :] if not isinstance(x, Failure)}
        return (max if self.more_is_better else min)(numbers, key=numbers.get, default="")

    def ratio(self, cells: Cells, column: str) -> float | None:
        """Return how many times better attnlib is than ``column``; tables show this ratio in brackets.

        If several columns are attnlib's, return how many times better ``column`` is than the best column of
        another library. The result is None for a column that gets no ratio.
        """
        mine = list(cells)[: self.ours]
        if (column in mine) == (self.ours == 1):
            return None
        first, other = (mine[0], column) if self.ours == 1 else (column, self.best(cells))
        a, b = cells.get(first, MISSING), cells.get(other, MISSING)
        if isinstance(a, Failure) or isinstance(b, Failure):
            return None
        return a / b if self.more_is_better else b / a

    def failed(self, row: Line) -> bool:
        """True if a column of attnlib has no number in this row."""
        return any(isinstance(value, Failure) for value in list(row.cells.values())[: self.ours])

    def texts(self, row: Line, columns: Sequence[str]) -> list[str]:
        """Format the cells of a row: a number, with a ratio in brackets, or the reason why there is none."""
        found = []
        for column in columns:
            value, ratio = row.cells.get(column, MISSING), self.ratio(row.cells, column)
            text = value if isinstance(value, Failure) else digits(value)
            found.append(text if ratio is None else f"{text} ({ratio:.2f}x)")
        return found


def markdown(table: Table, rows: Sequence[Line], facts: dict[str, str]) -> str:
    """Format a table as Markdown, under a heading with the command, the device, the versions and the date."""
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    lines = [f"## {table.title}", ", ".join((f"`{facts['command']}`", *list(facts.values())[1:])), ""]
    lines += [f"| {' | '.join([table.unit, *columns])} |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {' | '.join([row.name, *table.texts(row, columns)])} |" for row in rows]
    return "\n".join(lines) + "\n"


def line(table: Table, row: Line) -> str:
    """Format a row as a line of text."""
    cells = zip(row.cells, table.texts(row, list(row.cells)), strict=True)
    return (
        f"{table.name}, {row.name}: {', '.join(f'{column} {cell}' for column, cell in cells)} [{table.unit}]"
    )


def digits(x: float) -> str:
    """Format a number with at least three significant digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.3g}"


class Report:
    """Collects the rows of tables and saves a table after each new row, in case the run is cut short."""

    def __init__(self, folder: Path, facts: dict[str, str], say: Callable[[str], None] = print):
        self.folder = folder
        self.facts = facts
        self.say = say
        self.tables: dict[Table, list[Line]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, table: Table, row: Line) -> None:
        """Print a row and write its table's ``.md`` and ``.json``."""
        rows = self.tables.setdefault(table, [])
        rows.append(row)
        self.say(line(table, row))
        (self.folder / f"{table.name}.md").write_text(markdown(table, rows, self.facts))
        record = {"facts": self.facts, **table._asdict(), "rows": [row._asdict() for row in rows]}
        (self.folder / f"{table.name}.json").write_text(json.dumps(record, indent=1) + "\n")
