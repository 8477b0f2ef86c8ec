"""Mask and score programs as device functions, which kernels take as constexpr arguments and inline.

Captured tensors are passed as ``t``, a tuple with one ``CapturedTensor`` per tensor. Indices are int32
scalars or broadcastable int32 tiles, and stay within the ``bounds`` that a function is compiled for.
"""

import linecache
from collections.abc import Callable, Iterable
from hashlib import sha256

from torch import Tensor

from ....tracing.derivative import derivative
from ....tracing.program import Program
from ...operators import AnyArguments, Arguments, CachedArguments, apart
from ..launching.launch import cached_plan
from .ranges import ANYWHERE, Bounds
from .sources import FunctionSource, derivative_source, gradients_source, source


def tables(tensors: Iterable[Tensor | None]) -> tuple:
    """Return captured tensors as kernels take them; None stays None."""
    from ..kernels.elements import CapturedTensor

    return tuple(None if x is None else CapturedTensor(x, tuple(x.shape), tuple(x.stride())) for x in tensors)


def learned(program: Program) -> tuple[int, ...]:
    """Return the indices of the captured tensors that a score program has gradients for."""
    return tuple(sorted({int(x.tensor.name[1:]) for x in derivative(program).reads}))


@cached_plan
def function_of(program: Program, bounds: Bounds) -> Callable:
    """Return a mask function ``mask(b, h, i, j, first, t)`` or ``score(score, b, h, i, j, first, t)``.

    The result of ``mask`` broadcasts to a tile; that of ``score`` is a whole tile.
    """
    return device_function(source(program, bounds))


@cached_plan
def derivative_of(program: Program, bounds: Bounds) -> Callable:
    """Return ``derivative(score, d, b, h, i, j, first, t)``, the backward of a score function.

    ``d`` is the gradient of the changed scores; ``derivative`` returns the gradient of the input scores.
    """
    return device_function(derivative_source(program, bounds))


@cached_plan
def gradients_of(program: Program, bounds: Bounds) -> Callable | None:
    """Return ``gradients(score, d, seen, b, h, i, j, first, t, grads)``; None if no tensor has a gradient.

    The function adds to ``grads``, a tuple with one fp32 ``CapturedTensor`` per :func:`learned` tensor and
    None for the others. ``seen`` is True or a tile of bools. Pairs outside it add nothing, whatever their
    scores and derivatives are.
    """
    return device_function(gradients_source(program, bounds)) if learned(program) else None


def device_function(source: FunctionSource) -> Callable:
    """Compile a source to a Triton function in a module and file named by a hash of the text.

    Different texts therefore never share a compilation. Triton gets the source from inspect, which finds it
    in linecache.
    """
    from ..kernels import elements
    from ..kernels.scores import LOG2E, tanh

    digest = sha256(source.text.encode()).hexdigest()[:16]
    file = f"<{source.name} {digest}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    # Includes triton and tl.
    names = {name: x for name, x in vars(elements).items() if not name.startswith("__")}
    names |= {"__name__": f"attnlib.programs.{digest}", "LOG2E": LOG2E, "tanh": tanh}
    exec(compile(source.text, file, "exec"), names)
    return names[source.name]


def captured(a: AnyArguments, grads: Tensor | None = None) -> dict[str, tuple]:
    """Return the kernel arguments for captured tensors, and for their gradients if ``grads`` is given.

    In ``grads`` the gradients lie side by side, and kernels add to them.
    """
    if a.mask_program is a.score_program is None:
        return {}
    of_mask, read = 0 if a.mask_program is None else _reads(a.mask_program), a.captured or ()
    made = {"mask_tensors": tables(read[:of_mask]), "score_tensors": tables(read[of_mask:])}
    if grads is not None:
        made["grad_tensors"] = tables(apart(grads, a)[of_mask:])
    return made


@cached_plan
def _reads(program: str) -> int:
    """Return the number of tensors that a program reads."""
    return len(Program(program).parsed.captured)


def bounds(a: Arguments | CachedArguments, sequences: int, heads: int, tokens: int) -> Bounds:
    """Return upper bounds on the indices that the functions of a call see.

    A chunk of a larger call gets the widest bounds, since its indices are unknown.
    """
    return Bounds.of(sequences, heads, tokens) if a.origin is None else ANYWHERE


def functions(a: Arguments, bounds: Bounds) -> dict[str, Callable | None]:
    """Return the mask and score functions for kernels to inline; None for a missing one."""
    named = {"MASK": a.mask_program, "SCORE": a.score_program}
    return {
        name: None if text is None else function_of(Program(text), bounds) for name, text in named.items()
    }


def derivatives(a: Arguments, bounds: Bounds) -> dict[str, Callable | None]:
    """Return the device functions for the derivative of a score function; None for each without one."""
    program = None if a.score_program is None else Program(a.score_program)
    if program is None:
        return {"DERIVATIVE": None, "GRADIENTS": None}
    return {
        "DERIVATIVE": derivative_of(program, bounds),
        "GRADIENTS": gradients_of(program, bounds) if a.learns else None,
    }
