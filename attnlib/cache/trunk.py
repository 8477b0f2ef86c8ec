"""What neighbours in a step share: first pages, of which each run of neighbours is one sequence to the attention.

Hydragen (Juravsky et al., 2024, arXiv 2402.05099); cascade inference in FlashInfer (Ye et al., 2025, arXiv 2501.01005).
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .book import Request
from .buffer import Buffer, Schedules
from .pages import Holding, PageLedger

SHARED_TOKENS = 1024  # fewer make no run; a guess, not measured on a GPU yet


class Run(NamedTuple):
    """Neighbours in a step: how many rows, and how many first pages all of them share."""

    rows: int
    pages: int


def runs(holdings: Sequence[Holding], whole: Sequence[int], page_size: int) -> list[Run]:
    """Cut the sequences of a step, which no window shortens, into runs of neighbours that share pages, or nothing.

    Only the first ``whole[i]`` pages of sequence ``i`` may be shared. A run grows as long as that saves no fewer reads.
    """
    found: list[Run] = []
    for row, holding in enumerate(holdings):
        if found:
            rows, pages = found[-1]
            common = min(pages, whole[row], common_pages(holdings[row - 1], holding))
            if common * page_size >= SHARED_TOKENS and rows * common >= (rows - 1) * pages:
                found[-1] = Run(rows + 1, common)
                continue
        found.append(Run(1, whole[row]))
    cut: list[Run] = []
    for rows, pages in found:
        if rows == 1:
            before = cut.pop().rows if cut and cut[-1].pages == 0 else 0
            cut.append(Run(before + 1, 0))
        else:
            cut.append(Run(rows, pages))
    return cut


def common_pages(a: Holding, b: Holding) -> int:
    """How many first pages two sequences share. They share all before any, since only the last pages are replaced."""
    least = min(len(a.pages), len(b.pages))
    return bisect_left(range(least), True, key=lambda i: a.pages[i] != b.pages[i])


class Trunk(NamedTuple):
    """What the layers of a step read of its runs, a row for each, with their queries packed; the last rows may have no
    queries and no keys. And where each sequence's own tokens start, after those of its run."""

    table: Tensor
    starts: Tensor
    lengths: Tensor
    cu_seqlens_q: Tensor
    schedules: Schedules
    own_starts: Tensor
    own_schedules: Schedules


class TrunkBuffers:
    """The buffers of up to ``most`` runs, beside the page table of the ledger without a window."""

    def __init__(self, ledger: PageLedger, sequences: Tensor, most: int):
        (rows, columns), device = sequences.shape, sequences.device
        self.table = torch.zeros(most, columns, dtype=torch.int32, device=device)
        self.starts, self.lengths, self.own_starts = (Buffer("i", n, device) for n in (most, most, rows))
        self.cu_seqlens_q, self._leaders = Buffer("i", most + 1, device), Buffer("q", most, device)
        limit = columns * ledger.page_size
        self.schedules, self.own_schedules = (Schedules(n, limit, 0, device) for n in (most, rows))
        self._ledger, self._sequences = ledger, sequences
        self._shared: list[int] = []  # first pages, of each row of the step
        self._found_for: tuple | None = None  # the queries for which that was found

    def update(self, request: Request, *, counted: bool, same_rows: bool) -> None:
        """Find the runs anew, unless the same sequences come with as many queries, and still have what they share.

        ``counted``: the queries are new tokens, which the holdings do not count yet.
        """
        size, counts = self._ledger.page_size, list(request.tokens.values())
        firsts = [h.length if counted else h.length - n for h, n in zip(request.holdings, counts, strict=True)]
        whole = [first // size for first in firsts]  # what is shared comes before all queries, whatever the mask
        if same_rows and self._found_for == (counted, counts) and all(map(int.__ge__, whole, self._shared)):
            return
        self._found_for = None
        holdings = self._ledger.holdings(request.tokens)
        self._show(runs(holdings, whole, size)[: len(self.table)], holdings, counts)
        self._found_for = counted, counts

    def _show(self, found: Sequence[Run], holdings: Sequence[Holding], counts: Sequence[int]) -> None:
        size, none = self._ledger.page_size, [0] * (len(self.table) - len(found))
        starts = [holding.start for holding in holdings]
        rows, queries = (list(accumulate(x, initial=0)) for x in ((run.rows for run in found), counts))
        shared = [run.pages for run in found for _ in range(run.rows)]
        self._shared = shared + [0] * (len(holdings) - len(shared))
        self.own_starts.show(array("i", [max(a, n * size) for a, n in zip(starts, self._shared, strict=True)]))
        self.starts.show(array("i", [starts[row] for row in rows[:-1]] + none))
        self.lengths.show(array("i", [run.pages * size for run in found] + none))
        self.cu_seqlens_q.show(array("i", [queries[row] for row in rows + rows[-1:] * len(none)]))
        leaders = self._leaders.show(array("q", rows[:-1] + none))
        torch.index_select(self._sequences, 0, leaders, out=self.table)
        most = min(len(self.table), len(holdings))
        self.schedules.update(self.starts.tensor[:most], self.lengths.tensor[:most])

    def update_schedules(self, lengths: Tensor) -> None:
        """Share out anew what sequences of these lengths have for themselves."""
        self.own_schedules.update(self.own_starts.tensor[: len(lengths)], lengths)

    def cut(self, rows: int) -> Trunk:
        """The parts of the buffers that steps of so many sequences use."""
        most = min(len(self.table), rows)
        return Trunk(
            self.table[:most],
            self.starts.tensor[:most],
            self.lengths.tensor[:most],
            self.cu_seqlens_q.tensor[: most + 1],
            self.schedules,
            self.own_starts.tensor[:rows],
            self.own_schedules,
        )
