"""A continuous-batching scheduler: it decides which requests a decoder over one KVCache runs in each step.

The scheduler handles no tensors and no model. The prompt and the answer of a request form one sequence, of
which the cache has stored the first tokens. A chunk of a prompt, a single new token, and the tokens that a
preempted request must store again are therefore all the same: the next tokens of a sequence.

- Requests join and leave between any two steps (Yu et al., 2022, "Orca").
- A preempted request gives back its pages and is stored again later (Kwon et al., 2023, arXiv 2309.06180).
- Steps mix prompts with new tokens (Agrawal et al., 2024, arXiv 2403.02310).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnlib import KVCache
from attnlib.cache.pages import SequenceHandle
from attnlib.sizes import cache_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """A request for up to ``new_tokens`` tokens after ``prompt``, or fewer if the token ``end`` is generated.

    ``arrival`` is the step at which the request arrives. A higher ``priority`` is served first.
    """

    prompt: Sequence[int]
    new_tokens: int
    arrival: int = 0
    priority: int = 0
    end: int | None = None


@dataclass(slots=True, eq=False)
class Stream:
    """A submitted request and its text so far; while it runs, ``handle`` is its sequence in the cache."""

    request: Request
    number: int
    text: list[int]
    handle: SequenceHandle | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key of streams; the stream with the smallest key is served first."""
        return -self.request.priority, self.number

    @property
    def answer(self) -> list[int]:
        """The new tokens so far."""
        return self.text[len(self.request.prompt) :]

    @property
    def done(self) -> bool:
        """True if the answer is complete."""
        new = len(self.text) - len(self.request.prompt)
        return new == self.request.new_tokens or (new > 0 and self.text[-1] == self.request.end)


class Scheduler:
    """Decides which requests run: it admits them in order until one does not fit into the free pages.

    Everything follows from this rule:

    - If sequences outgrow the pages, the request that ranks last is preempted.
    - A request of higher priority displaces requests of lower priority.
    - No request overtakes one that ranks before it.
    - The request that ranks first always runs, and a request that could not run even on its own is refused.
      So every request finishes, unless higher-priority requests keep arriving.

    ``cache`` must be empty, except for ``shared``: a stored prompt that all requests continue. The cache
    needs as many ``max_sequences`` as pages, the same number of pages in all layers, and sequences of at most
    ``max_length`` tokens. ``budget`` is the largest number of tokens per step.
    """

    def __init__(self, cache: KVCache, *, max_length: int, budget: int, shared: SequenceHandle | None = None):
        if budget < 1:
            raise ValueError(f"budget: expected at least 1 token a step, got {budget}")
        self.cache = cache
        self.max_length = max_length
        self.budget = budget
        self.shared = shared
        self.shared_length = 0 if shared is None else cache.length(shared)
        self.page_bytes = cache_bytes(cache.layouts, [1], page_size=cache.page_size)
        self.pages = cache.nbytes // self.page_bytes - -(-self.shared_length // cache.page_size)
        self.live: list[Stream] = []  # sorted by rank in plan(), like `waiting`
        self.waiting: list[Stream] = []
        self.preemptions = 0
        self._submitted = 0

    def submit(self, request: Request) -> Stream:
        """Add a request to those that wait, and return its stream.

        Raises:
            ValueError: the request has no prompt, asks for no tokens, or would not fit even on its own.
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
        """Preempt and admit requests; return how many tokens each stream stores in the next step.

        New tokens come first; prompts share the rest of the budget in order of priority.
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
        """Record a step: ``likeliest`` holds the most likely next token of each stream in the plan.

        A stream is extended by its token only if all its earlier tokens are stored. Streams that are done are
        released and returned.
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
        """Return how many tokens of a live stream are stored, without the shared prompt."""
        return self.cache.length(stream.handle) - self.shared_length

    def pages_for(self, tokens: int) -> int:
        """Return the pages that a sequence of ``tokens`` tokens needs besides a shared prompt's full pages.

        If the shared prompt ends inside a page, every sequence needs its own copy of that page.
        """
        size = self.cache.page_size
        return -(-(self.shared_length + tokens) // size) - self.shared_length // size

    def _release(self, stream: Stream) -> None:
        self.cache.release(stream.handle)
        stream.handle = None
