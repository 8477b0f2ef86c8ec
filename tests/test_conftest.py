"""`-m slow` runs every property test, with at least 200 examples; the default run leaves each its own number."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("marks", "examples"),
    [
        ("slow", {"plain": 200, "few": 200, "many": 250, "TestMachine": 200}),
        ("not slow and not gpu", {"plain": 30, "few": 7, "many": 250, "TestMachine": 9, "by_example": None}),
    ],
)
def test_the_number_of_examples(tmp_path, marks, examples):
    (tmp_path / "test_properties.py").write_text(PROPERTIES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n  gpu\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-v", "-m", marks, "--hypothesis-show-statistics"]
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path}
    )
    ran = re.findall(r"::(?:test_)?(\w+)(?:::runTest)? PASSED", run.stdout)
    assert sorted(ran) == sorted(examples)
    counts = re.findall(r"::(?:test_)?(\w+)(?:::runTest)?:\n(?:.*\n)*?.*?(\d+) passing", run.stdout)
    assert {name: int(count) for name, count in counts} == {name: n for name, n in examples.items() if n}
