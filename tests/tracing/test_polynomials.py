"""Results of steps as polynomials: equal formulas are equal, and what may overflow is an atom."""

import pytest
import torch

from attnlib import score_mod
from attnlib.tracing.polynomials import BEHIND, DISTANCE, polynomials
from attnlib.tracing.program import Value


def polynomial(function):
    """The polynomial of a function's result, with the names of its atoms."""
    parsed = score_mod(function, torch.rand(4)).program.parsed
    found = polynomials(parsed)[parsed.result]
    return {" ".join(atom.name for atom in monomial): number for monomial, number in found.items()}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, b, h, i, j, m: 2 * (s + 3) - 1, {"score": 2, "": 5}),
        (lambda s, b, h, i, j, m: (s + 2) * (s + 1), {"score score": 1, "score": 3, "": 2}),
        (lambda s, b, h, i, j, m: -(s / 4), {"score": -0.25}),
        (lambda s, b, h, i, j, m: m[h] * s * (i - j), {"i score t0": 1, "j score t0": -1}),
        (lambda s, b, h, i, j, m: s * (j - j + 1), {"score": 1}),
        (lambda s, b, h, i, j, m: 2 * (3 * i - 3 * j).abs(), {DISTANCE.name: 6}),
        (lambda s, b, h, i, j, m: (i - j).clamp(0) - (j - i).clamp(max=0), {BEHIND.name: 2}),
        (lambda s, b, h, i, j, m: torch.where(j < i, 2 * i - 2 * j, 2 * j - 2 * i), {DISTANCE.name: 2}),
    ],
)
def test_formulas(function, expected):
    assert polynomial(function) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, i, j, m: s * 2.0**30 * 2.0**30,  # overflows in fp32
        lambda s, b, h, i, j, m: s - s,  # not 0 for infinity
        lambda s, b, h, i, j, m: (s - 1) * (s + 1),
        lambda s, b, h, i, j, m: s * float("inf"),
        lambda s, b, h, i, j, m: (i - j) * 2**30,  # wraps around in the kernels' int32
        lambda s, b, h, i, j, m: (i - j).to(torch.int16),
        lambda s, b, h, i, j, m: (i - j).int() * 2,
        lambda s, b, h, i, j, m: torch.where(i - j > 1, i - j, j - i),
        lambda s, b, h, i, j, m: torch.where(s > 1, i - j, j - i),
        lambda s, b, h, i, j, m: (i - j).clamp(max=0).clamp(0),
        lambda s, b, h, i, j, m: s.int() + 1,
        lambda s, b, h, i, j, m: m[h + 1],
        lambda s, b, h, i, j, m: s * s * s * s * s,
        lambda s, b, h, i, j, m: (s + m[h] + i + j + 1) ** 3,
    ],
)
def test_other_results_are_atoms(function):
    parsed = score_mod(function, torch.rand(4)).program.parsed
    assert polynomials(parsed)[parsed.result] == {(parsed.result,): 1}


def test_inputs_are_atoms():
    parsed = score_mod(lambda s, b, h, i, j: s).program.parsed
    assert polynomials(parsed)[Value("score")] == {(Value("score"),): 1}
