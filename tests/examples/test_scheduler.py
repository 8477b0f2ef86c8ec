"""The scheduler: who runs is a law, every page is accounted for, and company changes no answer."""

from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import serving
import torch
from decoding import decode_uncached, prefill
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler import Request, Scheduler
from serving import Sample, first_fit, serve
from small_models import make

from attnlib import KVCache

MAX_LENGTH = 16
REQUESTS = st.builds(
    Request,
    prompt=st.lists(st.integers(1, 255), min_size=1, max_size=9),
    new_tokens=st.integers(1, 8),
    arrival=st.integers(0, 8),
    priority=st.integers(0, 2),
)


@cache
def model(variant: str):
    """A small model in fp64, where nothing ties."""
    torch.manual_seed(1)
    return make(variant).double()


def alone(variant: str, request: Request, before=()) -> list[int]:
    """The request's answer when nobody else is there, without a cache."""
    prompt = torch.tensor([*before, *request.prompt])
    answer = decode_uncached(model(variant), [prompt], request.new_tokens)[0][0].tolist()
    return answer[: answer.index(request.end) + 1] if request.end in answer else answer


def make_cache(variant: str, *, pages: int, page_size: int) -> KVCache:
    """So many pages, or rows where a page is as long as a text may be."""
    layouts = model(variant).kv_layouts()
    if page_size == MAX_LENGTH:
        return KVCache.contiguous(layouts, max_sequences=pages, max_length=MAX_LENGTH)
    return KVCache.paged(
        layouts, pages=pages, page_size=page_size, max_sequences=pages, max_length=MAX_LENGTH
    )


class Watched(Scheduler):
    """A scheduler whose every plan is held against the rule."""

    def plan(self):
        arrived = sorted(
            self.live + self.waiting, key=lambda stream: (-stream.request.priority, stream.number)
        )
        plan = super().plan()
        fitting = [n for n in range(len(arrived) + 1) if self.room_for(arrived[:n])]
        assert fitting == list(range(len(fitting)))
        assert (self.live, self.waiting) == (arrived[: fitting[-1]], arrived[fitting[-1] :])
        assert bool(plan) == bool(arrived)  # the first by rank always runs
        assert all((stream.handle is None) == (stream in self.waiting) for stream in arrived)
        missing = {stream: len(stream.text) - self.stored(stream) for stream in self.live}
        assert all(1 <= n <= missing[stream] for stream, n in plan.items())
        assert sum(plan.values()) == min(self.budget, sum(missing.values()))
        new = [stream for stream in self.live if missing[stream] == 1]
        assert list(plan)[: len(new)] == new[: self.budget]
        return plan

    def room_for(self, streams) -> bool:
        """Whether every token of these texts would have a place, all whole pages of the shared prompt being
        common.
        """
        size, common = self.cache.page_size, self.shared_length // self.cache.page_size
        page_bytes = sum(layout.token_bytes for layout in self.cache.layouts) * size
        ends = [self.shared_length + len(stream.text) for stream in streams]
        pages = -(-self.shared_length // size) + sum(len(range(common * size, end, size)) for end in ends)
        return pages * page_bytes <= self.cache.nbytes


def sample_by_pages(scheduler: Scheduler, tokens: int) -> Sample:
    """What :func:`serving.measure` says, held against the ledger, page by page."""
    sample = MEASURE(scheduler, tokens)
    [ledger] = scheduler.cache._sequences.allocators.values()
    size, filled = ledger.page_size, {}
    for holding in ledger.holdings(ledger.handles):
        for index, page in enumerate(holding.pages):
            filled[page] = max(filled.get(page, 0), min(size, holding.length - index * size))
    token = sum(layout.token_bytes for layout in scheduler.cache.layouts)
    assert (sample.used, sample.filled) == (len(filled) * size * token, sum(filled.values()) * token)
    assert (sample.live, sample.waiting) == (len(scheduler.live), len(scheduler.waiting))
    assert sample.external == 0  # whoever waits needs more than is free
    return sample


MEASURE = serving.measure


@settings(max_examples=25)
@given(
    variant=st.sampled_from(("gqa", "mla")),
    requests=st.lists(REQUESTS, min_size=2, max_size=8),
    page_size=st.sampled_from((1, 2, 4, MAX_LENGTH)),
    memory=st.integers(8, 24),
    budget=st.integers(1, 20),
    shared_length=st.integers(0, 5),
    ends=st.booleans(),
)
def test_every_request_is_answered_as_if_alone(
    variant, requests, page_size, memory, budget, shared_length, ends
):
    cache = make_cache(
        variant, pages=-(-shared_length // page_size) + -(-memory // page_size), page_size=page_size
    )
    before, shared = list(range(50, 50 + shared_length)), None
    if shared_length:
        [shared], _ = prefill(model(variant), cache, [torch.tensor(before)])
    stored = cache.used_bytes
    scheduler = Watched(cache, max_length=MAX_LENGTH, budget=budget, shared=shared)
    requests = sorted(
        (request for request in requests if not refused(cache, shared, request)),
        key=lambda request: request.arrival,
    )
    answers = [alone(variant, request, before) for request in requests]
    if ends:  # in the middle of an answer, if it does not come sooner
        middles = [answer[len(answer) // 2] for answer in answers]
        requests = [replace(request, end=end) for request, end in zip(requests, middles, strict=True)]
        answers = [alone(variant, request, before) for request in requests]
    with mock.patch.object(serving, "measure", sample_by_pages):
        run = serve(model(variant), scheduler, requests)
    assert run.answers == answers
    assert (cache.used_bytes, scheduler.live, scheduler.waiting) == (stored, [], [])
    assert all(sample.tokens <= budget for sample in run.samples)
    again = sum(sample.tokens for sample in run.samples) - sum(len(stream.text) - 1 for stream in run.streams)
    event(f"{'some' if run.preemptions else 'no'} preemptions")
    assert (again > 0) <= (run.preemptions > 0)  # tokens are stored twice only after a preemption


def refused(cache: KVCache, shared, request: Request) -> bool:
    """Whether a request is too large, which the scheduler must say and be none the worse for."""
    scheduler = Watched(cache, max_length=MAX_LENGTH, budget=1, shared=shared)
    longest = [*request.prompt, *[0] * (request.new_tokens - 1)]
    stream = mock.Mock(text=longest)
    if scheduler.shared_length + len(longest) <= MAX_LENGTH and scheduler.room_for([stream]):
        scheduler.submit(request)
        return False
    with pytest.raises(
        ValueError, match=r"request: expected at most -?\d+ tokens to store, got \d+ \(prompt"
    ):
        scheduler.submit(request)
    assert not scheduler.waiting
    return True


@pytest.mark.parametrize("page_size", [4, MAX_LENGTH])
def test_a_request_of_higher_priority_displaces_a_lower_one(page_size):
    requests = [Request([1, 2, 3], 9), Request([4, 5, 6, 7], 6, arrival=2, priority=1)]
    scheduler = Watched(
        make_cache("gqa", pages=16 // page_size, page_size=page_size), max_length=16, budget=8
    )
    run = serve(model("gqa"), scheduler, requests)
    assert run.answers == [alone("gqa", request) for request in requests]
    assert run.preemptions == 1
    tokens = [sample.tokens for sample in run.samples]
    if page_size == MAX_LENGTH:  # the one row changes hands, and back
        assert tokens == [3, 1, 4, 1, 1, 1, 1, 1, 5, 1, 1, 1, 1, 1, 1]
    else:  # both run until their texts, of 9 and 8 tokens, need a fifth page
        assert tokens == [3, 1, 5, 2, 2, 2, 1, 1, 8, 1, 1, 1]


def test_texts_that_outgrow_the_pages_preempt_the_last():
    requests = [Request([1, 2, 3], 9), Request([4, 5, 6], 9), Request([7, 8, 9], 9)]
    scheduler = Watched(make_cache("mla", pages=5, page_size=4), max_length=16, budget=9)
    run = serve(model("mla"), scheduler, requests)
    assert run.answers == [alone("mla", request) for request in requests]
    assert run.preemptions > 1
    assert [sample.live for sample in run.samples[:3]] == [
        3,
        3,
        2,
    ]  # from 4 tokens on, each needs a second page


def test_the_end_of_an_answer_may_stand_in_its_prompt():
    scheduler = Watched(make_cache("gqa", pages=4, page_size=4), max_length=16, budget=1)
    request = Request([7, 7], 3, end=7)
    assert serve(model("gqa"), scheduler, [request]).answers == [alone("gqa", request)]


@pytest.mark.parametrize("page_size", [1, 4, 8, MAX_LENGTH])
def test_a_shared_prompt_is_stored_once_to_the_byte(page_size):
    cache = make_cache("gqa", pages=6 * MAX_LENGTH // page_size, page_size=page_size)
    [shared], _ = prefill(model("gqa"), cache, [torch.arange(1, 11)])
    scheduler = Watched(cache, max_length=MAX_LENGTH, budget=15, shared=shared)
    run = serve(model("gqa"), scheduler, [Request([i, 3, 4], 1) for i in range(5)])
    [sample] = run.samples
    pages = {1: 10 + 5 * 3, 4: 3 + 5 * 2, 8: 2 + 5 * 1, MAX_LENGTH: 1 + 5}[page_size]
    assert sample.used * 6 * MAX_LENGTH == pages * page_size * cache.nbytes
    assert run.answers == [alone("gqa", stream.request, range(1, 11)) for stream in run.streams]


def test_wrong_requests_are_refused():
    scheduler = Scheduler(make_cache("gqa", pages=3, page_size=4), max_length=16, budget=1)
    for prompt, new in (([], 3), ([1], 0)):
        with pytest.raises(
            ValueError, match=f"request: expected a prompt and new tokens, got {len(prompt)} and {new}"
        ):
            scheduler.submit(Request(prompt, new))
    scheduler.submit(Request([1] * 10, 3))
    with pytest.raises(
        ValueError, match=r"expected at most 12 tokens to store, got 13 \(prompt 10, new 4\); ask for"
    ):
        scheduler.submit(Request([1] * 10, 4))
    cache = make_cache("gqa", pages=3, page_size=4)
    [shared], _ = prefill(model("gqa"), cache, [torch.arange(2)])
    scheduler = Scheduler(cache, max_length=16, budget=1, shared=shared)
    scheduler.submit(Request([1] * 6, 1))  # its first page begins with the two tokens
    with pytest.raises(ValueError, match="expected at most 6 tokens to store, got 7"):
        scheduler.submit(Request([1] * 7, 1))
    with pytest.raises(ValueError, match="budget: expected at least 1 token a step, got 0"):
        Scheduler(scheduler.cache, max_length=16, budget=0)


def test_a_cache_that_holds_more_than_the_formula_fails():
    cache = make_cache("gqa", pages=8, page_size=4)
    prefill(model("gqa"), cache, [torch.arange(5)])
    with pytest.raises(SystemExit, match=r"cache: expected .* bytes in use by formula, measured"):
        serve(model("gqa"), Scheduler(cache, max_length=16, budget=8), [Request([1], 2)])


@given(requests=st.lists(REQUESTS, max_size=9), memory=st.integers(16, 40), budget=st.integers(1, 9))
def test_first_fit_serves_everybody_for_as_long_as_asked(requests, memory, budget):
    requests.sort(key=lambda request: request.arrival)
    samples = first_fit(
        requests, [[0] * request.new_tokens for request in requests], memory=memory, budget=budget
    )
    steps = [-(-len(request.prompt) // budget) + request.new_tokens - 1 for request in requests]
    sizes = [len(request.prompt) + request.new_tokens - 1 for request in requests]
    assert sum(sample.live for sample in samples) == sum(steps)
    assert sum(sample.used for sample in samples) == sum(
        n * size for n, size in zip(steps, sizes, strict=True)
    )
    for sample in samples:
        assert 0 <= sample.used <= memory
        assert sample.external in (0, memory - sample.used)
        assert sample.waiting or not sample.external


def test_first_fit_is_blocked_by_holes_that_are_too_small():
    short, long, wide = Request([1] * 4, 1), Request([1], 2), Request([1] * 6, 1, arrival=1)
    samples = fitted([short, long, short, wide])  # extents [0, 4), [4, 6) and [6, 10)
    assert [sample.external for sample in samples] == [0, 8, 0, 0]
    assert [sample.live for sample in samples] == [3, 1, 1, 0]


def test_first_fit_has_no_external_fragmentation_while_too_little_is_free():
    samples = fitted([Request([1] * 7, 1), Request([1] * 7, 1)])
    assert [(sample.waiting, sample.external) for sample in samples] == [(1, 0), (0, 0), (0, 0)]


def test_first_fit_serves_higher_priorities_first():
    samples = fitted([Request([1] * 7, 1), Request([1] * 8, 1), Request([1] * 9, 1, priority=1)])
    assert [sample.used for sample in samples] == [9, 7, 8, 0]


def fitted(requests) -> list[Sample]:
    """First fit of requests that end as late as they may, in a memory of ten tokens."""
    return first_fit(requests, [[0] * request.new_tokens for request in requests], memory=10, budget=9)
