"""Which neighbours in a step share their first pages, so that attention reads these once for the whole group.

Hydragen (Juravsky et al., 2024, arXiv 2402.05099); cascade inference in FlashInfer (Ye et al., 2025, arXiv
2501.01005).
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..kv import KVLayout
from .buffer import Buffer, Schedules
from .pages import Holding, PageAllocator
from .sequences import Request

SHARED_TOKENS = 1024  # fewer make no group; a guess, not measured on a GPU yet


class PrefixGroup(NamedTuple):
    """Neighbours in a step: how many rows they are, and how many first pages all of them share."""

    rows: int
    pages: int


def prefix_groups(
    holdings: Sequence[Holding], full_pages: Sequence[int], page_size: int
) -> list[PrefixGroup]:
    """Divide the sequences of a step into groups of neighbours that share first pages, or none.

    No window may have dropped pages of them. Sequence ``i`` shares at most its first ``full_pages[i]`` pages.
    A group grows as long as that saves as many reads or more.
    """
    found: list[PrefixGroup] = []
    for row, holding in enumerate(holdings):
        if found:
            rows, pages = found[-1]
            common = min(pages, full_pages[row], common_pages(holdings[row - 1], holding))
            if common * page_size >= SHARED_TOKENS and rows * common >= (rows - 1) * pages:
                found[-1] = PrefixGroup(rows + 1, common)
                continue
        found.append(PrefixGroup(1, full_pages[row]))
    groups: list[PrefixGroup] = []
    for rows, pages in found:
        if rows == 1:
            before = groups.pop().rows if groups and groups[-1].pages == 0 else 0
            groups.append(PrefixGroup(before + 1, 0))
        else:
            groups.append(PrefixGroup(rows, pages))
    return groups


def common_pages(a: Holding, b: Holding) -> int:
    """How many first pages two sequences share; all they share are first pages, since only last ones are
    replaced.
    """
    shorter = min(len(a.pages), len(b.pages))
    return bisect_left(range(shorter), True, key=lambda i: a.pages[i] != b.pages[i])


class SharedPrefix(NamedTuple):
    """What the layers of a step read of its groups: a row for each, with their queries packed.

    The last rows may have no queries and no keys. ``own_starts`` says where each sequence's own tokens start,
    after those of its group.
    """

    table: Tensor
    starts: Tensor
    lengths: Tensor
    cu_seqlens_q: Tensor
    schedules: Schedules
    own_starts: Tensor
    own_schedules: Schedules


class SharedPrefixBuffers:
    """The buffers of up to ``max_groups`` groups, beside the page table of the allocator without a window."""

    def __init__(self, allocator: PageAllocator, page_table: Tensor, max_groups: int):
        (rows, columns), device = page_table.shape, page_table.device
        self.table: Tensor = torch.zeros(max_groups, columns, dtype=torch.int32, device=device)
        self.starts: Buffer = Buffer("i", max_groups, device)
        self.lengths: Buffer = Buffer("i", max_groups, device)
        self.own_starts: Buffer = Buffer("i", rows, device)
        self.cu_seqlens_q: Buffer = Buffer("i", max_groups + 1, device)
        self._leaders = Buffer("q", max_groups, device)
        limit = columns * allocator.page_size
        self.schedules: Schedules = Schedules(max_groups, limit, 0, device)
        self.own_schedules: Schedules = Schedules(rows, limit, 0, device)
        self._allocator, self._page_table = allocator, page_table
        self._shared: list[int] = []  # first pages, of each row of the step
        self._found_for: tuple | None = None  # the queries for which that was found

    def schedule(self, layout: KVLayout) -> None:
        """Keep schedules for this layout too."""
        self.schedules.add(layout)
        self.own_schedules.add(layout)

    def update(self, request: Request, *, counted: bool, same_rows: bool) -> None:
        """Find the groups anew, unless the same sequences come with as many queries, and still have what they
        share.

        ``counted``: the queries are new tokens, which the holdings do not count yet.
        """
        size, counts = self._allocator.page_size, list(request.tokens.values())
        firsts = [
            h.length if counted else h.length - n for h, n in zip(request.holdings, counts, strict=True)
        ]
        full_pages = [
            first // size for first in firsts
        ]  # what is shared comes before all queries, whatever the mask
        if (
            same_rows
            and self._found_for == (counted, counts)
            and all(map(int.__ge__, full_pages, self._shared))
        ):
            return
        self._found_for = None
        holdings = self._allocator.holdings(request.tokens)
        self._show(prefix_groups(holdings, full_pages, size)[: len(self.table)], holdings, counts)
        self._found_for = counted, counts

    def _show(self, found: Sequence[PrefixGroup], holdings: Sequence[Holding], counts: Sequence[int]) -> None:
        size, unused = self._allocator.page_size, [0] * (len(self.table) - len(found))
        starts = [holding.start for holding in holdings]
        rows, queries = (list(accumulate(x, initial=0)) for x in ((group.rows for group in found), counts))
        shared = [group.pages for group in found for _ in range(group.rows)]
        self._shared = shared + [0] * (len(holdings) - len(shared))
        self.own_starts.show(
            array("i", [max(a, n * size) for a, n in zip(starts, self._shared, strict=True)])
        )
        self.starts.show(array("i", [starts[row] for row in rows[:-1]] + unused))
        self.lengths.show(array("i", [group.pages * size for group in found] + unused))
        self.cu_seqlens_q.show(array("i", [queries[row] for row in rows + rows[-1:] * len(unused)]))
        leaders = self._leaders.show(array("q", rows[:-1] + unused))
        torch.index_select(self._page_table, 0, leaders, out=self.table)
        groups = min(len(self.table), len(holdings))
        self.schedules.update(self.starts.tensor[:groups], self.lengths.tensor[:groups])

    def update_schedules(self, lengths: Tensor) -> None:
        """Schedule the tokens that sequences of these lengths have for themselves."""
        self.own_schedules.update(self.own_starts.tensor[: len(lengths)], lengths)

    def slices(self, rows: int) -> SharedPrefix:
        """The rows of the buffers that steps of so many sequences use."""
        groups = min(len(self.table), rows)
        return SharedPrefix(
            self.table[:groups],
            self.starts.tensor[:groups],
            self.lengths.tensor[:groups],
            self.cu_seqlens_q.tensor[: groups + 1],
            self.schedules,
            self.own_starts.tensor[:rows],
            self.own_schedules,
        )
