"""Rewrite programs for trees of sequences: token indices become depths, and ALiBi becomes a score function.

The depth of a token is its position in an unshared copy of its sequence, so that distances are the same as
without the tree. An index that is a plain row of a captured tensor stays a row.
"""

from collections.abc import Sequence

from .kinds import BITS, INT64
from .program import SCORED, CapturedKind, Operand, Parsed, Program, Steps, Value, constant

DEEPEST = (1 << 30) - 1  # so that the difference of two depths fits int32, in which kernels then compute
TOKENS = (Value("i"), Value("j"))


def counts_tokens(program: Program) -> bool:
    """True if a program computes with the indices of tokens, instead of only reading tensors at them.

    >>> counts_tokens(Program("def mask(b, h, i, j, first, t0: int32[1]): x0 = load(t0, i); return x0"))
    False
    """
    return _counts_tokens(program.text)


def by_depth(program: Program, captured: Sequence[CapturedKind], positions: int) -> Program:
    """Return a program in which ``i`` and ``j`` are depths, except where they are rows of a captured tensor.

    An index is a row if it is ``i``, ``j``, or one of them minus the first query. ``captured`` describes all
    tensors of the result; number ``positions`` holds the depths, ``[b, t]`` or ``[t]``.
    """
    return Program(_by_depth(program.text, _plain(captured), positions))


def rebased(
    program: Program, captured: Sequence[CapturedKind], tensors: Sequence[int], offsets: int
) -> Program:
    """Return a program that reads packed ``tensors`` ``[t]`` from the start of sequence ``b`` on.

    ``captured`` describes all tensors of the result; number ``offsets`` holds the start of each sequence.
    """
    return Program(_rebased(program.text, _plain(captured), tuple(tensors), offsets))


def with_alibi(
    program: Program | None, captured: Sequence[CapturedKind], *, head: int, sequence: int
) -> Program:
    """Return a score program that subtracts ALiBi's bias before ``program`` changes the score.

    The last of the ``captured`` tensors has the slopes, ``[h]`` or ``[b, h]``; its first entry belongs to
    head ``head`` and sequence ``sequence``.
    """
    text = None if program is None else program.text
    return Program(_with_alibi(text, _plain(captured), head, sequence))


@constant
def _counts_tokens(text: str) -> bool:
    parsed = Program(text).parsed
    return not _counted(parsed, _rows(parsed)).isdisjoint(TOKENS)


@constant
def _by_depth(text: str, captured: tuple, positions: int) -> str:
    parsed = Program(text).parsed
    rows, steps = _rows(parsed), Steps(parsed.inputs, [CapturedKind(*x) for x in captured])
    counted, here = _counted(parsed, rows), {}
    for index in TOKENS:
        if index in counted:
            at = (Value("b"), index)[-steps.captured[positions].rank :]
            depth = steps.add("clamp_max", steps.add("clamp_min", steps.load(positions, *at), 0), DEEPEST)
            here[index] = steps.cast(depth, INT64)

    def row(x: Operand) -> Operand:
        return steps.again(rows[x].operation, map(row, rows[x].operands)) if rows.get(x) else x

    for step in parsed.steps:
        if step.result in counted:
            is_load = step.operation == "load"
            operands = (row(x) if is_load and x in rows else here.get(x, x) for x in step.operands)
            here[step.result] = steps.again(step.operation, operands)
    return steps.program(_name(parsed), here.get(parsed.result, parsed.result)).text


@constant
def _rebased(text: str, captured: tuple, tensors: tuple[int, ...], offsets: int) -> str:
    parsed = Program(text).parsed
    steps, here = Steps(parsed.inputs, [CapturedKind(*x) for x in captured]), {}
    for step in parsed.steps:
        operands = [here.get(x, x) for x in step.operands]
        if step.operation == "load" and int(operands[0].name[1:]) in tensors:
            operands[1] = steps.add("add", steps.load(offsets, Value("b")), operands[1])
        here[step.result] = steps.again(step.operation, operands)
    return steps.program(_name(parsed), here.get(parsed.result, parsed.result)).text


@constant
def _with_alibi(text: str | None, captured: tuple, head: int, sequence: int) -> str:
    steps = Steps(SCORED, [CapturedKind(*x) for x in captured])
    at = [steps.add("sub", Value(x), n) if n else Value(x) for x, n in (("b", sequence), ("h", head))]
    slope = steps.load(len(captured) - 1, *at[-steps.captured[-1].rank :])
    distance = steps.add("abs", steps.add("sub", *TOKENS))
    score = steps.add("sub", Value("score"), steps.add("mul", slope, distance))
    if text is not None:
        score = steps.copied(Program(text), range(len(captured) - 1), {Value("score"): score})
    return steps.program("score", score).text


def _rows(parsed: Parsed) -> dict:
    """Return the values that are plain rows, and the step that computes each; None for ``i`` and ``j``."""
    rows = dict.fromkeys(TOKENS)
    for step in parsed.steps:
        x, is_cast = step.operands[0], step.operation.removeprefix("to_") in BITS
        is_from_first = step.operation == "sub" and x in TOKENS and step.operands[1] == Value("first")
        if is_from_first or (is_cast and x in rows):
            rows[step.result] = step
    return rows


def _counted(parsed: Parsed, rows: dict) -> set[Operand]:
    """Return the values on which the result depends other than as a row of a captured tensor."""
    found = {parsed.result}
    for step in reversed(parsed.steps):
        if step.result in found:
            is_load = step.operation == "load"
            found.update(x for x in step.operands if not (is_load and x in rows))
    return found


def _name(parsed: Parsed) -> str:
    return "score" if "score" in parsed.inputs else "mask"


def _plain(captured: Sequence[CapturedKind]) -> tuple:
    return tuple(tuple(x) for x in captured)
