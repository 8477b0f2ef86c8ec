"""The comparison of two versions of torch: it refuses other results, takes turns, and fails beyond its
bound.
"""

import sys

import pytest
import torch

from tests.bench import torch_versions


def test_it_runs_under_two_interpreters(capsys):
    torch_versions.main([sys.executable, sys.executable, "--tokens", "9", "--turns", "1"])
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.count(f"torch {torch.__version__}") == 2
    assert [row.split("|")[1].strip() for row in rows] == ["9 tokens, forward", "9 tokens, with backward"]


def test_other_results_are_refused(monkeypatch):
    monkeypatch.setattr(torch_versions, "ours", lambda q, k, v: 1.001 * torch_versions.sdpa(q, k, v))
    with pytest.raises(AssertionError, match="not close"):
        list(torch_versions.cases([9]))


class Answers:
    """A server that answers with these ratios, one a turn."""

    version = "0"

    def __init__(self, *ratios: float):
        self._ratios = iter(ratios)

    def turn(self) -> dict[str, float]:
        return {"quick": 1.0, "slow": next(self._ratios)}


@pytest.mark.parametrize(("newer", "is_fast"), [((2.2, 9.0, 0.5), True), ((2.3, 9.0, 0.5), False)])
def test_the_bound_is_on_medians(newer, is_fast):
    assert torch_versions.compare(Answers(2.0, 2.0, 8.0), Answers(*newer), 3) == is_fast


def test_an_interpreter_that_fails_is_named():
    with pytest.raises(RuntimeError, match="ended without an answer"):
        torch_versions.Server(sys.executable, ["none"])
