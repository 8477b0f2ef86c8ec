"""Mask and score functions as Triton functions, which kernels take as constexpr arguments and inline.

Captured tensors are passed as ``t``, a tuple with one ``CapturedTensor`` for each. Indices are int32 scalars,
or int32 tiles that broadcast. They stay within the ``bounds`` for which a function is compiled.
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
    """Wrap captured tensors in the form that kernels take; None stays None."""
    from ..kernels.elements import CapturedTensor

    return tuple(None if x is None else CapturedTensor(x, tuple(x.shape), tuple(x.stride())) for x in tensors)


def learned(program: Program) -> tuple[int, ...]:
    """Return the indices of the captured tensors that may get a gradient from a score function."""
    return tuple(sorted({int(x.tensor.name[1:]) for x in derivative(program).reads}))


@cached_plan
def function_of(program: Program, bounds: Bounds) -> Callable:
    """Return a mask function ``mask(b, h, i, j, first, t)`` or ``score(score, b, h, i, j, first, t)``.

    The result of ``mask`` can be broadcast to a tile. The result of ``score`` has the shape of a tile.
    """
    return device_function(source(program, bounds))


@cached_plan
def derivative_of(program: Program, bounds: Bounds) -> Callable:
    """Return ``derivative(score, d, b, h, i, j, first, t)``, the backward of a score function.

    ``d`` is the gradient of the scores that the function returned. ``derivative`` returns the gradient of the
    scores that the function took.
    """
    return device_function(derivative_source(program, bounds))


@cached_plan
def gradients_of(program: Program, bounds: Bounds) -> Callable | None:
    """Return ``gradients(score, d, seen, b, h, i, j, first, t, grads)``; None if no tensor has a gradient.

    It computes the gradients of the tensors that a score function captures, and adds them to ``grads``, a
    tuple with an fp32 ``CapturedTensor`` for each :func:`learned` tensor, and None for other tensors.
    ``seen`` is True, or a tile of bools that is True for visible pairs. Hidden pairs add nothing, even if
    their scores or derivatives are NaN.
    """
    return device_function(gradients_source(program, bounds)) if learned(program) else None


def device_function(source: FunctionSource) -> Callable:
    """Turn source text into a Triton function, in a module and file named by a hash of the text.

    The hash keeps Triton from mistaking one text for another. Triton asks inspect for the source, and inspect
    finds it in linecache.
    """
    from ..kernels import elements
    from ..kernels.scores import LOG2E, tanh

    digest = sha256(source.text.encode()).hexdigest()[:16]
    file = f"<{source.name} {digest}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    # The names in elements include triton and tl, which the source text uses.
    names = {name: x for name, x in vars(elements).items() if not name.startswith("__")}
    names |= {"__name__": f"attnlib.programs.{digest}", "LOG2E": LOG2E, "tanh": tanh}
    exec(compile(source.text, file, "exec"), names)
    return names[source.name]


def captured(a: AnyArguments, grads: Tensor | None = None) -> dict[str, tuple]:
    """Return the kernel arguments for captured tensors, and for their gradients if ``grads`` is given.

    ``grads`` is a flat tensor that holds all gradients one after another; kernels add to it.
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
    """Return the number of captured tensors that a mask or score function reads."""
    return len(Program(program).parsed.captured)


def bounds(a: Arguments | CachedArguments, sequences: int, heads: int, tokens: int) -> Bounds:
    """Return upper bounds on the indices that a call passes to its mask and score functions.

    A chunk of a larger call gets the widest bounds, since its indices are not known in advance.
    """
    return Bounds.of(sequences, heads, tokens) if a.origin is None else ANYWHERE


def functions(a: Arguments, bounds: Bounds) -> dict[str, Callable | None]:
    """Return the mask and score functions of a call for kernels to inline; None if a function is missing."""
    named = {"MASK": a.mask_program, "SCORE": a.score_program}
    return {
        name: None if text is None else function_of(Program(text), bounds) for name, text in named.items()
    }


def derivatives(a: Arguments, bounds: Bounds) -> dict[str, Callable | bool | None]:
    """Return the Triton functions that differentiate a score function, or None if they are not needed.

    ``NEEDS_SCORE``: the derivative with respect to the score depends on the score.
    """
    program = None if a.score_program is None else Program(a.score_program)
    if program is None:
        return {"DERIVATIVE": None, "GRADIENTS": None, "NEEDS_SCORE": False}
    return {
        "DERIVATIVE": derivative_of(program, bounds),
        "GRADIENTS": gradients_of(program, bounds) if a.learns else None,
        "NEEDS_SCORE": derivative(program).needs_score,
    }
