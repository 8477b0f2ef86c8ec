"""Promotion in functions of indices, compared with torch for every pair of dtypes."""

import operator
from itertools import product

import pytest
import torch

from attnlib.tracing.kinds import BOOL, DTYPES, FLOAT, fits, kind_of, limits, promoted, wrapped
from attnlib.tracing.program import CapturedKind, Steps

NUMBERS = {kind: torch.tensor(1, dtype=dtype) for kind, dtype in DTYPES.items()} | {FLOAT: torch.tensor(1.0)}
CONSTANTS = (True, 3, 2.5)
BINARY = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "bitand": operator.and_, "bitor": operator.or_,
    "bitxor": operator.xor, "lshift": operator.lshift, "rshift": operator.rshift, "lt": operator.lt,
    "eq": operator.eq, "minimum": torch.minimum, "maximum": torch.maximum, "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
}  # fmt: skip
UNARY = {
    "neg": operator.neg, "abs": torch.abs, "bitnot": operator.invert, "exp": torch.exp, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid, "exp2": torch.exp2, "log": torch.log, "tanh": torch.tanh,
}  # fmt: skip


def by_torch(function, *operands):
    """The kind of what torch gives; None where it refuses."""
    try:
        return kind_of(function(*operands).dtype)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return None


def by_steps(operation, *operands):
    """The kind of a step on values of kinds, which are loaded first, and on constants."""
    kinds = [x for x in operands if isinstance(x, str)]
    steps = Steps((), [CapturedKind(kind, 0) for kind in kinds])
    numbers = iter(range(len(kinds)))
    given = [steps.load(next(numbers)) if isinstance(x, str) else x for x in operands]
    try:
        return steps.kind(steps.add(operation, *given))
    except TypeError:
        return None


@pytest.mark.parametrize("operation", BINARY)
def test_two_numbers(operation):
    for x, y in product(NUMBERS, NUMBERS):
        theirs = by_torch(BINARY[operation], NUMBERS[x], NUMBERS[y])
        assert by_steps(operation, x, y) == theirs, (x, y)


@pytest.mark.parametrize("operation", [name for name in BINARY if name not in ("minimum", "maximum")])
def test_a_number_and_a_constant(operation):
    for kind, constant in product(NUMBERS, CONSTANTS):
        theirs = by_torch(BINARY[operation], NUMBERS[kind], constant)
        assert by_steps(operation, kind, constant) == theirs, (kind, constant)
        if not operation.startswith("clamp"):
            theirs = by_torch(BINARY[operation], constant, NUMBERS[kind])
            assert by_steps(operation, constant, kind) == theirs, (constant, kind)


@pytest.mark.parametrize("operation", UNARY)
def test_one_number(operation):
    for kind in NUMBERS:
        assert by_steps(operation, kind) == by_torch(UNARY[operation], NUMBERS[kind]), kind


def test_choices():
    condition = torch.tensor(True)
    for x, y in product((*NUMBERS, *CONSTANTS), repeat=2):
        of = [NUMBERS[n] if isinstance(n, str) else n for n in (x, y)]
        kinds = [n for n in (x, y) if isinstance(n, str)]
        ours = promoted(kinds, [n for n in (x, y) if not isinstance(n, str)])
        assert ours == kind_of(torch.where(condition, *of).dtype), (x, y)


@pytest.mark.parametrize("kind", [kind for kind in DTYPES if kind != BOOL])
def test_integers_wrap_around_as_torch_casts_them(kind):
    least, most = limits(kind)
    for x in (
        least,
        most,
        least - 1 if least > -(2**63) else 0,
        most + 1 if most < 2**63 - 1 else 0,
        300,
        -300,
        2**40,
    ):
        assert wrapped(x, kind) == int(torch.tensor(x).to(DTYPES[kind]))
        assert fits(x, kind) == (wrapped(x, kind) == x)
