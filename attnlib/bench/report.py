"""Tables of measurements: what they look like on a terminal, in Markdown and in JSON."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from .race import Failure


class Claim(NamedTuple):
    """A ratio that was asked for: at least the bound, or with ``most`` at most."""

    ratio: float
    bound: float
    most: bool = False

    @property
    def met(self) -> bool:
        ratio = round(self.ratio, 2)
        return ratio <= self.bound if self.most else ratio >= self.bound

    def __str__(self) -> str:
        text = f"{self.ratio:.2f}x, asked {'<=' if self.most else '>='} {self.bound:g}x"
        return text if self.met else f"{text}: **missed**"


Cells = dict[str, float | Failure]  # by column; a Failure says why there is no number


class Row(NamedTuple):
    """A line of a table."""

    name: str
    cells: Cells
    claim: Claim | None = None
    tokens: int | None = None

    @property
    def failed(self) -> bool:
        """Whether the first column, which is ours, has no number."""
        return isinstance(next(iter(self.cells.values())), Failure)


class Table(NamedTuple):
    """What a table shows. The first column of its rows is compared with the others; of TFLOP/s more is better.

    ``what`` is timed, "forward", "backward" or "both", where that does not differ by row. The rows of a ``growing``
    table differ by their tokens alone.
    """

    name: str
    title: str
    unit: str
    what: str = ""
    growing: bool = False

    def lead(self, cells: Cells, first: str, over: str) -> float | None:
        """How many times better the first column is than another; above 1 it is better."""
        ours, theirs = cells.get(first, MISSING), cells.get(over, MISSING)
        if isinstance(ours, Failure) or isinstance(theirs, Failure):
            return None
        return ours / theirs if self.unit == "TFLOP/s" else theirs / ours

    def claim(self, cells: Cells, first: str, over: str, bound: float) -> Claim | None:
        """That the first column leads by the bound; None where either has no number."""
        lead = self.lead(cells, first, over)
        return None if lead is None else Claim(lead, bound)


MISSING = Failure("")


def markdown(table: Table, rows: Sequence[Row], facts: dict[str, str]) -> str:
    """The table and, above it, how and on what it was made."""
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    asked = any(row.claim for row in rows)
    first, *others = columns
    head = [table.unit, first, *others, *(["asked"] if asked else [])]
    lines = [f"## {table.title}", ", ".join((f"`{facts['command']}`", *list(facts.values())[1:])), ""]
    lines += [f"| {' | '.join(head)} |", "|---|" + "---:|" * len(columns) + ("---|" if asked else "")]
    for row in rows:
        cells = [row.name, *cells_of(table, row, columns)]
        lines.append(f"| {' | '.join([*cells, str(row.claim or '')] if asked else cells)} |")
    return "\n".join(lines) + "\n"


def cells_of(table: Table, row: Row, columns: Sequence[str]) -> list[str]:
    """What stands in each column: a number, with the first's lead over it in brackets, or why there is none."""
    found = []
    for column in columns:
        value = row.cells.get(column, MISSING)
        text = value if isinstance(value, Failure) else digits(value)
        lead = None if column == columns[0] else table.lead(row.cells, columns[0], column)
        found.append(text if lead is None else f"{text} ({lead:.2f}x)")
    return found


def line(table: Table, row: Row) -> str:
    """The row as a line of text."""
    cells = zip(row.cells, cells_of(table, row, list(row.cells)), strict=True)
    text = f"{table.name}, {row.name}: {', '.join(f'{column} {cell}' for column, cell in cells)} [{table.unit}]"
    return f"{text}; {row.claim}" if row.claim else text


def digits(x: float) -> str:
    """Three digits or more.

    >>> digits(1234.5), digits(56.78), digits(0.1234)
    ('1234', '56.8', '0.123')
    """
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.3g}"


class Report:
    """Rows as they come, kept in files that are whole after each of them, for a run may be cut short."""

    def __init__(self, folder: Path, facts: dict[str, str], say: Callable[[str], None] = print):
        self.folder, self.facts, self.say = folder, facts, say
        self.tables: dict[Table, list[Row]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, table: Table, row: Row) -> None:
        """Print a row and write its table's ``.md`` and ``.json``."""
        rows = self.tables.setdefault(table, [])
        rows.append(row)
        self.say(line(table, row))
        (self.folder / f"{table.name}.md").write_text(markdown(table, rows, self.facts))
        found = [{**row._asdict(), "claim": row.claim and row.claim._asdict()} for row in rows]
        record = {"facts": self.facts, **table._asdict(), "rows": found}
        (self.folder / f"{table.name}.json").write_text(json.dumps(record, indent=1) + "\n")
