"""Programs of indices in Triton's language: a line of source for each step. Imports no triton."""

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from ...derivative import BY_RESULT, derivative, needed, operands_of
from ...program import BOOL, FLOAT, INDICES, INT, Captured, Operand, Program, Step, Value

TYPES = MappingProxyType({INT: "tl.int32", FLOAT: "tl.float32"})
COMPARED = MappingProxyType({"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="})
SPELLED = MappingProxyType(
    {name: f"{{}} {sign} {{}}" for name, sign in COMPARED.items()}
    | {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "neg": "-{}", "abs": "tl.abs({})"}
    | {"exp": "tl.exp2({} * LOG2E)", "log": "tl.log({})", "tanh": "tanh({})", "where": "tl.where({}, {}, {})"}
    | {"logical_and": "{} & {}", "logical_or": "{} | {}", "logical_not": "~{}"}
)
TILES = frozenset(("score", BY_RESULT))  # inputs that are whole tiles
ALONG = frozenset(("i", "j")) | TILES  # and those that are no scalars
LARGEST, SMALLEST = (2 - 2**-23) * 2.0**127, 2.0**-126  # of fp32; beyond them Triton takes a number to be of fp64
EXACT = 2.0**64  # powers of two up to here, and 1 over them, are fp32 numbers


class Source(NamedTuple):
    """The text of a device function of this name."""

    name: str
    text: str


def source(program: Program) -> Source:
    """A mask or a score."""
    parsed = program.parsed
    body = _Body(parsed.inputs, parsed.steps)
    if "score" in parsed.inputs:
        says, result = "What becomes of a score", body.tile(parsed.result, "score")
    else:
        says, result = "Whether query ``i`` sees key ``j``", body.mask(parsed.result)
    name = "score" if "score" in parsed.inputs else "mask"
    lines = [*body.lines, f"return {result}"]
    return _function(name, (*parsed.inputs, "t"), f"{says}; ``t`` has {_listed(parsed.captured)}.", lines)


def derivative_source(program: Program) -> Source:
    """The derivative of a score by the score that it was made of."""
    by, captured = derivative(program), program.parsed.captured
    body = _Body((*by.inputs, BY_RESULT), needed(by.steps, [by.score]))
    says = f"The derivative by a score, of ``{BY_RESULT}``, that by what becomes of it; ``t`` has {_listed(captured)}."
    lines = [*body.lines, f"return {body.tile(by.score, BY_RESULT)}"]
    return _function("derivative", (*_with_derivative(by.inputs), "t"), says, lines)


def gradients_source(program: Program) -> Source:
    """What adds up the gradients of the tensors that a score reads."""
    by, captured = derivative(program), program.parsed.captured
    body = _Body((*by.inputs, BY_RESULT), needed(by.steps, operands_of(by.reads)))
    lines = list(body.lines)
    for tensor, indices, x in by.reads:
        value = f"tl.where(seen, {body.spelled(x, FLOAT)}, 0.0)"
        lines.append(f"add_elements(grads[{tensor.name[1:]}], {body.indices(indices)}, {value})")
    says = f"Add derivatives by what is read of ``t``, {_listed(captured)}, to ``grads``, for pairs that are seen."
    return _function("gradients", (*_with_derivative(by.inputs, "seen"), "t", "grads"), says, lines)


class _Body:
    """Steps as lines, and operands as these spell them."""

    def __init__(self, inputs: Sequence[str], steps: Sequence[Step]):
        self._kinds = {Value(name): INT if name in INDICES else FLOAT for name in inputs}
        self._inputs = {Value(name): frozenset((name,)) for name in inputs}  # which of them a value depends on
        self.lines = [self._line(step) for step in steps]

    def mask(self, x: Operand) -> str:
        """A bool that broadcasts."""
        return self.spelled(x, BOOL) if isinstance(x, Value) else f"tl.full([1, 1], {x}, tl.int1)"

    def tile(self, x: Operand, like: str) -> str:
        """A float for each element of a tile."""
        if not isinstance(x, Value):
            return f"tl.full({like}.shape, {self.spelled(x, FLOAT)}, tl.float32)"
        whole = self._inputs[x] & TILES
        return self.spelled(x, FLOAT) if whole else f"tl.broadcast_to({self.spelled(x, FLOAT)}, {like}.shape)"

    def indices(self, operands: Sequence[Operand]) -> str:
        """A tuple of ints."""
        return f"({', '.join(self.spelled(x, INT) for x in operands)}{',' * (len(operands) == 1)})"

    def spelled(self, x: Operand, kind: str) -> str:
        """An operand, brought to a kind."""
        if not isinstance(x, Value):
            return _number(x) if kind == FLOAT else str(int(x) if kind == INT else bool(x))
        if self._kinds[x] == kind:
            return x.name
        return f"{x.name} != 0" if kind == BOOL else f"tl.cast({x.name}, {TYPES[kind]})"

    def _line(self, step: Step) -> str:
        self._kinds[step.result] = step.kind
        depends = [self._inputs[x] for x in step.operands if x in self._inputs]
        self._inputs[step.result] = frozenset().union(*depends)
        written = self._written(step)
        if step.kind == BOOL and step.takes == FLOAT and not self._inputs[step.result] & ALONG:
            # The interpreter would broadcast a bool scalar as a number of what was compared.
            written = f"tl.where({written}, 1, 0) != 0"
        return f"{step.result.name} = {written}"

    def _written(self, step: Step) -> str:
        operation, operands, takes = step.operation, step.operands, step.takes
        if operation == "load":
            return f"{step.kind}_of(t[{operands[0].name[1:]}], {self.indices(operands[1:])})"
        if operation == "where":
            condition, *choices = operands
            spelled = [self.spelled(condition, BOOL), *(self.spelled(x, takes) for x in choices)]
            return SPELLED[operation].format(*spelled)
        if operation.startswith("to_"):
            return self.spelled(operands[0], step.kind)
        spelled = [self.spelled(x, takes) for x in operands]
        if operation in ("minimum", "maximum"):
            nan = ", propagate_nan=tl.PropagateNan.ALL" * (takes == FLOAT)
            return f"tl.{operation}({', '.join(spelled)}{nan})"
        if operation in ("floordiv", "mod"):
            return _rounded_down(operation, takes, operands[1], *spelled)
        if operation == "truediv":
            return self._divided(operands, *spelled)
        return SPELLED[operation].format(*spelled)

    def _divided(self, operands: Sequence[Operand], x: str, y: str) -> str:
        """A quotient; of ints it is rounded as torch does, since what follows may ask whether it is an integer."""
        divisor = operands[1]
        if _is_power_of_two(divisor):
            return f"{x} * {_number(1 / divisor)}"
        kinds = [self._kinds[n] for n in operands if isinstance(n, Value)]
        return f"{x} / {y}" if FLOAT in kinds else f"tl.div_rn({x}, {y})"


def _rounded_down(operation: str, takes: str, divisor: Operand, x: str, y: str) -> str:
    if takes == INT and _is_power_of_two(divisor) and divisor > 0:
        return f"{x} >> {int(divisor).bit_length() - 1}" if operation == "floordiv" else f"{x} & {int(divisor) - 1}"
    return f"{takes}_{'quotient' if operation == 'floordiv' else 'rest'}({x}, {y})"


def _is_power_of_two(x: Operand) -> bool:
    return not isinstance(x, Value) and 1 / EXACT <= abs(x) <= EXACT and abs(math.frexp(x)[0]) == 0.5


def _number(x: bool | int | float) -> str:
    """A constant in fp32."""
    x = float(x)
    if math.isnan(x) or abs(x) > LARGEST:
        return f'float("{math.copysign(math.inf, x) if x == x else x}")'
    return repr(x if abs(x) >= SMALLEST else 0.0)


def _with_derivative(inputs: Sequence[str], *more: str) -> tuple[str, ...]:
    score, *indices = inputs
    return score, BY_RESULT, *more, *indices


def _listed(captured: Sequence[Captured]) -> str:
    return ", ".join(f"{kind}[{rank}]" for kind, rank in captured) or "nothing"


def _function(name: str, parameters: Sequence[str], says: str, lines: Sequence[str]) -> Source:
    head = ["@triton.jit", f"def {name}({', '.join(parameters)}):", f'    """{says}"""']
    return Source(name, "\n".join([*head, *(f"    {line}" for line in lines)]) + "\n")
