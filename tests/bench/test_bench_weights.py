"""Recomputed probabilities, timed beside the forward: on a CPU."""

import pytest
from bench_helpers import place, tiny

from attnlib import FULL
from attnlib.bench import tables, weights

COLUMNS = ("forward", "maxima", "mass", "mass of 64 rows")
CASE = tiny(130, kv_heads=2)


@pytest.mark.parametrize("case", [CASE, CASE._replace(mask=FULL)], ids=["causal", "full"])
def test_every_call_is_checked_and_timed(case):
    assert weights.timed(place(), case) == dict.fromkeys(COLUMNS, 1e-3)


@pytest.mark.parametrize(("name", "column"), [("attention_maxima", "maxima"), ("attention_weights", "mass")])
def test_a_wrong_result_is_not_timed(name, column, monkeypatch):
    right = getattr(weights, name)
    monkeypatch.setattr(weights, name, lambda *args, **options: right(*args, **options) + 1)
    found = weights.timed(place(), CASE)
    assert found["forward"] == 1e-3
    assert "AssertionError" in found[column]


def test_the_table_is_in_milliseconds():
    [table] = [entry.table for entry in tables.GPU if entry.table.name == "weights"]
    [(_, row)] = weights.rows(place(), [table], [CASE])
    assert row.cells == dict.fromkeys(COLUMNS, 1.0)
