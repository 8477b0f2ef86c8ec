"""CPU time from a small call to its last launch, against torch's attention."""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from .cases import SMALL, Case
from .place import Place, host_seconds
from .race import Entry, Failure, attempt, line_up
from .report import Claim, Row, Table
from .speed import Rows

BATCHES = 30
BOUNDS = (("without gradients", "forward", 1.5), ("with gradients", "both", 2.5))


def rows(place: Place, tables: Sequence[Table], case: Case = SMALL, batches: int = BATCHES) -> Rows:
    """Microseconds of a call without gradients, and of a forward with its backward."""
    runs, failures = line_up(place, [Entry(name, name, case) for name in ("ours", "SDPA")])
    for name, what, bound in BOUNDS:
        actions = {column: run.action(what) for column, run in runs.items()}
        with torch.set_grad_enabled(what == "both"):
            taken = attempt(_in_turns, place, actions, batches)
        if isinstance(taken, Failure):
            taken = dict.fromkeys(runs, taken)
        cells = {c: failures.get(c) or taken[c] for c in ("ours", "SDPA")}
        cells = {c: x if isinstance(x, Failure) else x * 1e6 for c, x in cells.items()}
        numbers = not any(isinstance(x, Failure) for x in cells.values())
        claim = Claim(cells["ours"] / cells["SDPA"], bound, most=True) if numbers else None
        yield tables[0], Row(f"{case.name} {name}", cells, claim)


def _in_turns(place: Place, actions: dict[str, Callable], batches: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {column: [] for column in actions}
    for _ in range(batches):
        for column, action in actions.items():
            taken[column].append(host_seconds(action, place.synchronize))
    return {column: median(times) for column, times in taken.items()}
