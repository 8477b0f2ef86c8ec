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
    program: Program, inputs: Mapping[str, Tensor], tensors: Sequence[Tensor], dtype: torch.dtype, *, checked: bool = False
) -> Tensor:
    """What a program gives of inputs that broadcast; its floats are of ``dtype``. A gradient flows through it.

    Raises:
        IndexError: ``checked``, and an index is outside of its tensor.
    """
    parsed = read(program)
    device = next(iter(inputs.values())).device
    known = {Value(name): inputs[name] for name in parsed.inputs}
    captured = {Value(f"t{n}"): x for n, x in enumerate(tensors)}

    def brought(x: Operand, kind: str) -> Tensor:
        of = {BOOL: torch.bool, FLOAT: dtype}.get(kind, torch.int64)
        return known[x].to(of) if isinstance(x, Value) else torch.tensor(x, dtype=of, device=device)

    for step in parsed.steps:
        known[step.result] = _done(step, captured, brought, checked=checked)
    return brought(parsed.result, FLOAT if "score" in inputs else BOOL)


def _done(step: Step, captured: Mapping[Value, Tensor], brought: Callable, *, checked: bool) -> Tensor:
    """What a step gives."""
    if step.operation == "load":
        x, indices = captured[step.operands[0]], [brought(n, step.takes) for n in step.operands[1:]]
        return _loaded(step, x, indices, checked=checked)
    if step.operation == "where":
        condition, *choices = step.operands
        return torch.where(brought(condition, BOOL), *(brought(x, step.takes) for x in choices))
    if step.operation not in OPERATIONS:  # a cast
        return brought(*step.operands, step.kind)
    return OPERATIONS[step.operation](*(brought(x, step.takes) for x in step.operands))


def _loaded(step: Step, x: Tensor, indices: list[Tensor], *, checked: bool) -> Tensor:
    for n, (index, size) in enumerate(zip(indices, x.shape, strict=True)):
        if checked and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
            at = f"{int(index.min())} to {int(index.max())}"
            raise IndexError(f"{step.operands[0].name}: expected indices in [0, {size}) of dimension {n}, got {at}")
    at = tuple(index.clamp(0, size - 1) for index, size in zip(indices, x.shape, strict=True))
    return x[at] if at else x


def _divisor(y: Tensor) -> Tensor:
    """What is divided by: 1 where it is 0, which kernels could not report."""
    return torch.where(y == 0, 1, y)
