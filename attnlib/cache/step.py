"""The device state of a step: fixed buffers that every step updates in place."""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..kv import KVLayout
from .buffer import MAX_PINNED, Buffer, Schedules, Sending
from .options import ReadOptions
from .pages import Holding, PageAllocator, SequenceHandle, StepPlan, Window
from .routes import RouteBuffers, StepRoute
from .sequences import Request, Sequences


class PerStep(NamedTuple):
    """The buffer slices that all layers read in a step; row ``i`` is the step's i-th sequence."""

    lengths: Tensor
    cu_seqlens_q: Tensor | None
    positions: Tensor | None
    split_size: int


class PerWindow(NamedTuple):
    """The buffer slices that layers of one window class read; a step writes its tokens to ``slots``."""

    table: Tensor
    starts: Tensor
    slots: Tensor | None
    schedules: Schedules
    route: StepRoute | None


class TableBuffers:
    """The device buffers of one page allocator: page table, starts, slots, and buffers of a feature."""

    def __init__(
        self,
        allocator: PageAllocator,
        rows: int,
        length: int,
        tokens: int,
        options: ReadOptions,
        device: torch.device,
    ):
        self.allocator = allocator
        columns = -(-length // allocator.page_size)
        self.table: Tensor = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.starts: Buffer = Buffer("i", rows, device)
        self.slots: Buffer = Buffer("q", tokens, device)
        self.schedules: Schedules = Schedules(rows, columns * allocator.page_size, options.split_size, device)
        self.route: RouteBuffers | None = None
        if options.route is not None and allocator.window is None:  # features need pages that a window drops
            self.route = options.route.buffers(allocator, self.table)
        self._entries, self._pages = (Buffer(code, MAX_PINNED, device) for code in "qi")
        self._shown_starts: array | None = None
        self._shown_dropped: list[int] = []

    def schedule(self, layout: KVLayout) -> None:
        """Add split schedules for layers of this layout."""
        if self.route is None or not self.route.is_partial:
            self.schedules.add(layout)
        if self.route is not None:
            self.route.add(layout)

    def update(self, request: Request, shown: Sequence[SequenceHandle], plan: StepPlan | None) -> None:
        """Update the buffers for a step or read; row ``i`` of the table still shows sequence ``shown[i]``."""
        rows = list(request.tokens)
        if rows != shown or self.allocator.window is not None:
            self._update_starts(array("i", [holding.start for holding in self.allocator.holdings(rows)]))
        if plan is not None:
            slots = self.allocator.slots(plan.tokens)
            self.slots.show(slots if self.route is None else self.route.local_slots(slots))
        if rows != shown or (plan is not None and plan.grants) or self._has_dropped(rows):
            self._update_table(rows, shown, plan)
        if self.route is not None:
            self.route.update(request, counted=plan is not None, same_rows=rows == shown)

    def update_schedules(self, lengths: Tensor, max_tokens: int) -> None:
        """Divide sequences into splits; no sequence has more than ``max_tokens`` tokens in the step."""
        window, starts = self.allocator.window, self.starts.tensor[: lengths.shape[0]]
        is_all_read = window is None or self.allocator.first_tokens > 0
        self.schedules.update(starts, lengths, reach=None if is_all_read else window + max_tokens)
        if self.route is not None:
            self.route.update_schedules(lengths)

    def _has_dropped(self, rows: Sequence[SequenceHandle]) -> bool:
        """True if a window with retained first pages has dropped more pages since the last update."""
        if not self.allocator.first_tokens:
            return False
        dropped = [holding.dropped for holding in self.allocator.holdings(rows)]
        return dropped != self._shown_dropped

    def _update_starts(self, starts: array) -> None:
        if starts != self._shown_starts:
            self._shown_starts = None
            self.starts.show(starts)
            self._shown_starts = starts

    def _update_table(
        self, rows: Sequence[SequenceHandle], shown: Sequence[SequenceHandle], plan: StepPlan | None
    ) -> None:
        columns = self.table.shape[1]
        entries, pages = array("q"), array("i")

        def put(row: int, index: int, found: Sequence[int]) -> None:
            entries.extend(range(row * columns + index, row * columns + index + len(found)))
            pages.extend(found)

        for row, (handle, holding) in enumerate(zip(rows, self.allocator.holdings(rows), strict=True)):
            kept, known = len(holding.first), self._shown_dropped[row : row + 1]
            if row >= len(shown) or shown[row] is not handle:
                put(row, holding.dropped, holding.pages)
                put(row, 0, holding.first)
                known = []
            # A tile of keys that begins in a retained page may extend into dropped ones. The table entries of
            # dropped pages must not point to pages of other sequences.
            if kept:
                index = max([kept, *known])
                put(row, index, [holding.first[-1]] * (holding.dropped - index))
        if plan is not None and plan.grants:
            row_of = {handle: row for row, handle in enumerate(rows)}
            entries.extend(row_of[grant.handle] * columns + grant.index for grant in plan.grants)
            pages.extend(grant.page for grant in plan.grants)
        if entries:
            if len(entries) <= MAX_PINNED:
                at, to = self._entries.show(entries), self._pages.show(pages)
            else:
                at = torch.frombuffer(entries, dtype=torch.int64).to(self.table.device)
                to = torch.frombuffer(pages, dtype=torch.int32).to(self.table.device)
            self.table.view(-1).index_copy_(0, at, to)
        self._shown_dropped = [holding.dropped for holding in self.allocator.holdings(rows)]


class StepBuffers:
    """All step buffers of a cache, at fixed addresses, so that a replayed CUDA graph reads the new step."""

    def __init__(self, sequences: Sequences, options: ReadOptions, device: torch.device):
        rows, allocators = sequences.max_sequences, sequences.allocators.values()
        room = min(allocator.total * allocator.page_size for allocator in allocators)
        tokens = min(room, rows * sequences.max_length)  # no step can have more
        self._sending = Sending(device)
        self.lengths: Buffer = Buffer("i", rows, device)
        self.cu_seqlens_q: Buffer = Buffer("i", rows + 1, device)
        self.positions: Buffer = Buffer("i", tokens, device)
        self.windows: list[TableBuffers] = [
            TableBuffers(allocator, rows, sequences.max_length, tokens, options, device)
            for allocator in allocators
        ]
        self._by_window: dict[Window, TableBuffers] = dict(
            zip(sequences.allocators, self.windows, strict=True)
        )
        self._split_size = options.split_size
        self._shown_rows: list[SequenceHandle] = []  # the sequences that the rows of the page tables show
        self._shown_counts: list[int] | None = None

    def schedule(self, layouts: Sequence[KVLayout]) -> None:
        """Add split schedules for layers of these layouts, if the device uses schedules."""
        for layout in layouts:
            self._by_window[layout.window_class].schedule(layout)

    def forget(self) -> None:
        """Mark all rows of the page tables as outdated, so that the next update writes every row."""
        self._shown_rows = []

    def update(self, request: Request, plans: Sequence[StepPlan]) -> None:
        """Write the sequences of a request to the buffers, in order.

        A step passes ``plans``, the reservation of each allocator. Its lengths include the new tokens, and
        the buffers get the new tokens' slots. A read passes no plans; its lengths count stored tokens only.
        """
        rows, counts = list(request.tokens), list(request.tokens.values())
        shown, self._shown_rows = (
            self._shown_rows,
            [],
        )  # if anything below fails, the next update writes every row
        with self._sending:
            self._update_per_step(request, counts, counted=bool(plans))
            for i, window in enumerate(self.windows):
                window.update(request, shown, plans[i] if plans else None)
        max_tokens = 1 << max(0, max(counts, default=0) - 1).bit_length()
        for window in self.windows if rows else ():
            window.update_schedules(self.lengths.tensor[: len(rows)], max_tokens)
        self._shown_rows = rows

    def _update_per_step(self, request: Request, counts: Sequence[int], *, counted: bool) -> None:
        holdings = request.holdings
        if counted:
            self.lengths.show(
                array("i", [holding.length + n for holding, n in zip(holdings, counts, strict=True)])
            )
            self.positions.show(_positions(holdings, counts))
        else:
            self.lengths.show(array("i", [holding.length for holding in holdings]))
        if request.packed and counts != self._shown_counts:
            self._shown_counts = None
            self.cu_seqlens_q.show(array("i", accumulate(counts, initial=0)))
            self._shown_counts = counts

    def slices(self, request: Request, *, writing: bool) -> tuple[PerStep, list[PerWindow]]:
        """Return the buffer slices for steps of this shape: common ones, and others for each allocator."""
        rows, tokens = len(request.tokens), prod(request.shape)
        per_step = PerStep(
            self.lengths.tensor[:rows],
            self.cu_seqlens_q.tensor[: rows + 1] if request.packed else None,
            self.positions.tensor[:tokens].view(request.shape) if writing else None,
            self._split_size,
        )
        windows = [
            PerWindow(
                x.table[:rows],
                x.starts.tensor[:rows],
                x.slots.tensor[:tokens] if writing else None,
                x.schedules,
                None if x.route is None else x.route.slices(request, writing=writing),
            )
            for x in self.windows
        ]
        return per_step, windows


def _positions(holdings: Sequence[Holding], counts: Sequence[int]) -> array:
    """Return rotary positions: indices minus left padding, and 0 for the padding itself."""
    positions = array("i")
    for holding, n in zip(holdings, counts, strict=True):
        first = holding.length - holding.padding
        if n == 1 and first >= 0:
            positions.append(first)
        else:
            positions.extend([0] * min(n, -first))
            positions.extend(range(max(first, 0), first + n))
    return positions
