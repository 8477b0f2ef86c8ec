"""The interfaces by which features such as shared prefixes change how attention reads a cache."""

from array import array
from typing import Protocol

from torch import Tensor

from ..kv import KVLayout, KVView
from ..rope.rope import Angles
from .pages import PageAllocator
from .sequences import Request


class StepRoute(Protocol):
    """The slices of a feature's buffers that steps of one shape use."""

    def routed(self, view: KVView) -> KVView:
        """Return the view of one layer with its route."""
        ...

    def appended(
        self, view: KVView, k: Tensor, v: Tensor | None, angles: Angles | None, *, history: int
    ) -> KVView:
        """Return the view after an append of ``k`` and ``v``, given as to :meth:`LayerCache.append`.

        ``history`` is that of the layer: 0 if no sequence had stored a token before this step.
        """
        ...


class RouteBuffers(Protocol):
    """The buffers that a feature keeps beside those of one page allocator.

    ``is_partial``: this rank stores only some of the tokens, so that nothing reads the allocator's own
    schedules.
    """

    is_partial: bool

    def add(self, layout: KVLayout) -> None:
        """Keep schedules for this layout too."""
        ...

    def local_slots(self, slots: "array[int]") -> "array[int]":
        """Return where this rank stores the tokens of these slots: -1 for those that it does not store."""
        ...

    def update(self, request: Request, *, counted: bool, same_rows: bool) -> None:
        """Show the sequences of a step, after the page table shows them.

        ``counted``: the step appends tokens, which the holdings do not count yet. ``same_rows``: the last
        step had the same sequences in the same order.
        """
        ...

    def update_schedules(self, lengths: Tensor) -> None:
        """Schedule the sequences that are shown, which have these ``lengths`` after the step."""
        ...

    def slices(self, request: Request, *, writing: bool) -> StepRoute:
        """Return the slices that steps of this shape use."""
        ...


class RouteOption(Protocol):
    """The choice of a feature when a cache is made. ``shards``: how many ranks divide a page's tokens."""

    shards: int

    def buffers(self, allocator: PageAllocator, page_table: Tensor) -> RouteBuffers:
        """Return the buffers beside those of an allocator without a window."""
        ...

    def check_replay(self, request: Request) -> None:
        """Raise RuntimeError if a captured graph may not replay this step."""
        ...

    def check_whole(self, name: str) -> None:
        """Raise NotImplementedError if this rank lacks tokens that the method ``name`` needs."""
        ...
