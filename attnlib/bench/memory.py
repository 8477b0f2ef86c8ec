"""Measure the peak memory of forward and backward passes for growing numbers of tokens."""

import math
from collections.abc import Sequence

from . import cases
from .cases import Case
from .compare import attempt
from .place import Target
from .report import Line, Table
from .speed import Rows, Run, line_up, same_case
from .watchdog import watched


def rows(place: Target, tables: Sequence[Table], work=cases.MEMORY, peers=("FA2", "cuDNN", "eager")) -> Rows:
    """Yield a row per case: the peak memory in MiB that each implementation needs beyond its inputs.

    Inputs are q, k, v and the output's gradient. The last column is what every implementation must allocate.
    """
    for case in work:
        with watched(f"{tables[0].name}, {case.name}"):
            ready = line_up(place, same_case(case, ("ours", *peers)))
            place.tidy()
            peaks = {
                name: attempt(place.peak, attempt(Run.action, run, "both")) for name, run in ready.items()
            }
        peaks["must be held"] = needed(case)
        yield (
            tables[0],
            Line(case.name, {n: attempt(lambda x: x / 2**20, x) for n, x in peaks.items()}, case.tokens),
        )
        del ready
        place.tidy()


def needed(case: Case) -> int:
    """Return the size in bytes of the output, the gradients of q, k and v, and LSE and delta in fp32."""
    queries, keys = case.batch * case.tokens * case.heads, case.batch * case.tokens * case.kv_heads
    rows = ((queries, case.dim), (keys, case.dim), (keys, case.value_dim), (queries, case.value_dim))
    return sum(map(math.prod, rows)) * case.dtype.itemsize + 2 * 4 * queries
