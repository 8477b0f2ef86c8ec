"""Tracer: records what a mask or score function does with its placeholder arguments (stand-ins) as steps."""

import math
import sys
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from torch import Tensor
from torch.fx import Graph, Proxy
from torch.fx.proxy import TracerBase

from .kinds import BOOL, FLOAT, INT8, INT16, INT32, INT64, OPERATIONS, UINT8, fits, kind_of
from .program import BRACKETS, Operand, Program, Steps, Value
from .stand_ins import INDEXED, KNOWN, QUERY_OFFSET, Known, TraceError, line_of

# Maps the names that Python, torch and its tensors use to the operations of a program.
OPERATION_NAMES = MappingProxyType(
    {name: name for name in OPERATIONS}
    | {
        "subtract": "sub", "multiply": "mul", "div": "truediv", "divide": "truediv", "true_divide": "truediv",
        "floor_divide": "floordiv", "remainder": "mod", "negative": "neg", "absolute": "abs",
        "min": "minimum", "max": "maximum", "greater": "gt", "greater_equal": "ge", "less": "lt",
        "less_equal": "le", "not_equal": "ne", "and_": "bitand", "or_": "bitor", "xor": "bitxor",
        "invert": "bitnot", "bitwise_and": "bitand", "bitwise_or": "bitor", "bitwise_xor": "bitxor",
        "bitwise_not": "bitnot", "__and__": "bitand", "__or__": "bitor", "__xor__": "bitxor",
        "bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift",
    }
)  # fmt: skip
CASTS = MappingProxyType(
    {"bool": BOOL, "byte": UINT8, "char": INT8, "short": INT16, "int": INT32, "long": INT64}
    | {"float": FLOAT, "double": FLOAT}
)
OTHER_FUNCTIONS = frozenset(("pos", "where", "square", "logical_xor"))
TENSOR_MAKERS = frozenset(
    ("stack", "cat", "arange", *(f"{x}{end}" for x in ("zeros", "ones", "full") for end in ("", "_like")))
)
MULTIPLIED = 8  # powers up to this exponent become products


class Tracer(TracerBase):
    """A torch.fx tracer that adds a step to a program for every operation on a placeholder (a stand-in).

    If ``shapes`` of the captured tensors are given, constant indices are compared with them. ``beginning`` is
    the file and line where the function begins; errors name it if no line inside the function caused them.
    """

    def __init__(self, name: str, steps: Steps, shapes: tuple[tuple[int, ...], ...] | None, beginning: str):
        super().__init__()
        self.graph: Graph = Graph()  # stays empty, since proxies only use it to format names
        self.name: str = name
        self.steps: Steps = steps
        self.first: Known = Known(QUERY_OFFSET, self)
        self.shapes: tuple[tuple[int, ...], ...] | None = shapes
        self._beginning = beginning
        self._has_ended = False
        self._refused: TraceError | None = None  # the first error, kept because the function may catch it

    def captured(self, n: int) -> Known:
        """Return the stand-in for captured tensor ``n``; a tensor without dimensions is read as a number."""
        return Known(self.steps.load(n) if self.steps.captured[n].rank == 0 else _Tensor(n), self)

    def program(self, given: object) -> Program:
        """Return the program whose result is the value that the function returned.

        Raises:
            TraceError: the value is not of the right kind, or the function caught an earlier TraceError.
        """
        self._has_ended = True
        if self._refused is not None:
            raise self._refused
        if given is None or isinstance(given, tuple | list | dict):
            self.refuse(
                f"expected a function that returns a number, got {type(given).__name__}; is a return missing?"
            )
        wanted = FLOAT if self.name == "score" else BOOL
        result = self._operand(given)
        kind = self.steps.kind(result)
        if BOOL in (wanted, kind) and wanted != kind:
            self.refuse(f"expected a function that returns a {wanted}, got one that returns a {kind}")
        return self.steps.program(self.name, result)

    def create_proxy(
        self, kind: str, target: object, args: Any, kwargs: Any, *rest: Any, **more: Any
    ) -> Proxy:
        """Record a call of an operator, a torch function or a method; torch.fx calls this method."""
        called = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        if kind == "call_method" and called == "where" and len(args) == 3:
            args = (args[1], args[0], args[2])
        try:
            return Known(self._step(called, args, dict(kwargs)), self)
        except TraceError:
            raise
        except TypeError as error:
            self.refuse(str(error))

    def refuse(self, why: str) -> NoReturn:
        """Raise a TraceError that names the line at which the traced function is now."""
        line = None if self._has_ended else line_of(sys._getframe(1))
        error = TraceError(f"{self.name}_mod: {line or self._beginning}: {why}")
        self._refused = self._refused or error
        raise error from None

    def _step(self, called: str, args: tuple, kwargs: dict) -> Operand:
        steps = self.steps
        if called in ("getitem", "__getitem__"):
            return self._load(*args)
        if called == "getattr":
            self.refuse(f".{args[1]} cannot be known; a function may use {KNOWN}")
        if called in ("clamp", "clip", "clamp_min", "clamp_max"):
            return self._clamped(called, *args, **kwargs)
        if called in ("div", "divide") and kwargs == {"rounding_mode": "floor"}:
            called, kwargs = "floordiv", {}
        if called == "to" and len(args) + len(kwargs) == 2 and (args[1:] or "dtype" in kwargs):
            return self._cast(args[0], *args[1:], *kwargs.values())
        if called in ("half", "bfloat16"):
            self.refuse(f"{called}: floats are fp32, as the scores are; leave it out")
        if called in TENSOR_MAKERS:
            self.refuse(
                f"{called}() makes a tensor; a function computes one number, so use its numbers as they are"
            )
        if not (called in OPERATION_NAMES or called in CASTS or called in OTHER_FUNCTIONS):
            self._refuse_unknown(called, args, kwargs)
        operands = [self._operand(x) for x in args]
        if called == "pos" and not kwargs:
            return self._positive(*operands)
        if called in CASTS and len(args) == 1:
            return steps.cast(operands[0], CASTS[called])
        if called == "where" and len(args) == 3:
            return steps.where(*operands)
        if called.startswith("logical_") and not kwargs:
            operands = [steps.cast(x, BOOL) for x in operands]  # numbers other than 0 count as True
            called = "ne" if called == "logical_xor" else called
        if called == "square" and len(args) == 1:
            return self._power(operands[0], 2)
        operation = OPERATION_NAMES.get(called)
        if operation is None or kwargs or len(args) != OPERATIONS[operation][0]:
            self._refuse_unknown(called, args, kwargs)
        if called in ("min", "max") and not isinstance(operands[1], Value):
            self.refuse(f"{called} of a tensor and a number reduces a dimension in torch; use clamp")
        return self._power(*operands) if operation == "pow" else steps.add(operation, *operands)

    def _refuse_unknown(self, called: str, args: tuple, kwargs: dict) -> NoReturn:
        given = f"{len(args)} argument{'s' * (len(args) != 1)}{' and ' + ', '.join(kwargs) if kwargs else ''}"
        self.refuse(f"{called}() of {given} is not known; a function may use {KNOWN}")

    def _load(self, x: Proxy, at: object) -> Operand:
        if not isinstance(x, Proxy):
            self.refuse(INDEXED)
        known, at = x.node, at if isinstance(at, tuple) else (at,)
        if any(n is None or n is ... or isinstance(n, slice | list) for n in at):
            self.refuse(f":, ..., None and lists would give many numbers; {BRACKETS}")
        indices = [self._operand(n) for n in at]
        if known is QUERY_OFFSET:
            if indices != [Value("b")]:
                self.refuse("QUERY_OFFSET is only known for the query's own sequence; index it by b")
            return Value("first")
        if not isinstance(known, _Tensor):
            self.refuse(f"a number is indexed; {BRACKETS}")
        sizes = () if self.shapes is None else self.shapes[known.number]
        for dim, (n, size) in enumerate(zip(indices, sizes, strict=False)):
            if isinstance(n, int) and not -size <= n < size:
                self.refuse(
                    f"tensor {known.number}: expected an index below {size} of dimension {dim}, got {n}"
                )
        return self.steps.load(known.number, *indices)

    def _cast(self, x: object, dtype: object) -> Operand:
        kind = kind_of(dtype)
        if kind is None or (kind == FLOAT and dtype.itemsize == 2):
            self.refuse(
                f"to {dtype}: floats are fp32, as the scores are, and integers keep their dtype; leave it out"
            )
        return self.steps.cast(self._operand(x), kind)

    def _positive(self, x: Operand) -> Operand:
        if self.steps.kind(x) == BOOL:
            self.refuse("torch has no + of a bool; leave it out")
        return x

    def _clamped(
        self, called: str, x: object, low: object = None, high: object = None, **named: object
    ) -> Operand:
        low, high = named.get("min", low), named.get("max", high)
        if called == "clamp_max":
            low, high = None, low if high is None else high
        result = self._operand(x)
        if not isinstance(result, Value):
            self.refuse("a constant is clamped; write torch.minimum and torch.maximum")
        if low is not None:
            result = self.steps.add("clamp_min", result, self._operand(low))
        return result if high is None else self.steps.add("clamp_max", result, self._operand(high))

    def _power(self, x: Operand, n: Operand) -> Operand:
        steps = self.steps
        if isinstance(n, Value):
            if isinstance(x, Value):
                self.refuse("** of two numbers that vary; one of them must be a constant")
            if isinstance(x, int) and steps.kind(n) != FLOAT:
                if x != 2:
                    self.refuse(f"{x} ** an integer: write {float(x)} ** it, or 2 ** it")
                return steps.add("lshift", 1, steps.cast(n, INT64) if steps.kind(n) == BOOL else n)
            if not 0 < x < math.inf:
                self.refuse(f"expected a base above 0, got {x}")
            return steps.add("pow", float(x), n)
        if not math.isfinite(n) or isinstance(n, bool):
            self.refuse(f"expected a finite number as exponent, got {n}")
        if isinstance(n, int) and steps.kind(x) != FLOAT:
            if n < 0:
                self.refuse("integers have no negative powers; write .float()")
            return self._product(steps.cast(x, INT64) if steps.kind(x) == BOOL else x, n)
        x = steps.cast(x, FLOAT)
        if abs(n) == 0.5:
            return steps.add("sqrt" if n > 0 else "rsqrt", x)
        if n != int(n) or abs(n) > MULTIPLIED:
            return steps.add("pow", x, float(n))
        product = self._product(x, abs(int(n))) if n else 1.0
        return product if n >= 0 else steps.add("truediv", 1.0, product)

    def _product(self, x: Operand, n: int) -> Operand:
        """Compute ``x ** n`` by repeated squaring; the result has the kind of ``x``, even if ``n`` is 0."""
        steps = self.steps
        if n == 0:
            return steps.add("add", steps.add("mul", x, 0), 1)
        if n == 1:
            return x
        half = self._product(x, n // 2)
        squared = steps.add("mul", half, half)
        return steps.add("mul", squared, x) if n % 2 else squared

    def _operand(self, x: object) -> Operand:
        if isinstance(x, Proxy):
            x = x.node  # if x is a proxy of an attribute, reading its node records the access
        if isinstance(x, _Tensor):
            self.refuse(f"tensor {x.number} is used as a whole; index it, as in table[h]")
        if x is QUERY_OFFSET:
            self.refuse("QUERY_OFFSET is used as a whole; index it by b")
        if isinstance(x, Tensor):
            self.refuse(
                "a tensor that is made in the function or around it; pass it as an argument, or write a "
                "number"
            )
        if isinstance(x, Value | bool):
            return x
        if isinstance(x, float):
            return float(x)
        if not isinstance(x, int):
            if hasattr(x, "__float__"):  # for example a numpy number or a Decimal
                self.refuse(f"expected a number of Python's, got {x!r:.60}; write int() or float() of it")
            self.refuse(f"expected a number, got {type(x).__name__}")
        if not fits(x, INT64):
            self.refuse(f"expected ints of 64 bits, got {x}")
        return int(x)


class _Tensor(NamedTuple):
    """A captured tensor by its number; the function must index it to get a value."""

    number: int
