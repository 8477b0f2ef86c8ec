"""The page allocator: which sequence owns which page. Plain Python on the host, without tensors."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..internal.signatures import leading_to

# Layers of one window class share a page allocator. The class of a layer is None without a window; otherwise
# it is the window, or (window, first_tokens).
Window = int | None | tuple[int, int]


class CacheFullError(RuntimeError):
    """The cache has too few free pages, or too many sequences already; nothing was changed."""


@leading_to("cache.admit(n) gives them")
class SequenceHandle:
    """One sequence of a cache. Handles are compared by identity, so a cache rejects those of another one."""

    __slots__ = ()

    def __init__(self):  # Dynamo cannot trace a wrapped object.__init__
        pass

    def __repr__(self) -> str:
        return f"SequenceHandle({id(self):#x}, a sequence of a KVCache)"


@dataclass(slots=True)
class Holding:
    """The pages of one sequence.

    Attributes:
        padding: the number of left-padding tokens, which are never visible.
        start: the first token that can still be visible.
        length: the number of stored tokens.
        dropped: the number of leading pages that the window has dropped, or moved to ``first``.
        pages: the pages of the tokens ``[dropped * page_size, length)``. In a step, they also include pages
            for the step's tokens.
        first: the pages of the first tokens, which a window with ``first_tokens`` never drops.
        missing: in a sequence loaded from a file, ``pages`` has no tokens before this one.
    """

    padding: int
    start: int
    length: int = 0
    dropped: int = 0
    pages: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    missing: int = 0


class Grant(NamedTuple):
    """A page granted to a sequence, as the page of its tokens from ``index * page_size`` on.

    ``source`` is the shared page that it replaces (copy-on-write), or None.
    """

    handle: SequenceHandle
    index: int
    page: int
    source: int | None


class StepPlan(NamedTuple):
    """The reservation of one step: its tokens, and the granted pages in order."""

    tokens: Mapping[SequenceHandle, int]
    grants: Sequence[Grant]

    @property
    def copies(self) -> list[tuple[int, int]]:
        """The pages ``(from, to)`` to copy before the step writes."""
        return [(grant.source, grant.page) for grant in self.grants if grant.source is not None]


class PageAllocator:
    """The page allocator of one window class: a free list, reference counts, and the pages of each sequence.

    Only a sole owner writes into a page. A sequence that writes into a shared page gets a copy first; if all
    owners write in one step, one of them keeps the original. No other method may be called between
    ``reserve`` and its ``commit`` or ``restore``.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        window: int | None = None,
        first_tokens: int = 0,
        rollback: int = 0,
    ):
        self.total = pages
        self.page_size = page_size
        self.window = window
        self.first_tokens = first_tokens
        self.rollback = rollback
        self._free = list(reversed(range(pages)))  # a stack: its last page is used next, at first page 0
        self._owners = [0] * pages
        self._holdings: dict[SequenceHandle, Holding] = {}

    @property
    def handles(self) -> list[SequenceHandle]:
        """The live sequences in the order they were admitted."""
        return list(self._holdings)

    @property
    def used(self) -> int:
        """The number of pages in use; a shared page counts once."""
        return self.total - len(self._free)

    def holding(self, handle: SequenceHandle) -> Holding:
        """Return the pages, length and padding of a sequence; the caller must not change the result.

        Raises:
            ValueError: the handle was released, or belongs to another cache.
            TypeError: ``handle`` is not a SequenceHandle.
        """
        if not isinstance(handle, SequenceHandle):
            raise TypeError(
                f"handle: expected a SequenceHandle from admit() or fork(), got {type(handle).__name__}"
            )
        holding = self._holdings.get(handle)
        if holding is None:
            raise ValueError(
                "handle: not a live sequence of this cache; it was released, or belongs to another cache"
            )
        return holding

    def holdings(self, handles: Iterable[SequenceHandle]) -> list[Holding]:
        """Return the pages, lengths and padding of live sequences; the caller must not change them."""
        return [self._holdings[handle] for handle in handles]

    def reserve(self, tokens: Mapping[SequenceHandle, int]) -> StepPlan:
        """Reserve the pages that a step's tokens need, including copies of shared pages.

        Raises:
            CacheFullError: too few pages are free; nothing was changed.
        """
        needs = self._needs(tokens)
        if len(needs) > len(self._free):
            raise CacheFullError(self._full(len(needs)))
        grants = [Grant(handle, index, self._free.pop(), source) for handle, index, source in needs]
        for handle, index, page, source in grants:
            holding = self._holdings[handle]
            self._owners[page] = 1
            if source is None:
                holding.pages.append(page)
            else:
                self._owners[source] -= 1
                holding.pages[index - holding.dropped] = page
        return StepPlan(tokens, grants)

    def _needs(self, tokens: Mapping[SequenceHandle, int]) -> list[tuple[SequenceHandle, int, int | None]]:
        """Return the needed pages as ``(handle, index, source)``: a :class:`Grant` without ``page``."""
        size, needs = self.page_size, []
        in_place = self._writers_in_place(tokens)
        for handle, n in tokens.items():
            if n == 0:
                continue
            holding = self._holdings[handle]
            end = holding.dropped + len(holding.pages)
            if holding.length % size:  # the step writes into the partial last page
                page = holding.pages[-1]
                if self._owners[page] > 1 and in_place.get(page) is not handle:
                    needs.append((handle, end - 1, page))
            if holding.length + n > end * size:
                needs.extend((handle, index, None) for index in range(end, -(-(holding.length + n) // size)))
        return needs

    def _writers_in_place(self, tokens: Mapping[SequenceHandle, int]) -> dict[int, SequenceHandle]:
        """For each shared page that all of its owners write to, return the owner that keeps the original.

        This owner is the longest sequence. It writes beyond the tokens of all other owners, so the page can
        be shared again after a failed step.
        """
        writers: dict[int, list[SequenceHandle]] = {}
        for handle, n in tokens.items():
            holding = self._holdings[handle]
            if n and holding.length % self.page_size and self._owners[holding.pages[-1]] > 1:
                writers.setdefault(holding.pages[-1], []).append(handle)
        return {
            page: max(reversed(handles), key=lambda handle: self._holdings[handle].length)
            for page, handles in writers.items()
            if len(handles) == self._owners[page]
        }

    def _full(self, need: int) -> str:
        pages, free = f"{need} page{'s' if need > 1 else ''}", len(self._free)
        kind = f"page_size={self.page_size}" + (f", window={self.window}" if self.window else "")
        parts = ", or give a long prompt in several steps, which a window lets go of" if self.window else ""
        return (
            f"the step needs {pages} and {free} {'is' if free == 1 else 'are'} free ({kind}); "
            f"release() a sequence or make the cache larger{parts}"
        )

    def slots(self, tokens: Mapping[SequenceHandle, int]) -> "array[int]":
        """Return where to write the reserved tokens: a slot ``page * page_size + offset`` for each."""
        size, slots = self.page_size, array("q")
        for handle, n in tokens.items():
            holding = self._holdings[handle]
            first = holding.length
            if n == 1:  # in decoding, this takes half the time of the general code below
                slots.append(holding.pages[first // size - holding.dropped] * size + first % size)
                continue
            stop = first + n
            while first < stop:
                index, offset = divmod(first, size)
                slot = holding.pages[index - holding.dropped] * size + offset
                count = min(size - offset, stop - first)
                slots.extend(range(slot, slot + count))
                first += count
        return slots

    def commit(self, plan: StepPlan) -> Sequence[int]:
        """Make the reservation permanent, advance lengths, and drop pages that the window no longer reaches.

        Return the pages that became free.
        """
        freed: list[int] = []
        for handle, n in plan.tokens.items():
            holding = self._holdings[handle]
            holding.length += n
            if self.window is not None:
                first_visible = max(0, holding.length - self.window + 1 - self.rollback)
                count = first_visible // self.page_size - holding.dropped
                if count > 0:
                    kept = min(count, max(0, -(-self.first_tokens // self.page_size) - holding.dropped))
                    holding.first += holding.pages[:kept]
                    freed += self._disown(holding.pages[kept:count])
                    del holding.pages[:count]
                    holding.dropped += count
                    if not self.first_tokens:
                        holding.start = self._from(holding)
        return freed

    def _from(self, holding: Holding) -> int:
        """Return the first token that the window retains."""
        return max(holding.padding, holding.dropped * self.page_size, holding.missing)

    def restore(self, plan: StepPlan) -> Sequence[int]:
        """Undo the reservation, and return the pages that became free."""
        for handle, index, page, source in reversed(plan.grants):
            holding = self._holdings[handle]
            self._owners[page] = 0
            self._free.append(page)
            if source is None:
                holding.pages.pop()
            else:
                self._owners[source] += 1
                holding.pages[index - holding.dropped] = source
        return [grant.page for grant in plan.grants]

    def admit(self, handle: SequenceHandle, *, padding: int = 0) -> None:
        """Start an empty sequence; its first ``padding`` tokens will never be visible."""
        self._holdings[handle] = Holding(padding, padding)

    def fork(self, handle: SequenceHandle, child: SequenceHandle) -> None:
        """Start ``child`` as a copy of ``handle`` that shares all of its pages."""
        of = self.holding(handle)
        for page in (*of.first, *of.pages):
            self._owners[page] += 1
        self._holdings[child] = replace(of, pages=list(of.pages), first=list(of.first))

    def shortest(self, handle: SequenceHandle) -> int:
        """Return the shortest length at which the pages still hold every key in the next query's window."""
        holding = self.holding(handle)
        first = max(holding.dropped * self.page_size, holding.missing)
        return first + self.window - 1 if first else 0

    def check_truncate(self, handle: SequenceHandle, length: int) -> None:
        """Raise as :meth:`truncate` would, without changing anything."""
        holding, shortest = self.holding(handle), self.shortest(handle)
        if not 0 <= length <= holding.length:
            raise ValueError(
                f"length: expected 0 to {holding.length}, what the sequence has stored, got {length}"
            )
        if length < shortest:
            raise RuntimeError(
                f"length: the layers of window={self.window} keep this sequence from {self._from(holding)} "
                f"on, so it can be truncated to {shortest} at least, got {length}; construct the cache with "
                "a larger rollback="
            )

    def check_read(self, tokens: Mapping[SequenceHandle, int]) -> None:
        """Check that the window has dropped no key that the queries, counted by ``tokens``, can see.

        Raises:
            RuntimeError: a key was dropped; the message says how many queries are possible.
        """
        for handle, n in tokens.items():
            holding, shortest = self.holding(handle), self.shortest(handle)
            if shortest and n and holding.length - n < shortest:
                raise RuntimeError(
                    f"tokens: the layers of window={self.window} keep this sequence from "
                    f"{self._from(holding)} on, so its last {max(0, holding.length - shortest)} tokens can "
                    f"be queries again, got {n}; construct the cache with a larger rollback="
                )

    def truncate(self, handle: SequenceHandle, length: int) -> Sequence[int]:
        """Forget all tokens from ``length`` on, and return the pages that became free.

        Raises:
            ValueError: ``length`` is negative or more than is stored.
            RuntimeError: the window has dropped keys that a sequence of this length still needs.
        """
        self.check_truncate(handle, length)
        holding = self._holdings[handle]
        keep = -(-length // self.page_size) - holding.dropped
        freed = self._disown(holding.pages[keep:])
        del holding.pages[keep:]
        holding.length = length
        return freed

    def release(self, handle: SequenceHandle) -> Sequence[int]:
        """End a sequence, and return the pages that became free."""
        holding = self.holding(handle)
        freed = self._disown((*holding.first, *holding.pages))
        del self._holdings[handle]
        return freed

    def _disown(self, pages: Iterable[int]) -> list[int]:
        freed = []
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                freed.append(page)
        self._free += reversed(freed)
        return freed
