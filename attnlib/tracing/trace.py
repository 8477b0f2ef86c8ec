"""Trace a mask or score function: call it once, with torch.fx proxies in place of numbers and tensors."""

from collections.abc import Callable, Sequence
from inspect import getclosurevars, unwrap

from torch import Tensor

from ..internal.checks import came, is_strided
from .kinds import kind_of
from .program import INDICES, SCORED, CapturedKind, Program, Steps, Value, constant, constant_indices
from .stand_ins import KNOWN, QUERY_OFFSET, FirstQuery, Known, TraceError, line_of_error
from .tracer import Tracer

Kinds = tuple[tuple[str, int] | None, ...]


def traced(name: str, function: Callable, tensors: Sequence[Tensor | FirstQuery]) -> Program:
    """Convert a mask or score function into a program by calling it once with placeholders.

    A ``mask`` function maps ``(b, h, i, j, *tensors)`` to a bool; a ``score`` function maps
    ``(score, b, h, i, j, *tensors)`` to a float. The program depends only on the kinds and ranks of the
    tensors, but constant indices are compared with the tensors' shapes.

    Raises:
        TraceError: the function uses an unsupported operation, or returns a value of the wrong kind.

    >>> print(traced("mask", lambda b, h, i, j: (i - j) % 2 == 0, ()))
    def mask(b, h, i, j, first):
        x0 = sub(i, j)
        x1 = mod(x0, 2)
        x2 = eq(x1, 0)
        return x2
    """
    if not callable(function):
        raise TypeError(f"{name}_mod: expected a function of indices, got {type(function).__name__}")
    captured = iter(captured_of(name, tensors))
    kinds = tuple(None if x is QUERY_OFFSET else tuple(next(captured)) for x in tensors)
    program = Program(_traced_text(name, function, kinds, None))
    known = [x for x in tensors if x is not QUERY_OFFSET]
    for n, dim, at in constant_indices(program.text):
        size = known[n].shape[dim]
        if not -size <= at < size:  # trace again with the shapes, so that the error names the line
            _traced_text(name, function, kinds, tuple(tuple(x.shape) for x in known))
    return program


@constant
def _traced_text(
    name: str, function: Callable, kinds: Kinds, shapes: tuple[tuple[int, ...], ...] | None
) -> str:
    """Return the program's text for tensors of these kinds and shapes; the kind None means QUERY_OFFSET."""
    _refuse_enclosed(name, function)
    inputs = SCORED if name == "score" else SCORED[1:]
    steps = Steps(inputs, [CapturedKind(*x) for x in kinds if x is not None])
    tracer = Tracer(name, steps, shapes, _beginning(function))
    numbers = iter(range(len(kinds)))
    captured = [tracer.first if x is None else tracer.captured(next(numbers)) for x in kinds]
    given = _called(name, function, [*(Known(Value(x), tracer) for x in inputs[:-1]), *captured])
    return tracer.program(given).text


def _called(name: str, function: Callable, arguments: Sequence[Known]) -> object:
    """Call the function with stand-ins as arguments, and convert any exception into a TraceError."""
    try:
        return function(*arguments)
    except TraceError:
        raise
    except Exception as error:  # code that gets a stand-in may raise any exception
        line, message = line_of_error(error.__traceback__), f"{type(error).__name__}: {error}"
        if line is None:  # the function never ran: it takes other arguments, or is not Python code
            inputs = SCORED[:-1] if name == "score" else INDICES[:-1]
            takes = ", ".join((*inputs, *(f"t{n}" for n in range(len(arguments) - len(inputs)))))
            message = message.splitlines()[0].removesuffix(", but expected one of:")
            message = f"expected a Python function that takes ({takes}); calling it raised {message}"
            raise TraceError(f"{name}_mod: {_beginning(function)}: {message}") from error
        raise TraceError(f"{name}_mod: {line}: {message}; a function may use {KNOWN}") from error


def _beginning(function: Callable) -> str:
    """Return the file and line on which a function begins, or the repr of a callable without Python code."""
    code = getattr(unwrap(function), "__code__", None)
    return repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def captured_of(name: str, tensors: Sequence[Tensor | FirstQuery]) -> list[CapturedKind]:
    """Return the kind and rank of each tensor among the arguments of a function, skipping QUERY_OFFSET.

    Raises:
        TypeError: an argument is not a strided tensor of a known dtype.
    """
    found = []
    for n, x in enumerate(tensors):
        if x is QUERY_OFFSET:
            continue
        if not is_strided(x):
            raise TypeError(f"{name}_mod: expected a tensor or QUERY_OFFSET as argument {n}, got {came(x)}")
        if (kind := kind_of(x.dtype)) is None:
            raise TypeError(f"{name}_mod: expected bools, integers or floats as argument {n}, got {x.dtype}")
        found.append(CapturedKind(kind, x.dim()))
    return found


def _refuse_enclosed(name: str, function: Callable) -> None:
    """Raise TraceError if the function uses a tensor from its closure or globals.

    The traced program would not notice if the variable were set to another tensor.
    """
    try:
        around = getclosurevars(unwrap(function))
    except TypeError:  # callable objects and functools.partial have no closure
        return
    for variable, x in {**around.globals, **around.nonlocals}.items():
        if isinstance(x, Tensor):
            raise TraceError(
                f"{name}_mod: {_beginning(function)}: {variable} is a tensor from outside the function; pass "
                f"it as an argument, {name}_mod({function.__name__}, {variable})"
            )
