"""Programs of indices as device functions, which kernels take as constexpr arguments and inline.

What such a function reads comes as ``t``, a tuple with a ``CapturedTensor`` for each captured tensor. Indices
are int32, scalars and tiles that broadcast, and below the ``bounds`` that a function is written for.
"""

import linecache
from collections.abc import Callable, Iterable
from hashlib import sha256

from torch import Tensor

from ....tracing.derivative import derivative
from ....tracing.program import Program
from ...operators import AnyArguments, Arguments, CachedArguments, apart
from ..launching.launch import remembered
from .ranges import ANYWHERE, Bounds
from .sources import FunctionSource, derivative_source, gradients_source, source


def tables(tensors: Iterable[Tensor | None]) -> tuple:
    """Captured tensors as kernels take them; None for one that is not there."""
    from ..kernels.elements import CapturedTensor

    return tuple(None if x is None else CapturedTensor(x, tuple(x.shape), tuple(x.stride())) for x in tensors)


def learned(program: Program) -> tuple[int, ...]:
    """The numbers of the tensors that a score program has gradients for."""
    return tuple(sorted({int(x.tensor.name[1:]) for x in derivative(program).reads}))


@remembered
def function_of(program: Program, bounds: Bounds) -> Callable:
    """``mask(b, h, i, j, first, t)``, which broadcasts, or ``score(score, b, h, i, j, first, t)``, a whole
    tile.
    """
    return device_function(source(program, bounds))


@remembered
def derivative_of(program: Program, bounds: Bounds) -> Callable:
    """``derivative(score, d, b, h, i, j, first, t)``: by the score, where ``d`` is that by what the program
    gives.
    """
    return device_function(derivative_source(program, bounds))


@remembered
def gradients_of(program: Program, bounds: Bounds) -> Callable | None:
    """``gradients(score, d, seen, b, h, i, j, first, t, grads)``; None where the program has no gradients.

    It adds to ``grads``, which has a ``CapturedTensor`` of fp32 for each tensor that is :func:`learned`, and
    None for others. Pairs that are not ``seen``, a tile of bools or True, add nothing, whatever their scores
    and derivatives are.
    """
    return device_function(gradients_source(program, bounds)) if learned(program) else None


def device_function(source: FunctionSource) -> Callable:
    """What Triton makes of a source, whose module and file are named by what it says: no two share their
    compilations.

    Triton asks inspect for the source, which finds it among the lines that linecache holds.
    """
    from ..kernels import elements
    from ..kernels.scores import LOG2E, tanh

    digest = sha256(source.text.encode()).hexdigest()[:16]
    file = f"<{source.name} {digest}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    names = {
        name: x for name, x in vars(elements).items() if not name.startswith("__")
    }  # triton and tl among them
    names |= {"__name__": f"attnlib.programs.{digest}", "LOG2E": LOG2E, "tanh": tanh}
    exec(compile(source.text, file, "exec"), names)
    return names[source.name]


def captured(a: AnyArguments, grads: Tensor | None = None) -> dict[str, tuple]:
    """What functions of indices read, as kernels take it, and where the gradients of it are added up, side by
    side.
    """
    if a.mask_program is a.score_program is None:
        return {}
    of_mask, read = 0 if a.mask_program is None else _reads(a.mask_program), a.captured or ()
    made = {"mask_tensors": tables(read[:of_mask]), "score_tensors": tables(read[of_mask:])}
    if grads is not None:
        made["grad_tensors"] = tables(apart(grads, a)[of_mask:])
    return made


@remembered
def _reads(program: str) -> int:
    """How many tensors a program reads."""
    return len(Program(program).parsed.captured)


def bounds(a: Arguments | CachedArguments, sequences: int, heads: int, tokens: int) -> Bounds:
    """The bounds of the indices that functions of a call are given; nobody knows those of a piece."""
    return Bounds.of(sequences, heads, tokens) if a.origin is None else ANYWHERE


def functions(a: Arguments, bounds: Bounds) -> dict[str, Callable | None]:
    """The functions of indices that kernels inline, of a mask and of scores; None without."""
    named = {"MASK": a.mask_program, "SCORE": a.score_program}
    return {
        name: None if text is None else function_of(Program(text), bounds) for name, text in named.items()
    }


def derivatives(a: Arguments, bounds: Bounds) -> dict[str, Callable | None]:
    """Return the device functions for the derivative of a score function, or None for each if there is
    none.
    """
    program = None if a.score_program is None else Program(a.score_program)
    if program is None:
        return {"DERIVATIVE": None, "GRADIENTS": None}
    return {
        "DERIVATIVE": derivative_of(program, bounds),
        "GRADIENTS": gradients_of(program, bounds) if a.learns else None,
    }
