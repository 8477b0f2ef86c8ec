"""The interfaces by which features such as shared prefixes change how attention reads a cache."""

from array import array
from typing import Protocol

from torch import Tensor

from ..kv import KVLayout, KVView
from ..rope.rope import Angles
from .pages import PageAllocator
from .sequences import Request


class StepRoute(Protocol):
    """The slices of a feature's device buffers for steps of one shape; they add a route to views."""

    def routed(self, view: KVView) -> KVView:
        """Return a layer's view with a route: the object that tells attention how to read this view."""
        ...

    def appended(
        self, view: KVView, k: Tensor, v: Tensor | None, angles: Angles | None, *, history: int
    ) -> KVView:
        """Return the view after an append of ``k`` and ``v``, given as to :meth:`LayerCache.append`.

        ``history`` is :attr:`LayerCache.history`: 0 if no sequence had stored a token before this step.
        """
        ...


class RouteBuffers(Protocol):
    """The device buffers that a feature adds to the buffers of one page allocator.

    ``is_partial`` is True if this rank stores only some of the tokens. Attention then does not use the
    allocator's own split schedules.
    """

    is_partial: bool

    def add(self, layout: KVLayout) -> None:
        """Add split schedules for layers of this layout."""
        ...

    def local_slots(self, slots: "array[int]") -> "array[int]":
        """Convert global slots of tokens to this rank's slots; -1 for tokens that other ranks store."""
        ...

    def update(self, request: Request, *, counted: bool, same_rows: bool) -> None:
        """Write the sequences of a step to the buffers, after the page table has been updated.

        ``counted`` is True if the step appends tokens, which the stored lengths do not include yet.
        ``same_rows`` is True if the last step had the same sequences in the same order.
        """
        ...

    def update_schedules(self, lengths: Tensor) -> None:
        """Divide the sequences of the step into splits; ``lengths`` are their lengths after the step."""
        ...

    def slices(self, request: Request, *, writing: bool) -> StepRoute:
        """Return the slices of the buffers that a step with the shape of ``request`` uses."""
        ...


class RouteOption(Protocol):
    """A feature chosen when a cache is made; ``shards`` ranks divide the tokens of each page."""

    shards: int

    def buffers(self, allocator: PageAllocator, page_table: Tensor) -> RouteBuffers:
        """Return the feature's buffers for a page allocator without a window."""
        ...

    def check_replay(self, request: Request) -> None:
        """Raise RuntimeError if this step cannot be run by replaying a captured graph."""
        ...

    def check_whole(self, name: str) -> None:
        """Raise NotImplementedError if this rank lacks tokens that the method ``name`` needs."""
        ...
