"""Tables of measurements: what they look like on a terminal, in Markdown and in JSON."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from .race import Failure


class Claim(NamedTuple):
    """A ratio that was asked for, or a number in another unit: at least the bound, or with ``most`` at most.

    ``of`` names the column that it is about, where that is not the first.
    """

    ratio: float
    bound: float
    most: bool = False
    unit: str = "x"
    of: str = ""

    @property
    def met(self) -> bool:
        ratio = round(self.ratio, 2)
        return ratio <= self.bound if self.most else ratio >= self.bound

    @property
    def room(self) -> float:
        """How many times better it is than asked."""
        return self.bound / self.ratio if self.most else self.ratio / self.bound

    def __str__(self) -> str:
        unit = self.unit
        text = f"{self.ratio:.2f}{unit}, asked {'<=' if self.most else '>='} {self.bound:g}{unit}"
        text = f"{self.of}: {text}" if self.of else text
        return text if self.met else f"{text}: **missed**"


Cells = dict[str, float | Failure]  # by column; a Failure says why there is no number


class Row(NamedTuple):
    """A line of a table."""

    name: str
    cells: Cells
    claim: Claim | None = None
    tokens: int | None = None


class Table(NamedTuple):
    """What a table shows. Of what is counted per second more is better.

    The first ``ours`` columns of its rows are ours: a single one is compared with each of the others, several with the
    best of the others. ``what`` is timed, "forward", "backward" or "both", where that does not differ by row. The rows
    of a ``growing`` table differ by their tokens alone.
    """

    name: str
    title: str
    unit: str
    what: str = ""
    growing: bool = False
    ours: int = 1

    @property
    def more_is_better(self) -> bool:
        return self.unit.endswith("/s")

    def lead(self, cells: Cells, first: str, over: str) -> float | None:
        """How many times better the first column is than another; above 1 it is better."""
        ours, theirs = cells.get(first, MISSING), cells.get(over, MISSING)
        if isinstance(ours, Failure) or isinstance(theirs, Failure):
            return None
        return ours / theirs if self.more_is_better else theirs / ours

    def best(self, cells: Cells) -> str:
        """The best of the columns that are not ours; "" if none has a number."""
        numbers = {column: x for column, x in list(cells.items())[self.ours :] if not isinstance(x, Failure)}
        return (max if self.more_is_better else min)(numbers, key=numbers.get, default="")

    def compare(self, cells: Cells, column: str) -> float | None:
        """The lead in brackets: of the first column over this one; where several are ours, of each over the best."""
        mine = list(cells)[: self.ours]
        if self.ours > 1:
            return self.lead(cells, column, self.best(cells)) if column in mine else None
        return None if column in mine else self.lead(cells, mine[0], column)

    def failed(self, row: Row) -> bool:
        """Whether a column that is ours has no number."""
        return any(isinstance(value, Failure) for value in list(row.cells.values())[: self.ours])

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
    """What stands in each column: a number, with a lead in brackets, or why there is none."""
    found = []
    for column in columns:
        value = row.cells.get(column, MISSING)
        text = value if isinstance(value, Failure) else digits(value)
        lead = table.compare(row.cells, column)
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
