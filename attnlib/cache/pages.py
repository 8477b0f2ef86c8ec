"""The page allocator: who owns which page. Plain Python on the host, without tensors and without a model."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..internal.signatures import leading_to

# What layers have in common that share pages: their window, None without, and with it the first tokens that
# are kept.
Window = int | None | tuple[int, int]


class CacheFullError(RuntimeError):
    """A step, an admission or a fork needs more pages or rows than are free; nothing was changed."""


@leading_to("cache.admit(n) gives them")
class Handle:
    """One sequence of a cache; compared by identity, so that another cache's handle is never accepted."""

    __slots__ = ()

    def __init__(self):  # its own, since Dynamo cannot trace a wrapped object.__init__
        pass

    def __repr__(self) -> str:
        return f"Handle({id(self):#x}, a sequence of a KVCache)"


@dataclass(slots=True)
class Holding:
    """What one sequence holds: its pages from absolute page ``dropped`` on, and ``length`` stored tokens.

    The first ``padding`` tokens are never visible, and ``start`` is the first token that still can be.
    Between steps the pages are exactly those of the tokens ``[dropped * page_size, length)``; and before the
    dropped ones, in ``first``, those of tokens that a window keeps for ever. Of a sequence that a file gave,
    tokens before ``missing`` are not in these pages.
    """

    padding: int
    start: int
    length: int = 0
    dropped: int = 0
    pages: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    missing: int = 0


class Grant(NamedTuple):
    """A page given to a sequence at an absolute page index; ``source`` is the shared page that it replaces,
    if any.
    """

    handle: Handle
    index: int
    page: int
    source: int | None


class StepPlan(NamedTuple):
    """What one step reserved: its tokens, and the pages given for them in order."""

    tokens: Mapping[Handle, int]
    grants: Sequence[Grant]

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Pages ``(from, to)`` to copy before anything is written."""
        return [(grant.source, grant.page) for grant in self.grants if grant.source is not None]


class PageAllocator:
    """Pages of one window class: free list, reference counts, and each sequence's pages by absolute index.

    The only owner of a page writes into it. A sequence that is to write into a shared page gets a copy of it;
    where all owners are to write, one of them keeps the page itself. Between ``reserve`` and ``commit`` or
    ``restore`` nothing else may be called.
    """

    def __init__(
        self, pages: int, page_size: int, *, window: int | None = None, keep_first: int = 0, rollback: int = 0
    ):
        self.total = pages
        self.page_size = page_size
        self.window = window
        self.keep_first = keep_first
        self.rollback = rollback
        self._free = list(
            reversed(range(pages))
        )  # a stack: low pages first, and the last freed is the next given
        self._owners = [0] * pages
        self._holdings: dict[Handle, Holding] = {}

    @property
    def handles(self) -> list[Handle]:
        """Live sequences in the order they started."""
        return list(self._holdings)

    @property
    def used(self) -> int:
        """How many pages some sequence holds, a shared page once."""
        return self.total - len(self._free)

    def holding(self, handle: Handle) -> Holding:
        """What ``handle`` holds; for reading.

        Raises:
            ValueError: the handle was released, or belongs to another cache.
            TypeError: it is no handle at all.
        """
        if not isinstance(handle, Handle):
            raise TypeError(f"handle: expected a Handle from admit() or fork(), got {type(handle).__name__}")
        holding = self._holdings.get(handle)
        if holding is None:
            raise ValueError(
                "handle: not a live sequence of this cache; it was released, or belongs to another cache"
            )
        return holding

    def holdings(self, handles: Iterable[Handle]) -> list[Holding]:
        """What each of these live sequences holds; for reading."""
        return [self._holdings[handle] for handle in handles]

    def reserve(self, tokens: Mapping[Handle, int]) -> StepPlan:
        """Give every sequence the pages its new tokens need, copy-on-write included, or raise and change
        nothing.
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

    def _needs(self, tokens: Mapping[Handle, int]) -> list[tuple[Handle, int, int | None]]:
        """The pages that these tokens need: each a Grant without its page."""
        size, needs = self.page_size, []
        in_place = self._writers_in_place(tokens)
        for handle, n in tokens.items():
            if n == 0:
                continue
            holding = self._holdings[handle]
            end = holding.dropped + len(holding.pages)
            if holding.length % size:  # the last page is partial, so the step writes into it
                page = holding.pages[-1]
                if self._owners[page] > 1 and in_place.get(page) is not handle:
                    needs.append((handle, end - 1, page))
            if holding.length + n > end * size:
                needs.extend((handle, index, None) for index in range(end, -(-(holding.length + n) // size)))
        return needs

    def _writers_in_place(self, tokens: Mapping[Handle, int]) -> dict[int, Handle]:
        """The sequence that keeps each shared page into which all of its owners are to write: the longest of
        them.

        It writes beyond what any of the others has stored, so that a failing step can give the page back to
        all.
        """
        writers: dict[int, list[Handle]] = {}
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

    def slots(self, tokens: Mapping[Handle, int]) -> "array[int]":
        """Where the reserved tokens go, ``page * page_size + offset`` each, one sequence after the other."""
        size, slots = self.page_size, array("q")
        for handle, n in tokens.items():
            holding = self._holdings[handle]
            first = holding.length
            if n == 1:  # half the time of the general case below, and decoding does little else
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
        """Keep the reservation, advance lengths, and drop pages that the window cannot reach any more.

        Returns the pages that became free.
        """
        freed: list[int] = []
        for handle, n in plan.tokens.items():
            holding = self._holdings[handle]
            holding.length += n
            if self.window is not None:
                first_visible = max(0, holding.length - self.window + 1 - self.rollback)
                count = first_visible // self.page_size - holding.dropped
                if count > 0:
                    kept = min(count, max(0, -(-self.keep_first // self.page_size) - holding.dropped))
                    holding.first += holding.pages[:kept]
                    freed += self._disown(holding.pages[kept:count])
                    del holding.pages[:count]
                    holding.dropped += count
                    if not self.keep_first:
                        holding.start = self._from(holding)
        return freed

    def _from(self, holding: Holding) -> int:
        """The first token of those that a window keeps."""
        return max(holding.padding, holding.dropped * self.page_size, holding.missing)

    def restore(self, plan: StepPlan) -> Sequence[int]:
        """Undo the reservation; returns the pages that became free."""
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

    def admit(self, handle: Handle, *, padding: int = 0) -> None:
        """Start an empty sequence, whose first ``padding`` tokens will never be visible."""
        self._holdings[handle] = Holding(padding, padding)

    def fork(self, handle: Handle, child: Handle) -> None:
        """Start ``child`` as a copy of ``handle`` that shares all of its pages."""
        of = self.holding(handle)
        for page in (*of.first, *of.pages):
            self._owners[page] += 1
        self._holdings[child] = replace(of, pages=list(of.pages), first=list(of.first))

    def shortest(self, handle: Handle) -> int:
        """The least length that ``truncate`` accepts: its next query still finds every key of its window."""
        holding = self.holding(handle)
        first = max(holding.dropped * self.page_size, holding.missing)
        return first + self.window - 1 if first else 0

    def check_truncate(self, handle: Handle, length: int) -> None:
        """Raise what :meth:`truncate` raises, and change nothing."""
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

    def check_read(self, tokens: Mapping[Handle, int]) -> None:
        """Refuse queries, the last ones of each sequence, for which the window has dropped a key.

        Raises:
            RuntimeError: naming how many queries may be read for.
        """
        for handle, n in tokens.items():
            holding, shortest = self.holding(handle), self.shortest(handle)
            if shortest and n and holding.length - n < shortest:
                raise RuntimeError(
                    f"tokens: the layers of window={self.window} keep this sequence from "
                    f"{self._from(holding)} on, so its last {max(0, holding.length - shortest)} tokens can "
                    f"be queries again, got {n}; construct the cache with a larger rollback="
                )

    def truncate(self, handle: Handle, length: int) -> Sequence[int]:
        """Forget all tokens from ``length`` on; returns the pages that became free.

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

    def release(self, handle: Handle) -> Sequence[int]:
        """End a sequence; returns the pages that became free."""
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
