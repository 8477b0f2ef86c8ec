"""How fast: a row for each case, whose columns are contenders, and rows that hold one case of ours against another."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from . import cases
from .cases import Case
from .peers import PEERS
from .place import Place
from .race import Entry, race
from .report import Cells, Row, Table

Rows = Iterator[tuple[Table, Row]]
EVERY = ("eager", "efficient", "FA2", "cuDNN", "Flex")
NAMES = (("forward", "forward"), ("backward", "backward"), ("both", "forward + backward"))


def training(place: Place, tables: Sequence[Table], work: Iterable[Case] = cases.TRAINING, peers=PEERS) -> Rows:
    """Forward and backward against torch's fused attentions and FlexAttention."""
    return _cases(place, tables, work, ("ours", *peers))


def growing(place: Place, tables: Sequence[Table], work: Iterable[Case] = cases.GROWING, peers=EVERY) -> Rows:
    """48 heads of 64 channels over more and more tokens, against every way that torch has."""
    return _cases(place, tables, work, ("ours", *peers))


def growing_full(place: Place, tables: Sequence[Table]) -> Rows:
    """The same without a mask."""
    return growing(place, tables, cases.GROWING_FULL)


def long(place: Place, tables: Sequence[Table], work: Iterable[Case] = cases.LONG, peers=("FA2", "cuDNN")) -> Rows:
    """Forward and backward together, to be faster than FlashAttention-2."""
    return _cases(place, tables, work, ("ours", *peers), over="FA2")


def _cases(
    place: Place,
    tables: Sequence[Table],
    work: Iterable[Case],
    columns: Sequence[str],
    over: str | None = None,
) -> Rows:
    for case in work:
        entries = [Entry(name, name, case) for name in columns]
        taken = race(place, entries, [table.what for table in tables])
        for table in tables:
            cells = _in_units(table, table.what, taken[table.what], dict.fromkeys(columns, case))
            asked = None if over is None else table.claim(cells, "ours", over, 1)
            yield table, Row(case.name, cells, asked, case.tokens if table.growing else None)


def varlen(place: Place, tables: Sequence[Table], work=cases.VARLEN, judge: str = "FA2") -> Rows:
    """Packed sequences against a batch of as many tokens, within 8 %."""
    for packed, dense in work:
        entries = (
            Entry("packed", "ours", packed),
            Entry("dense", "ours", dense),
            Entry("packed, by sequence", "by sequence", packed, timed=False),
            Entry(f"dense, {judge}", judge, dense, timed=False),
        )
        yield from _contest(place, tables[0], packed.name, entries, {"forward": 0.92, "backward": 0.92})


def window(place: Place, tables: Sequence[Table], work=cases.WINDOW, peer: str = "Flex", judge: str = "FA2") -> Rows:
    """A sliding window against all earlier keys, five times faster."""
    near, far = work
    entries = (
        Entry("sliding", "ours", near),
        Entry("causal", "ours", far),
        Entry(f"{peer}, sliding", peer, near),
        Entry("eager, sliding", "eager", near, timed=False),
        Entry(f"{judge}, causal", judge, far, timed=False),
    )
    name = f"{near.mask.left + 1} of {near.tokens} keys"
    yield from _contest(place, tables[0], name, entries, {"forward": None, "backward": None, "both": 5})


def grouped(place: Place, tables: Sequence[Table], work=cases.GROUPED, judge: str = "FA2") -> Rows:
    """Fewer KV heads, no slower than as many as query heads."""
    few, many = work
    entries = (
        Entry(few.name, "ours", few),
        Entry(many.name, "ours", many),
        *(Entry(f"{case.name}, {judge}", judge, case, timed=False) for case in work),
    )
    name = f"{few.batch} x {few.tokens} d{few.dim}"
    yield from _contest(place, tables[0], name, entries, {"forward": 1, "backward": 1})


def _contest(
    place: Place, table: Table, name: str, entries: Sequence[Entry], asked: Mapping[str, float | None]
) -> Rows:
    """A row for each of ``asked``, in which the first column leads the second by the bound."""
    taken = race(place, entries, asked)
    for what, bound in asked.items():
        cells = _in_units(table, what, taken[what], {entry.column: entry.case for entry in entries})
        first, second, *_ = (entry.column for entry in entries)
        claim = None if bound is None else table.claim(cells, first, second, bound)
        yield table, Row(f"{name}, {dict(NAMES)[what]}", cells, claim)


def _in_units(table: Table, what: str, seconds: Cells, work: Mapping[str, Case]) -> Cells:
    """Seconds as the table's milliseconds or TFLOP/s; a Failure stays one."""

    def convert(column: str, taken: float) -> float:
        return work[column].flops(what) / taken / 1e12 if table.unit == "TFLOP/s" else taken * 1e3

    return {c: x if isinstance(x, str) else convert(c, x) for c, x in seconds.items()}
