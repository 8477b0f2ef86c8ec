"""What is behind `-m slow`: property tests with 200 examples or more, cases that a covering leaves out; and
shares.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import slow_tests
from shares import covering, is_of_share

PROPERTIES = """
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

@given(st.integers())
def test_plain(n):
    pass

@settings(max_examples=7)
@given(st.integers())
def test_few(n):
    pass

@given(st.integers())
@settings(max_examples=250)
def test_many(n):
    pass

class Machine(RuleBasedStateMachine):
    @rule(n=st.integers())
    def step(self, n):
        pass

Machine.TestCase.settings = settings(max_examples=9, stateful_step_count=2)
TestMachine = Machine.TestCase

def test_by_example():
    pass
"""


EXAMPLES = {
    "not slow and not gpu": {"plain": 20, "few": 7, "many": 250, "TestMachine": 9, "by_example": None},
    "slow": {"plain": 200, "few": 200, "many": 250, "TestMachine": 200},
}


@pytest.mark.slow
def test_the_number_of_examples(tmp_path):
    runs = run(tmp_path, PROPERTIES, *(["-m", marks, "--hypothesis-show-statistics"] for marks in EXAMPLES))
    for stdout, examples in zip(runs, EXAMPLES.values(), strict=True):
        ran = re.findall(r"::(?:test_)?(\w+)(?:::runTest)? PASSED", stdout)
        assert sorted(ran) == sorted(examples)
        counts = re.findall(r"::(?:test_)?(\w+)(?:::runTest)?:\n(?:.*\n)*?.*?(\d+) passing", stdout)
        assert {name: int(count) for name, count in counts} == {name: n for name, n in examples.items() if n}


def run(folder: Path, tests: str, *runs: list[str]) -> list[str]:
    """What pytest prints of these tests with each list of options, under the suite's conftest, in one
    process.
    """
    (folder / "test_these.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n  gpu\n  covering\n")
    code = f"""
import pytest
for options in {runs}:
    assert pytest.main(["-p", "conftest", "-v", *options]) == 0
    print({END!r})
"""
    here = Path(__file__).parents[1]
    path = os.pathsep.join((str(here), str(here / "helpers"), os.environ.get("PYTHONPATH", "")))
    asked = {"capture_output": True, "text": True, "check": True, "env": os.environ | {"PYTHONPATH": path}}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, **asked).stdout.split(END)[:-1]


END = "-- the end of a run --"


CASES = """
import pytest

@pytest.mark.covering(1)
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize(("b", "c"), [(1, 2), (3, 4)])
def test_covered(a, b, c):
    pass

@pytest.mark.slow
@pytest.mark.parametrize("n", range(20))
def test_slow(n):
    pass

def test_other():
    pass
"""


@pytest.mark.slow
def test_cases_and_shares(tmp_path):
    """The default run and all shares of the slow tests run every case once."""
    slow = (["-m", "slow", f"--share={n}/2"] for n in (1, 2))
    runs = run(tmp_path, CASES, ["-m", "not slow"], *slow)
    default, *shares = (re.findall(r"::(\S+) PASSED", stdout) for stdout in runs)
    covered = [name for name in default if "covered" in name]
    assert len(covered) == len(default) - 1 == 3  # of six cases, in which every value occurs
    assert all(any(value in re.split(r"[-\[\]]", name) for name in covered) for value in "xyz1234")
    assert len(shares[0]) + len(shares[1]) == 3 + 20
    assert len({*default, *shares[0], *shares[1]}) == 4 + 23
    assert all(shares)


def test_a_covering_holds_all_pairs():
    cases = [{"a": a, "b": b, "c": c} for a in range(4) for b in range(3) for c in range(3)]
    kept = [cases[n] for n in covering(cases, 2)]
    assert len(kept) <= 15  # of 36; 12 at least
    for x, y in (("a", "b"), ("a", "c"), ("b", "c")):
        assert {(case[x], case[y]) for case in kept} == {(case[x], case[y]) for case in cases}
    assert len(covering(cases, 3)) == len(cases)


def test_a_wrong_share_is_refused():
    for share in ("0/10", "11/10", "3", "a/b"):
        with pytest.raises(pytest.UsageError):
            is_of_share("test", share)


def test_what_is_left_to_slow_runs_is_listed():
    """Tests marked so by themselves; properties, which are all so, aside."""
    page = slow_tests.PAGE.read_text()
    assert slow_tests.written(page) == page, "python tests/helpers/slow_tests.py writes the table anew"


MARKS = """
@pytest.mark.slow
def test_all(): pass

@pytest.mark.covering(2)
def test_pairs(a, b, c): pass

@pytest.mark.parametrize(("a", "b"), [(1, 2), pytest.param(3, 4, marks=pytest.mark.slow)])
def test_one_case(a, b): pass

@pytest.mark.parametrize("n", [pytest.param(n, marks=[pytest.mark.slow] if n else []) for n in range(9)])
def test_a_loop(n): pass

CASES = [pytest.param(1, marks=pytest.mark.slow), 2]

def cases():
    return [pytest.param(1, marks=pytest.mark.slow), 2]

@pytest.mark.parametrize("n", CASES)
def test_of_a_list(n): pass

@pytest.mark.parametrize("n", cases())
def test_of_a_function(n): pass

@pytest.mark.parametrize("n", [1, 2])
def test_none(n): pass
"""


def test_every_way_to_mark_a_slow_test_is_listed():
    assert [*slow_tests.slow_of(ast.parse(MARKS))] == [
        ("::test_all", "nothing"),
        ("::test_pairs", "a few cases, which hold every pair of values"),
        ("::test_one_case", "all but a, b = 3, 4"),
        ("::test_a_loop", "some values of n"),
        ("::test_of_a_list", "some values of n"),
        ("::test_of_a_function", "some values of n"),
    ]
    assert [*slow_tests.slow_of(ast.parse(f"pytestmark = pytest.mark.slow\n{MARKS}"))] == [("", "nothing")]
