"""Programs: traced mask and score functions, as lists of steps that operate on earlier values and constants.

A program is stored as text, because custom operators can take strings as arguments, and because functions
that do the same then compare as equal. Every backend reads programs: the torch backend runs the steps on
tiles, and the Triton backend writes them into its kernels.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from .kinds import BITWISE, BOOL, FLOAT, INT64, OF_BOOLS, OPERATIONS, TRANSCENDENTAL, UINT8, fits, promoted

INDICES = ("b", "h", "i", "j", "first")
SCORED = ("score", *INDICES)
NOTHING: Mapping = MappingProxyType({})
BRACKETS = "write an index for each dimension in one pair of brackets, as in t[b, j]"


def constant(function: Callable) -> Callable:
    """Mark a function that torch.compile should call once, and whose result it should treat as a constant.

    The decorator does the same as ``torch.compiler.assume_constant_result``, but without importing the
    compiler, which takes two seconds.
    """
    function._dynamo_marked_constant = True
    return function


class Value(NamedTuple):
    """A reference by name to an input of a program, a captured tensor, or the result of an earlier step."""

    name: str


Operand = Value | bool | int | float


class CapturedKind(NamedTuple):
    """The kind of elements and the rank of a captured tensor: programs depend only on these two."""

    kind: str
    rank: int


class Step(NamedTuple):
    """One operation of a program: it converts its operands to the kind ``takes``, and names its result.

    Two operations also have operands of other kinds. ``load`` takes a tensor and an index for each of its
    dimensions; indices are clamped to the valid range, and a negative constant counts from the end. ``where``
    takes a bool and two values to choose from. Integers wrap around at the limits of their kind, and a
    divisor of 0 counts as 1.
    """

    result: Value
    operation: str
    operands: tuple[Operand, ...]
    takes: str
    kind: str


class Parsed(NamedTuple):
    """A parsed program: its inputs, its captured tensors, its steps in order, and its result."""

    inputs: tuple[str, ...]
    captured: tuple[CapturedKind, ...]
    steps: tuple[Step, ...]
    result: Operand


class Program(NamedTuple):
    """A traced mask or score function as text, on one line because compilers may quote it in a comment.

    ``parsed`` holds the steps of the program.

    >>> steps = Steps(INDICES, [CapturedKind("int32", 2)])
    >>> owners = [steps.load(0, Value("b"), Value(index)) for index in "ij"]
    >>> print(steps.program("mask", steps.add("eq", *owners)))
    def mask(b, h, i, j, first, t0: int32[2]):
        x0 = load(t0, b, i)
        x1 = load(t0, b, j)
        x2 = eq(x0, x1)
        return x2
    """

    text: str

    def __str__(self) -> str:
        head, _, body = self.text.partition("): ")
        return "\n    ".join((f"{head}):", *body.split("; ")))

    @property
    def parsed(self) -> Parsed:
        """The program, parsed from its text."""
        return _read(self.text)

    @property
    def read(self) -> frozenset[str]:
        """The names of everything that the steps use: inputs, captured tensors and earlier results."""
        return frozenset(x.name for step in self.parsed.steps for x in step.operands if isinstance(x, Value))

    @property
    def exponentials(self) -> int:
        """An upper bound on the number of exp, log, pow, tanh and sigmoid operations per query-key pair."""
        return sum(step.operation in (*TRANSCENDENTAL, "pow") for step in self.parsed.steps)

    @property
    def gathers(self) -> int:
        """The number of loads whose indices depend on both query and key, so that every pair repeats them."""
        of_pairs = {Value("i"): {"i"}, Value("j"): {"j"}, Value("score"): {"i", "j"}}
        found = 0
        for step in self.parsed.steps:
            depends = set().union(*(of_pairs.get(x, ()) for x in step.operands))
            of_pairs[step.result] = depends
            found += step.operation == "load" and len(depends) > 1
        return found


class Steps:
    """A program under construction; a repeated step is added only once.

    ``add``, ``where``, ``load`` and ``cast`` add a step and return a reference to its result.
    """

    def __init__(self, inputs: Sequence[str], captured: Sequence[CapturedKind]):
        self.inputs: tuple[str, ...] = tuple(inputs)
        self.captured: tuple[CapturedKind, ...] = tuple(captured)
        self._made: dict[tuple, Step] = {}
        self._kinds = {Value(name): INT64 if name in INDICES else FLOAT for name in inputs}

    def add(self, operation: str, *operands: Operand) -> Operand:
        """Add an operation of :data:`OPERATIONS`; logical operations with True or False are simplified away.

        Raises:
            TypeError: torch does not have the operation for operands of these kinds.
        """
        _, takes, kind = OPERATIONS[operation]
        if takes == BOOL:
            for x in operands:
                if self.kind(x) != BOOL:
                    raise TypeError(
                        f"{operation}: expected a bool, got {self.kind(x)}; compare it with something"
                    )
            if any(isinstance(x, bool) for x in operands):
                return _decided(operation, operands)
        takes = takes or self._promoted(operands)
        if operation == "sub" and BOOL in map(self.kind, operands):
            raise TypeError("sub: torch has no difference with a bool; write ^, ~ or .int()")
        if takes == BOOL and kind is None:
            by_constant = operation.startswith("clamp") and not all(isinstance(x, Value) for x in operands)
            if operation not in OF_BOOLS or by_constant:
                raise TypeError(f"{operation}: torch has none of bools; write .int()")
            return self.add(OF_BOOLS[operation], *operands)
        if operation in BITWISE and takes == FLOAT:
            raise TypeError(f"{operation}: expected integers or bools, got float; write .int()")
        if operation.startswith("clamp"):
            self._refuse_wrapped(operation, operands, takes)
        return self._step(operation, operands, takes, kind or takes)

    def where(self, condition: Operand, x: Operand, y: Operand) -> Operand:
        """Add a choice between two values, as ``torch.where`` does; two bools give a bool.

        Raises:
            TypeError: the condition is not a bool, or a constant does not fit the kind of the other value.
        """
        if self.kind(condition) != BOOL:
            raise TypeError(f"where: expected a bool to choose by, got {self.kind(condition)}")
        kind = self._promoted((x, y))
        self._refuse_wrapped("where", (x, y), kind)
        return self._step("where", (condition, x, y), kind, kind)

    def load(self, n: int, *indices: Operand) -> Operand:
        """Add a read of one element of captured tensor ``n``.

        Raises:
            TypeError: the indices are not exactly one int for each dimension of the tensor.
        """
        kind, rank = self.captured[n]
        if len(indices) != rank:
            raise TypeError(f"tensor {n}: expected {rank} indices, got {len(indices)}; {BRACKETS}")
        for x in indices:
            if self.kind(x) in (BOOL, FLOAT):
                raise TypeError(f"tensor {n}: expected int indices, got {self.kind(x)}")
            if self.kind(x) == UINT8:
                raise TypeError(f"tensor {n}: torch takes an index of uint8 for a mask; write .long()")
        return self._step("load", (Value(f"t{n}"), *indices), INT64, kind)

    def cast(self, x: Operand, kind: str) -> Operand:
        """Convert ``x`` to another kind; floats are truncated towards zero, and integers wrap around."""
        return x if self.kind(x) == kind else self._step(f"to_{kind}", (x,), self.kind(x), kind)

    def kind(self, x: Operand) -> str:
        """Return the kind of an operand; Python ints are int64."""
        if isinstance(x, Value):
            return self._kinds[x]
        return BOOL if isinstance(x, bool) else INT64 if isinstance(x, int) else FLOAT

    def again(self, operation: str, operands: Iterable[Operand]) -> Operand:
        """Add a step of another program, with other operands of the same kinds."""
        tensor, *rest = operands
        if operation == "load":
            return self.load(int(tensor.name[1:]), *rest)
        if operation == "where":
            return self.where(tensor, *rest)
        if operation in OPERATIONS:
            return self.add(operation, tensor, *rest)
        return self.cast(tensor, operation.removeprefix("to_"))

    def copied(
        self, program: Program, tensors: Sequence[int], given: Mapping[Value, Operand] = NOTHING
    ) -> Operand:
        """Copy the steps of another program into this one, and return a reference to its result.

        ``tensors`` lists which captured tensors of this program replace those of the other one, by number.
        ``given`` has operands that replace inputs of the other one.
        """
        parsed = program.parsed
        here = {Value(name): Value(name) for name in parsed.inputs} | dict(given)
        here |= {Value(f"t{n}"): Value(f"t{at}") for n, at in enumerate(tensors)}
        for step in parsed.steps:
            operands = tuple(here.get(x, x) if isinstance(x, Value) else x for x in step.operands)
            here[step.result] = self._step(step.operation, operands, step.takes, step.kind)
        return here[parsed.result] if isinstance(parsed.result, Value) else parsed.result

    def program(self, name: str, result: Operand) -> Program:
        """Finish the program: return it as text, with ``result`` as its return value."""
        tensors = [f"t{n}: {kind}[{rank}]" for n, (kind, rank) in enumerate(self.captured)]
        made = (
            f"{x.result.name} = {x.operation}({', '.join(map(_written, x.operands))})"
            for x in self._made.values()
        )
        body = "; ".join((*made, f"return {_written(result)}"))
        return Program(f"def {name}({', '.join((*self.inputs, *tensors))}): {body}")

    def _promoted(self, operands: Sequence[Operand]) -> str:
        return promoted(
            [self._kinds[x] for x in operands if isinstance(x, Value)],
            [x for x in operands if not isinstance(x, Value)],
        )

    def _refuse_wrapped(self, operation: str, operands: Sequence[Operand], kind: str) -> None:
        """Raise TypeError for a constant that its kind cannot hold; only some torch versions do the same."""
        for x in operands:
            if isinstance(x, int) and not isinstance(x, bool) and kind != BOOL and not fits(x, kind):
                raise TypeError(f"{operation}: expected a number of {kind}, got {x}; write .long()")

    def _step(self, operation: str, operands: tuple[Operand, ...], takes: str, kind: str) -> Value:
        key = (operation, *((type(x), x) for x in operands))  # with types, because True == 1 == 1.0
        if key not in self._made:
            result = Value(f"x{len(self._made)}")
            self._made[key], self._kinds[result] = Step(result, operation, operands, takes, kind), kind
        return self._made[key].result

    def parsed(self, result: Operand) -> Parsed:
        """Return the steps added so far as a parsed program that returns ``result``."""
        return Parsed(self.inputs, self.captured, tuple(self._made.values()), result)


def _read(text: str) -> Parsed:
    """Parse the text of a program."""
    head, _, body = text.partition("): ")
    *lines, last = body.split("; ")
    inputs, captured = [], []
    for argument in head[head.index("(") + 1 :].split(", "):
        name, _, kind = argument.partition(": ")
        if kind:
            captured.append(CapturedKind(kind[: kind.index("[")], int(kind[kind.index("[") + 1 : -1])))
        else:
            inputs.append(name)
    steps = Steps(inputs, captured)
    for line in lines:
        name, _, operands = line.partition(" = ")[2][:-1].partition("(")
        steps.again(name, [_operand(x) for x in operands.split(", ") if x])
    return steps.parsed(_operand(last.removeprefix("return ")))


@constant
def constant_indices(text: str) -> tuple[tuple[int, int, int], ...]:
    """Return all constant indices with which a program loads, as (tensor number, dimension, index)."""
    found = []
    for line in text.split("; "):
        _, is_load, read = line.partition(" = load(")
        if is_load:
            tensor, *indices = read[:-1].split(", ")
            found += [(int(tensor[1:]), n, int(x)) for n, x in enumerate(indices) if x and not x[0].isalpha()]
    return tuple(found)


def combined(
    operation: str, *parts: tuple[Program, Sequence[int]], captured: Sequence[CapturedKind]
) -> Program:
    """Combine mask programs into one by a logical operation.

    Each part is a program and a list that maps its tensors to tensors in ``captured``, by number.
    """
    parts = tuple((program.text, tuple(tensors)) for program, tensors in parts)
    return Program(_combined(operation, parts, tuple(tuple(x) for x in captured)))


@constant
def _combined(operation: str, parts: tuple, captured: tuple) -> str:
    steps = Steps(INDICES, [CapturedKind(*x) for x in captured])
    copies = [steps.copied(Program(text), tensors) for text, tensors in parts]
    return steps.program("mask", steps.add(operation, *copies)).text


def _decided(operation: str, operands: Sequence[Operand]) -> Operand:
    """Simplify a logical operation in which an operand is the constant True or False."""
    if operation == "logical_not":
        return not operands[0]
    known, other = sorted(operands, key=lambda x: not isinstance(x, bool))
    decides = operation == "logical_or"  # this constant alone decides the result
    return decides if known is decides else other


def _operand(text: str) -> Operand:
    if text in ("True", "False"):
        return text == "True"
    if text[0].isalpha() and text not in ("inf", "nan"):
        return Value(text)
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _written(x: Operand) -> str:
    return x.name if isinstance(x, Value) else repr(x)
