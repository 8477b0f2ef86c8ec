"""Programs: equal text is equal, a step is computed once, and constant indices may count from the end."""

import pytest
import torch

from attnlib import attention, mask_mod
from attnlib.tracing.program import INDICES, CapturedKind, Program, Steps, Value
from attnlib.tracing.trace import traced


def call(mask, **options):
    q = torch.randn(2, 5, 4, 8)
    return attention(q, q, q, mask=mask, **options)


def test_a_program_is_its_text():
    steps = Steps(INDICES, [CapturedKind("float", 1)])
    x = steps.add("mul", steps.load(0, Value("h")), -2.5)
    y = steps.where(steps.add("lt", Value("i"), -3), x, float("-inf"))
    program = steps.program("score", steps.add("add", y, steps.add("mul", Value("j"), 1e-30)))
    assert Program(program.text).parsed == steps.parsed(program.parsed.result)
    assert "\n" not in program.text  # torch.compile quotes an operator's arguments in comments of a line
    assert str(program).splitlines()[-1] == "    return x5"
    assert Program("def mask(b, h, i, j, first): return True").parsed.result is True
    assert traced("mask", lambda b, h, i, j: i == j, ()) == traced("mask", lambda w, x, y, z: y == z, ())


def test_what_is_computed_twice_is_one_step():
    program = traced("mask", lambda b, h, i, j: ((i - j) > 2) | ((i - j) < 0), ())
    assert [step.operation for step in program.parsed.steps] == ["sub", "gt", "lt", "logical_or"]
    assert traced("mask", lambda b, h, i, j: (1 == True) & (i < 1.0), ()) != traced(
        "mask", lambda b, h, i, j: i < 1, ()
    )


LAST = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_constant_index_below_0_counts_from_the_end(backend):
    """As in torch, and in tensors of any size that the function is given later."""
    q = torch.randn(1, 6, 2, 8)
    last = mask_mod(lambda b, h, i, j, x: j < x[-1, -1], LAST)
    for mask, keys in ((last, 6), (last.reading([LAST[:1]]), 3)):
        fewer = mask_mod(lambda b, h, i, j, keys=keys: j < keys)
        ours, theirs = (attention(q, q, q, mask=x, backend=backend) for x in (mask, fewer))
        assert torch.equal(ours, theirs)
    with pytest.raises(
        ValueError, match=r"tensor 0 of a function: expected a larger one, got \(1, 2\).*at 2 in"
    ):
        call(mask_mod(lambda b, h, i, j, x: x[0, 2] > j, LAST).reading([LAST[:1, :2]]))
