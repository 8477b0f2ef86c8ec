"""The page tables of prefix groups (sequences that share their first pages), for layers without a window."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...kv import KVLayout, KVView
from ...rope.rope import Angles
from ..buffer import Buffer, Schedules
from ..pages import Holding, PageAllocator
from ..sequences import Request
from .attend import PrefixRoute
from .groups import PrefixGroup, prefix_groups


class SharedPrefixes(NamedTuple):
    """The cache option that reads shared prefixes once for each of up to ``max_groups`` groups."""

    max_groups: int
    shards: int = 1

    def buffers(self, allocator: PageAllocator, page_table: Tensor) -> "SharedPrefixBuffers":
        """Return the buffers of the groups, for a page allocator without a window."""
        return SharedPrefixBuffers(allocator, page_table, min(self.max_groups, len(page_table)))

    def check_replay(self, request: Request) -> None:
        """Accept every step: a captured graph reads the groups from buffers that each step updates."""

    def check_whole(self, name: str) -> None:
        """Do nothing: save() and load() work, since this process stores all tokens."""


class SharedPrefixStep(NamedTuple):
    """The prefix groups in steps of one shape; the queries of a group are packed into one row.

    Unused rows at the end have no queries and no keys. ``own_starts`` is the index of each sequence's first
    token after the prefix that its group shares.
    """

    table: Tensor
    starts: Tensor
    lengths: Tensor
    cu_seqlens_q: Tensor
    schedules: Schedules
    own_starts: Tensor
    own_schedules: Schedules

    def routed(self, view: KVView) -> KVView:
        """Return the view with a route that reads shared keys and each sequence's own keys separately."""
        heads = view.layout.heads
        tables = {"table": self.table, "starts": self.starts, "lengths": self.lengths}
        queries = {"cu_seqlens_q": self.cu_seqlens_q, "positions": None}
        shared = replace(view, **tables, **queries, schedule=self.schedules.get(heads), check=False)
        own = replace(view, starts=self.own_starts, schedule=self.own_schedules.get(heads), check=False)
        return view.with_route(PrefixRoute(shared, own))

    def appended(
        self, view: KVView, k: Tensor, v: Tensor | None, angles: Angles | None, *, history: int
    ) -> KVView:
        """Return the view unchanged, since appending tokens changes no prefix."""
        return view


class SharedPrefixBuffers:
    """The device buffers of up to ``max_groups`` prefix groups, for a page allocator without a window."""

    is_partial = False

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
        self._shared: list[int] = []  # how many pages each sequence shares with its group
        self._found_for: tuple | None = None  # the query counts for which the groups were found

    def add(self, layout: KVLayout) -> None:
        """Add split schedules for layers of this layout."""
        self.schedules.add(layout)
        self.own_schedules.add(layout)

    def local_slots(self, slots: "array[int]") -> "array[int]":
        """Return the slots unchanged, since this process stores all tokens."""
        return slots

    def update(self, request: Request, *, counted: bool, same_rows: bool) -> None:
        """Find the prefix groups of a step.

        Do nothing if the sequences and query counts are the same as in the last step, and the sequences still
        share the same pages.
        """
        size, counts = self._allocator.page_size, list(request.tokens.values())
        firsts = [
            h.length if counted else h.length - n for h, n in zip(request.holdings, counts, strict=True)
        ]
        full_pages = [first // size for first in firsts]  # only pages before all queries can be shared
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
        """Divide each sequence's tokens from its shared prefix to its entry of ``lengths`` into splits."""
        self.own_schedules.update(self.own_starts.tensor[: len(lengths)], lengths)

    def slices(self, request: Request, *, writing: bool) -> SharedPrefixStep:
        """Return the slices of the buffers that a step with the shape of ``request`` uses."""
        rows = len(request.tokens)
        groups = min(len(self.table), rows)
        return SharedPrefixStep(
            self.table[:groups],
            self.starts.tensor[:groups],
            self.lengths.tensor[:groups],
            self.cu_seqlens_q.tensor[: groups + 1],
            self.schedules,
            self.own_starts.tensor[:rows],
            self.own_schedules,
        )
