"""Results of a program's steps as polynomials, so that formulas compare as equal however they are written.

A polynomial maps monomials to coefficients. A monomial is a sorted tuple of atoms: inputs, results of steps
that are not polynomials, and three kinds of atoms that a program does not name:

- :data:`DISTANCE` is ``|i - j|``;
- :data:`BEHIND` is ``i - j``, or 0 for keys after the query;
- ``t0`` is the element ``t0[h]`` or ``t0[b, h]`` of tensor number 0.

Results with equal polynomials are the same number up to rounding. The reverse is not true: terms that may be
infinite never cancel, and integers that may wrap around are atoms.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .kinds import BOOL, FLOAT, INT32, INT64
from .program import Operand, Parsed, Step, Value

Polynomial = Mapping[tuple[Value, ...], float]
B, H, I, J = map(Value, "bhij")  # noqa: E741
DISTANCE, BEHIND = Value("distance"), Value("behind")
SMALL = (DISTANCE, BEHIND, B, H, I, J)  # atoms that are finite integers of 31 bits
BETWEEN: Polynomial = MappingProxyType({(I,): 1, (J,): -1})
# Beyond LARGEST, a coefficient or its inverse might overflow in fp32; beyond LARGEST_INT, a multiple of an
# index might overflow in int64.
LARGEST, LARGEST_INT = 2.0**40, 2**20
TERMS, DEGREE = 16, 4  # of longer polynomials, the step becomes an atom
SIGNS = MappingProxyType({"gt": 1, "ge": 1, "lt": -1, "le": -1})


def polynomials(parsed: Parsed) -> dict[Value, Polynomial]:
    """Return the polynomial of every input and of every step's result."""
    known: dict[Value, Polynomial] = {Value(name): {(Value(name),): 1} for name in parsed.inputs}
    signs: dict[Value, float] = {}
    for step in parsed.steps:
        operands = [_polynomial(x, known) for x in step.operands]
        found = None
        if step.operation == "load":
            found = _of_heads(step, operands)
        elif step.operation in SIGNS and None not in operands:
            signs[step.result] = SIGNS[step.operation] * factor(_sum(operands[0], operands[1], -1), BETWEEN)
        elif step.operation == "where" and step.operands[0] in signs and None not in operands[1:]:
            found = _chosen(signs[step.operands[0]], *operands[1:])
        elif None not in operands:
            found = _result(step, operands)
        known[step.result] = found if found and _is_exact(step, found) else {(step.result,): 1}
    return known


def factor(x: Polynomial, of: Polynomial) -> float:
    """Return the number by which ``of`` must be multiplied to give ``x``; 0 if there is none.

    >>> factor({(I,): 2, (J,): -2}, BETWEEN), factor({(I,): 2, (J,): 1}, BETWEEN)
    (2.0, 0)
    """
    if x.keys() != of.keys():
        return 0
    first, *others = (x[monomial] / coefficient for monomial, coefficient in of.items())
    return first if all(other == first for other in others) else 0


def _polynomial(x: Operand, known: Mapping[Value, Polynomial]) -> Polynomial | None:
    """Return the polynomial of an operand; None for a captured tensor or a constant that is no number."""
    if isinstance(x, Value):
        return known.get(x)
    return None if isinstance(x, bool) or not abs(x) <= LARGEST else {(): x} if x else {}


def _of_heads(step: Step, operands: Sequence[Polynomial | None]) -> Polynomial | None:
    """Return the atom of a tensor if a step reads its element of head h, or of sequence b and head h."""
    is_of_heads = step.kind == FLOAT and operands[1:] in ([{(H,): 1}], [{(B,): 1}, {(H,): 1}])
    return {(step.operands[0],): 1} if is_of_heads else None


def _result(step: Step, operands: Sequence[Polynomial]) -> Polynomial | None:
    """Return the polynomial of a step's result; None if it is not one, or if a term may not cancel."""
    if step.takes not in (INT32, INT64, FLOAT) or step.kind == BOOL:
        return None
    x, y = operands[0], operands[-1]
    match step.operation:
        case "add":
            return _sum(x, y, 1)
        case "sub":
            return _sum(x, y, -1)
        case "neg":
            return _scaled(x, -1)
        case "mul":
            return _product(x, y)
        case "truediv":
            return _scaled(x, 1 / y[()]) if y.keys() == {()} else None
        case "abs":
            return _greatest(x, _scaled(x, -1))
        case "maximum" | "clamp_min":
            return _greatest(x, y)
        case "minimum" | "clamp_max":
            found = _greatest(_scaled(x, -1), _scaled(y, -1))
            return None if found is None else _scaled(found, -1)
    is_rounded = step.takes == FLOAT and step.kind != FLOAT
    return x if step.operation.startswith("to_") and not is_rounded else None


def _sum(x: Polynomial, y: Polynomial, times: float) -> Polynomial:
    """Return ``x + times * y``; a term that cancels stays, with the coefficient 0."""
    return {at: x.get(at, 0) + times * y.get(at, 0) for at in (*x, *y)}


def _scaled(x: Polynomial, number: float) -> Polynomial:
    return {monomial: coefficient * number for monomial, coefficient in x.items()}


def _product(x: Polynomial, y: Polynomial) -> Polynomial:
    found: dict[tuple[Value, ...], float] = {}
    for first, a in x.items():
        for second, b in y.items():
            at = (*sorted((*first, *second)),)
            found[at] = found.get(at, 0) + a * b
    return found


def _greatest(x: Polynomial, y: Polynomial) -> Polynomial | None:
    """Return the greater of two numbers if it is a multiple of a distance, else None."""
    of_x, of_y = factor(x, BETWEEN), factor(y, BETWEEN)
    if of_x and of_x == -of_y:
        return {(DISTANCE,): abs(of_x)}
    if not (x and y):
        return {(BEHIND,): of_x + of_y} if of_x + of_y > 0 else None
    of_x, of_y = factor(x, {(DISTANCE,): 1}), factor(y, {(DISTANCE,): 1})
    return {(DISTANCE,): abs(of_x)} if of_x and of_x == -of_y else None


def _chosen(sign: float, yes: Polynomial, no: Polynomial) -> Polynomial | None:
    """Return the choice of ``yes`` where ``sign * (i - j)`` is above 0, if that gives a distance."""
    before, after = (yes, no) if sign > 0 else (no, yes)
    of = factor(before, BETWEEN)
    if not (sign and of and (not after or factor(after, BETWEEN) == -of)):
        return None
    return {(DISTANCE if after else BEHIND,): of}


def _is_exact(step: Step, x: dict[tuple[Value, ...], float]) -> bool:
    """True if the program computes this polynomial up to rounding; remove coefficients of 0 from it."""
    for monomial in [at for at, coefficient in x.items() if coefficient == 0]:
        if any(atom not in SMALL for atom in monomial):  # infinity minus infinity is not 0
            return False
        del x[monomial]
    if len(x) > TERMS or any(len(monomial) > DEGREE for monomial in x):
        return False
    if step.kind == FLOAT:
        return all(1 / LARGEST <= abs(coefficient) <= LARGEST for coefficient in x.values())
    if step.kind == INT32:  # holds an index or the difference of two, but no multiples
        return bool(factor(x, BETWEEN) in (1, -1)) or (
            len(x) == 1 and all(at in {(y,) for y in SMALL} and n in (1, -1) for at, n in x.items())
        )
    return step.kind == INT64 and all(
        len(at) <= 1 and all(y in SMALL for y in at) and abs(n) <= LARGEST_INT for at, n in x.items()
    )
