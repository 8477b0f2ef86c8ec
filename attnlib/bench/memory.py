"""Peak memory of forward and backward over more and more tokens."""

import math
from collections.abc import Iterable, Sequence

from . import cases
from .cases import Case
from .place import Place
from .race import Entry, Failure, attempt, line_up
from .report import Claim, Row, Table
from .speed import Rows

MOST = 1.05
PEERS = ("FA2", "cuDNN", "eager")


def rows(place: Place, tables: Sequence[Table], work: Iterable[Case] = cases.MEMORY, peers=PEERS) -> Rows:
    """MiB beyond q, k, v and the output's gradient; ours also over all that must be held, theirs included."""
    for case in work:
        columns = ("ours", *peers)
        runs, failures = line_up(place, [Entry(name, name, case) for name in columns])
        place.tidy()
        peaks = {name: failures.get(name) or attempt(place.peak, runs[name].action("both")) for name in columns}
        given, made = needed(case)
        cells = {name: x if isinstance(x, Failure) else x / 2**20 for name, x in peaks.items()}
        claim = None
        if not isinstance(peaks["ours"], Failure):
            claim = Claim((given + peaks["ours"]) / (given + made), MOST, most=True)
        yield tables[0], Row(case.name, {**cells, "must be held": made / 2**20}, claim, case.tokens)
        del runs
        place.tidy()


def needed(case: Case) -> tuple[int, int]:
    """Bytes of q, k, v and the output's gradient; of the output, three gradients, and fp32 LSE and delta."""
    queries, keys = case.batch * case.tokens * case.heads, case.batch * case.tokens * case.kv_heads
    q, k, v, out = (math.prod(size) * case.dtype.itemsize for size in (
        (queries, case.dim), (keys, case.dim), (keys, case.value_dim), (queries, case.value_dim),
    ))  # fmt: skip
    return q + k + v + out, out + q + k + v + 2 * 4 * queries
