"""The compile check: which kernels it builds, what it reads out of them, and what it holds against them."""

import os
import re
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from itertools import combinations
from pathlib import Path

import pytest
from compiled import check
from compiled.builds import Build, entries, pairwise, product
from compiled.cached_builds import MLA, CachedBuild
from compiled.chipless import Binary, _absent, _tiles, binary, distinct
from compiled.launches import prepared
from compiled.page import PAGE, committed, regressions, section, shortfall, written
from hypothesis import given
from hypothesis import strategies as st

from attnlib.backends._triton.dense import tables
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends._triton.launching.launch import plan_cache

BUILD = Build("forward", 90, (128, 128))
BINARY = Binary("128 x 64, 8 warps, 3 stages", 255, 24, 160 << 10, 0, 8)
PAGES = written("", "3.7.1", section({BUILD: BINARY}, {}))


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_any_two_levels_meet(counts):
    factors = {str(n): range(count) for n, count in enumerate(counts)}
    rows = pairwise(factors)
    for a, b in combinations(factors, 2):
        assert {(row[a], row[b]) for row in rows} == {(x, y) for x in factors[a] for y in factors[b]}
    assert all(row.keys() == factors.keys() for row in rows)


def test_what_must_never_meet_does_not():
    factors = {"a": (1, 2), "b": (1, 2, 3), "c": (1, 2)}
    never = {frozenset((("a", 1), ("b", 3))), frozenset((("b", 2), ("c", 2)))}
    rows = pairwise(factors, never)
    met = {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}
    every = {
        frozenset(((f, x), (g, y)))
        for f, g in combinations(factors, 2)
        for x in factors[f]
        for y in factors[g]
    }
    assert met == every - never
    with pytest.raises(ValueError, match=r"c: expected a level that may meet .* got none"):
        pairwise({"a": (1,), "b": (1,), "c": (1,)}, {frozenset((("a", 1), ("c", 1)))})


def test_pairs_take_few_rows():
    assert len(pairwise({str(n): range(2) for n in range(10)})) <= 15  # of 1024
    assert len(list(product())) < 200


def test_every_entry_of_the_launch_tables_is_built(monkeypatch):
    """Each entry gets a number, as its stages; all must turn up in the kernels' constants."""
    pytest.importorskip("triton")
    found = {name: table for name, table in vars(tables).items() if _is_table(table)}
    assert len(found) > 5
    numbered = {}
    for name, table in found.items():
        first = 1000 + len(numbered)
        anew = tuple((limit, config._replace(stages=first + n)) for n, (limit, config) in enumerate(table))
        numbered |= {config.stages: f"{name}, up to {limit}" for limit, config in anew}
        monkeypatch.setattr(tables, name, anew)
    plan_cache.cache_clear()
    try:
        for build in entries():
            numbered.pop(prepared(build)[0].arguments.get("STAGES"), None)
    finally:
        plan_cache.cache_clear()
    assert not numbered


def _is_table(value):
    return isinstance(value, tuple) and {type(x[-1]) for x in value if isinstance(x, tuple)} == {LaunchConfig}


def test_nothing_is_built_twice():
    pytest.importorskip("triton")
    builds = list(entries())
    few = distinct(builds)
    assert len(few) < len(builds)
    assert distinct(few + builds) == few
    both = {*few, *distinct(product())}
    assert len({(str(build), build.arch) for build in both}) == len(both)


def test_a_kernel_is_compiled_without_a_chip():
    pytest.importorskip("triton")
    small, broken = Build("prepare", 80, (16, 16)), Build("prepare", 80, (16, 16), mask="none such")
    results = dict(check.apart(binary, [small, broken], 1))
    assert 16 <= results[small].registers <= 64
    assert results[small].spilled == 0
    assert results[small].warps == 4
    assert results[small].lost == ()
    assert isinstance(results[broken], KeyError)
    assert "KeyError" in shortfall(broken, results[broken])


def fusion_of(build: Build) -> bool:
    binary(build)
    metadata, _ = _absent(build.arch).launched
    return metadata.enable_fp_fusion


def test_a_launch_states_the_fusion_of_products_and_sums(monkeypatch):
    """Triton 3.10 fuses none where nothing is stated."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert [fused for _, fused in check.apart(fusion_of, [Build("prepare", 80, (16, 16))], 1)] == [True]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Build("prepare", 80, (16, 16)), "32, 4 warps"),
        (CachedBuild("combine", 90), "8 x 128, 4 warps"),
        (CachedBuild("schedule", 90, sequences=64), "64 x 2, 4 warps"),
        (Build("forward", 90, (256, 256), hopper=True), "128 x 64, 4 warps, 3 + 2 slots, TMA"),
    ],
)
def test_tiles_in_words(build, words):
    pytest.importorskip("triton")
    assert _tiles(prepared(build)[0], 4) == words


def test_a_process_that_dies_takes_no_other_job_along():
    dies = "__import__('os')._exit(1)"
    results = dict(check.apart(eval, ["1", dies, "1 / 0", "2", f"{dies} or 3", "4"], 2))
    assert [results[n] for n in "124"] == [1, 2, 4]
    assert isinstance(results["1 / 0"], ZeroDivisionError)
    assert isinstance(results[dies], BrokenProcessPool)
    assert isinstance(results[f"{dies} or 3"], BrokenProcessPool)


@pytest.mark.parametrize(
    ("changes", "programs"),
    [
        ({}, 1),  # of 8 warps with 255 registers
        ({"registers": 128, "shared": 100 << 10}, 2),
        ({"registers": 128, "shared": (113 << 10) + 1}, 1),  # and a program takes another KiB
        ({"registers": 40, "shared": 0, "warps": 4}, 12),
        ({"registers": 40, "shared": 0, "columns": 256}, 2),
        (
            {"registers": 128, "shared": 0, "warps": 16},
            1,
        ),  # three warpgroups that multiply, and one that loads
        ({"shared": 228 << 10}, 0),
    ],
)
def test_programs_per_sm(changes, programs):
    assert BINARY._replace(**changes).resident(90) == programs


def test_the_page_says_what_was_built():
    row = committed(PAGES, "3.7.1")
    assert row == {("forward d128 bf16 causal", "sm_90"): (BINARY.tiles, BINARY.spilled, 1)}
    assert regressions({BUILD: BINARY}, row) == []


def test_a_section_replaces_its_own_and_leaves_others():
    other = written(PAGES, "3.6.0", section({BUILD: BINARY._replace(spilled=40)}, {}))
    assert committed(other, "3.7.1") == committed(PAGES, "3.7.1")
    assert committed(other, "3.6.0")["forward d128 bf16 causal", "sm_90"].spilled == 40
    assert other.index("## triton 3.7.1") < other.index("## triton 3.6.0")
    assert written(other, "3.6.0", section({BUILD: BINARY._replace(spilled=40)}, {})) == other
    assert committed(other, "3.5.0") == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spilled": 40}, None),
        ({"spilled": 0}, None),
        ({"spilled": 41}, "spills 41 bytes; expected 24"),
        ({"tiles": "64 x 64"}, "has tiles of 64 x 64; expected 128 x 64"),
        ({"warps": 4}, None),
        ({"warps": 16}, "leaves an SM 0 programs at once; expected 1"),
        ({"warps": 16, "spilled": 0}, None),
    ],
)
def test_worse_than_the_page(changes, words):
    found = regressions({BUILD: BINARY._replace(**changes)}, committed(PAGES, "3.7.1"))
    assert len(found) == (words is not None)
    assert all(line.startswith("forward d128 bf16 causal on sm_90") and words in line for line in found)


def test_the_page_and_the_builds_differ():
    other = BUILD._replace(arch=80)
    found = regressions({other: BINARY._replace(shared=0)}, committed(PAGES, "3.7.1"))
    assert found == [
        f"forward d128 bf16 causal on sm_80 is not in {PAGE}",
        f"forward d128 bf16 causal on sm_90 is in {PAGE} and was not built",
    ]


def test_what_can_never_run():
    large = BINARY._replace(shared=(227 << 10) + 1)
    assert shortfall(BUILD, BINARY) == ""
    assert shortfall(BUILD, large) == "takes 227.0 KiB of shared memory, of at most 227"
    lost = BINARY._replace(lost=("UIADD3 UR26, UP0, UR26, 0x40, URZ ;",))
    assert shortfall(BUILD, lost) == "reads what ptxas never wrote: UIADD3 UR26, UP0, UR26, 0x40, URZ ;"
    reused = BINARY._replace(reused=("LDS.128 R8, [UR6+0x28400]",))
    assert shortfall(BUILD, reused) == "has a barrier where other things lie: LDS.128 R8, [UR6+0x28400]"
    assert shortfall(BUILD, RuntimeError("a | b\nc")) == "does not compile: RuntimeError: a / b c"
    text = section({BUILD: RuntimeError("a | b")}, {BUILD: large})
    assert "1 more kernels. 1 fail to compile or to fit:" in text
    assert committed(written("", "3.7.1", text), "3.7.1") == {}


def test_calls_over_caches_have_a_place_of_their_own():
    cached, other = CachedBuild("decode", 90, MLA), BUILD._replace(sinks=True)
    text = section({BUILD: BINARY, cached: BINARY}, {other: BINARY, cached._replace(page=16): BINARY})
    tables, pairs, calls = re.split(
        r"^### (?:Flags in pairs|More calls over caches)$", text, flags=re.MULTILINE
    )
    rows = [
        [line.split(" | ")[0] for line in part.splitlines() if " | sm_" in line]
        for part in (tables, pairs, calls)
    ]
    assert rows == [[f"| {BUILD}", f"| {cached}"], [f"| {other}"], [f"| {cached} pages of 16"]]
    assert all("1 more kernels. None fail" in part for part in (pairs, calls))
    assert set(committed(written("", "3.7.1", text), "3.7.1")) == {(str(x), "sm_90") for x in (BUILD, cached)}


def test_other_tritons_show_what_differs_from_the_newest():
    """And are read back in full, whatever the order in which they are written."""
    shared, differs, gone = BUILD, BUILD._replace(mask="full"), BUILD._replace(mask="left")
    newest = {shared: BINARY._replace(registers=200), differs: BINARY, gone: BINARY}
    older = {shared: BINARY, differs: BINARY._replace(spilled=80), BUILD._replace(sinks=True): BINARY}
    more = {BUILD._replace(rows="packed"): BINARY}
    sections = {"3.9.0": section(newest, more), "3.10.0": section(older, {})}
    pages = set()
    for order in (["3.9.0", "3.10.0"], ["3.10.0", "3.9.0"]):
        text = ""
        for version in order:
            text = written(text, version, sections[version])
        pages.add(text)
    [text] = pages
    assert text.index("## triton 3.10.0") < text.index("## triton 3.9.0")
    assert "As with triton 3.10.0 but for registers, and for 3 of 3 kernels:" in text
    assert committed(text, "3.9.0") == committed(written("", "3.9.0", sections["3.9.0"]), "3.9.0")
    assert committed(text, "3.10.0") == committed(written("", "3.10.0", sections["3.10.0"]), "3.10.0")
    own = text.split("## triton 3.9.0")[1]
    assert (str(shared) + " |" in own, str(gone) in own, "1 more kernels" in own) == (False, True, True)
    assert f"| {BUILD._replace(sinks=True)} | sm_90 | not built | | | | |" in own


def test_refusals(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    assert check.main([]) == 2
    assert "no table of triton" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert check.main(["--write"]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_folder_is_the_command():
    asked = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, Path(__file__).parent], env=asked, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("python tests/compiled: TRITON_INTERPRET is set")
