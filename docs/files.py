"""Write the file tree and the import table of internals.md: ``python docs/files.py``.

The tree quotes the first sentence of each file's docstring; the table comes from ``tests/helpers/rooms.py``.
"""

import ast
import re
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "internals.md"
FOLDERS = ("attnlib", "examples")
WIDTH = 88  # columns of code that the site shows without scrolling


def tree() -> str:
    """Return a line for each folder and file, folders after the files beside them."""
    return "\n".join(line for folder in FOLDERS for line in _lines(HERE.parent / folder, 0))


def _lines(folder: Path, depth: int) -> Iterator[str]:
    yield _line(f"{folder.name}/", folder / "__init__.py", depth)
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            yield _line(file.name, file, depth + 1)
    for inside in sorted(path for path in folder.iterdir() if any(path.glob("*.py"))):
        yield from _lines(inside, depth + 1)


def _line(name: str, file: Path, depth: int) -> str:
    doc = ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None
    paragraph = " ".join((doc or "").split("\n\n")[0].split()).replace("``", "")
    sentence = re.split(r"(?<=[^.])\.(?= |$)", paragraph)[0]
    start = f"{'  ' * depth}{name:18} "
    return textwrap.fill(start + sentence, WIDTH, subsequent_indent=" " * len(start)).rstrip()


def imports() -> str:
    """Return the import table: a row per room (package folder) with the rooms that it may import.

    Rooms are sorted from top to bottom. "values" stands for all rooms of values.
    """
    known = runpy.run_path(str(HERE.parent / "tests/helpers/rooms.py"))
    values, rooms = known["VALUES"], known["ROOMS"]
    rows = [f"| `{room}` | {_named(rooms[room], values)} |" for room in rooms if room not in values]
    below = (
        f"| values | {', '.join(f'`{room}`' for room in values)}, each of which may import those after it |"
    )
    return "\n".join(["| room | may import |", "|---|---|", *rows, below])


def _named(rooms: set[str], values: tuple[str, ...]) -> str:
    names = [f"`{room}`" for room in sorted(rooms - {*values} if rooms >= {*values} else rooms)]
    return ", ".join(names + ["values"] * (rooms >= {*values})) or "nothing"


def written(page: str) -> str:
    """Return the page with the current tree and table."""
    before, _, after = page.partition("```\n")
    page = f"{before}```\n{tree()}\n```{after.partition('```')[2]}"
    before, _, after = page.partition("| room | may import |\n")
    _, blank, rest = after.partition("\n\n")
    return f"{before}{imports()}{blank}{rest}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
