"""Continuous batching: which requests run in the next step of a decoder over one KVCache. No tensors, no
model.

A request's prompt and its answer are one text, of which the cache has stored a beginning. A chunk of a
prompt, a single new token, and what a preempted request must store again are then the same thing: the next
tokens of a text. Requests join and leave between any two steps (Yu et al., 2022, "Orca"); a preempted one
gives back its pages and is stored again later (Kwon et al., 2023, arXiv 2309.06180); steps mix prompts with
new tokens (Agrawal et al., 2024, arXiv 2403.02310).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnlib import KVCache
from attnlib.cache.pages import Handle
from attnlib.sizes import cache_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """At most ``new_tokens`` tokens are asked for after ``prompt``, ``end`` being the last one if it comes.

    ``arrival`` counts steps. A higher ``priority`` goes first.
    """

    prompt: Sequence[int]
    new_tokens: int
    arrival: int = 0
    priority: int = 0
    end: int | None = None


@dataclass(slots=True, eq=False)
class Stream:
    """A request that was submitted as the ``number``-th; it has a ``handle`` in the cache while it is
    live.
    """

    request: Request
    number: int
    text: list[int]
    handle: Handle | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Orders streams, the first to be served being the least."""
        return -self.request.priority, self.number

    @property
    def answer(self) -> list[int]:
        """The new tokens so far."""
        return self.text[len(self.request.prompt) :]

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        new = len(self.text) - len(self.request.prompt)
        return new == self.request.new_tokens or (new > 0 and self.text[-1] == self.request.end)


class Scheduler:
    """Decides who runs: of all requests by rank, as many as have room for their texts so far, until one has
    not.

    Everything follows from this one rule. When texts outgrow the pages, the last by rank is preempted; a
    request of higher priority displaces lower ones; nobody overtakes whom the rule puts first. The first by
    rank always runs, and a request that could not even run alone is refused, so every one ends unless higher
    priorities never cease to come.

    ``cache`` is empty, but for ``shared``: a stored prompt that all requests continue; theirs begin after it.
    It has as many pages as sequences, the same number for every window, and ``max_length`` tokens at most in
    each. ``budget`` bounds the tokens of a step.
    """

    def __init__(self, cache: KVCache, *, max_length: int, budget: int, shared: Handle | None = None):
        if budget < 1:
            raise ValueError(f"budget: expected at least 1 token a step, got {budget}")
        self.cache = cache
        self.max_length = max_length
        self.budget = budget
        self.shared = shared
        self.shared_length = 0 if shared is None else cache.length(shared)
        self.page_bytes = cache_bytes(cache.layouts, [1], page_size=cache.page_size)
        self.pages = cache.nbytes // self.page_bytes - -(-self.shared_length // cache.page_size)
        self.live: list[Stream] = []  # by rank since the last plan, as are those who wait
        self.waiting: list[Stream] = []
        self.preemptions = 0
        self._submitted = 0

    def submit(self, request: Request) -> Stream:
        """Let a request wait for its turn.

        Raises:
            ValueError: it has no prompt, asks for nothing, or would not fit if it were alone.
        """
        prompt, new = len(request.prompt), request.new_tokens
        if prompt < 1 or new < 1:
            raise ValueError(f"request: expected a prompt and new tokens, got {prompt} and {new} tokens")
        size, store = self.cache.page_size, prompt + new - 1  # the last token is not stored
        capacity = min(self.max_length - self.shared_length, self.pages * size - self.shared_length % size)
        if store > capacity:
            raise ValueError(
                f"request: expected at most {capacity} tokens to store, got {store} (prompt {prompt}, new "
                f"{new}); ask for fewer, or make the cache larger"
            )
        stream = Stream(request, self._submitted, list(request.prompt))
        self._submitted += 1
        self.waiting.append(stream)
        return stream

    def plan(self) -> dict[Stream, int]:
        """Preempt and admit, and return how many tokens of which texts the next step is to store.

        New tokens come before prompts, which share what remains of the budget by rank.
        """
        arrived = sorted(self.live + self.waiting, key=lambda stream: stream.rank)
        fitting, free = 0, self.pages
        for stream in arrived:
            free -= self.pages_for(len(stream.text))
            if free < 0:
                break
            fitting += 1
        self.live, self.waiting = arrived[:fitting], arrived[fitting:]
        for stream in self.waiting:
            if stream.handle is not None:
                self._release(stream)
                self.preemptions += 1
        for stream in self.live:
            if stream.handle is None:
                cache = self.cache
                [stream.handle] = cache.admit() if self.shared is None else cache.fork(self.shared)
        return self._share_budget()

    def _share_budget(self) -> dict[Stream, int]:
        plan, budget = {}, self.budget
        missing = {stream: len(stream.text) - self.stored(stream) for stream in self.live}
        for stream in sorted(self.live, key=lambda stream: missing[stream] > 1):
            plan[stream] = min(missing[stream], budget)
            budget -= plan[stream]
        return {stream: n for stream, n in plan.items() if n}

    def advance(self, plan: Mapping[Stream, int], likeliest: Sequence[int]) -> list[Stream]:
        """Take note of a step: the token that comes after what each stream of the plan has stored now.

        Where a whole text is stored, its answer grows; streams that are done end and are returned.
        """
        for stream, token in zip(plan, likeliest, strict=True):
            if self.stored(stream) == len(stream.text):
                stream.text.append(token)
        done = [stream for stream in self.live if stream.done]
        for stream in done:
            self._release(stream)
        self.live = [stream for stream in self.live if not stream.done]
        return done

    def stored(self, stream: Stream) -> int:
        """How many tokens of its text a live stream has stored."""
        return self.cache.length(stream.handle) - self.shared_length

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens of one text take, beside the whole pages of the shared prompt.

        In the page that the shared prompt fills in part, every text needs a copy of its own.
        """
        size = self.cache.page_size
        return -(-(self.shared_length + tokens) // size) - self.shared_length // size

    def _release(self, stream: Stream) -> None:
        self.cache.release(stream.handle)
        stream.handle = None
