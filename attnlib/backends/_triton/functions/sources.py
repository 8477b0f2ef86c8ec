"""Generate the Triton source of mask and score functions, one line per step, without importing triton."""

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from ....tracing.derivative import BY_RESULT, derivative, needed, operands_of
from ....tracing.kinds import BITS, BOOL, FLOAT, INT32, INT64, limits, wrapped
from ....tracing.program import CapturedKind, Operand, Program, Step, Value
from .ranges import INT32 as NARROW
from .ranges import Bounds, Range, exact, range_of

COMPARED = MappingProxyType({"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="})
SPELLED = MappingProxyType(
    {name: f"{{}} {sign} {{}}" for name, sign in COMPARED.items()}
    | {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "neg": "-{}", "abs": "tl.abs({})"}
    | {"exp": "tl.exp2({} * LOG2E)", "exp2": "tl.exp2({})", "log": "tl.log({})", "tanh": "tanh({})"}
    | {"sqrt": "tl.sqrt_rn({})", "rsqrt": "tl.rsqrt({})", "sigmoid": "1.0 / (1.0 + tl.exp2({} * -LOG2E))"}
    | {
        "bitand": "{} & {}",
        "bitor": "{} | {}",
        "bitxor": "{} ^ {}",
        "bitnot": "~{}",
        "where": "tl.where({}, {}, {})",
    }
    | {"logical_and": "{} & {}", "logical_or": "{} | {}", "logical_not": "~{}"}
)
MINIMA = MappingProxyType(
    {"minimum": "minimum", "maximum": "maximum", "clamp_min": "maximum", "clamp_max": "minimum"}
)
TILES = frozenset(("score", BY_RESULT))  # the inputs that have the shape of a tile
ALONG = frozenset(("i", "j")) | TILES  # the inputs that are not scalars
# The largest and the smallest normal fp32 number. Triton would treat constants beyond them as fp64.
LARGEST, SMALLEST = (2 - 2**-23) * 2.0**127, 2.0**-126
EXACT = 2.0**64  # powers of two up to this one, and their inverses, are exact in fp32


class FunctionSource(NamedTuple):
    """The name and the source text of a Triton function."""

    name: str
    text: str


def source(program: Program, bounds: Bounds) -> FunctionSource:
    """Return the Triton source of a mask or score function."""
    parsed = program.parsed
    body = _Body(parsed.inputs, parsed.steps, bounds)
    if "score" in parsed.inputs:
        says, result = "What becomes of a score", body.tile(parsed.result, "score")
    else:
        says, result = "Whether query ``i`` sees key ``j``", body.mask(parsed.result)
    name = "score" if "score" in parsed.inputs else "mask"
    lines = [*body.lines, f"return {result}"]
    return _function(name, (*parsed.inputs, "t"), f"{says}; ``t`` has {_described(parsed.captured)}.", lines)


def derivative_source(program: Program, bounds: Bounds) -> FunctionSource:
    """Return the Triton source of a function that propagates a gradient through a score function."""
    by, captured = derivative(program), program.parsed.captured
    body = _Body((*by.inputs, BY_RESULT), needed(by.steps, [by.score]), bounds)
    says = (
        f"The derivative by a score, of ``{BY_RESULT}``, that by what becomes of it; "
        f"``t`` has {_described(captured)}."
    )
    lines = [*body.lines, f"return {body.tile(by.score, BY_RESULT)}"]
    return _function("derivative", (*_with_derivative(by.inputs), "t"), says, lines)


def gradients_source(program: Program, bounds: Bounds) -> FunctionSource:
    """Return the Triton source of a function that sums gradients of the tensors a score function reads."""
    by, captured = derivative(program), program.parsed.captured
    body = _Body((*by.inputs, BY_RESULT), needed(by.steps, operands_of(by.reads)), bounds)
    lines = list(body.lines)
    for tensor, indices, x in by.reads:
        value = f"tl.where(seen, {body.spelled(x, FLOAT)}, 0.0)"
        table = f"grads[{tensor.name[1:]}]"
        lines.append(f"add_elements({table}, {body.indices(table, indices)}, {value})")
    says = (
        f"Add derivatives by what is read of ``t``, {_described(captured)}, to ``grads``, "
        "for pairs that are seen."
    )
    return _function("gradients", (*_with_derivative(by.inputs, "seen"), "t", "grads"), says, lines)


class _Body:
    """The steps of a traced function as lines of Triton source, and their operands as expressions.

    An integer is int32, or int64 if its value may not fit in int32.
    """

    def __init__(self, inputs: Sequence[str], steps: Sequence[Step], bounds: Bounds):
        known = bounds.inputs()
        self._kinds = {Value(name): INT64 if name in known else FLOAT for name in inputs}
        self._ranges = {Value(name): known.get(name) for name in inputs}
        self._inputs = {
            Value(name): frozenset((name,)) for name in inputs
        }  # the inputs on which each value depends
        self.lines = [self._line(step) for step in steps]

    def mask(self, x: Operand) -> str:
        """Return an expression for a bool that can be broadcast to a tile."""
        return self.spelled(x, BOOL) if isinstance(x, Value) else f"tl.full([1, 1], {x}, tl.int1)"

    def tile(self, x: Operand, like: str) -> str:
        """Return an expression for a float tile with the shape of ``like``."""
        if not isinstance(x, Value):
            return f"tl.full({like}.shape, {self.spelled(x, FLOAT)}, tl.float32)"
        whole = self._inputs[x] & TILES
        return self.spelled(x, FLOAT) if whole else f"tl.broadcast_to({self.spelled(x, FLOAT)}, {like}.shape)"

    def indices(self, table: str, operands: Sequence[Operand]) -> str:
        """Return an expression for a tuple of indices; negative constants count from the end."""
        found = [
            f"{table}.sizes[{n}] - {-x}" if isinstance(x, int) and x < 0 else self._as_stored(x)
            for n, x in enumerate(operands)
        ]
        return f"({', '.join(found)}{',' * (len(found) == 1)})"

    def spelled(self, x: Operand, kind: str, width: int = 32) -> str:
        """Return an expression for an operand, converted to a kind such as float or bool.

        Integers get ``width`` bits, which must be enough for their values.
        """
        if not isinstance(x, Value):
            return self._constant(x, kind, width)
        own = self._kinds[x]
        if own == kind and kind in (BOOL, FLOAT):
            return x.name
        if kind == BOOL:
            return f"{x.name} != 0"
        if kind == FLOAT:
            return f"tl.cast({x.name}, tl.float32)"
        return x.name if own != BOOL and self._width(x) == width else f"tl.cast({x.name}, tl.int{width})"

    def _constant(self, x: bool | int | float, kind: str, width: int) -> str:
        if kind in (BOOL, FLOAT):
            return str(bool(x)) if kind == BOOL else _number(x)
        x = wrapped(int(x), kind)
        return str(x) if Range(x, x).within(NARROW) else f"tl.full([], {x}, tl.int{width})"

    def _as_stored(self, x: Operand) -> str:
        return self.spelled(x, INT64, self._width(x) if isinstance(x, Value) else 64)

    def _width(self, x: Value) -> int:
        """Return the number of bits of a value as an integer: 32 if its range fits in int32, otherwise 64."""
        return 32 if self._ranges[x].within(NARROW) else 64

    def _range(self, x: Operand, kind: str) -> Range:
        """Return the range of an operand after conversion to an integer kind."""
        if isinstance(x, Value):
            return self._ranges[x]
        return Range(*[wrapped(int(x), kind)] * 2)

    def _line(self, step: Step) -> str:
        depends = [self._inputs[x] for x in step.operands if x in self._inputs]
        self._inputs[step.result] = frozenset().union(*depends)
        self._kinds[step.result], self._ranges[step.result] = step.kind, range_of(step.kind)
        written = self._written(step)
        if step.kind == BOOL and step.takes == FLOAT and not self._inputs[step.result] & ALONG:
            # Broadcasting a bool scalar in Triton's interpreter would give it the operands' float dtype.
            written = f"tl.where({written}, 1, 0) != 0"
        return f"{step.result.name} = {written}"

    def _written(self, step: Step) -> str:
        operation, operands, takes = step.operation, step.operands, step.takes
        if operation == "load":
            return self._load(step)
        if operation.startswith("to_"):
            return self._cast(step)
        if operation in COMPARED and takes != FLOAT:
            return self._compared(step)
        if takes in BITS:
            return self._of_integers(step)
        if operation == "where":
            condition, *choices = operands
            spelled = [self.spelled(condition, BOOL), *(self.spelled(x, takes) for x in choices)]
            return SPELLED[operation].format(*spelled)
        if operation == "pow":
            return self._power(*operands)
        spelled = [self.spelled(x, takes) for x in operands]
        if operation in MINIMA:
            return f"tl.{MINIMA[operation]}({', '.join(spelled)}, propagate_nan=tl.PropagateNan.ALL)"
        if operation in ("floordiv", "mod"):
            return f"float_{'quotient' if operation == 'floordiv' else 'rest'}({', '.join(spelled)})"
        if operation == "truediv":
            return self._divided(operands, *spelled)
        return SPELLED[operation].format(*spelled)

    def _load(self, step: Step) -> str:
        tensor, *indices = step.operands
        table = f"t[{tensor.name[1:]}]"
        arguments = f"{table}, {self.indices(table, indices)}"
        if step.kind in (BOOL, FLOAT):
            return f"{step.kind}_of({arguments})"
        return f"int_of({arguments}, tl.int{self._width(step.result)})"

    def _cast(self, step: Step) -> str:
        (x,), kind = step.operands, step.kind
        if kind in (BOOL, FLOAT):
            return self.spelled(x, kind)
        if step.takes == FLOAT:  # like torch, first convert to int32 or int64
            width = 64 if kind == INT64 else 32
            return self._held(
                f"tl.cast({self.spelled(x, FLOAT)}, tl.int{width})", kind, range_of(INT64), width, step
            )
        known = self._range(x, INT64)
        width = 32 if known.within(NARROW) else 64
        return self._held(self.spelled(x, INT64, width), kind, known, width, step)

    def _held(self, written: str, kind: str, known: Range, width: int, step: Step) -> str:
        """Wrap an integer expression around at the limits of its kind, and cast it to the width it needs.

        ``known`` is the range of the expression, and ``width`` its number of bits.
        """
        if not known.within(range_of(kind)):
            if kind in (INT32, INT64):
                written = written if width == BITS[kind] else f"tl.cast({written}, tl.int{BITS[kind]})"
                width = BITS[kind]
            else:
                written, width = f"tl.cast(tl.cast({written}, tl.{kind}), tl.int32)", 32
            known = range_of(kind)
        self._ranges[step.result] = known
        own = self._width(step.result)
        return written if own == width else f"tl.cast({written}, tl.int{own})"

    def _compared(self, step: Step) -> str:
        """Compare integers or bools, in int32 if at least one operand always fits int32."""
        kind = INT32 if step.takes == BOOL else step.takes
        ranges = [self._range(x, kind) for x in step.operands]
        narrow = [known.within(NARROW) for known in ranges]
        width = 32 if all(narrow) else 64
        spelled = [self.spelled(x, kind, width) for x in step.operands]
        if any(narrow) and width == 64:
            # The result is the same if the wide operand is clamped to the narrow one's range, widened by 1.
            n = narrow.index(True)
            least, most = ranges[n].least - 1, ranges[n].most + 1
            if Range(least, most).within(NARROW) and isinstance(step.operands[n], Value):
                nearest = f"tl.minimum(tl.maximum({spelled[1 - n]}, {least}), {most})"
                spelled[1 - n] = f"tl.cast({nearest}, tl.int32)"
                spelled[n] = self.spelled(step.operands[n], kind, 32)
        return SPELLED[step.operation].format(*spelled)

    def _of_integers(self, step: Step) -> str:
        """Return an expression for a step on integers, in int32 if operands and result always fit int32."""
        operation, kind = step.operation, step.takes
        condition, operands = step.operands[:-2], step.operands
        if operation == "where":
            operands = operands[1:]
        ranges = [self._range(x, kind) for x in operands]
        known = ranges[0].joined(ranges[1]) if operation == "where" else exact(operation, kind, ranges)
        narrow = kind != INT64 or all(x.within(NARROW) for x in (*ranges, known))
        width = 32 if narrow else 64
        spelled = [self.spelled(x, kind, width) for x in operands]
        # The range of a constant is the constant itself, wrapped around at the limits of its kind.
        last = operands[-1] if isinstance(operands[-1], Value) else ranges[-1].least
        if operation == "where":
            written = SPELLED[operation].format(self.spelled(condition[0], BOOL), *spelled)
        elif operation in MINIMA:
            written = f"tl.{MINIMA[operation]}({', '.join(spelled)})"
        elif operation in ("floordiv", "mod"):
            written = _rounded_down(operation, last, *spelled, width)
        elif operation in ("lshift", "rshift"):
            written = _shifted(operation, kind, last, *spelled, width)
        else:
            written = SPELLED[operation].format(*spelled)
        return self._held(written, kind, known, width, step)

    def _power(self, x: Operand, y: Operand) -> str:
        """Return an expression for a power whose base or exponent is a constant."""
        if not isinstance(x, Value):
            return f"tl.exp2({self.spelled(y, FLOAT)} * {_number(math.log2(x))})"
        return f"power({self.spelled(x, FLOAT)}, {_number(y)}, {y == int(y)}, {y % 2 == 1})"

    def _divided(self, operands: Sequence[Operand], x: str, y: str) -> str:
        """Return an expression for a quotient.

        Quotients of integers are rounded exactly as in torch, since later steps may test if they are whole.
        """
        divisor = operands[1]
        if (
            not isinstance(divisor, Value)
            and 1 / EXACT <= abs(divisor) <= EXACT
            and abs(math.frexp(divisor)[0]) == 0.5
        ):
            return f"{x} * {_number(1 / divisor)}"
        kinds = [self._kinds[n] for n in operands if isinstance(n, Value)]
        return f"{x} / {y}" if FLOAT in kinds else f"tl.div_rn({x}, {y})"


def _rounded_down(operation: str, divisor: Value | int, x: str, y: str, width: int) -> str:
    if not isinstance(divisor, Value) and divisor > 0 and divisor & (divisor - 1) == 0:  # a power of two
        return f"{x} >> {divisor.bit_length() - 1}" if operation == "floordiv" else f"{x} & {divisor - 1}"
    return f"int_{'quotient' if operation == 'floordiv' else 'rest'}({x}, {y}, tl.int{width})"


def _shifted(operation: str, kind: str, by: Value | int, x: str, y: str, width: int) -> str:
    """Return an expression for a shift.

    As in torch, a shift by a negative number, or by at least the number of bits, gives 0 (or -1 if a negative
    number is shifted right).
    """
    most = min(BITS[kind] - (limits(kind)[0] < 0), width - 1)  # longer right shifts give the same result
    if isinstance(by, Value):
        return f"{operation}ed({x}, {y}, {BITS[kind] if operation == 'lshift' else most}, tl.int{width})"
    if operation == "rshift":
        return f"{x} >> {by if 0 <= by <= most else most}"
    return f"{x} << {by}" if 0 <= by < BITS[kind] else f"{x} * 0"


def _number(x: bool | int | float) -> str:
    """Return a constant as an fp32 literal."""
    x = float(x)
    if math.isnan(x) or abs(x) > LARGEST:
        return f'float("{math.copysign(math.inf, x) if x == x else x}")'
    return repr(x if abs(x) >= SMALLEST else 0.0)


def _with_derivative(inputs: Sequence[str], *more: str) -> tuple[str, ...]:
    score, *indices = inputs
    return score, BY_RESULT, *more, *indices


def _described(captured: Sequence[CapturedKind]) -> str:
    return ", ".join(f"{kind}[{rank}]" for kind, rank in captured) or "nothing"


def _function(name: str, parameters: Sequence[str], says: str, lines: Sequence[str]) -> FunctionSource:
    head = ["@triton.jit", f"def {name}({', '.join(parameters)}):", f'    """{says}"""']
    return FunctionSource(name, "\n".join([*head, *(f"    {line}" for line in lines)]) + "\n")
