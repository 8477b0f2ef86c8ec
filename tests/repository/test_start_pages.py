"""The pages for new users: quickstart and FAQ print what they show, and tables and terms are complete."""

import codeop
import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attnlib
from attnlib import FULL, GroupedQueryAttention, MultiHeadLatentAttention, sizes, sliding
from attnlib.dispatch.select import select

DOCS = Path(__file__).parents[2] / "docs"
QUICKSTART, LAYERS, GLOSSARY, FAQ = (
    (DOCS / f"{name}.md").read_text() for name in ("quickstart", "which_layer", "glossary", "faq")
)
# A block of Python and the text block that shows its output, if one follows.
SHOWN = re.compile(
    r"^```python\n(.*?)^```$(?:\n\n(?:[^\n`]+\n)*\n?^```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
TERMS = {
    *("absorbed-form", "attention-sinks", "band", "descale", "expanded-form", "gqa-group", "kl", "kv-view"),
    *("latent", "layout", "lse", "packed-varlen", "page", "prefix", "principal-merge", "rank-of-a-matrix"),
    *("rank-process", "sink-logit", "slot", "step", "storage-index", "window", "zigzag"),
}


def printed(code: str, known: dict) -> str:
    """Return what a block prints; ``known`` holds its names."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "block", "exec"), known)
    return out.getvalue()


def is_shown(expected: str, output: str) -> bool:
    """True if a text block shows an output: ``...`` is any text, and lines may break elsewhere."""
    expected, output = (re.sub(r"loss \d\.\d\d", "loss", text) for text in (expected, output))
    return doctest.OutputChecker().check_output(
        expected, output, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )


@pytest.mark.parametrize("block", SHOWN.findall(FAQ), ids=lambda block: block[0].splitlines()[-1][:40])
def test_a_block_of_the_faq_runs_by_itself_and_prints_what_it_shows(block, monkeypatch):
    code, expected = block
    # Another test of this process may have registered attnlib, which one block shows the lack of. Functions
    # for masks and for attention belong together, so both are put back afterwards.
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.delitem(functions._global_mapping, "attnlib", raising=False)
    assert is_shown(expected, printed(code, {"__name__": "page"}))


def test_the_faq_quotes_the_warning_of_a_slow_call():
    q = torch.zeros(1, 9, 64, 8, device="meta").mT
    spec = attnlib.explain(
        attnlib.attention, q, torch.zeros(1, 9, 8, 64, device="meta"), q.contiguous(), mask=FULL
    ).spec
    with pytest.warns(attnlib.SlowPathWarning) as caught:
        select(spec._replace(device="cuda", arch=80))
    assert f"`{caught[0].message}`" in " ".join(FAQ.split())


def test_the_quickstart_prints_what_it_shows():
    known = {"__name__": "page"}
    for code, expected in SHOWN.findall(QUICKSTART):
        output = printed(code, known)
        assert not expected or is_shown(expected, output), output


def test_a_planted_difference_of_an_output_is_found():
    assert is_shown("step 0: loss 3.49\na ... b\n", "step 0: loss 3.51\na c\nb\n")
    assert not is_shown("1 page\n", "2 pages\n")
    assert SHOWN.findall("```python\nx\n```\n\n```\n1\n```\n") == [("x\n", "1\n")]


@pytest.mark.parametrize("code", [code for page in (QUICKSTART, FAQ) for code, _ in SHOWN.findall(page)])
def test_a_block_can_be_pasted_into_a_python_session(code):
    """Python's shell ends an indented block at an empty line, and only there."""
    entered = []
    for line in [*code.splitlines(), ""]:
        entered.append(line)
        if codeop.compile_command("\n".join(entered), symbol="single") is not None:
            entered = []
    assert not entered


@pytest.mark.parametrize(
    "page", [QUICKSTART, LAYERS, GLOSSARY, FAQ], ids=["quickstart", "layers", "glossary", "faq"]
)
def test_code_is_narrow(page):
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert max((len(line) for block in blocks for line in block.splitlines()), default=0) <= 88


def numbers(cell: str) -> int:
    """Return the first number of a cell, such as 16384 for ``16,384`` and ``16 KiB``."""
    value = int(re.match(r"[\d,]+", cell)[0].replace(",", ""))
    return value * 1024 if "KiB" in cell else value


def test_the_cache_sizes_of_the_layers_are_those_of_sizes():
    llama = sizes.model("llama-3-8b")
    layouts = {x.kind: x.layouts(dtype=torch.bfloat16) for x in sizes.variants(llama)}
    kinds = ["GQA-8", "MHA", "MQA", "MLA 512+64", "GQA-8", "GQA-8"]
    rows = re.findall(r"^\| .*?Attention`.*$|^\| a GQA layer .*$", LAYERS, re.MULTILINE)
    assert len(rows) == len(kinds)
    for row, kind in zip(rows, kinds, strict=True):
        *_, layer, whole, _ = [cell.strip() for cell in row.strip("|").split("|")]
        assert numbers(layer) == layouts[kind][0].token_bytes, row
        assert numbers(whole) == sum(x.token_bytes for x in layouts[kind]), row


def test_the_layers_store_what_the_table_says():
    options = {"mask": FULL, "device": "meta", "dtype": torch.bfloat16}
    widths = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 0, "v_head_dim": 128}
    grouped = GroupedQueryAttention(4096, 32, num_kv_heads=8, **options | {"mask": sliding(1024)}).kv_layout
    assert (grouped.token_bytes, grouped.window) == (4096, 1024)
    latent = MultiHeadLatentAttention(4096, 32, **widths, **options).kv_layout
    assert latent.token_bytes + 2 * 64 == 1152


def test_the_cache_of_the_model_with_windows():
    layouts = sizes.model("gemma-3-27b").layouts(dtype=torch.bfloat16)
    windows = [layout.window for layout in layouts]
    stated = re.search(
        r"window of ([\d,]+) tokens in (\d+) of its\s+(\d+)\s+layers.*?takes ([\d.]+) GiB.*?take (\d+) GiB",
        LAYERS,
        re.DOTALL,
    ).groups()
    window, count, total, gib, full = (float(x.replace(",", "")) for x in stated)
    assert (windows.count(int(window)), len(windows)) == (count, total)
    assert gib == round(sizes.cache_bytes(layouts, [2**17], page_size=64) / 2**30, 2)
    assert full == sum(layout.token_bytes for layout in layouts) * 2**17 / 2**30


def test_speeds_are_those_of_the_performance_page():
    measured = {
        cells[0]: cells[1:]
        for line in (DOCS / "performance.md").read_text().splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) > 2
    }
    rows = re.findall(r"^\| \w+ \| \[(.+?)\]\(performance\.md.*?\) \| ([\d.]+) \|$", LAYERS, re.MULTILINE)
    assert len(rows) == 3
    for name, time in rows:
        assert time in [cell.split()[0] for cell in measured[name] if cell], name


def entries() -> dict[str, str]:
    """The terms of the glossary, with their texts."""
    _, *found = re.split(r"^## ", GLOSSARY.partition("## Symbols\n")[2], flags=re.MULTILINE)
    return dict(entry.split("\n", 1) for entry in found)


def test_the_glossary_is_complete_sorted_and_leads_on():
    terms = [*entries()]
    assert terms == sorted(terms, key=str.lower)
    anchors = [re.sub(r"[^\w\- ]", "", term.lower()).replace(" ", "-") for term in terms]
    assert not TERMS - {*anchors}
    assert not [term for term, text in entries().items() if not re.search(r"\]\([\w/]+\.md", text)]


def test_the_symbols_are_those_of_the_conventions():
    table = (DOCS / "conventions.md").read_text().partition("## Shapes")[2].partition("\n\nQuery")[0]
    symbols = re.findall(r"^\| `(\w)` \|", GLOSSARY, re.MULTILINE)
    assert symbols == sorted(re.findall(r"`(\w)` \|", table))
