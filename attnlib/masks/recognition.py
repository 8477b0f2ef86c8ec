"""Masks written as Python functions, whose conditions become bands where they amount to one.

However a window, a prefix or causal attention is written, it then takes the kernels of bands:
``(j <= i) & (i - j < 1024)`` is ``sliding(1024)``. Other conditions, such as a comparison of documents, stay
in the program. So do conditions on a tensor, even if it has only one element, since it may change.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from math import floor
from struct import pack, unpack
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from ..internal.checks import INT32
from ..internal.signatures import kind
from ..tracing import kinds
from ..tracing.derivative import needed
from ..tracing.program import Operand, Parsed, Program, Step, Steps, Value, constant
from ..tracing.trace import FirstQuery
from .band import CAUSAL, FULL, NOTHING, AnyMask, Mask
from .function import EVERYWHERE, function_of, simplest

# Numbers up to these do not wrap around, and in fp32 are not rounded.
LIMITS = MappingProxyType({kinds.INT64: 1 << 52, kinds.INT32: 1 << 24, kinds.FLOAT: 1 << 24})


class Linear(NamedTuple):
    """The integer ``query * i + key * j + number``, for a query index ``i`` and a key index ``j``."""

    query: int
    key: int
    number: int


class Extreme(NamedTuple):
    """The greatest of several numbers, or the least of them."""

    is_greatest: bool
    numbers: tuple["Number", ...]


class Quotient(NamedTuple):
    """A number divided by a positive integer, rounded down."""

    number: Linear
    divisor: int


class Condition(NamedTuple):
    """The band of pairs for which a condition holds, and the band for which it fails; None if it is no band.

    Both are needed: keys from number 9 on are no band, but those before it are, and ``~`` swaps the two.
    """

    holds: Mask | None
    fails: Mask | None


Number = Linear | Extreme | Quotient
Known = Number | Condition | float
ONE = Linear(0, 0, 1)
NO_BAND = Mask(None, -INT32)  # it shows no key, since all queries have an index below INT32
OPPOSITE = MappingProxyType({"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"})
MIRRORED = MappingProxyType({"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"})


@kind
def mask_mod(function: Callable, *arguments: Tensor | FirstQuery) -> AnyMask:
    """Return the mask that shows a key where ``function(b, h, i, j, *arguments)`` is True.

    ``b`` is the sequence, ``h`` the query head, and ``i`` and ``j`` are the storage indices of query and key,
    as in :class:`Mask`. Indices are int64, bools and integers behave as in torch, and floats are fp32.

    Conditions that amount to a band, such as ``i - j < 1024``, become the mask's band, for which kernels are
    faster. If no other condition is left, the result is a :class:`Mask`, otherwise a :class:`MaskFunction`.

    The function may use arithmetic, ``**`` with a constant, comparisons, ``& | ^ ~ << >>``, ``torch.where``,
    ``abs``, ``minimum``, ``maximum``, ``clamp``, ``exp``, ``log``, ``tanh``, ``sigmoid`` and ``sqrt``. It may
    index the tensors that are passed as arguments; their indices are clamped to the valid range. The function
    is called once, with placeholders for the indices, so Python's ``if`` cannot test an index.

    If you pass ``QUERY_OFFSET`` as an argument, the function gets an int64 tensor ``[b]`` in its place, with
    the storage index of the first query of each sequence.

    Raises:
        TraceError: the function does something that a kernel cannot do; the message names the line.

    >>> documents = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    >>> def same(b, h, i, j, documents):
    ...     return documents[b, i] == documents[b, j]
    >>> mask = CAUSAL & mask_mod(same, documents)
    >>> print(mask.program)
    def mask(b, h, i, j, first, t0: int32[2]):
        x0 = load(t0, b, i)
        x1 = load(t0, b, j)
        x2 = eq(x0, x1)
        return x2
    """
    mask = function_of(FULL, function, arguments)
    bounds, rest = _split(mask.program.text)
    return simplest(Mask(*bounds), Program(rest), mask.tensors, ())


@constant
def _split(text: str) -> tuple[tuple[int | None, ...], str]:
    """Return the bounds of the band that a program contains, and the program of its other conditions."""
    parsed = Program(text).parsed
    known, band, others = _evaluated(parsed), FULL, []
    for condition in _conditions(parsed):
        found = _known(condition, known)
        shown = found.holds if isinstance(found, Condition) else None
        both = None if shown is None or _is_lone_prefix(shown) else _both(band, shown)
        if both is None:
            others.append(condition)
        else:
            band = both
    return astuple(band), _all_of(parsed, others).text


def _conditions(parsed: Parsed) -> list[Operand]:
    """Return the conditions of which all must hold for the program to return True."""
    ands = {step.result: step.operands for step in parsed.steps if step.operation == "logical_and"}
    found, waiting = [], [parsed.result]
    while waiting:
        x = waiting.pop()
        if x in ands:
            waiting.extend(reversed(ands[x]))
        else:
            found.append(x)
    return found


def _all_of(parsed: Parsed, conditions: Sequence[Operand]) -> Program:
    """Return the program that is True where all of these conditions hold."""
    if not conditions:
        return EVERYWHERE
    steps, here = Steps(parsed.inputs, parsed.captured), {}
    for step in needed(parsed.steps, conditions):
        here[step.result] = steps.again(step.operation, [here.get(x, x) for x in step.operands])
    result, *others = (here.get(x, x) for x in conditions)
    for x in others:
        result = steps.add("logical_and", result, x)
    return steps.program("mask", result)


def _is_lone_prefix(band: Mask) -> bool:
    """True if a band shows only the first keys, whatever the query."""
    return band.without_prefix() == NO_BAND != band


# ---- the steps of a program, as integers and conditions


def _evaluated(parsed: Parsed) -> dict[Operand, Known]:
    """Return the results of steps that are integers or conditions of only ``i`` and ``j``."""
    known: dict[Operand, Known] = {Value("i"): Linear(1, 0, 0), Value("j"): Linear(0, 1, 0)}
    for step in parsed.steps:
        operands = [_known(x, known) for x in step.operands]
        result = None if None in operands else _result(step, operands)
        if result is not None:
            known[step.result] = result
    return known


def _known(x: Operand, known: dict[Operand, Known]) -> Known | None:
    if isinstance(x, Value):
        return known.get(x)
    if isinstance(x, bool):
        return Condition(FULL, NOTHING) if x else Condition(NOTHING, FULL)
    return Linear(0, 0, x) if isinstance(x, int) else x


def _result(step: Step, operands: Sequence[Known]) -> Known | None:
    """Return the result of a step on known operands, or None if it is not of a known form."""
    x, y = operands[0], operands[-1]
    if step.operation.startswith("to_"):
        is_distance = isinstance(x, Linear) and abs(x.query) <= 1 and abs(x.key) <= 1 and x.query * x.key <= 0
        return x if is_distance and step.kind in LIMITS and _largest(x) <= LIMITS[step.kind] else None
    if step.kind == kinds.BOOL:
        return _condition(step, operands)
    if step.takes not in (kinds.INT64, kinds.INT32):
        return None
    result = _number(step.operation, x, y)
    return result if result is not None and _largest(result) <= LIMITS[step.takes] else None


def _number(operation: str, x: Known, y: Known) -> Number | None:
    """Return the result of an operation on integers, or None if it is not of a known form."""
    if not (isinstance(x, Number) and isinstance(y, Number)):
        return None
    match operation:
        case "add":
            return _sum(x, y)
        case "sub":
            return _sum(x, _product(y, -1))
        case "neg":
            return _product(x, -1)
        case "mul":
            factor, other = (x, y) if _is_constant(x) else (y, x)
            return _product(other, factor.number) if _is_constant(factor) else None
        case "floordiv":
            is_known = isinstance(x, Linear) and _is_constant(y) and y.number > 0
            return Quotient(x, y.number) if is_known else None
        case "abs":
            opposite = _product(x, -1)
            return None if opposite is None else Extreme(True, (x, opposite))
        case "maximum" | "clamp_min":
            return Extreme(True, (x, y))
        case "minimum" | "clamp_max":
            return Extreme(False, (x, y))
    return None


def _is_constant(x: Number) -> bool:
    return isinstance(x, Linear) and x.query == x.key == 0


def _largest(x: Number) -> int:
    """Return the largest factor or constant in a number."""
    if isinstance(x, Linear):
        return max(map(abs, x))
    return _largest(x.number) if isinstance(x, Quotient) else max(map(_largest, x.numbers))


def _product(x: Number, factor: int) -> Number | None:
    match x:
        case Linear():
            return Linear(*(part * factor for part in x))
        case Extreme():
            parts = [_product(part, factor) for part in x.numbers]
            return None if None in parts else Extreme(x.is_greatest == (factor > 0), tuple(parts))
    return None


def _sum(x: Number | None, y: Number | None) -> Number | None:
    match x, y:
        case Linear(), Linear():
            return Linear(*(a + b for a, b in zip(x, y, strict=True)))
        case (Extreme(), Linear() | Extreme()) | (Linear(), Extreme()):
            x, y = (x, y) if isinstance(x, Extreme) else (y, x)
            parts = [_sum(part, y) for part in x.numbers]
            return None if None in parts else Extreme(x.is_greatest, tuple(parts))
    return None


def _condition(step: Step, operands: Sequence[Known]) -> Condition | None:
    """Return the condition that a step computes, or None if it is not made of comparisons that we know."""
    x, y = operands[0], operands[-1]
    match step.operation:
        case "logical_not":
            return Condition(x.fails, x.holds)
        case "logical_and":
            return Condition(_both(x.holds, y.holds), _either(x.fails, y.fails))
        case "logical_or":
            return Condition(_either(x.holds, y.holds), _both(x.fails, y.fails))
        case "where":
            yes, no = operands[1:]
            return Condition(
                _either(_both(x.holds, yes.holds), _both(x.fails, no.holds)),
                _either(_both(x.holds, yes.fails), _both(x.fails, no.fails)),
            )
    if step.takes == kinds.BOOL:
        return None
    if step.takes == kinds.FLOAT and not any(_is_exact(x) for x in operands):
        return None  # two numbers that are rounded to fp32 may be equal though the integers are not
    return Condition(*(_comparison(name, x, y) for name in (step.operation, OPPOSITE[step.operation])))


def _is_exact(x: Number | float) -> bool:
    """True for a constant that fp32 holds, or that we round to fp32 as the program does."""
    return isinstance(x, float) or (_is_constant(x) and abs(x.number) <= LIMITS[kinds.FLOAT])


def _comparison(operation: str, x: Number | float, y: Number | float) -> Mask | None:
    """Return the band where a comparison of two numbers holds."""
    if isinstance(x, float):
        operation, x, y = MIRRORED[operation], y, x
    if isinstance(x, float):
        return None
    if isinstance(y, float):
        if not abs(y) <= LIMITS[kinds.FLOAT]:
            return None
        y = unpack("f", pack("f", y))[0]  # 1023.99999999 is 1024 in fp32
        if y != floor(y):  # only integers are compared with it
            operation = {"lt": "le", "ge": "gt"}.get(operation, operation)
            if operation in ("eq", "ne"):
                return NOTHING if operation == "eq" else FULL
        y = Linear(0, 0, floor(y))
    match operation:
        case "le":
            return _at_most(x, y)
        case "lt":
            return _less(x, y)
        case "ge":
            return _at_most(y, x)
        case "gt":
            return _less(y, x)
        case "eq":
            return _both(_at_most(x, y), _at_most(y, x))
        case "ne":
            return _either(_less(x, y), _less(y, x))
    return None


def _less(x: Number, y: Number) -> Mask | None:
    """Return the band where ``x < y``, or None if it is no band."""
    # We know no form of a quotient plus or minus 1, so we move the other number.
    before = _sum(y, Linear(0, 0, -1))
    return _at_most(_sum(x, ONE), y) if before is None else _at_most(x, before)


def _at_most(x: Number | None, y: Number | None) -> Mask | None:
    """Return the band where ``x <= y``, or None if it is no band."""
    match x, y:
        case Extreme(is_greatest, numbers), _:
            return _joined([_at_most(number, y) for number in numbers], _both if is_greatest else _either)
        case _, Extreme(is_greatest, numbers):
            return _joined([_at_most(x, number) for number in numbers], _either if is_greatest else _both)
        case Quotient(number, divisor), Linear() if _is_constant(y):
            return _at_most(number, Linear(0, 0, divisor * y.number + divisor - 1))
        case Linear(), Quotient(number, divisor) if _is_constant(x):
            return _at_most(Linear(0, 0, divisor * x.number), number)
        case Linear(), Linear():
            return _where_not_positive(_sum(x, _product(y, -1)))
    return None


def _where_not_positive(x: Linear) -> Mask | None:
    """Return the band where a number is at most 0."""
    if x.query == -x.key:
        if x.query == 0:
            return FULL if x.number <= 0 else NOTHING
        limit = -x.number // abs(x.query)
        if abs(limit) >= INT32:
            return FULL if limit > 0 else NOTHING
        return ~CAUSAL.shift(-limit - 1) if x.query > 0 else CAUSAL.shift(limit)
    if x.query == 0 and x.key > 0:
        keys = min(-x.number // x.key + 1, INT32)
        return Mask(None, -INT32, keys) if keys > 0 else NOTHING
    # Indices are at least 0, so that some comparisons with one index always or never hold.
    if min(x.query, x.key) >= 0 and x.number > 0:
        return NOTHING
    return FULL if max(x.query, x.key) <= 0 and x.number <= 0 else None


def _joined(bands: Sequence[Mask | None], join: Callable) -> Mask | None:
    first, *others = bands
    for x in others:
        first = join(first, x)
    return first


def _both(x: Mask | None, y: Mask | None) -> Mask | None:
    return None if x is None or y is None else x.meet(y)


def _either(x: Mask | None, y: Mask | None) -> Mask | None:
    return None if x is None or y is None else x.join(y)
