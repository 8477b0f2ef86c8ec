"""Write the tree of files in internals.md, each with the first sentence of its docstring: ``python docs/files.py``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "internals.md"
FOLDERS = ("attnlib", "examples")


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
    return f"{'  ' * depth}{name:18} {sentence}".rstrip()


def written(page: str) -> str:
    """Return the page with the tree of today."""
    before, _, after = page.partition("```\n")
    return f"{before}```\n{tree()}\n```{after.partition('```')[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
