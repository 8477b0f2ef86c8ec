"""The site of docs/: every public name and page has its place, every link leads somewhere, every block
runs.
"""

import importlib
import importlib.util
import inspect
import os
import re
import runpy
import shutil
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
ARGUMENTS = runpy.run_path(str(DOCS / "site/arguments.py"))
WIDE = ("examples.md", "sizes.md")  # pages that show output of programs as it is
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
OPEN = (
    "masks",
    "scores",
    "packing",
    "sizes",
    "convert",
    "parallel",
    "qk_clip",
    "compat.mha",
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


def undescribed(page: str) -> dict[str, list[str]]:
    """The arguments without a description in the lists of a page, by function."""
    tables, earlier, missing = ARGUMENTS["tables_of"](page), {}, {}
    for name, rest in entries(page):
        x = found(name)
        if not (inspect.isroutine(x) or inspect.isclass(x)) or getattr(x, "__cause__", x) is not x:
            continue  # a value, or an exception
        own = ARGUMENTS["described_in"](inspect.getdoc(x) or "")
        calls = [] if rest == "()" else [x]
        if inspect.isclass(x):
            members = vars(x).items()
            calls += [getattr(x, key) for key, y in members if isinstance(y, classmethod) and key[0] != "_"]
        for call in calls:
            own = ARGUMENTS["described_in"]((inspect.getdoc(call) or "") + "\n")
            best = ARGUMENTS["best_first"](tables, call)
            known = ARGUMENTS["descriptions"](call, own, *best, earlier)
            missing[name] = [key for key, text in known.items() if not text and key not in ("args", "kwargs")]
            earlier |= own
    return {name: left for name, left in missing.items() if left}


def test_the_reference_has_every_public_name_once():
    named = [name for page in PAGES for name, _ in entries(page.read_text())]
    assert not public() - {*named}, "docs/api: add an entry"
    assert len(named) == len({*named})
    for name in named:
        assert found(name) is not None


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_a_page_of_the_reference_says_what_each_argument_is(page):
    assert not undescribed(page.read_text()), f"{page.name}: say what these are"


def test_a_planted_gap_of_the_reference_is_found():
    rows = "<!-- arguments -->\n| argument | meaning |\n|---|---|\n{}<!-- end of arguments -->\n"
    page = ".. currentmodule:: attnlib\n.. autofunction:: merge_states\n.. py:data:: FULL\n"
    assert entries(page) == [("attnlib.merge_states", ""), ("attnlib.FULL", "")]
    assert undescribed(rows.format("| `lse_a`, `lse_b` | LSEs |\n") + page) == {
        "attnlib.merge_states": ["out_a", "out_b"]
    }
    assert not undescribed(
        rows.format("| `lse_a`, `lse_b` | LSEs |\n| `out_a`, `out_b` | outputs |\n") + page
    )


def test_an_argument_has_the_description_of_its_docstring_or_else_of_a_table():
    def turn(x, *, angle=0.5, other=None):
        """Turn.

        Args:
            x: a tensor
                ``[b]``

        Raises:
            ValueError: never.

        >>> turn(1)
        """

    table = {"x": "from the table", "turn.angle": "for this function", "angle": "for others"}
    docstring = inspect.getdoc(turn)
    described = ARGUMENTS["descriptions"](turn, ARGUMENTS["described_in"](docstring), table)
    assert ARGUMENTS["with_arguments"](docstring, turn, described).splitlines() == [
        *("Turn.", "", "Args:", "    x: a tensor", "        ``[b]``."),
        "    angle: for this function. Default: ``0.5``.",
        "    other: Default: ``None``.",
        *("", "Raises:", "    ValueError: never.", "", ">>> turn(1)"),
    ]


def test_every_page_has_one_place_in_the_contents():
    listed = []
    for page in PAGES:
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed += [(page.parent / f"{line}.md").relative_to(DOCS).as_posix() for line in lines]
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES} - {"index.md", "compiled.md"}
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_has_one_title_and_pictures_have_alt_texts(page):
    text = FENCE.sub("", page.read_text())
    included = re.search(r"^```\{include\}", page.read_text())
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == (0 if included else 1)
    assert all(alt.strip() for alt in re.findall(r"!\[([^]]*)\]", text))


def too_wide(page: str) -> list[str]:
    """The lines of code blocks that a reader at 1280 pixels would have to scroll."""
    blocks = re.findall(r"^```(.*)\n((?s:.*?))^```$", page, re.MULTILINE)
    lines = [line for language, code in blocks if "{" not in language for line in code.splitlines()]
    return [line for line in lines if len(line) > 88]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in WIDE],
    ids=lambda page: page.relative_to(DOCS).as_posix(),
)
def test_code_fits_the_column(page):
    assert not too_wide(page.read_text())
    for name, _ in entries(page.read_text()):
        examples = re.findall(r"^(?:>>>|\.\.\.) .*", inspect.getdoc(found(name)) or "", re.MULTILINE)
        assert all(len(line) <= 88 for line in examples), name


def test_a_planted_wide_line_is_found():
    line = "x" * 89
    assert too_wide(f"{line}\n```python\n{line}\n{line[1:]}\n```\n") == [line]
    assert not too_wide(f"```{{eval-rst}}\n{line}\n```\n")


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
    assert {"furo", "latex2mathml", "myst-parser", "sphinx", "sphinx-copybutton", "sphinx-design"} <= {
        line.partition("==")[0] for line in lines
    }
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
    pages = {
        page.relative_to(tmp_path).with_suffix("").as_posix(): page.read_text()
        for page in tmp_path.rglob("*.html")
    }
    assert {name: n for name, page in pages.items() if (n := page.count("<h1")) != 1} == {}
    assert re.findall(r'class="caption-text">(\w+)<', pages["index"]) == [
        *("Start", "Guides", "API", "Internals"),
    ]
    assert "pip install ." in re.sub(r"<.*?>", "", pages["index"])
    assert "growing-training.png" in pages["index"]
    assert pages["index"].count("sd-card-title") >= 6
    assert "copybutton.js" in pages["index"]
    for name, page in pages.items():
        assert not re.search(r'<(?:script|img|link)[^>]* (?:src|href)="(?:https?:)?//', page), (
            f"{name}: a network"
        )
        assert all(re.search(r' alt="[^"]+"', image) for image in re.findall(r"<img .*?>", page)), name
    assert 'display="block"' in pages["api/attention"]
    assert "$" not in re.sub(r"<script.*?</script>", "", pages["api/attention"], flags=re.DOTALL)
    softcap = r"<strong>softcap</strong> \(<em>float</em>.*?<em>None</em>\) .*?Default: .*?None"
    assert re.search(softcap, pages["api/attention"])
    assert re.search(r"<strong>head_dim</strong>.*?<em>int</em>.*?<em>None</em>", pages["api/layers"])
    texts = (tmp_path / "_static/search-texts.js").read_text()
    assert all(
        f'"{page.relative_to(DOCS).with_suffix("")}": ' in texts for page in PAGES if page.stem != "compiled"
    )
    source = re.search(r'href="(source/attnlib/\S+?\.html)"', pages["tour"])[1]
    assert source.removesuffix(".html") in pages


FAULTY = """<!doctype html><title>x</title><h1>x</h1>{}"""
FAULTS = {
    "<pre style='width: 99px; overflow: auto'>0123456789012345678901234567890</pre>": "31 columns is cut off",
    f"<pre style='width: 99px; overflow: auto'>{'0' * 89}</pre>": None,
    "<div style='width: 2000px'>x</div>": "pixels wide",
    "<div style='overflow: auto'><table style='width: 2000px'><td>x</table></div>": None,
    "<article><img src='x.png'></article>": "no alternative text",
    "<h1>y</h1>": "2 titles",
    "<img src='https://example.invalid/x.png'>": "not on disk",
}


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_finds_planted_faults(tmp_path):
    look = runpy.run_path(str(DOCS / "look.py"))
    for n, body in enumerate(FAULTS):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "index.html").write_text(FAULTY.format(body))
    with look["opened"]() as browser:
        for n, fault in enumerate(FAULTS.values()):
            browser.requests.clear()
            told = look["look"](browser, tmp_path / str(n), tmp_path)
            assert (fault in told[0]) if fault else not told, told
    assert len([*tmp_path.glob("index-*.png")]) == 4


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_finds_planted_faults_of_a_search(tmp_path):
    look = runpy.run_path(str(DOCS / "look.py"))["search"]
    look.__globals__["SEARCHES"] = {"a": "x.html#a", "b": "x.html#b"}
    look.__globals__["RESULTS"] = look.__globals__["RESULTS"].replace("look(50)", "look(0)")
    page, excerpt = tmp_path / "search.html", "<p class='context'>a, b</p>"
    results = [f"<a href='x.html#{anchor}'>x</a>" for anchor in "acdb"]
    with look.__globals__["opened"]() as browser:
        page.write_text(f"<ul id='search-results'><li>{excerpt}{'<li>'.join(results)}</ul>")
        (told,) = look(browser, page.as_uri())
        assert "search for 'b': expected x.html#b among the first three" in told
        page.write_text(page.read_text().replace(excerpt, ""))
        assert {f"search for {query!r}: no excerpt" for query in "ab"} <= {*look(browser, page.as_uri())}


def test_without_a_browser_or_a_site_it_says_so(monkeypatch, tmp_path):
    look = runpy.run_path(str(DOCS / "look.py"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="needs chromium on PATH"), look["opened"]():
        pass
    monkeypatch.setitem(look["main"].__globals__, "SITE", tmp_path)
    with pytest.raises(SystemExit, match="run `make docs` first"):
        look["main"]()
