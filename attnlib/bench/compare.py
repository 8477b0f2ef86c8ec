"""Compare implementations of the same attention call: check that their results agree, then time them."""

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
# Compiler errors of Triton and FlashAttention-4, by module. They inherit from no other type in `_failures`.
FOREIGN = MappingProxyType({"triton.errors": "TritonError", "cutlass.base_dsl.common": "DSLBaseError"})
APART = 1e-2  # two bf16 results disagree if their relative difference exceeds this


class Failure(str):
    """The reason why a cell of a table has no number."""

    __slots__ = ()


Cells = dict[str, float | Failure]  # the cells of a row, by column


def attempt(call: Callable[..., Result], *arguments: object) -> Result | Failure:
    """Return the result of ``call(*arguments)``, or a Failure if it raises, so that other calls go on.

    If an argument is a Failure already, that Failure is returned and nothing is called.
    """
    for x in arguments:
        if isinstance(x, Failure):
            return x
    try:
        return call(*arguments)
    except _failures() as error:
        return Failure(_why(error))


def _failures() -> tuple[type[Exception], ...]:
    """Return the exception types that mean "this implementation cannot run here", such as compiler errors."""
    return (
        RuntimeError,
        ValueError,
        TypeError,
        AssertionError,
        LookupError,
        AttributeError,
        ImportError,
        OSError,
        *(getattr(sys.modules[name], error) for name, error in FOREIGN.items() if name in sys.modules),
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
    """Replace each implementation whose results disagree with the majority by a Failure; return the dict.

    ``results`` computes the results of an entry of ``made``. The reference is the entry that most other
    entries agree with. Entries named in ``ours`` share kernels and therefore errors, so agreement among them
    counts only if no other implementation has results.
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
    """Return the largest relative error of several tensors, such as an output and its gradients, or NaN."""
    errors = [(x.float() - y.float()).norm() / y.float().norm() for x, y in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max())


def in_turns(
    actions: Mapping[str, Action | Failure],
    clock: Callable[[Action], float],
    rounds: int,
    budget: float = 0.0,
) -> Cells:
    """Time the actions in turns, because GPU clocks drift under load; return the median seconds of each.

    There are at least ``rounds`` rounds, and enough to fill ``budget`` seconds.
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
    """Time one call by several implementations; return the seconds of each whose results agree.

    ``makers`` maps the name of an implementation to a function that prepares its call. If ``captured`` is not
    0, that many calls are captured and replayed as one graph; otherwise calls run eagerly. Implementations in
    ``checks`` only serve to check results and are not timed.
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
