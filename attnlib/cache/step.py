"""What the device knows of a step: fixed buffers that every step updates in place."""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..kv import KVLayout
from .book import Book, Request
from .buffer import PINNED, Buffer, Schedules, Sending
from .pages import Handle, Holding, PageLedger, Plan
from .trunk import Trunk, TrunkBuffers


class Shared(NamedTuple):
    """What all layers of a step read: row ``i`` is the step's i-th sequence."""

    lengths: Tensor
    cu_seqlens_q: Tensor | None
    positions: Tensor | None
    split_size: int


class Sharing(NamedTuple):
    """How the work of a step is shared out: runs of neighbours that are read as one at most, and a split size if bits
    must not depend on the batch, else 0."""

    prefixes: int
    split_size: int


class PerWindow(NamedTuple):
    """What the layers of one window read; slots say where a step's tokens go; the trunk is there where runs are."""

    table: Tensor
    starts: Tensor
    slots: Tensor | None
    schedules: Schedules
    trunk: Trunk | None


class TableBuffers:
    """The part of the buffers that follows one ledger: its page table, starts and slots, and its trunk if any."""

    def __init__(
        self, ledger: PageLedger, rows: int, columns: int, tokens: int, sharing: Sharing, device: torch.device
    ):
        self.ledger = ledger
        self.table = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.starts = Buffer("i", rows, device)
        self.slots = Buffer("q", tokens, device)
        self.schedules = Schedules(rows, columns * ledger.page_size, sharing.split_size, device)
        self.trunk: TrunkBuffers | None = None
        if sharing.prefixes and ledger.window is None:  # a window drops the first pages, and hides them
            self.trunk = TrunkBuffers(ledger, self.table, min(sharing.prefixes, rows))
        self._entries, self._pages = (Buffer(code, PINNED, device) for code in "qi")
        self._shown_starts: array | None = None

    def schedule(self, layout: KVLayout) -> None:
        """Keep schedules for this layout too."""
        trunk = self.trunk
        for schedules in (self.schedules, *((trunk.schedules, trunk.own_schedules) if trunk else ())):
            schedules.add(layout)

    def update(self, request: Request, known: Sequence[Handle], plan: Plan | None) -> None:
        """Show the ledger's pages, when row ``i`` showed ``known[i]`` so far."""
        rows = list(request.tokens)
        if rows != known or self.ledger.window is not None:
            self._update_starts(array("i", [holding.start for holding in self.ledger.holdings(rows)]))
        if plan is not None:
            self.slots.show(self.ledger.slots(plan.tokens))
        if rows != known or (plan is not None and plan.grants):
            self._update_table(rows, known, plan)
        if self.trunk is not None:
            self.trunk.update(request, counted=plan is not None, same_rows=rows == known)

    def update_schedules(self, lengths: Tensor, most: int) -> None:
        """Share out these lengths anew, for steps of at most ``most`` tokens for each sequence."""
        window, starts = self.ledger.window, self.starts.tensor[: lengths.shape[0]]
        self.schedules.update(starts, lengths, reach=None if window is None else window + most)
        if self.trunk is not None:
            self.trunk.update_schedules(lengths)

    def _update_starts(self, starts: array) -> None:
        if starts != self._shown_starts:
            self._shown_starts = None
            self.starts.show(starts)
            self._shown_starts = starts

    def _update_table(self, rows: Sequence[Handle], known: Sequence[Handle], plan: Plan | None) -> None:
        columns = self.table.shape[1]
        entries, pages = array("q"), array("i")
        for row, (handle, holding) in enumerate(zip(rows, self.ledger.holdings(rows), strict=True)):
            if row >= len(known) or known[row] is not handle:
                first = row * columns + holding.dropped
                entries.extend(range(first, first + len(holding.pages)))
                pages.extend(holding.pages)
        if plan is not None and plan.grants:
            row_of = {handle: row for row, handle in enumerate(rows)}
            entries.extend(row_of[grant.handle] * columns + grant.index for grant in plan.grants)
            pages.extend(grant.page for grant in plan.grants)
        if entries:
            if len(entries) <= PINNED:
                at, to = self._entries.show(entries), self._pages.show(pages)
            else:
                given = torch.frombuffer(entries, dtype=torch.int64), torch.frombuffer(pages, dtype=torch.int32)
                at, to = (x.to(self.table.device) for x in given)
            self.table.view(-1).index_copy_(0, at, to)


class StepBuffers:
    """All buffers of a cache. They are allocated once, so that a captured graph finds every later step in them."""

    def __init__(self, book: Book, page_size: int, sharing: Sharing, device: torch.device):
        rows, ledgers = book.max_sequences, book.ledgers.values()
        tokens = min(min(ledger.total for ledger in ledgers) * page_size, rows * book.max_length)  # of any one step
        self._sending = Sending(device)
        self.lengths = Buffer("i", rows, device)
        self.cu_seqlens_q = Buffer("i", rows + 1, device)
        self.positions = Buffer("i", tokens, device)
        columns = -(-book.max_length // page_size)
        self.windows = [TableBuffers(ledger, rows, columns, tokens, sharing, device) for ledger in ledgers]
        self._split_size = sharing.split_size
        self._known: list[Handle] = []  # the sequences that the table rows show
        self._shown_counts: list[int] | None = None

    def schedule(self, layouts: Sequence[KVLayout]) -> None:
        """Keep schedules for these layouts too, where their device has a use for them."""
        for layout in layouts:
            next(x for x in self.windows if x.ledger.window == layout.window).schedule(layout)

    def forget(self) -> None:
        """Distrust what the tables show, so that the next update writes them whole."""
        self._known = []

    def update(self, request: Request, plans: Sequence[Plan]) -> None:
        """Show these sequences in their order. With plans, one for each ledger, their tokens are counted into the
        lengths and get slots; without, the sequences are shown as they are."""
        rows, counts = list(request.tokens), list(request.tokens.values())
        known, self._known = self._known, []  # whatever fails below, the next update starts over
        with self._sending:
            self._update_shared(request, counts, counted=bool(plans))
            for i, window in enumerate(self.windows):
                window.update(request, known, plans[i] if plans else None)
        most = 1 << max(0, max(counts, default=0) - 1).bit_length()
        for window in self.windows if rows else ():
            window.update_schedules(self.lengths.tensor[: len(rows)], most)
        self._known = rows

    def _update_shared(self, request: Request, counts: Sequence[int], *, counted: bool) -> None:
        holdings = request.holdings
        if counted:
            self.lengths.show(array("i", [holding.length + n for holding, n in zip(holdings, counts, strict=True)]))
            self.positions.show(_positions(holdings, counts))
        else:
            self.lengths.show(array("i", [holding.length for holding in holdings]))
        if request.packed and counts != self._shown_counts:
            self._shown_counts = None
            self.cu_seqlens_q.show(array("i", accumulate(counts, initial=0)))
            self._shown_counts = counts

    def cut(self, request: Request, *, writing: bool) -> tuple[Shared, list[PerWindow]]:
        """The parts of the buffers that steps of this shape use, and those of each ledger."""
        rows, tokens = len(request.tokens), prod(request.shape)
        shared = Shared(
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
                x.trunk and x.trunk.cut(rows),
            )
            for x in self.windows
        ]
        return shared, windows


def _positions(holdings: Sequence[Holding], counts: Sequence[int]) -> array:
    """Rotary positions: the index in the sequence minus left padding, and 0 for the padding itself."""
    positions = array("i")
    for holding, n in zip(holdings, counts, strict=True):
        first = holding.length - holding.padding
        if n == 1 and first >= 0:
            positions.append(first)
        else:
            positions.extend([0] * min(n, -first))
            positions.extend(range(max(first, 0), first + n))
    return positions
