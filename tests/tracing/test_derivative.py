"""Derivatives of score programs against torch's autograd in fp64, also where a function has none and torch
chooses.
"""

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from program_cases import FLOATS, SCORES, Case, Tile, program_of
from torch import Tensor

from attnlib import score_mod
from attnlib.tracing.derivative import BY_RESULT, derivative
from attnlib.tracing.kinds import DTYPES, FLOAT, INT64
from attnlib.tracing.program import Operand, Program, Step, Value
from attnlib.tracing.trace import QUERY_OFFSET

TILE = Tile()
NAMED = {"truediv": "true_divide", "floordiv": "floor_divide", "mod": "remainder"}
NAMED |= {f"bit{name}": f"bitwise_{name}" for name in ("and", "or", "xor", "not")}
NAMED |= {"lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift"}


@pytest.fixture(autouse=True)
def _in_fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run(
    steps: Sequence[Step], inputs: Mapping[str, Tensor], tensors: Sequence[Tensor]
) -> Callable[..., Tensor]:
    """What gives any operand, once the steps are done, as one would read their names."""
    known = {Value(name): x for name, x in inputs.items()}
    kinds = {**DTYPES, FLOAT: torch.float64}

    def brought(x: Operand, kind: str) -> Tensor:
        return torch.as_tensor(known.get(x, x) if isinstance(x, Value) else x).to(kinds[kind])

    for step in steps:
        operation = step.operation
        if operation == "load":
            table = tensors[int(step.operands[0].name[1:])]
            known[step.result] = table[clamped(table, step.operands[1:], brought)]
            continue
        given = [brought(x, step.takes) for x in step.operands]
        if operation == "where":
            known[step.result] = torch.where(brought(step.operands[0], "bool"), *given[1:])
        elif operation.startswith("to_"):
            known[step.result] = brought(step.operands[0], step.kind)
        else:
            known[step.result] = getattr(torch, NAMED.get(operation, operation))(*given)
    return brought


def clamped(x: Tensor, indices: Sequence[Operand], brought: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """Indices of a tensor; constants below 0 count from its end."""
    sizes = zip(indices, x.shape, strict=True)
    return tuple(
        n % size if isinstance(n, int) else brought(n, INT64).clamp(0, size - 1) for n, size in sizes
    )


def differentiated(program: Program, score: Tensor, d: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The derivatives by the score, and by each tensor of floats."""
    by = derivative(program)
    b, h, i, j = TILE.indices()
    inputs = {"score": score, BY_RESULT: d, "b": b, "h": h, "i": i, "j": j, "first": torch.tensor(TILE.first)}
    brought = run(by.steps, inputs, tensors)
    grads = [torch.zeros(x.shape) for x in tensors]
    for tensor, indices, x in by.reads:
        grad = grads[int(tensor.name[1:])]
        at = torch.broadcast_tensors(d, *map(torch.as_tensor, clamped(grad, indices, brought)))[1:]
        x = brought(x, FLOAT).broadcast_to(d.shape)
        grad.index_put_(at, x, accumulate=True) if at else grad.add_(x.sum())
    return [
        brought(by.score, FLOAT).broadcast_to(d.shape),
        *(grad for grad, x in zip(grads, tensors, strict=True) if x.is_floating_point()),
    ]  # fmt: skip


def expected(case: Case, arguments: list, score: Tensor, d: Tensor) -> list[Tensor]:
    """The same by autograd."""
    leaves = [score, *(x for x in arguments if x is not QUERY_OFFSET and x.is_floating_point())]
    given = TILE.called(case, arguments, score)
    if not given.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    return list(torch.autograd.grad(given, leaves, d, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("name", SCORES)
def test_it_is_that_of_autograd(name):
    case = SCORES[name]
    arguments = [
        x.double().requires_grad_() if x is not QUERY_OFFSET and x.dtype in FLOATS else x
        for x in case.arguments()
    ]
    score, d = torch.randn(2, len(TILE.i), len(TILE.j))
    wanted = expected(case, arguments, score.requires_grad_(), d)
    tensors = [x.detach() for x in arguments if x is not QUERY_OFFSET]
    found = differentiated(program_of("score", case, arguments), score.detach(), d, tensors)
    torch.testing.assert_close(found, wanted)


TIES = {
    "minimum": lambda score, b, h, i, j: torch.minimum(score, (i - j).float()),
    "maximum": lambda score, b, h, i, j: torch.maximum(score, (i - j).float()),
    "clamp": lambda score, b, h, i, j: score.clamp(-1, 2),
    "clamp_min": lambda score, b, h, i, j: score.clamp_min(-1),
    "clamp from above": lambda score, b, h, i, j: torch.clamp(score, max=2.0),
    "clamp to one number": lambda score, b, h, i, j: score.clamp(1, 1),
    "clamp by numbers that vary": lambda score, b, h, i, j: torch.clamp(
        score, (i - 3).double(), (j + 9).double()
    ),
    "abs": lambda score, b, h, i, j: score.abs(),
    "where": lambda score, b, h, i, j: torch.where(i > j, score, float("-inf")),
    "remainder": lambda score, b, h, i, j: score % 2.0,
}


@pytest.mark.parametrize("name", TIES)
def test_ties_go_where_torch_has_them(name):
    i, j = TILE.indices()[2:]
    score, d = (i - j).double().requires_grad_(), torch.randn(len(TILE.i), len(TILE.j))
    case = Case(TIES[name])
    (wanted,) = expected(case, [], score, d)
    (found,) = differentiated(program_of("score", case, []), score.detach(), d, [])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_what_does_not_matter_is_left_out():
    case = Case(lambda score, b, h, i, j, s, t: score * t[h] + torch.exp(s[j]).int())
    by = derivative(program_of("score", case, [torch.randn(3), torch.randn(3)]))
    assert [read.tensor for read in by.reads] == [Value("t1")]
    assert {step.operation for step in by.steps} == {"load", "mul"}


def test_ints_and_bools_have_none():
    case = Case(lambda score, b, h, i, j, t: torch.where(t[h] > 0.5, i // 2, (t[j] * 2).int()))
    by = derivative(program_of("score", case, [torch.randn(3)]))
    assert (by.steps, by.score, by.reads) == ((), 0.0, ())


def test_what_a_program_asks_for():
    bias = torch.zeros(4, 9)
    relative = score_mod(lambda s, b, h, i, j, x: s + x[h, (i - j).clamp(-4, 4) + 4] + x[h, 0], bias).program
    capped = score_mod(
        lambda s, b, h, i, j: torch.tanh(s) * 2,
    ).program
    squared = score_mod(lambda s, b, h, i, j: s * s).program
    assert (relative.gathers, relative.exponentials, "b" in relative.read, "h" in relative.read) == (
        1,
        0,
        False,
        True,
    )
    assert (capped.gathers, capped.exponentials) == (0, 1)
    assert [derivative(x).needs_score for x in (relative, capped, squared)] == [False, True, True]
