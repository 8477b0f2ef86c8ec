"""The steps that a traced function becomes give what torch gives, for masks, scores and derivatives."""

import pytest
import torch
from program_cases import AT

from attnlib import QUERY_OFFSET
from attnlib.backends._torch.programs import differentiated
from attnlib.tracing.derivative import derivative
from attnlib.tracing.evaluation import evaluated
from attnlib.tracing.trace import traced

DOCUMENT = torch.zeros(2, 9, dtype=torch.int32)
TABLE, GAIN = torch.randn(4, 9).double(), torch.tensor(1.3).double()


def given(function, *tensors, score=None):
    """What a program gives of all pairs, and what the function gives when called with them."""
    program = traced("mask" if score is None else "score", function, tensors)
    inputs = AT if score is None else {"score": score} | AT
    ours = evaluated(program, inputs, [x for x in tensors if x is not QUERY_OFFSET], torch.float64)
    return ours, function(*(x for name, x in inputs.items() if name != "first"), *tensors)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, i, j: i // 3 == j % 4,
        lambda b, h, i, j: (i - 5) // -3 < (i - 7) % -4,
        lambda b, h, i, j: ~(i > j) | (i != h) & (b >= 1),
        lambda b, h, i, j: abs(i) <= -(1 - j),
        lambda b, h, i, j: torch.where(i > 0, i, j) > 2,
        lambda b, h, i, j: torch.where(i > 0, i > j, b == 0),
        lambda b, h, i, j: torch.minimum(i, j).eq(torch.maximum(i, h)),
        lambda b, h, i, j: i.clamp(0, 3) + j.clamp(max=4) == torch.clamp(h, min=2) + j.clamp_min(1),
        lambda b, h, i, j: torch.logical_not(torch.logical_and(i > 0, j > 0)),
        lambda b, h, i, j: (i / 2).to(torch.int64) * 2 == i,
        lambda b, h, i, j: (j * 0.5).int() + (i > 0) == torch.div(j, 2, rounding_mode="floor"),
        lambda b, h, i, j: 3 - i > 7 - 2 * j,
        lambda b, h, i, j: (j > 3).float() * 1.5 + 0.25 > i.float().exp(),
    ],
)
def test_a_mask_gives_what_its_function_gives(function):
    ours, theirs = given(function)
    assert torch.equal(*torch.broadcast_tensors(ours, theirs))


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda s, b, h, i, j, t: s + t[h, j], (TABLE,)),
        (
            lambda s, b, h, i, j, t, g: torch.where(i > j, s * g + t[h, j].exp(), -s.tanh() / t[b, j]),
            (TABLE, GAIN),
        ),
        (lambda s, b, h, i, j, t: (s * s + 1).log() * t[b, 0] - (s - 1).abs() + s % 0.7, (TABLE,)),
        (
            lambda s, b, h, i, j, t: torch.maximum(s, t[h, 0]) + s.minimum(t[h, j]) * s.clamp(-0.3, 0.4),
            (TABLE,),
        ),
        (lambda s, b, h, i, j: (i * 1.5).double(), ()),
        (lambda s, b, h, i, j, t: 3 - t[b, j] / s - (-s) + s.float(), (DOCUMENT,)),
        (lambda s, b, h, i, j, t: s * t[b, j].double() + t[0, 0], (TABLE,)),
    ],
)
def test_a_score_and_its_derivative_are_torchs(function, tensors):
    score, d = (torch.randn(2, 4, 7, 9, dtype=torch.float64) for _ in "12")
    leaves = [x.clone().requires_grad_() for x in (score, *tensors) if x.is_floating_point()]
    reading = iter(leaves[1:])
    ours, theirs = given(
        function, *(next(reading) if x.is_floating_point() else x for x in tensors), score=leaves[0]
    )
    torch.testing.assert_close(*torch.broadcast_tensors(ours, theirs))
    options = {"allow_unused": True, "materialize_grads": True}
    wanted = (
        torch.autograd.grad(theirs.broadcast_to(d.shape), leaves, d, **options)
        if theirs.requires_grad
        else None
    )
    grads = torch.zeros(sum(x.numel() for x in leaves[1:]), dtype=torch.float64)
    by = derivative(traced("score", function, tensors))
    by_score = differentiated(by, d, None, {"score": score} | AT, tensors, grads)
    wanted = [torch.zeros_like(x) for x in leaves] if wanted is None else wanted
    torch.testing.assert_close(by_score, wanted[0])
    torch.testing.assert_close(grads, torch.cat([grads[:0], *(x.flatten() for x in wanted[1:])]))
