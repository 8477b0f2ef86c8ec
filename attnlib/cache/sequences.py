"""The sequences of a cache over all of its page allocators, one for each window class. Plain Python."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..internal.checks import INT32, check_count
from .pages import CacheFullError, Holding, PageAllocator, SequenceHandle, StepPlan, Window

Freed = list[tuple[Window, Sequence[int]]]  # pages that became free, by window


class Prompt(NamedTuple):
    """A sequence that gets many tokens in a packed step.

    ``row`` is its row in the step, ``first`` and ``tokens`` are its range among the packed tokens, and
    ``history`` is its length before the step.
    """

    row: int
    first: int
    tokens: int
    history: int


class Request(NamedTuple):
    """The argument of a step or read, validated: a token count for each sequence, in row order.

    ``shape`` is ``[b, s]``, or packed ``[t]``. ``holdings`` has each sequence's pages in the first page
    allocator; its length and padding are the same in all allocators.
    """

    tokens: Mapping[SequenceHandle, int]
    shape: tuple[int, ...]
    holdings: Sequence[Holding]

    @property
    def packed(self) -> bool:
        """True if the tokens of all sequences are packed in one dimension."""
        return len(self.shape) == 1

    @property
    def is_single(self) -> bool:
        """True if no sequence gets more than one token."""
        return max(self.tokens.values(), default=0) <= 1

    def prompts(self, least: int) -> tuple[Prompt, ...]:
        """Return the sequences that get at least ``least`` tokens in a packed step."""
        counts = list(self.tokens.values()) if self.packed else []
        starts = accumulate(counts, initial=0)
        rows = enumerate(zip(starts, counts, self.holdings, strict=False))
        return tuple(Prompt(row, first, n, holding.length) for row, (first, n, holding) in rows if n >= least)


class Sequences:
    """The live sequences of a cache. Every change is made in all page allocators or in none."""

    def __init__(
        self,
        pages: Mapping[Window, int],
        page_size: int,
        *,
        max_sequences: int,
        max_length: int,
        rollback: int = 0,
        shards: int = 1,
    ):
        self.max_sequences = max_sequences
        self.max_length = max_length
        self.rollback = rollback
        self.allocators: dict[Window, PageAllocator] = {
            of: PageAllocator(count, tokens_of(of, page_size, shards), **_window(of), rollback=rollback)
            for of, count in pages.items()
        }
        self._first = next(iter(self.allocators.values()))  # all allocators have the same lengths and padding

    @property
    def handles(self) -> list[SequenceHandle]:
        """The live sequences in admission order."""
        return self._first.handles

    def holding(self, handle: SequenceHandle) -> Holding:
        """Return the sequence's pages in the first page allocator, with its length and padding."""
        return self._first.holding(handle)

    def holdings(self, handle: SequenceHandle) -> dict[Window, Holding]:
        """Return the sequence's pages in every page allocator, by window class."""
        return {window: allocator.holding(handle) for window, allocator in self.allocators.items()}

    def __str__(self) -> str:
        free = [
            f"{x.total - x.used} of {x.total} pages free"
            + ("" if window is None else f" for window={window}")
            for window, x in self.allocators.items()
        ]
        return ", ".join((f"{len(self.handles)} of {self.max_sequences} sequences", *free))

    def admit(self, n: int, left_padding: Sequence[int] | None = None) -> list[SequenceHandle]:
        """Start ``n`` empty sequences; ``left_padding`` has the number of padding tokens of each."""
        check_count("n", n)
        self.need_rows(n)
        if left_padding is not None and not isinstance(left_padding, Sequence):
            raise TypeError(f"left_padding: expected a sequence of ints, got {type(left_padding).__name__}")
        padding = [0] * n if left_padding is None else list(left_padding)
        if len(padding) != n:
            raise ValueError(
                f"left_padding: expected {n} counts, one for each new sequence, got {len(padding)}"
            )
        for count in padding:
            check_count("left_padding", count)
            if count > self.max_length:
                raise ValueError(f"left_padding: expected at most max_length={self.max_length}, got {count}")
        handles = [SequenceHandle() for _ in padding]
        for allocator in self.allocators.values():
            for handle, count in zip(handles, padding, strict=True):
                allocator.admit(handle, padding=count)
        return handles

    def fork(self, handle: SequenceHandle, n: int) -> list[SequenceHandle]:
        """Start ``n`` sequences that share all pages of ``handle``."""
        check_count("n", n)
        self.holding(handle)
        self.need_rows(n)
        children = [SequenceHandle() for _ in range(n)]
        for allocator in self.allocators.values():
            for child in children:
                allocator.fork(handle, child)
        return children

    def need_rows(self, n: int) -> None:
        """Raise CacheFullError unless the cache can take ``n`` more sequences."""
        free = self.max_sequences - len(self.handles)
        if n > free:
            raise CacheFullError(
                f"{n} new sequences are asked for and {free} of max_sequences={self.max_sequences} "
                f"{'is' if free == 1 else 'are'} free; release() a sequence or make the cache larger"
            )

    def request(self, tokens: int | Mapping[SequenceHandle, int]) -> Request:
        """Validate the argument of ``step`` or ``read``, and return its request."""
        if isinstance(tokens, int):
            check_count("tokens", tokens)
            handles = self.handles
            return Request(
                dict.fromkeys(handles, tokens), (len(handles), tokens), self._first.holdings(handles)
            )
        if not isinstance(tokens, Mapping):
            raise TypeError(
                f"tokens: expected an int or a mapping of handles to ints, got {type(tokens).__name__}; pass "
                "dict(zip(handles, counts))"
            )
        holdings = [self.holding(handle) for handle in tokens]
        for n in tokens.values():
            check_count("tokens", n)
        total = sum(tokens.values())
        if total > INT32:
            raise ValueError(
                f"tokens: expected at most {INT32} together, since offsets are int32, got {total}"
            )
        return Request(dict(tokens), (total,), holdings)

    def check_read(self, request: Request) -> None:
        """Raise RuntimeError if some window has dropped a key that the queries could see."""
        for allocator in self.allocators.values():
            if allocator.window is not None:
                allocator.check_read(request.tokens)

    def reserve(self, request: Request) -> list[StepPlan]:
        """Reserve the pages of a step in every allocator, and return a plan for each allocator, in order.

        Raises:
            CacheFullError: pages are missing in some allocator, or a sequence would grow past ``max_length``.
            ValueError: left padding would arrive in packed form.
        """
        tokens = request.tokens
        for row, (holding, n) in enumerate(zip(request.holdings, tokens.values(), strict=True)):
            if holding.length + n > self.max_length:
                raise CacheFullError(
                    f"sequence {row} of the step would hold {holding.length + n} tokens, expected at most "
                    f"max_length={self.max_length}; truncate() or release() it, or make the cache with a "
                    "larger one"
                )
            if request.packed and n and holding.length < holding.padding:
                raise ValueError(
                    f"tokens: sequence {row} of the step has left padding {holding.padding} and length "
                    f"{holding.length}; padding arrives in dense steps, step(n)"
                )
        plans: list[StepPlan] = []
        try:
            for allocator in self.allocators.values():
                plans.append(allocator.reserve(tokens))
        except CacheFullError:
            self.restore(plans)
            raise
        return plans

    def commit(self, plans: Sequence[StepPlan]) -> Freed:
        """Make the reservations of a step permanent in every allocator."""
        return [(window, allocator.commit(plan)) for (window, allocator), plan in self._each(plans)]

    def restore(self, plans: Sequence[StepPlan]) -> Freed:
        """Undo the plans, which may be those of the first few allocators only."""
        return [(window, allocator.restore(plan)) for (window, allocator), plan in self._each(plans)]

    def _each(self, plans: Sequence[StepPlan]):
        return zip(self.allocators.items(), plans, strict=False)

    def truncate(self, handle: SequenceHandle, length: int) -> Freed:
        """Forget all tokens from ``length`` on."""
        check_count("length", length)
        for allocator in self.allocators.values():
            allocator.check_truncate(handle, length)
        return [(window, allocator.truncate(handle, length)) for window, allocator in self.allocators.items()]

    def release(self, handles: Sequence[SequenceHandle]) -> Freed:
        """End these sequences."""
        for handle in handles:
            self.holding(handle)
        if len(set(handles)) < len(handles):
            raise ValueError("handle: expected each sequence once, got one of them twice")
        return [
            (window, pages.release(handle)) for window, pages in self.allocators.items() for handle in handles
        ]


def tokens_of(of: Window, page_size: int, shards: int) -> int:
    """Return how many tokens a page stores on all ranks. With a window, every rank stores all of them."""
    return page_size * shards if of is None else page_size


def _window(of: Window) -> dict[str, int | None]:
    """Return the window of a class and the number of first tokens that it retains."""
    window, first = of if isinstance(of, tuple) else (of, 0)
    return {"window": window, "first_tokens": first}
