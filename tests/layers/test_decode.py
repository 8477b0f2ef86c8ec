"""Decoding from a cache is the prompt at once: for every kind of layer, of cache, of feeding and of
interruption.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_helpers import (
    HIDDEN,
    KINDS,
    alone,
    cache_for,
    close,
    feed,
    feed_dense,
    stack,
    tokens,
)

from attnlib import CAUSAL, KVCache, sliding

ALTERNATING = (sliding(3), CAUSAL)
VARIANTS = {
    "rope": {},
    "no-rope": {"rope": False},
    "window": {"masks": (sliding(5), sliding(5))},
    "alternating": {"masks": ALTERNATING},
    "sinks-alibi": {"masks": ALTERNATING, "sinks": True, "alibi": True},
    "softcap-qk_norm": {"softcap": 2.0, "qk_norm": True},
}
FOR_ALL = ("rope", "no-rope", "window", "alternating")
CASES = [(kind, variant) for kind in KINDS for variant in VARIANTS if variant in FOR_ALL or "mla" not in kind]
INTERRUPTED = [(kind, variant) for kind, variant in CASES if variant in ("rope", "alternating")]

page_sizes = st.sampled_from((None, 1, 4, 16))  # None is a contiguous cache
counts = st.one_of(st.integers(0, 3), st.integers(0, 20))  # more than 16 make a prefill
seeds = st.integers(0, 2**16)


@pytest.fixture(autouse=True, scope="module")
def poison():
    """Free pages hold NaN: whatever reads beyond its sequence shows it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNLIB_CHECK", "1")
        yield


class Run:
    """Random tokens of several sequences, fed to a cache bit by bit, and what came out."""

    def __init__(self, model, cache, seed=0):
        self.model, self.cache, self.fed, self.outs = model, cache, {}, {}
        self.random = torch.Generator().manual_seed(seed)

    def admit(self):
        (handle,) = self.cache.admit()
        self.fed[handle] = self.outs[handle] = torch.empty(0, HIDDEN, dtype=torch.float64)
        return handle

    def fork(self, handle):
        (child,) = self.cache.fork(handle)
        self.fed[child], self.outs[child] = self.fed[handle], self.outs[handle]
        return child

    def new(self, n):
        return torch.randn(n, HIDDEN, generator=self.random, dtype=torch.float64)

    def step(self, request):
        request = {handle: self.new(n) for handle, n in request.items()}
        for handle, out in feed(self.model, self.cache, request).items():
            self.fed[handle] = torch.cat((self.fed[handle], request[handle]))
            self.outs[handle] = torch.cat((self.outs[handle], out))

    def step_dense(self, n):
        x = {handle: self.new(n) for handle in self.fed}
        out = feed_dense(self.model, self.cache, torch.stack(list(x.values())))
        for handle, row in zip(x, out, strict=True):
            self.fed[handle] = torch.cat((self.fed[handle], x[handle]))
            self.outs[handle] = torch.cat((self.outs[handle], row))

    def truncate(self, handle, length):
        self.cache.truncate(handle, length)
        self.fed[handle], self.outs[handle] = self.fed[handle][:length], self.outs[handle][:length]

    def check(self):
        for handle, x in self.fed.items():
            assert self.cache.length(handle) == len(x)
            close(self.outs[handle], alone(self.model, x))


def churned(cache, model, seed):
    """The cache after other sequences came and went, so that pages are in disorder and hold their
    leftovers.
    """
    handles = cache.admit(3)
    feed(model, cache, {handle: 100 * tokens(1 + (seed >> 3 * n) % 8) for n, handle in enumerate(handles)})
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed)).tolist()
    cache.release(*(handles[n] for n in order))
    return cache


# Feeding does not matter (P6, P7, P9, P15)


@pytest.mark.parametrize(("kind", "variant"), CASES)
@settings(max_examples=5, deadline=None)
@given(page_sizes, counts, st.lists(st.tuples(counts, counts), min_size=1, max_size=5), seeds)
def test_ragged_steps_with_admission_equal_each_sequence_alone(
    kind, variant, page_size, head_start, steps, seed
):
    model = stack(kind, **VARIANTS[variant])
    run = Run(model, churned(cache_for(model, page_size, length=128), model, seed), seed)
    one = run.admit()
    run.step({one: head_start})
    two = run.admit()  # into a running batch
    for n, m in steps:
        run.step({one: n, two: m} if (n + m) % 2 else {two: m, one: n})
    run.step_dense(2)
    run.step_dense(1)
    run.check()


@pytest.mark.parametrize(("kind", "variant"), CASES)
@settings(max_examples=3, deadline=None)
@given(
    page_sizes,
    st.lists(st.one_of(st.just(1), counts), min_size=1, max_size=6),
    st.lists(counts, min_size=3),
    seeds,
)
def test_dense_steps_with_left_padding_equal_unpadded_runs(kind, variant, page_size, chunks, padding, seed):
    """Fault 91. The padding itself is NaN: it is stored and never seen."""
    model = stack(kind, **VARIANTS[variant])
    cache = churned(cache_for(model, page_size, length=128), model, seed)
    padding = padding[:3]
    cache.admit(3, left_padding=padding)
    x = tokens(3, sum(chunks), seed=seed)
    for row, n in zip(x, padding, strict=True):
        row[:n] = torch.nan
    out = torch.cat([feed_dense(model, cache, chunk) for chunk in x.split(chunks, 1)], 1)
    for n, row, got in zip(padding, x, out, strict=True):
        close(got[n:], alone(model, row[n:]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [None, 4])
def test_one_token_at_a_time(kind, page_size):
    model, x = stack(kind, ALTERNATING), tokens(2, 30)
    cache = cache_for(model, page_size)
    cache.admit(2)
    close(torch.cat([feed_dense(model, cache, token) for token in x.split(1, 1)], 1), model(x).detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("prompt", [5, 20])
def test_rows_do_not_see_each_other(kind, page_size, prompt):
    """NaN in another row changes nothing (P15), dense and packed."""
    model, outs = stack(kind), []
    for other in (1.0, torch.nan):
        x = tokens(3, prompt + 4)
        x[1] *= other
        cache = cache_for(model, page_size)
        first, second, third = cache.admit(3)
        parts = [feed_dense(model, cache, x[:, :prompt]), feed_dense(model, cache, x[:, prompt : prompt + 1])]
        packed = {second: x[1, -3:], third: x[2, -3:], first: x[0, -3:]}
        packed = feed(model, cache, packed)
        outs.append(torch.cat([*parts, torch.stack([packed[first], packed[second], packed[third]])], 1))
    close(outs[0][[0, 2]], outs[1][[0, 2]])
    assert outs[1][1].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_decodes_in_the_pages_it_needs(kind):
    model, x = stack(kind, (sliding(5), CAUSAL)), tokens(40)
    layouts = [layer.kv_layout for layer in model.layers]
    cache = KVCache.paged(layouts, pages={5: 3, None: 10}, page_size=4, max_sequences=1)
    (handle,) = cache.admit()
    out = torch.cat([feed(model, cache, {handle: token})[handle] for token in x.split(1)])
    close(out, alone(model, x))


# Interruptions


@pytest.mark.parametrize(("kind", "variant"), INTERRUPTED)
@settings(max_examples=4, deadline=None)
@given(page_sizes, st.integers(1, 20), counts, counts, seeds)
def test_forks_that_diverge_equal_independent_runs(kind, variant, page_size, shared, n, m, seed):
    model = stack(kind, **VARIANTS[variant])
    run = Run(model, cache_for(model, page_size, length=128), seed)
    parent = run.admit()
    run.step({parent: shared})
    child = run.fork(parent)
    run.step({child: n, parent: m})
    grandchild = run.fork(child)
    run.step({parent: 1, grandchild: m, child: n})
    run.step_dense(1)
    run.check()


@pytest.mark.parametrize(("kind", "variant"), INTERRUPTED)
@settings(max_examples=4, deadline=None)
@given(page_sizes, st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=4), seeds)
def test_truncating_and_appending_other_tokens_equals_a_fresh_run(kind, variant, page_size, rounds, seed):
    """Fault 89: speculative decoding takes back what was refused, up to ``rollback`` tokens from the longest
    it was.
    """
    model = stack(kind, **VARIANTS[variant])
    options = {} if page_size is None else {"rollback": 20}
    run = Run(model, cache_for(model, page_size, length=128, **options), seed)
    one, two = run.admit(), run.admit()
    longest = 0
    for n, back in rounds:
        run.step({one: n, two: 1})
        longest = max(longest, len(run.fed[one]))
        run.truncate(one, max(0, longest - 20, len(run.fed[one]) - back))
    run.step({one: 2, two: 2})
    run.check()


class Failure(Exception):
    pass


def fail_after_one_layer(run, request):
    x = torch.cat([run.new(n) for n in request.values()])

    def broken(x, layers):
        run.model.layers[0](x, kv=layers[0])
        raise Failure

    with pytest.raises(Failure), torch.no_grad(), run.cache.step(request) as layers:
        broken(x, layers)


def leave_after_one_layer(run, request):
    x = torch.cat([run.new(n) for n in request.values()])
    with (
        pytest.raises(RuntimeError, match="did not append"),
        torch.no_grad(),
        run.cache.step(request) as layers,
    ):
        run.model.layers[0](x, kv=layers[0])


def fail_in_a_layer(run, request):
    with pytest.raises(ValueError, match="x: expected"), torch.no_grad(), run.cache.step(request) as layers:
        run.model(torch.zeros(sum(request.values()), 3), layers)


@pytest.mark.covering(2)
@pytest.mark.parametrize("fail", [fail_after_one_layer, leave_after_one_layer, fail_in_a_layer])
@pytest.mark.parametrize(("kind", "variant"), INTERRUPTED)
@settings(max_examples=3, deadline=None)
@given(page_sizes, counts, st.integers(1, 20), seeds)
def test_a_failed_step_leaves_the_cache_as_it_was(kind, variant, fail, page_size, n, m, seed):
    model = stack(kind, **VARIANTS[variant])
    run = Run(model, cache_for(model, page_size, length=128), seed)
    parent, other = run.admit(), run.admit()
    run.step({parent: 6, other: n})
    child = run.fork(parent)
    before = run.cache.used_bytes, [run.cache.length(handle) for handle in run.fed]
    fail(run, {child: m, other: m})  # a copy on write is part of what is undone
    assert (run.cache.used_bytes, [run.cache.length(handle) for handle in run.fed]) == before
    run.step({parent: m, child: 2})
    run.step_dense(1)
    run.check()
