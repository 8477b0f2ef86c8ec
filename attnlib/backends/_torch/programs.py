"""Programs of indices on tiles: each step is an operation of torch on tensors that broadcast."""

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from ...derivative import BY_RESULT, Derivative
from ...program import BOOL, FLOAT, INT, Operand, Program, Step, Value

OPERATIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
        **{name: getattr(torch, name) for name in ("add", "sub", "mul", "neg", "abs", "minimum", "maximum")},
        **{name: getattr(torch, name) for name in ("exp", "log", "tanh", "logical_and", "logical_or", "logical_not")},
        "truediv": torch.true_divide,
        "floordiv": lambda x, y: torch.div(x, _divisor(y), rounding_mode="floor"),
        "mod": lambda x, y: torch.remainder(x, _divisor(y)),
    }
)  # fmt: skip


def evaluated(
    program: Program,
    inputs: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    counted: Tensor | None = None,
) -> Tensor:
    """What a program gives of inputs that broadcast; its floats are of ``dtype``. A gradient flows through it.

    Raises:
        IndexError: an index is outside of its tensor, for one of the ``counted`` pairs.
    """
    parsed = program.parsed
    brought = _run(parsed.steps, inputs, tensors, dtype, counted)
    return brought(parsed.result, BOOL if "score" not in parsed.inputs else FLOAT)


def differentiated(
    by: Derivative,
    d: Tensor,
    hidden: Tensor | None,
    inputs: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    grads: Tensor,
) -> Tensor:
    """The derivative by the score, of ``d``, that by what a program gives; ``by`` says how. That of hidden pairs is 0.

    Adds those by what the program reads to ``grads``, in which all its tensors of floats lie side by side.
    """
    firsts = [0, *accumulate(x.numel() if x.is_floating_point() else 0 for x in tensors)]
    brought = _run(by.steps, {**inputs, BY_RESULT: d}, tensors, d.dtype)

    def shown(x: Operand) -> Tensor:
        whole = brought(x, FLOAT).broadcast_to(d.shape)
        return whole if hidden is None else whole.masked_fill(hidden, 0)  # a function may make NaN of hidden pairs

    for tensor, indices, value in by.reads:
        n = int(tensor.name[1:])
        at = torch.full((1,) * d.dim(), firsts[n], device=d.device)
        for x, size, stride in zip(indices, tensors[n].shape, _contiguous(tensors[n]), strict=True):
            at = at + brought(x, INT).clamp(0, size - 1) * stride
        value = shown(value).sum_to_size(at.shape)  # what is added to one number
        grads.index_add_(0, at.flatten(), value.flatten())
    return shown(by.score)


def _contiguous(x: Tensor) -> Sequence[int]:
    """How far apart neighbours are in each dimension, if x is packed."""
    return torch.empty(x.shape, device="meta").stride()


def _run(
    steps: Sequence[Step],
    inputs: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    counted: Tensor | None = None,
) -> Callable[[Operand, str], Tensor]:
    """What gives any operand of these steps, once they are done, as a tensor of a kind."""
    device = next(iter(inputs.values())).device
    known = {Value(name): x for name, x in inputs.items()}
    captured = {Value(f"t{n}"): x for n, x in enumerate(tensors)}

    def brought(x: Operand, kind: str) -> Tensor:
        of = {BOOL: torch.bool, FLOAT: dtype}.get(kind, torch.int64)
        return known[x].to(of) if isinstance(x, Value) else torch.tensor(x, dtype=of, device=device)

    for step in steps:
        known[step.result] = _done(step, captured, brought, counted)
    return brought


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
