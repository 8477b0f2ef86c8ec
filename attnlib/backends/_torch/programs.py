"""Programs of indices on tiles: each step is an operation of torch on tensors that broadcast."""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ...program import BOOL, FLOAT, Operand, Program, Step, Value, read

OPERATIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "eq", "ne", "lt", "le", "gt", "ge")},
        **{name: getattr(torch, name) for name in ("neg", "abs", "minimum", "maximum", "exp", "log", "tanh", "where")},
        **{name: getattr(torch, name) for name in ("logical_and", "logical_or", "logical_not")},
        "floordiv": lambda x, y: torch.div(x, _divisor(y), rounding_mode="floor"),
        "mod": lambda x, y: torch.remainder(x, _divisor(y)),
    }
)  # fmt: skip


def evaluated(
    program: Program, inputs: Mapping[str, Tensor], tensors: Sequence[Tensor], dtype: torch.dtype, *, counted: Tensor | None = None
) -> Tensor:
    """What a program gives of inputs that broadcast; its floats are of ``dtype``. A gradient flows through it.

    Raises:
        IndexError: an index is outside of its tensor, for one of the ``counted`` pairs.
    """
    parsed = read(program)
    device = next(iter(inputs.values())).device
    known = {Value(name): inputs[name] for name in parsed.inputs}
    captured = {Value(f"t{n}"): x for n, x in enumerate(tensors)}

    def brought(x: Operand, kind: str) -> Tensor:
        of = {BOOL: torch.bool, FLOAT: dtype}.get(kind, torch.int64)
        return known[x].to(of) if isinstance(x, Value) else torch.tensor(x, dtype=of, device=device)

    for step in parsed.steps:
        known[step.result] = _done(step, captured, brought, counted)
    return brought(parsed.result, FLOAT if "score" in inputs else BOOL)


def _done(step: Step, captured: Mapping[Value, Tensor], brought: Callable, counted: Tensor | None) -> Tensor:
    """What a step gives."""
    if step.operation == "load":
        x, indices = captured[step.operands[0]], [brought(n, step.takes) for n in step.operands[1:]]
        if counted is not None:
            _check(step, x, indices, counted)
        at = tuple(index.clamp(0, size - 1) for index, size in zip(indices, x.shape, strict=True))
        return x[at] if at else x
    if step.operation == "where":
        condition, *choices = step.operands
        return torch.where(brought(condition, BOOL), *(brought(x, step.takes) for x in choices))
    if step.operation not in OPERATIONS:  # a cast
        return brought(*step.operands, step.kind)
    return OPERATIONS[step.operation](*(brought(x, step.takes) for x in step.operands))


def _check(step: Step, x: Tensor, indices: list[Tensor], counted: Tensor) -> None:
    """Raise IndexError for an index outside of the tensor, where a pair counts."""
    for n, (index, size) in enumerate(zip(indices, x.shape, strict=True)):
        outside = ((index < 0) | (index >= size)) & counted
        if outside.any():
            wrong = int(index.broadcast_to(outside.shape)[outside][0])
            raise IndexError(f"{step.operands[0].name}: expected indices in [0, {size}) of dimension {n}, got {wrong}")


def _divisor(y: Tensor) -> Tensor:
    """What is divided by: 1 where it is 0, which kernels could not report."""
    return torch.where(y == 0, 1, y)
