"""The site of docs/: every public name and page has its place, every link leads somewhere, every block
runs.
"""

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnlib
from tests.repository.test_cookbook import anchor

ROOT = Path(__file__).parents[2]
DOCS, TOOLS = ROOT / "docs", ROOT / "out/docs-tools"
PAGES = sorted(DOCS.rglob("*.md"))
REFERENCE = [
    page for page in PAGES if page.parent.name == "api" and page.stem != "compat"
]  # where arguments are ours
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
OPEN = (
    "masks",
    "scores",
    "packing",
    "sizes",
    "convert",
    "parallel",
    "compat.sdpa",
    "compat.flash_attn",
    "integrations.transformers",
)
# The blocks of these run in other files of tests.
ELSEWHERE = [
    *re.findall(r'"(docs/\S+\.md)"', (ROOT / "tests/repository/test_docs.py").read_text()),
    "docs/conversion.md",  # in test_conversion_pages.py
    *("docs/quickstart.md", "docs/faq.md"),  # in test_start_pages.py
]


def entries(text: str) -> list[tuple[str, str]]:
    """The names that a page of the reference has entries for, and what stands behind: ``()`` hides a
    constructor.
    """
    found, module = [], ""
    for kind, name, rest in re.findall(
        r"^\.\. (currentmodule|auto\w+|py:data):: ([\w.]+)(.*)$", text, re.MULTILINE
    ):
        if kind == "currentmodule":
            module = name
        else:
            found.append((name if name.startswith("attnlib.") else f"{module}.{name}", rest))
    return found


def public() -> set[str]:
    """Every name of docs/versioning.md's list that has a docstring of its own."""
    names = {f"attnlib.{name}" for name in attnlib.__all__}
    for path in (f"attnlib.{name}" for name in OPEN):
        module = importlib.import_module(path)
        own = [name for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == path]
        names |= {f"{path}.{name}" for name in getattr(module, "__all__", own) if name[0] != "_"}
    return names - {"attnlib.scores.score_mod"}  # which is attnlib.score_mod


def found(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def unnamed(page: str, name: str, rest: str) -> list[str]:
    """The arguments of a public function or class that its page does not name."""
    x = found(name)
    if not (inspect.isfunction(x) or inspect.isclass(x)) or (
        inspect.isclass(x) and issubclass(x, BaseException)
    ):
        return []
    takes = [] if rest == "()" else [x]
    if inspect.isclass(x):
        members = vars(x).items()
        takes += [
            getattr(x, key) for key, member in members if isinstance(member, classmethod) and key[0] != "_"
        ]
    arguments = {p.name for f in takes for p in inspect.signature(f).parameters.values()} - {
        "self",
        "args",
        "kwargs",
    }
    text = re.sub(r"\(.*?\)", "", page)
    return sorted(argument for argument in arguments if not re.search(rf"\b{argument}\b", text))


def test_the_reference_has_every_public_name_once():
    named = [name for page in PAGES for name, _ in entries(page.read_text())]
    assert not public() - {*named}, "docs/api: add an entry"
    assert len(named) == len({*named})
    for name in named:
        assert found(name) is not None


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_a_page_of_the_reference_says_what_each_argument_is(page):
    text = page.read_text()
    missing = {name: left for name, rest in entries(text) if (left := unnamed(text, name, rest))}
    assert not missing, f"{page.name}: say what these are"


def test_a_planted_gap_of_the_reference_is_found():
    text = "| `q`, `k` |\n.. currentmodule:: attnlib\n.. autofunction:: merge_states\n.. py:data:: FULL\n"
    assert entries(text) == [("attnlib.merge_states", ""), ("attnlib.FULL", "")]
    assert unnamed(text, "attnlib.merge_states", "") == ["lse_a", "lse_b", "out_a", "out_b"]
    assert not unnamed("`out_a`, `lse_a`, `out_b`, `lse_b`", "attnlib.merge_states", "")


def test_every_page_has_one_place_in_the_contents():
    listed = []
    for page in PAGES:
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed += [(page.parent / f"{line}.md").relative_to(DOCS).as_posix() for line in lines]
    shown = [page for page in PAGES if not page.read_text().startswith("---\norphan: true")]
    pages = {page.relative_to(DOCS).as_posix() for page in shown} - {"index.md"}
    assert sorted(listed) == sorted(pages)


def headings(page: Path) -> list[str]:
    return [anchor(head) for head in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_of_a_page_lead_somewhere(page):
    for path, at in re.findall(r"\]\(((?!https?:)[^)#\s]*)#?([^)\s]*)\)", FENCE.sub("", page.read_text())):
        target = page.parent / path if path else page
        assert target.exists(), f"no {path}"
        assert target.resolve().is_relative_to(ROOT.resolve())
        assert not at or target.suffix != ".md" or at in headings(target), f"{path}: no #{at}"


def test_what_a_page_includes_is_there():
    for page in PAGES:
        for path, options in re.findall(
            r"^```\{include\} (\S+)\n(.*?)```$", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            text = (page.parent / path).read_text()
            for mark in re.findall(r'^:(?:start-after|end-before): "(.*)"$', options, re.MULTILINE):
                assert text.count(mark) == 1, f"{page.name}: {path} has no {mark!r}"


def own_blocks() -> dict[Path, list[str]]:
    """The blocks of each page that no other file of tests runs."""
    pages = [
        page
        for page in PAGES
        if "cookbook" not in page.parts and page.relative_to(ROOT).as_posix() not in ELSEWHERE
    ]
    blocks = {
        page: re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for page in pages
    }
    return {page: found for page, found in blocks.items() if found}


@pytest.mark.parametrize("page", own_blocks(), ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_one_after_another(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    known = {"__name__": "page"}
    with torch.set_grad_enabled(True):
        for block in own_blocks()[page]:
            exec(compile(block, page.name, "exec"), known)


def test_what_builds_the_site_is_pinned():
    lines = (DOCS / "requirements.txt").read_text().splitlines()[1:]
    assert {"furo", "myst-parser", "sphinx"} <= {line.partition("==")[0] for line in lines}
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in lines)


def test_the_site_builds_without_a_warning(tmp_path):
    if importlib.util.find_spec("sphinx") is None and not (TOOLS / ".ready").exists():
        pytest.skip("needs sphinx, which `make docs` installs")
    env = os.environ | {"PYTHONPATH": str(TOOLS)}
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--quiet",
        "--fail-on-warning",
        "--keep-going",
        "docs",
        str(tmp_path),
    ]
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert not built.stderr
    assert (tmp_path / "index.html").stat().st_size > 10_000
    source = re.search(r'href="(source/attnlib/\S+?\.html)"', (tmp_path / "tour.html").read_text())[1]
    assert (tmp_path / source).is_file()
