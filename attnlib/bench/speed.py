"""Fill the speed tables: time implementations of the same attention call, or different calls of attnlib."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import cases
from .cases import Case
from .compare import Cells, Failure, agreeing, attempt, in_turns
from .implementations import implementation
from .peers import present
from .place import Target, host_seconds
from .report import Line, Table
from .watchdog import watched

BATCHES = 30  # CPU time is measured over this many batches of calls

Rows = Iterator[tuple[Table, Line]]


class Column(NamedTuple):
    """An implementation and the case that it runs; if not ``timed``, it only checks the others' results."""

    name: str
    implementation: str
    case: Case
    timed: bool = True


class Run(NamedTuple):
    """An attention implementation, ready to run: the function, its inputs and the gradient of its output."""

    call: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    dout: Tensor
    heads_first: bool

    def action(self, what: str) -> Callable[[], object]:
        """Return the function to time, for "inference", "forward", "backward" or "both".

        "forward" saves tensors for the backward pass; "backward" repeats the backward pass of one forward.
        """
        if what == "inference":
            tensors = [x.detach() for x in self.leaves]
            return lambda: self.call(*tensors)
        if what == "forward":
            return lambda: self.call(*self.leaves)
        if what == "backward":
            out = self.call(*self.leaves)
            return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)
        return lambda: torch.autograd.grad(self.call(*self.leaves), self.leaves, self.dout)

    def results(self, *, gradients: bool = True) -> list[Tensor]:
        """Return the output, and by default also the gradients of q, k and v.

        All have tokens before heads.
        """
        if not gradients:
            out = self.action("inference")()
            return [out.transpose(1, 2) if self.heads_first else out]
        out = self.call(*self.leaves)
        # With torch.compile, a backward pass can be repeated only if the first one retains the graph.
        found = [out.detach(), *torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)]
        return [x.transpose(1, 2) for x in found] if self.heads_first else found


def timed_passes(place: Target, runs: Mapping[str, Run | Failure]) -> dict[str, Cells]:
    """Return the seconds of each run in its forward and in its backward."""
    seconds = {}
    for what in ("forward", "backward"):
        actions = {name: attempt(Run.action, run, what) for name, run in runs.items()}
        seconds[what] = in_turns(actions, place.seconds, place.rounds, place.budget)
    return seconds


def milliseconds(place: Target, tables: Iterable[Table], work: Iterable, timed: Callable) -> Rows:
    """Yield a row in milliseconds for each pass of each case; ``timed(place, case)`` returns its seconds."""
    [table] = tables
    for case in work:
        with watched(f"{table.name}, {case.name}"):
            seconds = timed(place, case)
        place.tidy()
        for what, taken in seconds.items():
            cells = {name: attempt(lambda x: x * 1e3, x) for name, x in taken.items()}
            yield table, Line(f"{case.name}, {what}", cells)


def same_case(case: Case, names: Iterable[str]) -> list[Column]:
    """Return one table column for each implementation, all of which run the same attention call."""
    return [Column(name, name, case) for name in names]


def line_up(place: Target, columns: Sequence[Column], *, gradients: bool = True) -> dict[str, Run | Failure]:
    """Prepare the implementations; one that cannot run, or whose results differ, becomes a Failure.

    Without ``gradients``, only outputs are compared.
    """
    ready: dict[str, Run | Failure] = {}
    for case in dict.fromkeys(column.case for column in columns):
        mine = [column for column in columns if column.case == case]
        layouts = attempt(_layouts, place, case)
        made = {column.name: attempt(_run, column, place, layouts) for column in mine}
        ours = [column.name for column in mine if column.implementation == "ours"]
        ready |= agreeing(made, partial(Run.results, gradients=gradients), ours)
    return ready


def _layouts(place: Target, case: Case) -> dict[bool, list[Tensor]]:
    """Return a case's inputs in two layouts: tokens before heads (False), and heads before tokens (True)."""
    given = case.tensors(place.device)
    layouts = {
        False: given,
        True: [x.transpose(1, 2).contiguous() for x in given] if not case.lengths else given,
    }
    for tensors in layouts.values():
        for x in tensors[:3]:
            x.requires_grad_()
    return layouts


def _run(column: Column, place: Target, layouts: Mapping[bool, list[Tensor]]) -> Run:
    call, heads_first = implementation(column.implementation, column.case, place)
    *leaves, dout = layouts[heads_first]
    return Run(call, tuple(leaves), dout, heads_first)


def compare(place: Target, columns: Sequence[Column], whats: Collection[str]) -> dict[str, Cells]:
    """Time every column in each of ``whats`` (such as "forward" and "backward"); return the seconds.

    A column whose results disagree with those of other columns is not timed. Gradients are compared unless
    only "inference" is timed, because some implementations have no backward.
    """
    ready = line_up(place, columns, gradients=set(whats) != {"inference"})
    timed = [column.name for column in columns if column.timed]
    taken = {}
    for what in whats:
        actions = {name: attempt(Run.action, ready[name], what) for name in timed}
        taken[what] = in_turns(actions, place.seconds, place.rounds, place.budget)
        del actions
    del ready
    place.tidy()
    return taken


def rows(place: Target, tables: Sequence[Table], work: Iterable[Case], peers: Sequence[str]) -> Rows:
    """Compare attnlib with other libraries: one row per table and case, one column per implementation."""
    for case in work:
        columns = same_case(case, ("ours", *present(peers)))
        with watched(f"{tables[0].name}, {case.name}"):
            taken = compare(place, columns, [table.what for table in tables])
        for table in tables:
            cells = _in_units(table, table.what, taken[table.what], columns)
            yield table, Line(case.name, cells, case.tokens if table.growing else None)


def varlen(
    place: Target,
    tables: Sequence[Table],
    work: Iterable[tuple[Case, Case]] = cases.VARLEN,
    check: str = "FA2",
) -> Rows:
    """Compare the speed of packed sequences with that of a dense batch of equally many tokens."""
    for packed, dense in work:
        columns = (
            Column("packed", "ours", packed),
            Column("dense", "ours", dense),
            Column("packed, by sequence", "by sequence", packed, timed=False),
            Column(f"dense, {check}", check, dense, timed=False),
        )
        yield from by_what(place, tables[0], packed.name, columns, ("forward", "backward"))


def window(
    place: Target, tables: Sequence[Table], work=cases.WINDOW, peer: str = "Flex", check: str = "FA2"
) -> Rows:
    """Compare the speed of sliding-window attention with that of full causal attention."""
    near, far = work
    columns = (
        Column("sliding", "ours", near),
        Column("causal", "ours", far),
        Column(f"{peer}, sliding", peer, near),
        Column("eager, sliding", "eager", near, timed=False),
        Column(f"{check}, causal", check, far, timed=False),
    )
    name = f"{near.mask.left + 1} of {near.tokens} keys"
    yield from by_what(place, tables[0], name, columns, ("forward", "backward", "both"))


def grouped(
    place: Target, tables: Sequence[Table], work: Sequence[Case] = cases.GROUPED, check: str = "FA2"
) -> Rows:
    """Compare the speed of grouped-query attention with that of multi-head attention."""
    ours = [Column(case.name, "ours", case) for case in work]
    checks = [Column(f"{case.name}, {check}", check, case, timed=False) for case in work]
    name = f"{work[0].batch} x {work[0].tokens} d{work[0].dim}"
    yield from by_what(place, tables[0], name, (*ours, *checks), ("forward", "backward"))


def overhead(
    place: Target, tables: Sequence[Table], case: Case = cases.SMALL, batches: int = BATCHES
) -> Rows:
    """Measure the CPU time that a small call takes before the last kernel has been launched."""
    place = place._replace(seconds=partial(host_seconds, synchronize=place.synchronize), rounds=batches)
    return by_what(place, tables[0], case.name, same_case(case, ("ours", "SDPA")), ("inference", "both"))


def by_what(place: Target, table: Table, name: str, columns: Sequence[Column], whats: Sequence[str]) -> Rows:
    """Yield a row for each of ``whats``, such as "forward"; columns may run different attention calls."""
    with watched(f"{table.name}, {name}"):
        taken = compare(place, columns, whats)
    for what in whats:
        label = "forward + backward" if what == "both" else what
        yield table, Line(f"{name}, {label}", _in_units(table, what, taken[what], columns))


def _in_units(table: Table, what: str, seconds: Cells, columns: Iterable[Column]) -> Cells:
    """Convert seconds to the unit of a table (ms, us or TFLOP/s); failures stay as they are."""
    flops = {column.name: column.case.flops(what) for column in columns}

    def convert(name: str, taken: float) -> float:
        return (
            flops[name] / taken / 1e12
            if table.unit == "TFLOP/s"
            else taken * {"ms": 1e3, "us": 1e6}[table.unit]
        )

    return {name: attempt(convert, name, taken) for name, taken in seconds.items()}
