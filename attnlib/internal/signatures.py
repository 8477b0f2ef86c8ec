"""Error messages for unknown and missing arguments: name the attnlib argument to use instead."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, isclass, isfunction, signature
from typing import TypeVar

from .words import remedy_of

Function = TypeVar("Function", bound=Callable)
MASKS = "CAUSAL, FULL or sliding(n)"
RECEIVERS = ("self", "cls", "_cls")
BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def kind(x: Function) -> Function:
    """Wrap a function so that an unknown or missing argument raises a TypeError that names the right one.

    In a class, the constructor and the public methods are wrapped. Methods that another decorator has already
    wrapped are skipped. Such a method needs its own ``@kind``, for example below ``@contextmanager``.
    """
    if not isclass(x):
        return _wrapped(x, None)
    for name, member in [*vars(x).items()]:
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        is_public = name == "__init__" or name[0] != "_"
        if is_public and isfunction(function) and not hasattr(function, "__wrapped__"):
            changed = _wrapped(function, None)
            setattr(x, name, changed if function is member else type(member)(changed))
    return x


def leading_to(instead: str) -> Callable[[Function], Function]:
    """Return a decorator for constructors that users should not call; errors name what to call ``instead``.

    Public methods of a class are wrapped as by :func:`kind`.
    """

    def changed(x: Function) -> Function:
        if not isclass(x):
            return _wrapped(x, instead)
        name = "__new__" if issubclass(x, tuple) else "__init__"
        setattr(x, name, _wrapped(getattr(x, name), instead))
        return kind(x)

    return changed


def unknown(argument: str, names: Sequence[str]) -> str:
    """Return the error message for an unknown argument of a function that takes arguments ``names``."""
    remedy = remedy_of(argument, names)
    if remedy is None:
        near = get_close_matches(argument, names, 1)
        takes = f"it takes {', '.join(names)}" if names else "it takes none"
        remedy = f"did you mean {near[0]}=" if near else takes
    return f"{argument}: no such argument; {remedy}"


def _wrapped(function: Function, instead: str | None) -> Function:
    @wraps(function)
    def called(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__.tb_next is not None:  # the error comes from the function's own code
                raise
            why = str(error)
        name = _name_of(function, args)
        raise TypeError(f"{name}: {instead or _argument_error(function, name, args, kwargs) or why}")

    return called


def _name_of(function: Callable, args: Sequence[object]) -> str:
    """Return the name of a function for messages; for a method, include the class it was called on."""
    *owner, name = function.__qualname__.split(".")
    if args and _is_method(function):
        known = args[0] if isclass(args[0]) else type(args[0])
        owner = [known.__name__] if hasattr(known, name) else owner
    return ".".join(owner[-1:] if name in ("__init__", "__new__") else [*owner[-1:], name])


def _is_method(function: Callable) -> bool:
    return next(iter(signature(function).parameters), None) in RECEIVERS


def _argument_error(
    function: Callable, name: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> str | None:
    """Explain which arguments are wrong and what to pass instead; return None if no reason is found."""
    of, count = [*signature(function).parameters.values()], len(args)
    if _is_method(function):
        of, count = of[1:], max(0, count - 1)
    first = [x.name for x in of if x.kind in BY_PLACE]
    by_name = [x.name for x in of if x.kind is Parameter.KEYWORD_ONLY]
    kinds = {x.kind for x in of}
    if Parameter.VAR_KEYWORD not in kinds:
        for argument in kwargs:
            if argument not in (*first, *by_name):
                return unknown(argument, [*first, *by_name])
    if count > len(first) and Parameter.VAR_POSITIONAL not in kinds:
        example = "mask=CAUSAL" if "mask" in by_name else "".join(f"{x}=..." for x in by_name[:1])
        example = "context=y for keys and values of other tokens" if "context" in by_name else example
        rest = f" and all else by name, as {example}" if example else ""
        return f"expected {', '.join(first) or 'no arguments'} by position{rest}; {count} were given"
    if twice := [x for x in first[:count] if x in kwargs]:
        return f"{twice[0]}: expected once, got it by position and by name"
    given = {*first[:count], *kwargs}
    needed = [x for x in of if x.default is Parameter.empty and x.name in (*first, *by_name)]
    missing = [x.name for x in needed if x.name not in given]
    if missing == ["mask"]:
        return f"mask: expected a Mask such as {MASKS}, got none; there is no default mask"
    if missing:
        call = ", ".join(f"{x.name}=..." if x.name in by_name else x.name for x in needed)
        return f"missing {', '.join(missing)}; call it as {name}({call})"
    return None
