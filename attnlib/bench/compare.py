"""Implementations of one call: who computes what the others compute, and how long each takes, in turns."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import median
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from .place import Target

Result = TypeVar("Result")
Action = Callable[..., object]
# By module, errors of Triton and of FlashAttention-4's compiler, which are of no kind of Python's.
FOREIGN = MappingProxyType({"triton.errors": "TritonError", "cutlass.base_dsl.common": "DSLBaseError"})
APART = 1e-2  # relative norm of an error that is more than bf16's rounding


class Failure(str):
    """Why there is no number."""

    __slots__ = ()


Cells = dict[str, float | Failure]  # by column


def attempt(call: Callable[..., Result], *arguments: object) -> Result | Failure:
    """What ``call(*arguments)`` returns, or the Failure that it ends in; the first Failure among the
    arguments, if any.

    No implementation ends the comparison of the others.
    """
    for x in arguments:
        if isinstance(x, Failure):
            return x
    try:
        return call(*arguments)
    except _failures() as error:
        return Failure(_why(error))


def _failures() -> tuple[type[Exception], ...]:
    """What implementations raise where they cannot run: refusals, and errors of their own or of their
    compilers.
    """
    known = (
        RuntimeError,
        ValueError,
        TypeError,
        AssertionError,
        LookupError,
        AttributeError,
        ImportError,
        OSError,
    )
    return known + tuple(
        getattr(sys.modules[name], error) for name, error in FOREIGN.items() if name in sys.modules
    )


def _why(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    if isinstance(error, torch.OutOfMemoryError):
        return "OOM"
    if isinstance(error, NotImplementedError) or text.startswith(
        ("No available kernel", "No viable backend")
    ):
        return "refuses"
    return f"fails: {type(error).__name__}: {text[:100]}"


def agreeing(
    made: Mapping[str, object], results: Callable, ours: Collection[str] = (), bound: float = APART
) -> dict[str, object]:
    """``made``, with a Failure in place of each whose ``results`` are not those of the one that most agree
    with.

    Ours share kernels, and so errors: they vouch for each other only where nobody else has results.
    """
    found = {name: attempt(results, one) for name, one in made.items()}
    right = {name: x for name, x in found.items() if not isinstance(x, Failure)}
    apart = {a: {b: distance(y, x) for b, y in right.items() if a != b} for a, x in right.items()}
    others = right.keys() - ours
    votes = {
        a: sum(error < bound for b, error in errors.items() if not others or a in others or b in others)
        for a, errors in apart.items()
    }
    judge = max(votes, key=votes.get, default=None)
    for name in right:
        if votes[judge] == 0:
            found[name] = Failure("agrees with nobody")
        elif name != judge and not apart[judge][name] < bound:
            found[name] = Failure(f"differs from {judge} by {apart[judge][name]:.0e}")
    return {name: found[name] if isinstance(found[name], Failure) else one for name, one in made.items()}


def distance(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The worst relative norm of a difference, of the output and of all gradients; NaN if there is any."""
    errors = [(x.float() - y.float()).norm() / y.float().norm() for x, y in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max())


def in_turns(
    actions: Mapping[str, Action | Failure],
    clock: Callable[[Action], float],
    rounds: int,
    budget: float = 0.0,
) -> Cells:
    """Median seconds of each action over rounds in which all take turns, since clocks drift under load.

    There are at least ``rounds`` of them, and enough to fill ``budget`` seconds.
    """
    taken: dict[str, list[float]] = {name: [] for name in actions}
    lost: dict[str, Failure] = {}
    end = time.perf_counter() + budget
    while rounds > 0 or time.perf_counter() < end:
        rounds -= 1
        for name in [name for name in actions if name not in lost]:
            seconds = attempt(clock, actions[name])
            if isinstance(seconds, Failure):
                lost[name] = seconds
            else:
                taken[name].append(seconds)
    return {name: lost[name] if name in lost else median(times) for name, times in taken.items()}


def compare_calls(
    place: Target,
    makers: Mapping[str, Callable[[], Action]],
    *,
    captured: int = 0,
    ours: Collection[str] = (),
    checks: Collection[str] = (),
    bound: float = APART,
) -> Cells:
    """Seconds of one call of each that a maker makes ready, so many captured as one, or if 0 as it comes.

    Those named in ``checks`` are there to check others, and are not timed.
    """
    made = agreeing(
        {name: attempt(make) for name, make in makers.items()}, lambda call: _tensors(call()), ours, bound
    )
    timed = {name: call for name, call in made.items() if name not in checks}
    if captured:
        timed = {name: attempt(place.capture, call, captured) for name, call in timed.items()}
    taken = in_turns(timed, place.seconds, place.rounds, place.budget)
    del made, timed
    place.tidy()
    return {name: attempt(lambda x: x / max(captured, 1), x) for name, x in taken.items()}


def _tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
