"""Derivative of a traced score function with respect to the score and every tensor element that it reads.

The code visits the steps from the last to the first, as torch's autograd does, and follows torch's rules: if
two numbers are equal, ``minimum`` and ``maximum`` give each half of the gradient, and the gradient of ``abs``
at 0 is 0. The gradient of ``clamp`` at a bound depends on the torch version, so we try it out once.
"""

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import torch

from .kinds import FLOAT
from .program import Operand, Program, Step, Steps, Value

BY_RESULT = "d"  # the input of the derivative that holds the gradient of the program's result


class Read(NamedTuple):
    """A tensor element that a program reads: its tensor, its indices, and the gradient with respect to it."""

    tensor: Value
    indices: tuple[Operand, ...]
    derivative: Operand


class Derivative(NamedTuple):
    """The derivative of a program, as steps on the program's inputs and ``d``, the gradient of its result.

    ``score`` is the derivative with respect to the score. ``reads`` has one entry for each float that the
    program loads from a tensor and its result depends on.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    score: Operand
    reads: tuple[Read, ...]

    @property
    def needs_score(self) -> bool:
        """True if the derivative with respect to the score depends on the score itself."""
        read = {x for step in needed(self.steps, [self.score]) for x in step.operands}
        return Value("score") in read


def derivative(program: Program) -> Derivative:
    """Return the derivative of a traced score function.

    Its fields name values that its steps compute: in the example, x2 is ``d * x0`` and x3 is ``d * score``.

    >>> doubled = "def score(score, h, t0: float[1]): x0 = load(t0, h); x1 = mul(score, x0); return x1"
    >>> by = derivative(Program(doubled))
    >>> print(by.score, by.reads[0].derivative)
    Value(name='x2') Value(name='x3')
    """
    parsed = program.parsed
    steps = Steps((*parsed.inputs, BY_RESULT), parsed.captured)
    steps.copied(program, range(len(parsed.captured)))
    by: dict[Operand, Operand] = {parsed.result: Value(BY_RESULT)}
    reads = []
    for step in reversed(parsed.steps):
        if step.kind != FLOAT or step.result not in by:
            continue
        if step.operation == "load":
            reads.append(Read(step.operands[0], step.operands[1:], by[step.result]))
            continue
        for x, part in zip(step.operands, _operand_gradients(steps, step, by[step.result]), strict=False):
            if part is not None and isinstance(x, Value) and steps.kind(x) == FLOAT:
                by[x] = steps.add("add", by[x], part) if x in by else part
    score = by.get(Value("score"), 0.0)
    return Derivative(
        parsed.inputs, needed(steps.parsed(score).steps, [score, *operands_of(reads)]), score, tuple(reads)
    )


def _operand_gradients(steps: Steps, step: Step, d: Operand) -> Sequence[Operand | None]:
    """Return the gradient of each operand, None if it needs none; ``d`` is that of the step's result."""
    add, result, x = steps.add, step.result, step.operands[0]
    y = step.operands[-1]
    match step.operation:
        case "add":
            return d, d
        case "sub":
            return d, add("neg", d)
        case "mul":
            return add("mul", d, y), add("mul", d, x)
        case "truediv":
            by_x = add("truediv", d, y)
            return by_x, add("neg", add("mul", by_x, result))
        case "mod":
            return d, add("neg", add("mul", d, add("floordiv", x, y)))
        case "pow":
            if isinstance(x, Value):
                return (add("mul", d, add("mul", y, add("pow", x, y - 1))), None)
            return None, add("mul", add("mul", d, result), log(x))
        case "minimum":
            return _choice_gradients(steps, d, x, y, "lt", (0.5, 0.5))
        case "maximum":
            return _choice_gradients(steps, d, x, y, "gt", (0.5, 0.5))
        case "clamp_min":
            return _choice_gradients(
                steps, d, x, y, "gt", clamped_at_a_tie("clamp_min", by_tensor=isinstance(y, Value))
            )
        case "clamp_max":
            return _choice_gradients(
                steps, d, x, y, "lt", clamped_at_a_tie("clamp_max", by_tensor=isinstance(y, Value))
            )
        case "where":
            condition = step.operands[0]
            return None, steps.where(condition, d, 0.0), steps.where(condition, 0.0, d)
    return (_unary_gradient(steps, step, d),)


def _unary_gradient(steps: Steps, step: Step, d: Operand) -> Operand | None:
    """Return the gradient of an operation on one number, or None for casts and ``floordiv``."""
    add, result, x = steps.add, step.result, step.operands[0]
    match step.operation:
        case "neg":
            return add("neg", d)
        case "abs":
            return steps.where(add("eq", x, 0.0), 0.0, steps.where(add("lt", x, 0.0), add("neg", d), d))
        case "exp":
            return add("mul", d, result)
        case "exp2":
            return add("mul", add("mul", d, result), log(2))
        case "log":
            return add("truediv", d, x)
        case "tanh":
            return add("mul", d, add("sub", 1.0, add("mul", result, result)))
        case "sigmoid":
            return add("mul", d, add("mul", add("sub", 1.0, result), result))
        case "sqrt":
            return add("truediv", d, add("mul", 2.0, result))
        case "rsqrt":
            return add("mul", d, add("mul", -0.5, add("mul", result, add("mul", result, result))))
    return None


def _choice_gradients(
    steps: Steps, d: Operand, x: Operand, y: Operand, before: str, shares: tuple[float, float]
) -> tuple[Operand, Operand]:
    """Return the gradients of ``x`` and ``y`` in an operation such as minimum, which picks one of them.

    ``before`` is the comparison that is true if ``x`` is picked. ``d`` is the gradient of the
    result; if ``x`` and ``y`` are equal, ``shares`` says which fraction of ``d`` each of them gets.
    """
    equal = steps.add("eq", x, y)

    def by(own: Operand, other: Operand, share: float) -> Operand:
        shared = d if share == 1 else 0.0 if share == 0 else steps.add("mul", d, share)
        return steps.where(equal, shared, steps.where(steps.add(before, own, other), d, 0.0))

    return by(x, y, shares[0]), by(y, x, shares[1])


def clamped_at_a_tie(name: str, *, by_tensor: bool) -> tuple[float, float]:
    """Return the gradients of number and bound in ``torch.clamp_min`` or ``clamp_max`` if both are equal.

    We ask torch itself, since its versions differ. Up to 2.13, the number gets the whole gradient.
    From 2.14 on, it gets none at a constant bound, and half at a bound that is a tensor.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x, bound = (torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True) for _ in "xy")
        given = getattr(torch, name)(x, bound if by_tensor else 1.0)
        by_number, by_bound = torch.autograd.grad(given, (x, bound), allow_unused=True)
    return float(by_number), 0.0 if by_bound is None else float(by_bound)


def operands_of(reads: Sequence[Read]) -> list[Operand]:
    """Return the indices and derivatives in ``reads``, from which the tensors' gradients are summed."""
    return [x for known in reads for x in (*known.indices, known.derivative)]


def needed(steps: Sequence[Step], results: Sequence[Operand]) -> tuple[Step, ...]:
    """Return only the steps that ``results`` depend on."""
    found, kept = {x for x in results if isinstance(x, Value)}, []
    for step in reversed(steps):
        if step.result in found:
            kept.append(step)
            found.update(x for x in step.operands if isinstance(x, Value))
    return tuple(reversed(kept))
