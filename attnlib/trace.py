"""From a function of indices to a program: torch.fx calls it once, with proxies in place of numbers and tensors."""

import sys
from collections.abc import Callable, Sequence
from inspect import getclosurevars, unwrap
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, Proxy
from torch.fx.proxy import TracerBase

from .checks import INT32, is_strided
from .program import BOOL, FLOAT, INT, OPERATIONS, SCORED, Captured, Operand, Program, Steps, Value, constant

# What Python, torch and its tensors call the operations of a program.
SPELLED = MappingProxyType(
    {name: name for name in OPERATIONS}
    | {
        "subtract": "sub", "multiply": "mul", "div": "truediv", "divide": "truediv", "true_divide": "truediv",
        "floor_divide": "floordiv", "remainder": "mod", "negative": "neg", "absolute": "abs", "min": "minimum",
        "max": "maximum", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
        "and_": "logical_and", "or_": "logical_or", "invert": "logical_not", "bitwise_and": "logical_and",
        "bitwise_or": "logical_or", "bitwise_not": "logical_not", "__and__": "logical_and", "__or__": "logical_or",
    }
)  # fmt: skip
CASTS = MappingProxyType({"bool": BOOL, "int": INT, "long": INT, "float": FLOAT, "double": FLOAT})
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KNOWN = (
    "arithmetic, //, %, comparisons, & | ~, torch.where, abs, minimum, maximum, clamp, exp, log, tanh, casts, and the "
    "indexing of tensors that are passed as arguments"
)
CHOICES = "Python's if, and, or, not, min and max cannot look at an index; use torch.where, & | ~, torch.minimum"


class TraceError(TypeError):
    """A function of indices does what no kernel could; the message names the operation and the line."""


class FirstQuery:
    """In place of a tensor it stands for int32 ``[b]``: the storage index of the first query of each sequence."""

    def __repr__(self) -> str:
        return "FIRST_QUERY"


FIRST_QUERY = FirstQuery()


def traced(name: str, function: Callable, tensors: Sequence[Tensor | FirstQuery]) -> Program:
    """What ``function`` does: a ``mask`` of ``(b, h, i, j, *tensors)`` to a bool, or a ``score``, which it takes first.

    Of the tensors it depends on kinds and ranks alone.

    Raises:
        TraceError: it does what no program can say, or does not give what its name asks for.

    >>> print(traced("mask", lambda b, h, i, j: (i - j) % 2 == 0, ()))
    def mask(b, h, i, j, first):
        x0 = sub(i, j)
        x1 = mod(x0, 2)
        x2 = eq(x1, 0)
        return x2
    """
    if not callable(function):
        raise TypeError(f"{name}_mod: expected a function of indices, got {type(function).__name__}")
    kinds = captured_of(name, tensors)
    given = iter(kinds)
    return Program(_text_of(name, function, tuple(None if x is FIRST_QUERY else tuple(next(given)) for x in tensors)))


@constant
def _text_of(name: str, function: Callable, kinds: tuple[tuple[str, int] | None, ...]) -> str:
    """The text of the program, for arguments of these kinds and ranks; None is FIRST_QUERY."""
    _refuse_enclosed(name, function)
    inputs = SCORED if name == "score" else SCORED[1:]
    tracer = _Tracer(name, Steps(inputs, [Captured(*x) for x in kinds if x is not None]))
    numbers = iter(range(len(kinds)))
    of_tensors = [tracer.first if x is None else tracer.captured(next(numbers)) for x in kinds]
    return tracer.program(function(*(_Known(Value(x), tracer) for x in inputs[:-1]), *of_tensors)).text


def applied(function: Callable, arguments: Sequence[Tensor | FirstQuery], first: Tensor, *numbers: Tensor) -> Tensor:
    """What ``function`` gives of numbers, tensors that broadcast, as a program of it would: it is called.

    ``first`` is the storage index of the first query of the sequence that all indices are of.
    """
    return function(*numbers, *(_First(first) if x is FIRST_QUERY else _clamping(x) for x in arguments))


def filled(arguments: Sequence[Tensor | FirstQuery], tensors: Sequence[Tensor]) -> tuple[Tensor | FirstQuery, ...]:
    """The arguments of a function, with these tensors in place of its own."""
    given = iter(tensors)
    return tuple(x if x is FIRST_QUERY else next(given) for x in arguments)


class _First:
    """What FIRST_QUERY stands for within one sequence."""

    def __init__(self, first: Tensor):
        self._first = first

    def __getitem__(self, b: Tensor) -> Tensor:
        return self._first


class _Clamping:
    """A tensor whose indices are clamped to what there is."""

    def __init__(self, x: Tensor):
        self._x = x

    def __getitem__(self, at: object) -> Tensor:
        at = at if isinstance(at, tuple) else (at,)
        sizes = zip(at, self._x.shape, strict=True)
        return self._x[tuple(torch.as_tensor(n, device=self._x.device).clamp(0, size - 1) for n, size in sizes)]


def _clamping(x: Tensor) -> "Tensor | _Clamping":
    return _Clamping(x) if x.dim() else x


def captured_of(name: str, tensors: Sequence[Tensor | FirstQuery]) -> list[Captured]:
    """What a program depends on of these tensors.

    Raises:
        TypeError: not a strided tensor of a known dtype.
    """
    found = []
    for n, x in enumerate(tensors):
        if x is FIRST_QUERY:
            continue
        if not is_strided(x):
            got = "one that is not strided" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}_mod: expected a tensor or FIRST_QUERY as argument {n}, got {got}")
        if (kind := kind_of(x.dtype)) is None:
            raise TypeError(f"{name}_mod: expected bools, integers or floats as argument {n}, got {x.dtype}")
        found.append(Captured(kind, x.dim()))
    return found


def kind_of(dtype: object) -> str | None:
    """What a program knows numbers of a dtype as; None for others. (No mapping, which Dynamo may lose sight of.)"""
    return BOOL if dtype == torch.bool else INT if dtype in INTS else FLOAT if dtype in FLOATS else None


def _refuse_enclosed(name: str, function: Callable) -> None:
    """Raise for a tensor that the function would take from around it: nobody would see it change."""
    try:
        around = getclosurevars(unwrap(function))
    except TypeError:  # of a callable object, or a partial one
        return
    for variable, x in {**around.globals, **around.nonlocals}.items():
        if isinstance(x, Tensor):
            raise TraceError(
                f"{name}_mod: {variable} is a tensor from around the function; pass it as an argument, "
                f"{name}_mod({function.__name__}, {variable})"
            )


class _Known(Proxy):
    """A proxy of what a step, an input or a tensor is known as; it says which line asks for more."""

    def __init__(self, operand: Operand | Captured, tracer: "_Tracer"):
        super().__init__(operand, tracer)

    def __abs__(self) -> Proxy:
        return torch.abs(self)

    def __bool__(self) -> NoReturn:
        self.tracer.refuse(CHOICES)

    def __index__(self) -> NoReturn:
        self.tracer.refuse("a tensor from around the function is indexed; pass it as an argument")

    def __float__(self) -> NoReturn:
        self.tracer.refuse("float() cannot know an index; write .float()")

    def __int__(self) -> NoReturn:
        self.tracer.refuse("int() cannot know an index; write .int()")

    def __iter__(self) -> NoReturn:
        self.tracer.refuse("an index cannot be iterated over")

    def __len__(self) -> NoReturn:
        self.tracer.refuse("len() cannot know a tensor")


class _Tracer(TracerBase):
    """Adds a step for all that is done to a proxy."""

    def __init__(self, name: str, steps: Steps):
        super().__init__()
        self.graph = Graph()  # which stays empty; proxies ask it how to spell what is called
        self.name, self.steps, self.first = name, steps, _Known(FIRST_QUERY, self)

    def captured(self, n: int) -> _Known:
        """The proxy of tensor ``n``; without dimensions it is a number."""
        return _Known(self.steps.load(n) if self.steps.captured[n].rank == 0 else _Tensor(n), self)

    def program(self, given: object) -> Program:
        """The program that gives what the function gave."""
        wanted = FLOAT if self.name == "score" else BOOL
        result = self._operand(given)
        kind = self.steps.kind(result)
        if BOOL in (wanted, kind) and wanted != kind:
            raise TraceError(f"{self.name}_mod: expected a function that gives a {wanted}, got one that gives a {kind}")
        return self.steps.program(self.name, result)

    def create_proxy(self, kind: str, target: str | Callable, args: tuple, kwargs: dict, *rest, **more) -> Proxy:
        """What torch.fx calls for an operator, a function of torch or a method."""
        spelled = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        try:
            return _Known(self._step(spelled, args, dict(kwargs)), self)
        except TraceError:
            raise
        except TypeError as error:
            raise TraceError(f"{self.name}_mod: {_line()}: {error}") from None

    def refuse(self, why: str) -> NoReturn:
        """Raise for what the line of the function asks for that runs now."""
        raise TraceError(f"{self.name}_mod: {_line()}: {why}")

    def _step(self, spelled: str, args: tuple, kwargs: dict) -> Operand:
        steps = self.steps
        if spelled == "getitem":
            return self._load(*args)
        if spelled == "getattr":
            self.refuse(f".{args[1]} cannot be known; a function may use {KNOWN}")
        if spelled in ("clamp", "clip", "clamp_min", "clamp_max"):
            return self._clamped(spelled, *args, **kwargs)
        if spelled in ("div", "divide") and kwargs == {"rounding_mode": "floor"}:
            spelled, kwargs = "floordiv", {}
        if spelled == "to" and len(args) == 2 and (kind := kind_of(args[1])) is not None:
            return steps.cast(self._operand(args[0]), kind)
        operands = [self._operand(x) for x in args]
        if spelled == "pos" and not kwargs:
            return operands[0]
        if spelled in CASTS and len(args) == 1:
            return steps.cast(operands[0], CASTS[spelled])
        if spelled == "where" and len(args) == 3:
            return steps.where(*operands)
        operation = SPELLED.get(spelled)
        if operation is None or kwargs or len(args) != OPERATIONS[operation][0]:
            self.refuse(f"{spelled} of {len(args)}{' and ' + ', '.join(kwargs) if kwargs else ''}: it may use {KNOWN}")
        return steps.add(operation, *operands)

    def _load(self, x: Proxy, at: object) -> Operand:
        known = x.node if isinstance(x, Proxy) else x
        indices = [self._operand(n) for n in (at if isinstance(at, tuple) else (at,))]
        if known is FIRST_QUERY:
            if indices != [Value("b")]:
                self.refuse("FIRST_QUERY is known of the own sequence alone; index it by b")
            return Value("first")
        if not isinstance(known, _Tensor):
            self.refuse("a number is indexed")
        return self.steps.load(known.number, *indices)

    def _clamped(self, spelled: str, x: object, low: object = None, high: object = None, **named: object) -> Operand:
        low, high = named.get("min", low), named.get("max", high)
        if spelled == "clamp_max":
            low, high = None, low if high is None else high
        result = self._operand(x)
        if low is not None:
            result = self.steps.add("maximum", result, self._operand(low))
        return result if high is None else self.steps.add("minimum", result, self._operand(high))

    def _operand(self, x: object) -> Operand:
        if isinstance(x, Proxy):
            x = x.node  # of an attribute: what reading it gives
        if isinstance(x, _Tensor):
            self.refuse(f"tensor {x.number} is used as a whole; index it, as in table[h]")
        if x is FIRST_QUERY:
            self.refuse("FIRST_QUERY is used as a whole; index it by b")
        if isinstance(x, Tensor):
            self.refuse("a tensor from around the function; pass it as an argument")
        if isinstance(x, Value | bool | float):
            return x
        if not isinstance(x, int):
            self.refuse(f"expected a number, got {type(x).__name__}")
        if not -INT32 <= x <= INT32:
            self.refuse(f"expected ints within +-{INT32}, since indices are int32, got {x}")
        return x


class _Tensor(NamedTuple):
    """A captured tensor, which is nothing until it is indexed."""

    number: int


def _line() -> str:
    """Where the function is: the innermost line outside of this file and of torch."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] == "torch" or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
