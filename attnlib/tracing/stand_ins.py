"""Placeholders for the arguments of traced functions (stand-ins), and errors for unsupported operations."""

from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn, Protocol

from torch import Tensor
from torch.fx import Proxy

KNOWN = (
    "arithmetic, //, %, comparisons, & | ^ ~, << and >>, ** with a constant, torch.where, abs, minimum, "
    "maximum, clamp, exp, exp2, log, tanh, sigmoid, sqrt, rsqrt, casts, and the indexing of tensors that are "
    "passed as arguments"
)
CHOICES = (
    "Python's if, and, or, not, min and max cannot look at an index; use torch.where, & | ~, torch.minimum"
)
INDEXED = (
    "range(), lists, arrays and tensors from outside the function cannot take an index; pass a tensor as an "
    "argument and index it, or loop over a fixed number"
)
TAKEN = "len(), torch.tensor() and lists cannot take an index or a tensor; use it as it is"
TEXT = "str(), print() and f-strings cannot know an index; leave them out"
READ = ("item", "tolist", "numpy")  # methods that would convert a traced number to a Python or numpy value
NUMPY = "numpy cannot take an index; use torch's functions, and int() or float() of numpy's numbers"


class TraceError(TypeError):
    """Raised if a mask or score function uses an unsupported operation; the message names its line."""


class FirstQuery:
    """The type of ``QUERY_OFFSET``, an argument of mask and score functions.

    The function gets an int64 tensor ``[b]`` in its place: the storage index of each sequence's first query.
    """

    def __repr__(self) -> str:
        return "QUERY_OFFSET"

    def __reduce__(self) -> str:
        """Return the name of the global object, so that copying and unpickling return this same object."""
        return "QUERY_OFFSET"


QUERY_OFFSET = FirstQuery()


Refusal = Callable[..., NoReturn]


class Refusing(Protocol):
    """The methods of a tracer that stand-ins call."""

    def refuse(self, why: str) -> NoReturn: ...
    def create_proxy(
        self, kind: str, target: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Proxy: ...


def _refusing(why: str) -> Refusal:
    """Return a method for stand-ins that raises TraceError when it is called."""

    def refuse(self: "Known", *_: object, **__: object) -> NoReturn:
        self.tracer.refuse(why)

    return refuse


class Known(Proxy):
    """A placeholder for an input, a tensor or a step's result; unsupported uses of it raise TraceError."""

    def __init__(self, operand: object, tracer: Refusing):
        super().__init__(operand, tracer)

    def __abs__(self) -> Proxy:
        return self.tracer.create_proxy("call_function", "abs", (self,), {})

    __bool__: Refusal = _refusing(CHOICES)
    __index__: Refusal = _refusing(INDEXED)
    __float__: Refusal = _refusing(
        "float() and math cannot know an index; write .float() and torch's functions"
    )
    __int__: Refusal = _refusing("int() cannot know an index; write .int()")
    __complex__: Refusal = _refusing("complex() cannot know an index")
    __iter__: Refusal = _refusing(
        "an index cannot be iterated over; pass a tensor as an argument and index it"
    )
    __contains__: Refusal = _refusing("`in` cannot look into a tensor; compare with each, joined by |")
    __len__: Refusal = _refusing(TAKEN)
    __hash__: Refusal = _refusing(
        "a dict, a set or functools.cache cannot hold an index; pass a tensor as an argument and index it"
    )
    __setitem__: Refusal = _refusing("tensors are not written to; use torch.where to choose another value")
    __delitem__: Refusal = _refusing("tensors are not written to; use torch.where to choose another value")
    __round__: Refusal = _refusing("round() cannot know an index; write (x + 0.5) // 1")
    __floor__: Refusal = _refusing("math.floor() cannot know an index; write x // 1")
    __ceil__: Refusal = _refusing("math.ceil() cannot know an index; write -(-x // 1)")
    __trunc__: Refusal = _refusing("math.trunc() cannot know an index; write .int()")
    __divmod__: Refusal = _refusing("divmod() cannot know an index; write // and %")
    __rdivmod__: Refusal = _refusing("divmod() cannot know an index; write // and %")
    __str__: Refusal = _refusing(TEXT)
    __format__: Refusal = _refusing(TEXT)
    __array__: Refusal = _refusing(NUMPY)
    __array_ufunc__: Refusal = _refusing(NUMPY)

    def __getattr__(self, name: str) -> Proxy:
        if name.startswith("__array_"):
            self.tracer.refuse(NUMPY)
        if name.startswith(("__cuda_array_", "__dlpack_")):  # torch.tensor() reads these attributes
            self.tracer.refuse(TAKEN)
        if name in READ:
            self.tracer.refuse(
                f".{name}() cannot read an index, which stands for all of them; use it as it is"
            )
        if not name.startswith("__") and not callable(getattr(Tensor, name, None)):
            self.tracer.refuse(f".{name} cannot be known; a function may use {KNOWN}")
        return super().__getattr__(name)


def line_of(frame: FrameType) -> str | None:
    """Return the line of the user's function that led to ``frame``: the innermost outside torch and tracer.

    The result is None if there is no such line, because the traced function is not Python code (``max``, for
    example).
    """
    while _is_ours(frame):
        if frame.f_globals["__name__"] == f"{__package__}.trace":
            return None
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of_error(traceback: TracebackType) -> str | None:
    """Return the innermost line outside torch and the tracer that raised an error; None if there is none."""
    found = None
    while (traceback := traceback.tb_next) is not None:
        if not _is_ours(traceback.tb_frame):
            found = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
    return found


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    own = [f"{__package__}.{module}" for module in ("stand_ins", "tracer", "trace", "program", "kinds")]
    return name in own or name.partition(".")[0] in ("torch", "numpy")
