"""Trees of sequences, timed beside packed copies of them: on a CPU, with FlexAttention not compiled."""

import pytest
import torch
from bench_helpers import place

from attnlib.bench import tables, trees
from attnlib.bench.compare import Failure, distance
from attnlib.bench.trees import TreeCase

# torch warns once in a process, so any of these tests may be the one that it warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention")

CASE = TreeCase("small", 20, 7, 3, 4, 2, 16, torch.float32)


@pytest.fixture
def ways(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    torch.manual_seed(0)
    tree = CASE.tree()
    given = [torch.randn(len(tree.tokens), n, 16) for n in (4, 2, 2, 4)]
    return [make(place(), tree, given) for make in (trees.whole_tree, trees.copies, trees.flex)]


def test_all_ways_compute_the_same(ways):
    whole, copied, flex = ways
    assert distance(copied.results(), whole.results()) < 1e-5
    out = flex.call(*(x.detach() for x in flex.leaves))  # FlexAttention has no backward on CPUs
    assert distance(flex.whole([out]), whole.results()[:1]) < 1e-5


def test_visible_pairs(ways):
    of_prompt, of_answers = 20 * 21 // 2, 3 * (7 * 20 + 7 * 8 // 2)
    assert [way.pairs for way in ways] == [of_prompt + of_answers, 3 * (27 * 28 // 2), of_prompt + of_answers]


def test_a_way_with_another_mask_is_not_timed(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    causal = trees.CAUSAL
    monkeypatch.setattr(trees.masks, "until", lambda ends: causal)
    seconds, _ = trees.timed(place(), CASE)
    assert isinstance(seconds["forward"]["ours"], Failure)


def test_rates_count_the_pairs_of_each_way(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    [table] = [entry.table for entry in tables.GPU if entry.table.name == "trees"]
    rows = [row for _, row in trees.rows(place(), [table], [CASE])]
    assert [row.name for row in rows] == ["small, forward", "small, backward"]
    ours, copied = (rows[0].cells[name] for name in ("ours", "packed copies"))
    assert ours == pytest.approx(4 * 4 * 16 * 714 / 1e-3 / 1e12)
    assert copied / ours == pytest.approx(3 * 378 / 714)
