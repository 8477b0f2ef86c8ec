"""Find the options of attention that a score function contains, however they are written: softcap and ALiBi.

``c * tanh(score / c)`` is a softcap, and ``score - slopes[h] * |i - j|`` is ALiBi, whose slopes may also be
computed from ``h``. Kernels apply the softcap first, then ALiBi, then the score function, so what follows
both in a function can stay a function.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

from .derivative import needed
from .kinds import BOOL, FLOAT
from .polynomials import BEHIND, DISTANCE, H, I, J, Polynomial, polynomials
from .program import Operand, Parsed, Program, Step, Steps, Value, constant

SCORE = Value("score")
ROUNDED = 2.0**-48  # numbers this close to 1 count as 1, because 1 / 49 * 49 is not 1
MOST_TERMS = 64  # a longer sum stays in the function
Known = Mapping[Value, Polynomial]
Term = tuple[float, Operand]  # a factor, and the operand that it multiplies
PLACES = (I, J, DISTANCE, BEHIND)  # by which ALiBi multiplies a slope


class ScoreOptions(NamedTuple):
    """The options that a score function contains, and the rest of the function.

    Attributes:
        program: the program of the whole function, in which the options were found.
        cap: the softcap, or None.
        rest: the program without the softcap; None if it returns the score unchanged.
        slopes: the number of the captured tensor with ALiBi's slopes, ``[h]`` or ``[b, h]``; or the program
            that computes the slope of head ``h``, which may be negative; None without ALiBi.
        only_behind: True if the bias equals ALiBi's only for keys up to the query, not for keys after it.
        last: the program without the softcap and ALiBi; None if it returns the score unchanged.
    """

    program: Program
    cap: float | None
    rest: Program | None
    slopes: int | Program | None
    only_behind: bool
    last: Program | None


def options_in(program: Program) -> ScoreOptions | None:
    """Return the options that a score function contains, or None if it contains none.

    >>> options_in(Program("def score(score, b, h, i, j, first): x0 = tanh(score); return x0"))[1:]
    (1.0, None, None, False, None)
    """
    found = _options_in(program.text)
    if found is None:
        return None
    cap, rest, slopes, only_behind, last = found
    rest, slopes, last = (Program(x) if isinstance(x, str) else x for x in (rest, slopes, last))
    return ScoreOptions(program, cap, rest, slopes, only_behind, last)


@constant
def _options_in(text: str) -> tuple[float | None, str | None, int | str | None, bool, str | None] | None:
    rest, cap = Program(text).parsed, None
    if (found := _without_softcap(rest)) is not None:
        cap, rest = found
        if _without_softcap(rest) is not None:  # a cap of a cap stays as it is written
            return None
    slopes, only_behind, last = _without_alibi(rest) or (None, False, rest)
    if cap is slopes is None:
        return None
    return cap, _text(rest), slopes, only_behind, _text(last)


def _text(parsed: Parsed) -> str | None:
    """Return the text of a program without unneeded steps; None if it returns the score unchanged."""
    if parsed.result == SCORE:
        return None
    steps, here = Steps(parsed.inputs, parsed.captured), {}
    for step in needed(parsed.steps, [parsed.result]):
        here[step.result] = steps.again(step.operation, [here.get(x, x) for x in step.operands])
    return steps.program("score", here.get(parsed.result, parsed.result)).text


def _is_bottleneck(parsed: Parsed, value: Value) -> bool:
    """True if the result depends on the score only through ``value``."""
    found = {SCORE}
    for step in parsed.steps:
        if step.result != value and not found.isdisjoint(step.operands):
            found.add(step.result)
    return parsed.result not in found


def _replaced(parsed: Parsed, value: Value, terms: Sequence[Term]) -> Parsed:
    """Return the program in which ``value`` is the sum of the score and of ``terms``."""
    steps, here = Steps(parsed.inputs, parsed.captured), {}
    for step in parsed.steps:
        if step.result != value:
            here[step.result] = steps.again(step.operation, [here.get(x, x) for x in step.operands])
            continue
        total: Operand = SCORE
        for times, x in terms:
            x = here.get(x, x)
            if times not in (1, -1) or steps.kind(x) == BOOL:
                x, times = steps.add("mul", x, float(times)), 1
            total = steps.add("add" if times == 1 else "sub", total, x)
        here[value] = total
    return steps.parsed(here.get(parsed.result, parsed.result))


# ---- softcap


def _without_softcap(parsed: Parsed) -> tuple[float, Parsed] | None:
    """Return the softcap and the program that follows it; None if the program does not begin with one."""
    if all(step.operation != "tanh" for step in parsed.steps):
        return None
    known = polynomials(parsed)
    inside = {step.result: known.get(step.operands[0]) for step in parsed.steps if step.operation == "tanh"}
    for step in reversed(parsed.steps):
        cap = _softcap(known[step.result], inside)
        if cap is not None and _is_bottleneck(parsed, step.result):
            return cap, _replaced(parsed, step.result, ())
    return None


def _softcap(x: Polynomial, inside: Mapping[Value, Polynomial | None]) -> float | None:
    """Return ``c`` if a polynomial is ``c * tanh(score / c)``, else None."""
    ((monomial, cap),) = x.items() if len(x) == 1 else (((), 0),)
    scaled = inside.get(monomial[0]) if len(monomial) == 1 else None
    if scaled is None or scaled.keys() != {(SCORE,)} or not _is_one(cap * scaled[SCORE,]):
        return None
    return abs(float(cap))


def _is_one(x: float) -> bool:
    return abs(x - 1) <= ROUNDED


# ---- ALiBi


class _Alibi(NamedTuple):
    """ALiBi in a sum: the bias is ``-factor * slope`` times the distance.

    ``slope`` is a captured tensor, a value that depends on ``h`` alone, or 1. ``others`` are all other terms
    of the sum except the score.
    """

    slope: Operand
    factor: float
    only_behind: bool
    others: list[Term]


def _without_alibi(parsed: Parsed) -> tuple[int | str, bool, Parsed] | None:
    """Return the slopes' tensor or program, ``only_behind`` as in :class:`ScoreOptions`, and the rest.

    Return None if the program does not begin with ALiBi.
    """
    known, made, changing, of_head = polynomials(parsed), {}, {SCORE}, {H}
    for step in parsed.steps:
        made[step.result] = step
        if not changing.isdisjoint(step.operands):
            changing.add(step.result)
        if of_head.issuperset(x for x in step.operands if isinstance(x, Value)):
            of_head.add(step.result)
    for step in reversed(parsed.steps):
        if step.result in changing and _is_bottleneck(parsed, step.result):
            found = _alibi(_terms(step.result, made, changing), known, changing, of_head)
            if found is not None:
                slopes = int(found.slope.name[1:]) if _is_tensor(found.slope) else _of_head(parsed, found)
                return slopes, found.only_behind, _replaced(parsed, step.result, found.others)
    return None


def _is_tensor(slope: Operand) -> bool:
    return isinstance(slope, Value) and slope.name.startswith("t")


def _of_head(parsed: Parsed, found: _Alibi) -> str:
    """Return the text of the program that computes the slope of a head."""
    if not isinstance(found.slope, Value):
        return Steps(parsed.inputs, parsed.captured).program("score", found.factor).text
    steps = Steps(parsed.inputs, parsed.captured)
    here = {found.slope: found.slope}
    for step in needed(parsed.steps, [found.slope]):
        here[step.result] = steps.again(step.operation, [here.get(x, x) for x in step.operands])
    return steps.program("score", steps.add("mul", here[found.slope], found.factor)).text


def _terms(x: Value, made: Mapping[Value, Step], changing: Container[Operand]) -> list[Term]:
    """Return the terms of a sum, without parentheses; none of a very long sum."""
    found, waiting = [], [(1, x)]
    while waiting:
        times, x = waiting.pop()
        step = made.get(x)
        y, z = (None, None) if step is None else (step.operands[0], step.operands[-1])
        match step and step.takes == FLOAT and step.operation:
            case "add" | "sub":
                waiting += [(times if step.operation == "add" else -times, z), (times, y)]
            case "neg":
                waiting.append((-times, y))
            case "mul" if x in changing and not (isinstance(y, Value) and isinstance(z, Value)):
                y, z = (y, z) if isinstance(y, Value) else (z, y)
                waiting.append((times * z, y))
            case "truediv" if x in changing and not isinstance(z, Value) and z:
                waiting.append((times / z, y))
            case _:
                found.append((times, x))
        if len(found) + len(waiting) > MOST_TERMS:
            return []
    return found


def _alibi(
    terms: Sequence[Term], known: Known, changing: Container[Operand], of_head: Collection[Operand]
) -> _Alibi | None:
    """Return the ALiBi of a sum, or None if the sum does not contain the score once and ALiBi."""
    scores, others = ([x for x in terms if (x[1] in changing) == is_score] for is_score in (True, False))
    if any(x != SCORE for _, x in scores) or not _is_one(sum(times for times, _ in scores)):
        return None
    slopes = [_slope(known.get(x, {}), of_head) for _, x in others]
    best = None
    for slope in dict.fromkeys(x for x in slopes if x is not None):
        parts = [x for x, of in zip(others, slopes, strict=True) if of == slope]
        factor, only_behind = _bias(parts, known)
        takes = _is_one(factor) if _is_tensor(slope) else factor != 0
        if takes and (best is None or not only_behind):
            rest = [x for x, of in zip(others, slopes, strict=True) if of != slope and x[1] != 0]
            best = _Alibi(slope, factor, only_behind, rest)
    return best


def _slope(x: Polynomial, of_head: Collection[Operand]) -> Operand | None:
    """Return the slope if every monomial is the same slope times an index or a distance, else None."""
    found = {_factor_of_place(monomial) for monomial in x}
    slope = found.pop() if len(found) == 1 else None
    return slope if slope == 1 or _is_tensor(slope) or slope in of_head else None


def _factor_of_place(monomial: tuple[Value, ...]) -> Operand | None:
    """Return what multiplies an index or a distance in a product of at most two numbers, else None."""
    if len(monomial) not in (1, 2) or monomial[0] not in PLACES:
        return None
    return monomial[1] if len(monomial) == 2 else 1


def _bias(terms: Sequence[Term], known: Known) -> tuple[float, bool]:
    """Return the factor with which the terms add up to ALiBi's bias, and if only for keys up to the query.

    The factor is 0 if they do not.
    """
    total = dict.fromkeys(PLACES, 0.0)
    for times, x in terms:
        for monomial, coefficient in known[x].items():
            total[monomial[0]] += times * coefficient
    if total[I] == total[J] == total[BEHIND] == 0:
        return -total[DISTANCE], False
    behind = total[DISTANCE] + total[BEHIND]
    before, after = -total[I] - behind, total[J] - behind
    return (before, True) if before and _is_one(after / before) else (0.0, True)
