"""The host-side page ledger: who owns which page. Plain Python, without tensors and without a model."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class CacheFullError(RuntimeError):
    """A step, an admission or a fork needs more pages or rows than are free; nothing was changed."""


class Handle:
    """One sequence of a cache; compared by identity, so that another cache's handle is never accepted."""

    __slots__ = ()


class Plan(NamedTuple):
    """What one step reserved: pages to copy before writing, and what to undo."""

    copies: list[tuple[int, int]]


class PageLedger:
    """Pages of one window class: free list, reference counts, and each sequence's pages by absolute index."""

    def __init__(self, pages: int, page_size: int, *, window: int | None = None, rollback: int = 0):
        raise NotImplementedError

    def reserve(self, tokens: Mapping[Handle, int]) -> Plan:
        """Give every sequence the pages its new tokens need, copy-on-write included, or raise and change nothing."""
        raise NotImplementedError

    def commit(self, plan: Plan) -> None:
        """Keep the reservation, advance lengths, and drop pages that the window cannot reach any more."""
        raise NotImplementedError

    def restore(self, plan: Plan) -> None:
        """Undo the reservation."""
        raise NotImplementedError

    def admit(self, handle: Handle, *, padding: int = 0) -> None:
        """Start an empty sequence, whose first ``padding`` tokens will never be visible."""
        raise NotImplementedError

    def fork(self, handle: Handle, child: Handle) -> None:
        """Start ``child`` as a copy of ``handle`` that shares all of its pages."""
        raise NotImplementedError

    def truncate(self, handle: Handle, length: int) -> Sequence[int]:
        """Forget all tokens from ``length`` on; returns the pages that became free."""
        raise NotImplementedError

    def release(self, handle: Handle) -> Sequence[int]:
        """End a sequence; returns the pages that became free."""
        raise NotImplementedError
