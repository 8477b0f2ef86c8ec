"""The README's examples, and the examples in docstrings, run and print what they say."""

import doctest
import importlib
import pkgutil
import re
import runpy
from pathlib import Path

import pytest
import torch
from source import CORE, PACKAGE

import attnlib

ROOT = Path(__file__).parents[2]
MODULES = [
    module.name
    for module in pkgutil.walk_packages(attnlib.__path__, "attnlib.")
    if not module.name.startswith(("attnlib.bench", "attnlib.__main__"))
]


def test_each_example_of_the_readme_runs_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_the_readme_fits_a_page():
    """At most 120 lines of 120 columns, code of 88, and table cells of 12 words."""
    page = (ROOT / "README.md").read_text()
    lines = page.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert max(len(line) for block in code for line in block.splitlines()) <= 88
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert max(len(cell.split()) for cell in cells) <= 12


@pytest.mark.parametrize(
    "page", ["docs/masks.md", "docs/transformers.md", "docs/migration.md", "docs/trees.md", "docs/sparse.md"]
)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks, known = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL), {}
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), known)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    torch.manual_seed(0)
    known = {"attnlib": attnlib, "torch": torch} | {
        public: getattr(attnlib, public) for public in attnlib.__all__
    }
    module = importlib.import_module(name)
    result = doctest.testmod(
        module, extraglobs=known, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0


def test_a_page_shows_the_files_of_today():
    page = (ROOT / "docs/internals.md").read_text()
    assert runpy.run_path(str(ROOT / "docs/files.py"))["written"](page) == page, (
        "python docs/files.py writes it anew"
    )


def test_the_papers_table_names_what_exists():
    rows = [
        line.split("|")[1:-1]
        for line in (ROOT / "docs/papers.md").read_text().splitlines()
        if line[:3] != "|--"
    ]
    rows = [row for row in rows if len(row) == 5 and row[0].strip()]
    assert [int(row[0]) for row in rows] == list(range(1, 26))
    for *_, functions, tests in rows:
        for name in re.findall(r"`([\w.]+)`", functions):
            assert _resolves(name), f"docs/papers.md: no {name}"
        path = ROOT
        for file, test in re.findall(r"`([\w/]*(?:\.py)?)::(\w+|\*)`", tests):
            path = ROOT / "tests" / file if file else path
            assert path.is_file(), f"docs/papers.md: no {path}"
            assert test == "*" or f"def {test}(" in path.read_text(), f"docs/papers.md: no {test} in {path}"


def untrue(table: str) -> dict[str, list[str]]:
    """The rows of the tour's table that are not true, with what is wrong.

    A row names files and folders below attnlib; with an option of today, all files of the core that spell it,
    or all files of convert if it is about these.
    """
    wrong = {}
    for feature, cell, example in re.findall(r"^\| (.+?) \| (.+?) \|(?: `(\w+)`)? \|$", table, re.MULTILINE):
        named = re.findall(r"`([\w/]+(?:\.py|/))`", cell)
        faults = [f"no {name}" for name in named if not (ROOT / "attnlib" / name).exists()]
        if example:
            scope = [x for x in PACKAGE if x.parts[0] == "convert"] if "convert/" in cell else CORE
            spelled = [x.path for x in scope if example in x.words]
            faults += [] if named == spelled else [f"write {', '.join(f'`{path}`' for path in spelled)}"]
        wrong |= {feature: faults} if faults or not named else {}
    return wrong


def test_the_tour_says_where_a_feature_goes():
    table = (ROOT / "docs/tour.md").read_text().partition("## Where would a new feature go?")[2]
    assert len(re.findall(r"^\| .*`\w+` \|$", table, re.MULTILINE)) >= 5  # rows with an option of today
    assert not untrue(table), "docs/tour.md: " + "; ".join(
        f"{row}: {why}" for row, why in untrue(table).items()
    )


def test_a_planted_untruth_of_the_tour_is_found():
    true = "| x | `rope/__init__.py`, `rope/rope.py`, `rope/scaling.py`, `scaling.py` | `YaRNScaling` |"
    rows = [
        true.replace("rope", "mask"),
        true.replace("`rope/rope.py`, ", ""),
        "| y | `gone.py` | |",
        "| z | nowhere | |",
    ]
    assert all(untrue(row) for row in rows)
    assert not untrue(f"{true}\n| y | `layers/` | |")


def _resolves(name: str) -> bool:
    """Whether ``name`` is an object below attnlib, whose modules are imported as needed."""
    *modules, last = name.split(".")
    owner = importlib.import_module(".".join(["attnlib", *(part for part in modules if part.islower())]))
    for part in modules:
        owner = owner if part.islower() else getattr(owner, part)
    return hasattr(owner, last)
