"""Write the table of slow tests in tests/README.md: ``python tests/helpers/slow_tests.py``.

It reads the marks in the test files and collects nothing, so a test compares the table in no time.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS / "README.md"
HEAD = "| test | run by default |\n|---|---|\n"
TOGETHER = {1: "value of each parameter", 2: "pair of values"}
MARKED = "mark.slow"


def table() -> str:
    """Return a row for each test, or file, that runs in part or not at all without ``-m slow``."""
    rows = [
        f"| `{path.relative_to(TESTS).as_posix()}{name}` | {runs} |"
        for path in sorted(TESTS.rglob("test_*.py"))
        for name, runs in slow_of(ast.parse(path.read_text()))
    ]
    return HEAD + "\n".join(rows)


def slow_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The slow tests of a file, and which of their cases run by default; its properties are not told."""
    known = {name: one for one in tree.body for name in _names(one) if MARKED in ast.unparse(one)}
    if "pytestmark" in known:
        yield "", "nothing"
        return
    for test in (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name.startswith("test_")):
        told = [text for mark in test.decorator_list if (text := _of_mark(mark, known))]
        if told:
            yield f"::{test.name}", "nothing" if "nothing" in told else ", ".join(told)


def _names(statement: ast.stmt) -> list[str]:
    """The names that a statement defines for marks to use."""
    if isinstance(statement, ast.FunctionDef):
        return [] if statement.name.startswith("test_") else [statement.name]
    return [x.id for x in getattr(statement, "targets", ()) if isinstance(x, ast.Name)]


def _of_mark(mark: ast.expr, known: dict[str, ast.stmt]) -> str:
    """What one mark says of the cases that run by default; an empty string if all of them do."""
    text = ast.unparse(mark)
    if text.endswith(MARKED):
        return "nothing"
    if found := re.search(r"covering\((\d)\)", text):
        return f"a few cases, which hold every {TOGETHER[int(found[1])]}"
    used = [known[x.id] for x in ast.walk(mark) if isinstance(x, ast.Name) and x.id in known]
    if "parametrize" not in text or not (used or MARKED in text):
        return ""
    named = ast.literal_eval(mark.args[0])
    named = named if isinstance(named, str) else ", ".join(named)
    left = None if used else _left_out(mark)
    return f"some values of {named}" if left is None else f"all but {named} = {' or '.join(left)}"


def _left_out(mark: ast.expr) -> list[str] | None:
    """The values whose cases are slow, as text; None if they are many, or a loop makes them."""
    slow = [
        x
        for x in ast.walk(mark)
        if isinstance(x, ast.Call) and any(MARKED in ast.unparse(k) for k in x.keywords)
    ]
    made = any(isinstance(x, ast.comprehension) for x in ast.walk(mark))
    return None if made or len(slow) > 2 else [", ".join(map(ast.unparse, x.args)) for x in slow]


def written(page: str) -> str:
    """Return the page with the table of today."""
    before, _, after = page.partition(HEAD)
    rest = re.sub(r"\A(\|.*\n?)*", "", after)
    return f"{before}{table()}\n{rest}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
