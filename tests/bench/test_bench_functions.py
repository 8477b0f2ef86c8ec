"""Mask and score functions, timed beside FlexAttention: on a CPU, where it is not compiled."""

import pytest
import torch
from bench_helpers import place

from attnlib.bench import functions, tables
from attnlib.bench.compare import Failure, distance

# torch warns once in a process, so any of these tests may be the one that it warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention")

SMALL = {"dim": 16, "batch": 2, "heads": 2, "tokens": 1100, "dtype": torch.float32}
CASES = tuple(case._replace(**SMALL) for case in functions.FUNCTIONS[: len(functions.FUNCTIONS) // 2])


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_libraries_compute_the_same(case):
    torch.manual_seed(0)
    captured, given = case.tensors(case, "cpu"), [torch.randn(2, 1100, 2, 16) for _ in range(4)]
    ours, flex = (make(place(), case, captured, given) for make in (functions.ours, functions.flex))
    expected = ours.results(gradients=False)
    assert distance(flex.results(gradients=False), expected) < 1e-5  # FlexAttention has no backward on CPUs
    plain = case._replace(function=lambda *x: x[3] <= x[2] if case.is_mask else x[0])
    unlike = functions.ours(place(), plain, (), given)
    assert distance(unlike.results(gradients=False), expected) > 1e-3


def test_documents_are_numbered_in_order():
    (numbers,) = functions.documents(CASES[0], "cpu")
    steps = numbers.diff()
    assert set(steps.unique().tolist()) == {0, 1}
    assert (numbers[:, 0] == 0).all()
    assert (numbers[:, -1] == functions.DOCUMENTS - 1).all()


def test_every_pass_has_a_row(monkeypatch):
    monkeypatch.setattr(functions, "flex", functions.ours)  # since FlexAttention has no backward on CPUs
    [table] = [entry.table for entry in tables.GPU if entry.table.name == "functions"]
    found = [row for _, row in functions.rows(place(), [table], CASES[4:5])]
    assert [row.name for row in found] == ["tanh, d64, forward", "tanh, d64, backward"]
    assert [row.cells for row in found] == [{"ours": 1.0, "Flex": 1.0}] * 2


def test_results_that_nothing_confirms_are_not_timed():
    seconds = functions.timed(place(), CASES[4])
    assert seconds["forward"]["ours"] == Failure("agrees with nobody")
