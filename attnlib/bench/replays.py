"""Calls captured in graphs, in turns: who computes what the others compute, and how long each takes on the device."""

from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from .place import Place
from .race import APART, Failure, attempt, disagreements, in_turns
from .report import Cells

EAGER = "{}, not captured"  # the column of a peer that no graph can hold


class Captured(NamedTuple):
    """A call that is timed in a graph of several of it."""

    call: Callable[[], Tensor]
    place: Place
    calls: int

    def action(self, what: str) -> Callable[[], object]:
        """What is timed as "graph", all the calls at once, or as "eager", one of them."""
        return self.place.capture(self.call, self.calls) if what == "graph" else self.call


@torch.no_grad()
def race(
    place: Place,
    makers: Mapping[str, Callable[[], Callable[[], Tensor]]],
    *,
    calls: int,
    ours: Collection[str] = (),
    judges: Collection[str] = (),
    bound: float = APART,
) -> Cells:
    """Seconds of one call of each that a maker makes ready; whoever is apart from the others is not timed.

    What is ``ours`` is held against those who are not, if there are any, and must be captured: only another is timed
    without a graph, in a column that says so. ``judges`` are there to check others.
    """
    timed = [name for name in makers if name not in judges]
    runs, failures = _line_up(makers, ours, bound)
    racing = {name: Captured(runs[name], place, calls) for name in timed if name in runs}
    taken = in_turns(place, racing, "graph")
    seconds = {name: x if isinstance(x, Failure) else x / calls for name, x in taken.items()}
    lost = {name: run for name, run in racing.items() if isinstance(taken[name], Failure) and name not in ours}
    eager = in_turns(place, lost, "eager")
    del runs, racing, lost
    place.tidy()
    if "Flex" in makers:
        torch._dynamo.reset()  # else it stops compiling after a few shapes
    cells: Cells = {}
    for name in timed:
        if isinstance(eager.get(name), float):
            cells[EAGER.format(name)] = eager[name]
        else:
            cells[name] = failures[name] if name in failures else seconds[name]
    return cells


def _line_up(makers: Mapping[str, Callable], ours: Collection[str], bound: float) -> tuple[dict, dict[str, Failure]]:
    """The calls of those who agree, and why the others do not run, by name."""
    runs: dict[str, Callable[[], Tensor]] = {}
    results: dict[str, list[Tensor]] = {}
    failures: dict[str, Failure] = {}
    for name, make in makers.items():
        run = attempt(make)
        result = run if isinstance(run, Failure) else attempt(run)
        if isinstance(result, Failure):
            failures[name] = result
        else:
            runs[name], results[name] = run, [result]
    for name, failure in apart(results, ours, bound).items():
        failures[name] = failure
        del runs[name]
    return runs, failures


def apart(results: dict[str, list[Tensor]], ours: Collection[str], bound: float) -> dict[str, Failure]:
    """Who differs. Each of ours meets the others alone: ours share their kernels, and so their errors."""
    mine = [name for name in results if name in ours]
    others = {name: result for name, result in results.items() if name not in ours}
    if not others:
        return disagreements(results, bound)
    alone = (name for name in mine if name not in disagreements({name: results[name], **others}, bound))
    trusted = others | {name: results[name] for name in islice(alone, 1)}
    differ = disagreements(trusted, bound)
    failures = {name: differ[name] for name in others if name in differ}
    for name in mine:
        differ = disagreements({name: results[name], **trusted}, bound)
        failures |= {name: differ[name]} if name in differ else {}
    return failures
