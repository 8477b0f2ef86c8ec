"""Run traced mask and score functions on torch tensors: each step is a torch operation that broadcasts."""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from .kinds import BITS, BOOL, DTYPES, FLOAT, wrapped
from .program import Operand, Program, Step, Value

Lookup = Callable[[Operand, str], Tensor]
OPERATIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
        **{name: getattr(torch, name) for name in ("add", "sub", "mul", "neg", "abs", "minimum", "maximum")},
        **{name: getattr(torch, name) for name in ("exp", "exp2", "log", "tanh", "sigmoid", "sqrt", "rsqrt")},
        **{name: getattr(torch, name) for name in ("logical_and", "logical_or", "logical_not")},
        **{f"bit{name}": getattr(torch, f"bitwise_{name}") for name in ("and", "or", "xor", "not")},
        "lshift": torch.bitwise_left_shift,
        "rshift": torch.bitwise_right_shift,
        "truediv": torch.true_divide,
        "floordiv": lambda x, y: torch.div(x, _divisor(y), rounding_mode="floor"),
        "mod": lambda x, y: torch.remainder(x, _divisor(y)),
    }
)  # fmt: skip
BY_NUMBERS = MappingProxyType({name: getattr(torch, name) for name in ("clamp_min", "clamp_max", "pow")})


def evaluated(
    program: Program,
    inputs: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
    *,
    counted: Tensor | None = None,
) -> Tensor:
    """Evaluate a program on inputs that broadcast, with floats in ``dtype``; autograd can differentiate it.

    Raises:
        IndexError: an index is outside its tensor, for a query-key pair that ``counted`` marks as True.
    """
    parsed = program.parsed
    lookup = run(parsed.steps, inputs, tensors, dtype, counted)
    return lookup(parsed.result, BOOL if "score" not in parsed.inputs else FLOAT)


def run(
    steps: Sequence[Step],
    inputs: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    counted: Tensor | None = None,
) -> Lookup:
    """Run the steps, and return a function that looks up any operand as a tensor of the requested kind."""
    device = next(iter(inputs.values())).device
    known = {Value(name): x for name, x in inputs.items()}
    captured = {Value(f"t{n}"): x for n, x in enumerate(tensors)}

    def lookup(x: Operand, kind: str) -> Tensor:
        of = DTYPES.get(kind, dtype)
        if isinstance(x, Value):
            return known[x].to(of)
        return torch.tensor(wrapped(int(x), kind) if kind in BITS else x, dtype=of, device=device)

    for step in steps:
        known[step.result] = _evaluate(step, captured, lookup, counted)
    return lookup


def index_at(index: Operand, size: int, lookup: Lookup, kind: str) -> Tensor:
    """Clamp an index to a dimension of length ``size``; a negative constant counts from the end."""
    if isinstance(index, int) and index < 0:
        index += size
    return lookup(index, kind).clamp(0, size - 1)


def _evaluate(step: Step, captured: Mapping[Value, Tensor], lookup: Lookup, counted: Tensor | None) -> Tensor:
    """Compute the result of one step of a program."""
    if step.operation == "load":
        x, indices = captured[step.operands[0]], step.operands[1:]
        if counted is not None:
            _check(step, x, lookup, counted)
        at = tuple(
            index_at(index, size, lookup, step.takes) for index, size in zip(indices, x.shape, strict=True)
        )
        return x[at] if at else x
    if step.operation == "where":
        condition, *choices = step.operands
        return torch.where(lookup(condition, BOOL), *(lookup(x, step.takes) for x in choices))
    if step.operation in BY_NUMBERS:  # a constant stays a number: a tensor may change the derivative
        numbers = [lookup(x, step.takes) if isinstance(x, Value) else x for x in step.operands]
        return BY_NUMBERS[step.operation](*numbers)
    if step.operation not in OPERATIONS:  # a cast such as to_int32
        return lookup(*step.operands, step.kind)
    return OPERATIONS[step.operation](*(lookup(x, step.takes) for x in step.operands))


def _check(step: Step, x: Tensor, lookup: Lookup, counted: Tensor) -> None:
    """Raise IndexError if a load reads outside its tensor, for a query-key pair that ``counted`` marks.

    Constant indices are not checked here, since tracing has checked them already.
    """
    for n, (operand, size) in enumerate(zip(step.operands[1:], x.shape, strict=True)):
        if not isinstance(operand, Value):
            continue
        index = lookup(operand, step.takes)
        outside = ((index < 0) | (index >= size)) & counted
        if outside.any():
            wrong = int(index.broadcast_to(outside.shape)[outside][0])
            raise IndexError(
                f"{step.operands[0].name}: expected indices in [0, {size}) of dimension {n}, got {wrong}"
            )


def _divisor(y: Tensor) -> Tensor:
    """Replace divisors of 0 by 1, because kernels cannot report a division by zero."""
    return torch.where(y == 0, 1, y)
