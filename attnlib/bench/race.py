"""Contenders in turns: who computes what the others compute, and how long each takes."""

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .cases import Case
from .peers import contender
from .place import Place

APART = 1e-2  # relative norm of an error that is more than bf16's rounding


class Failure(str):
    """Why there is no number."""

    __slots__ = ()


class Entry(NamedTuple):
    """A column of a row: a contender and the case that it computes. Who is not ``timed`` is there to check others."""

    column: str
    contender: str
    case: Case
    timed: bool = True


class Timed(Protocol):
    """Whoever can be timed at something."""

    def action(self, what: str) -> Callable[[], object]:
        """What is called."""


class Run(NamedTuple):
    """A contender on tensors of its own, and on the gradient of its output."""

    call: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    dout: Tensor
    heads_first: bool

    def action(self, what: str) -> Callable[[], object]:
        """What is timed as "forward", in which autograd keeps what it needs, "backward" of such a one, or "both"."""
        if what == "forward":
            return lambda: self.call(*self.leaves)
        if what == "backward":
            out = self.call(*self.leaves)
            return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)
        return lambda: torch.autograd.grad(self.call(*self.leaves), self.leaves, self.dout)

    def results(self) -> list[Tensor]:
        """The output and the gradients of q, k and v, tokens before heads."""
        out = self.call(*self.leaves)
        # retain_graph, because torch.compile makes a backward that can be repeated only if the first is to be.
        found = [out.detach(), *torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)]
        return [x.transpose(1, 2) for x in found] if self.heads_first else found


def attempt(call: Callable, *arguments):
    """What ``call(*arguments)`` returns, or the Failure that it ends in: no contender ends the others' race."""
    try:
        return call(*arguments)
    except _failures() as error:
        return Failure(_why(error))


def _failures() -> tuple[type[Exception], ...]:
    """What contenders were seen to raise where they cannot run: refusals, their own errors, Triton's, Inductor's."""
    known = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, ImportError, OSError)
    if find_spec("triton") is None:
        return known
    from triton.errors import TritonError

    return (*known, TritonError)


def _why(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    if isinstance(error, torch.OutOfMemoryError):
        return "OOM"
    if isinstance(error, NotImplementedError) or text.startswith(("No available kernel", "No viable backend")):
        return "refuses"
    return f"fails: {type(error).__name__}: {text[:100]}"


def race(place: Place, entries: Iterable[Entry], whats: Iterable[str]) -> dict[str, dict[str, float | Failure]]:
    """For each of ``whats`` the seconds of every timed column; whoever is apart from the others is not timed."""
    entries = tuple(entries)
    runs, failures = line_up(place, entries)
    timed = [entry.column for entry in entries if entry.timed]
    racing = {column: runs[column] for column in timed if column in runs}
    taken = {}
    for what in whats:
        seconds = in_turns(place, racing, what)
        taken[what] = {column: failures[column] if column in failures else seconds[column] for column in timed}
    del runs, racing
    place.tidy()
    if any(entry.contender == "Flex" for entry in entries):
        torch._dynamo.reset()  # else it stops compiling after a few shapes
    return taken


def line_up(place: Place, entries: Iterable[Entry]) -> tuple[dict[str, Run], dict[str, Failure]]:
    """Whoever agrees with others on its case, and why the others do not run, by column."""
    entries = tuple(entries)
    runs: dict[str, Run] = {}
    failures: dict[str, Failure] = {}
    for work in dict.fromkeys(entry.case for entry in entries):
        mine = [entry for entry in entries if entry.case == work]
        ready = attempt(_get_ready, place, work, mine)
        if isinstance(ready, Failure):
            failures |= {entry.column: ready for entry in mine}
            continue
        results = {}
        for column, run in ready.items():
            result = run if isinstance(run, Failure) else attempt(run.results)
            if isinstance(result, Failure):
                failures[column] = result
                place.tidy()
            else:
                runs[column], results[column] = run, result
        for column, failure in disagreements(results).items():
            failures[column] = failure
            del runs[column]
    return runs, failures


def _get_ready(place: Place, work: Case, entries: Iterable[Entry]) -> dict[str, Run | Failure]:
    """The contenders of one case, on the same numbers; those of one layout share its tensors."""
    given = work.tensors(place.device)
    layouts = {False: given, True: [x.transpose(1, 2).contiguous() for x in given] if not work.lengths else given}
    for tensors in layouts.values():
        for x in tensors[:3]:
            x.requires_grad_()

    def ready(name: str) -> Run:
        call, heads_first = contender(name, work, place)
        *leaves, dout = layouts[heads_first]
        return Run(call, tuple(leaves), dout, heads_first)

    return {entry.column: attempt(ready, entry.contender) for entry in entries}


def disagreements(results: dict[str, list[Tensor]], bound: float = APART) -> dict[str, Failure]:
    """Who differs from the one that most agree with; all, where no two agree."""
    apart = {a: {b: _distance(y, x) for b, y in results.items() if a != b} for a, x in results.items()}
    agree = {a: sum(error < bound for error in others.values()) for a, others in apart.items()}
    judge = max(agree, key=agree.get, default=None)
    if judge is None or agree[judge] == 0:
        return dict.fromkeys(results, Failure("agrees with nobody"))
    differ = {column: error for column, error in apart[judge].items() if not error < bound}
    return {column: Failure(f"differs from {judge} by {error:.0e}") for column, error in differ.items()}


def _distance(given: list[Tensor], right: list[Tensor]) -> float:
    """The worst relative norm of an error, of the output and of all gradients; NaN if there is any."""
    errors = [(x.float() - y.float()).norm() / y.float().norm() for x, y in zip(given, right, strict=True)]
    return float(torch.stack(errors).max())


def in_turns(place: Place, runs: Mapping[str, Timed], what: str) -> dict[str, float | Failure]:
    """Median seconds of each run over rounds in which all take turns: clocks drift under load."""
    outcomes = {column: attempt(run.action, what) for column, run in runs.items()}
    taken: dict[str, list[float]] = {column: [] for column in runs}
    for _ in range(place.rounds):
        for column, action in outcomes.items():
            if isinstance(action, Failure):
                continue
            seconds = attempt(place.seconds, action)
            if isinstance(seconds, Failure):
                outcomes[column] = seconds
            else:
                taken[column].append(seconds)
    return {c: outcome if isinstance(outcome, Failure) else median(taken[c]) for c, outcome in outcomes.items()}
