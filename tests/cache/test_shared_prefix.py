"""What neighbours share is read once for all of them, and every answer is the one that each would get
alone.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from cache_model import Abort
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch._dynamo.testing import CompileCounterWithBackend

from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    Mask,
    MultiHeadLatentAttention,
    Rope,
    cached_attention,
    explain,
    sliding,
)
from attnlib import cached_attention_with_lse as attend
from attnlib.cache.pages import Holding
from attnlib.cache.prefixes import buffers, groups
from attnlib.cache.prefixes.attend import PrefixRoute
from attnlib.cache.prefixes.groups import PrefixGroup, prefix_groups
from attnlib.call.call import checked
from attnlib.dispatch import run as running

HEADS, SIZE, MOST = 4, 2, 24
GROUPED = KVLayout.grouped(2, 4, 3, dtype=torch.float64)
LATENT = KVLayout.latent(6, 2, dtype=torch.float64)
LAYOUTS = (GROUPED, LATENT, replace(GROUPED, window=5), replace(LATENT, store=torch.int8))
SINKS, SLOPES = torch.tensor([0.3, -1.0, 2.0, 0.0]), torch.tensor([0.5, 0.1, 0.0, 1.0])
CALLS = {
    "causal": {"mask": CAUSAL},
    "full": {"mask": FULL},
    "softcap": {"mask": CAUSAL, "softcap": 2.0, "scale": 0.7},
    "sinks": {"mask": Mask(None, 1), "sinks": SINKS},
    "prefix": {"mask": Mask(None, 0, 3)},
    "behind": {"mask": Mask(None, -3)},
    "sliding": {"mask": sliding(4)},
    "slopes": {"mask": CAUSAL, "alibi_slopes": SLOPES, "sinks": SINKS},
}


@pytest.fixture(autouse=True)
def _short_prefixes():
    """A single page is shared."""
    with mock.patch.object(groups, "SHARED_TOKENS", SIZE):
        yield


def make(prefixes: int, layouts=(GROUPED,), **sizes) -> KVCache:
    sizes = {"pages": 80, "page_size": SIZE, "max_sequences": 6, "max_length": MOST, **sizes}
    return KVCache.paged(layouts, shared_prefixes=prefixes, **sizes)


class Pair:
    """A cache that reads what is shared once, and one that does not: the same is done with both."""

    def __init__(self, prefixes: int, layouts=LAYOUTS):
        self.caches = [make(n, layouts) for n in (prefixes, 0)]
        self.live: list[tuple] = []  # each sequence's handles
        self.padding: list[int] = []

    def admit(self, n: int, padding: int = 0) -> None:
        self.live += zip(*(cache.admit(n, left_padding=[padding] * n) for cache in self.caches), strict=True)
        self.padding += [padding] * n

    def fork(self, i: int, n: int = 1) -> None:
        both = zip(self.caches, self.live[i], strict=True)
        self.live += zip(*(cache.fork(handle, n) for cache, handle in both), strict=True)
        self.padding += [self.padding[i]] * n

    def truncate(self, i: int, length: int) -> None:
        for cache, handle in zip(self.caches, self.live[i], strict=True):
            cache.truncate(handle, length)

    def release(self, i: int) -> None:
        del self.padding[i]
        for cache, handle in zip(self.caches, self.live.pop(i), strict=True):
            cache.release(handle)

    def shortest(self, i: int) -> int:
        """The length that a truncation may leave at least."""
        return max(
            allocator.shortest(self.live[i][0]) for allocator in self.caches[0]._sequences.allocators.values()
        )

    def length(self, i: int) -> int:
        return self.caches[0].length(self.live[i][0])

    def run(
        self, tokens: int | dict[int, int], *, reading: bool = False, fail: bool = False, calls=CALLS
    ) -> list:
        """Attend in a step or a read of so many tokens, for all or by number, alike in both caches; the
        views.
        """
        given = [
            tokens if isinstance(tokens, int) else {self.live[i][j]: n for i, n in tokens.items()}
            for j in (0, 1)
        ]
        shape = (len(self.live), tokens) if isinstance(tokens, int) else (sum(tokens.values()),)
        new = [
            [torch.randn(*shape, *x, dtype=torch.float64) for x in _widths(layout)] for layout in self.layouts
        ]
        answers, views = [], []
        for cache, counts in zip(self.caches, given, strict=True):
            with (cache.read if reading else cache.step)(counts) as layers:
                of = [kv.view() if reading else kv.append(*x[1:]) for kv, x in zip(layers, new, strict=True)]
                if fail:
                    raise Abort
                views += of
                asked = [
                    (view, x[0], call)
                    for view, x in zip(of, new, strict=True)
                    for call in _possible(view, calls)
                ]
                answers.append([y for view, q, call in asked for y in attend(q, view, **call)])
        for ours, plain in zip(*answers, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
        return views[: len(self.layouts)]

    @property
    def layouts(self):
        return self.caches[0].layouts


def _widths(layout: KVLayout) -> tuple:
    """Of queries, and of what is appended."""
    if layout.is_latent:
        return (HEADS, layout.dim + layout.tail), (layout.dim,), (layout.tail,)
    return (HEADS, layout.dim), (layout.heads, layout.dim), (layout.heads, layout.value_dim)


def _possible(view, calls) -> list[dict]:
    return [call for call in calls.values() if view.layout.window is None or call["mask"].left is not None]


def forked(prefixes: int = 1, length: int = 7, n: int = 3, layouts=(GROUPED,)) -> Pair:
    """A sequence of so many tokens, and ``n`` forks of it."""
    pair = Pair(prefixes, layouts)
    pair.admit(1)
    pair.run(length)
    pair.fork(0, n)
    return pair


class SharingMachine(RuleBasedStateMachine):
    """Admissions, steps, reads, forks, truncations and releases in any order change no answer."""

    @initialize(
        prefixes=st.integers(1, 3), padding=st.sampled_from([0, 3]), tokens=st.sampled_from([4, 5, 6])
    )
    def start(self, prefixes, padding, tokens):
        self.pair = Pair(prefixes)
        self.pair.admit(2, padding)
        self.pair.run(tokens)
        self.pair.fork(0)

    @property
    def live(self):
        return range(len(self.pair.live))

    def some(self, data):
        return data.draw(st.sampled_from(self.live), label="sequence")

    def run(self, data, most, **how):
        """Attend in one of all ways and in a window."""
        one = data.draw(st.sampled_from(list(CALLS)), label="call")
        calls = {name: CALLS[name] for name in (one, "sliding")}
        arriving = any(self.pair.length(i) < self.pair.padding[i] for i in self.live)
        if arriving or data.draw(st.booleans(), label="dense"):
            tokens = data.draw(st.sampled_from([0, 1, 1, 1, min(2, most)]), label="tokens")
        else:
            rows = data.draw(st.permutations(self.live))[: data.draw(st.integers(1, 6))]
            tokens = {i: data.draw(st.integers(0, most)) for i in rows}
        if how.get("reading"):
            tokens = self.readable(tokens)
        self.pair.run(tokens, calls=calls, **how)

    def readable(self, tokens):
        """As many of these queries as see no key that the window has dropped."""
        last = [
            self.pair.length(i) - self.pair.shortest(i) if self.pair.shortest(i) else MOST for i in self.live
        ]
        if isinstance(tokens, int):
            return min(tokens, *last)
        return {i: min(n, last[i]) for i, n in tokens.items()}

    @precondition(lambda self: len(self.live) < 6)
    @rule()
    def admit(self):
        self.pair.admit(1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data):
        if most := self.room():
            self.run(data, min(most, 5))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def failing_step(self, data):
        if most := self.room():
            with pytest.raises(Abort):
                self.run(data, min(most, 5), fail=True)

    def room(self) -> int:
        return MOST - max(map(self.pair.length, self.live))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def read(self, data):
        self.run(data, 9, reading=True)

    @precondition(lambda self: 0 < len(self.live) < 6)
    @rule(data=st.data(), n=st.integers(1, 3))
    def fork(self, data, n):
        self.pair.fork(self.some(data), min(n, 6 - len(self.live)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data):
        i = self.some(data)
        length = data.draw(st.integers(self.pair.shortest(i), self.pair.length(i)), label="length")
        self.pair.truncate(i, length)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        self.pair.release(self.some(data))


SharingMachine.TestCase.settings = settings(deadline=None, max_examples=20, stateful_step_count=20)
TestSharingMachine = SharingMachine.TestCase


@pytest.mark.covering(2)
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tokens", [1, 3, {3: 2, 0: 1, 1: 0, 2: 4}], ids=str)
def test_forks_attend_as_if_each_had_stored_its_own(tokens, call, backend):
    pair = forked(layouts=LAYOUTS)
    for _ in range(2):
        pair.run(tokens, calls={call: {**CALLS[call], "backend": backend}})


@pytest.mark.parametrize("layout", [GROUPED, LATENT, LAYOUTS[3]], ids=("grouped", "latent", "int8"))
def test_shared_pages_are_read_in_one_row(layout):
    """The row of a group is all that reads them: elsewhere the table may name any page. Without it they are
    missed.
    """
    (view,) = forked(length=7, n=3, layouts=(layout,)).run(1)
    shared, own = view.route.shared, view.route.own
    assert shared.lengths.tolist() == [6]
    assert shared.cu_seqlens_q.tolist() == [0, 4]
    assert own.starts.tolist() == [6, 6, 6, 6]
    assert view.starts.tolist() == [0, 0, 0, 0]
    q = torch.randn(4, 1, HEADS, layout.dim + layout.tail, dtype=torch.float64)
    whole = cached_attention(q, replace(view), mask=CAUSAL)
    scrambled = view.table.clone()
    scrambled[:, :3] = -1
    elsewhere = view.with_route(PrefixRoute(shared, replace(own, table=scrambled)))
    torch.testing.assert_close(cached_attention(q, elsewhere, mask=CAUSAL), whole, rtol=1e-12, atol=1e-12)
    without = view.with_route(PrefixRoute(replace(shared, lengths=torch.zeros_like(shared.lengths)), own))
    assert not cached_attention(q, without, mask=CAUSAL).isclose(whole).all(-1).any()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tokens", [2, {0: 1, 1: 2}], ids=str)
def test_explain_tells_the_calls_that_run(tokens, call):
    """Two where what is shared is seen whole by all, one elsewhere; run for run."""
    (view,) = forked(n=1).run(tokens)
    q, ran = torch.randn(*((2, 2) if tokens == 2 else (3,)), HEADS, 4, dtype=torch.float64), []
    with mock.patch.object(running, "checked", side_effect=lambda x: ran.append(checked(x)) or ran[-1]):
        told = explain(attend, q, view, **CALLS[call])
        explained = [x.spec for x in ran]
        attend(q, view, **CALLS[call])
    assert [x.spec for x in ran[len(explained) :]] == explained == [x.spec for x in (told, told.shared) if x]
    assert [x.kv for x in ran[: len(explained)]] == (
        [view] if told.shared is None else [view.route.own, view.route.shared]
    )
    assert (told.shared is None) == (call in ("behind", "sliding", "slopes"))


def test_explain_prints_both_calls_and_the_merge():
    (view,) = forked(n=1).run(1)
    q = torch.randn(2, 1, HEADS, 4, dtype=torch.float64)
    first, *lines = str(explain(cached_attention, q, view, mask=CAUSAL)).splitlines()
    assert first == "two calls, whose results merge_states joins"
    assert [line for line in lines if not line.startswith(" ")] == [
        "of each sequence's own keys:",
        "of shared prefixes, once for each group:",
    ]
    assert lines.count("  runs on: torch") == 2
    assert [line.partition(":")[0] for line in lines].count("  cached attention") == 2
    named = explain(cached_attention, q, view, mask=CAUSAL, backend="reference")
    assert (named.chosen, named.shared.chosen) == ("reference", "reference")
    alone = explain(cached_attention, q, replace(view), mask=CAUSAL)
    assert (alone.chosen, alone.shared) == ("torch", None)
    assert str(alone).startswith("cached attention: ")


@pytest.mark.parametrize("q", [None, torch.zeros(HEADS), torch.zeros(2, 1, HEADS, 4).to_sparse()], ids=repr)
def test_what_is_no_query_is_refused_as_over_any_view(q):
    (view,) = forked(n=1).run(1)
    with pytest.raises((TypeError, ValueError), match=r"^q: ") as plain:
        cached_attention(q, replace(view), mask=CAUSAL)
    for run in (cached_attention, lambda *args, **how: explain(cached_attention, *args, **how)):
        with pytest.raises(plain.type) as error:
            run(q, view, mask=CAUSAL)
        assert str(error.value) == str(plain.value)


def test_a_nan_in_what_some_share_reaches_no_other():
    pair = forked(prefixes=3, n=1)
    pair.admit(1)
    (view,) = pair.run(3)
    shared = view.route.shared
    assert shared.cu_seqlens_q.tolist() == [0, 6, 9, 9]
    for plane in (view.k, view.v):
        plane[shared.table[0, 0].long()] = torch.nan
    out, lse = attend(torch.randn(3, 3, HEADS, 4, dtype=torch.float64), view, mask=CAUSAL)
    assert out[:2].isnan().all()
    assert lse[:2].isnan().all()
    assert out[2].isfinite().all()
    assert lse[2].isfinite().all()


def holdings(*pages: str) -> list[Holding]:
    """A letter is a page."""
    return [Holding(0, 0, len(x) * SIZE, pages=list(map(ord, x))) for x in pages]


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ([], []),
        (["abc"], [(1, 0)]),
        (["abx", "aby", "ab"], [(3, 2)]),
        (
            ["abcx", "abcy", "az"],
            [(2, 3), (1, 0)],
        ),  # a third row would share one page in place of three
        (["abx", "aby", "abz", "az"], [(3, 2), (1, 0)]),
        (["abx", "aby", "az"], [(3, 1)]),
        (
            ["x", "y", "abp", "abq", "z", "cu", "cv"],
            [(2, 0), (2, 2), (1, 0), (2, 1)],
        ),
        (["abp", "z", "abq"], [(3, 0)]),  # not neighbours
        (["", "", "a"], [(3, 0)]),
    ],
)
def test_groups_of_neighbours(pages, expected):
    given = holdings(*pages)
    assert prefix_groups(given, [len(x.pages) for x in given], SIZE) == expected


def test_short_prefixes_and_unfinished_pages_make_no_group():
    given = holdings("abc", "abd", "abe")
    for full_pages in ([3, 1, 3], [1, 3, 3]):
        assert prefix_groups(given, full_pages, SIZE) == [PrefixGroup(3, 1)]
    assert prefix_groups(given, [3, 0, -2], SIZE) == [PrefixGroup(3, 0)]
    with mock.patch.object(groups, "SHARED_TOKENS", 2 * SIZE + 1):
        assert prefix_groups(given, [3, 3, 3], SIZE) == [PrefixGroup(3, 0)]


def test_more_groups_than_are_asked_for():
    pair = forked(prefixes=2, n=1)
    for _ in range(2):
        pair.admit(1)
        pair.run({len(pair.live) - 1: 5})
        pair.fork(len(pair.live) - 1)
    (view,) = pair.run({0: 1, 1: 1, 3: 2, 2: 2, 5: 1, 4: 1})
    shared, own = view.route.shared, view.route.own
    assert shared.lengths.tolist() == [6, 4]
    assert shared.cu_seqlens_q.tolist() == [0, 2, 6]
    assert own.starts.tolist() == [6, 6, 4, 4, 0, 0]
    (view,) = pair.run({0: 1, 2: 2, 1: 1})
    assert view.route.shared.lengths.tolist() == [0, 0]
    assert view.route.own.starts.tolist() == [0, 0, 0]


def test_what_is_truncated_is_not_shared_when_it_has_grown_again():
    """By steps of the same sequences and sizes, which look for groups no more while all keep what they
    share.
    """
    pair = forked(n=1)
    (view,) = pair.run(5)
    assert view.route.shared.lengths.tolist() == [6]
    pair.truncate(0, 3)
    for _ in range(2):
        pair.run(5)
        assert view.route.shared.lengths.tolist() == [2]
        assert view.route.own.starts.tolist() == [2, 2]


def test_other_sequences_of_the_same_sizes_are_other_groups():
    pair = forked(n=1)
    pair.admit(1)
    pair.run({2: 9})
    pair.fork(2)
    for rows, shared in (((0, 1), 6), ((2, 3), 8), ((0, 2), 0), ((1, 0), 6)):
        (view,) = pair.run(dict.fromkeys(rows, 1))
        assert view.route.shared.lengths.tolist() == [shared]


def test_children_share_when_their_parent_is_gone():
    pair = forked(n=2)
    pair.run(1)
    pair.release(0)
    (view,) = pair.run(1)
    assert view.route.shared.lengths.tolist() == [6]
    assert view.route.shared.cu_seqlens_q.tolist() == [0, 2]


def test_left_padding_stays_hidden():
    pair = Pair(1, (GROUPED,))
    pair.admit(1, padding=3)
    pair.run(7)
    pair.fork(0)
    (view,) = pair.run(1)
    shared, own = view.route.shared, view.route.own
    assert shared.starts.tolist() == [3]
    assert shared.lengths.tolist() == [6]
    assert own.starts.tolist() == [6, 6]
    long = Pair(1, (GROUPED,))
    long.admit(1, padding=5)
    long.run(4)
    long.fork(0)
    (view,) = long.run(4)
    assert view.route.own.starts.tolist() == [5, 5]


def test_queries_of_a_read_are_not_after_all_tokens():
    """What is shared ends before the first of them, so that it is seen whole whatever the mask."""
    pair = forked(length=6, n=1)
    for queries, shared in ((1, 4), (2, 4), (3, 2), (6, 0), (9, 0), (1, 4)):
        (view,) = pair.run(queries, reading=True)
        assert view.route.shared.lengths.tolist() == [shared]
    (view,) = pair.run(1)
    assert view.route.shared.lengths.tolist() == [6]


def test_decoding_looks_for_groups_once():
    pair = forked()
    with mock.patch.object(buffers, "prefix_groups", wraps=prefix_groups) as found:
        for _ in range(5):
            pair.run(1, calls={})
        assert found.call_count == 1
        pair.truncate(0, 6)  # no less than it shares
        pair.run(1, calls={})
        assert found.call_count == 1
        pair.release(1)
        pair.run(1, calls={})
        assert found.call_count == 2


def test_views_and_their_memory_stay():
    """So that a captured graph finds every later run in them."""
    pair = forked(prefixes=2)
    addresses, views = set(), []
    for _ in range(3):
        views += pair.run(1)
        pair.release(0)
        pair.fork(1)
        shared, own = views[-1].route.shared, views[-1].route.own
        buffers = [x for part in (shared, own) for x in (part.table, part.starts, part.lengths)]
        addresses.add(tuple(x.data_ptr() for x in (*buffers, shared.cu_seqlens_q)))
    assert all(view is views[0] for view in views)
    assert len(addresses) == 1


def test_who_does_not_ask_gets_one_view():
    with make(0).step(0) as (kv,):
        assert kv.view().route is None
    layouts = (GROUPED, replace(GROUPED, window=5))
    with make(2, layouts).step(0) as layers:
        assert [layer.view().route is None for layer in layers] == [False, True]
        assert replace(layers[0].view()).route is None
    with pytest.raises(ValueError, match="shared_prefixes: expected at least 0, got -1"):
        make(-1)


def layer(kind: str, form: str = "absorbed"):
    torch.manual_seed(0)
    if kind == "gqa":
        return GroupedQueryAttention(
            16, HEADS, num_kv_heads=2, mask=CAUSAL, rope=Rope(4), dtype=torch.float64
        )
    sizes = {
        "q_lora_rank": None,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
    }
    return MultiHeadLatentAttention(
        16, HEADS, mask=CAUSAL, rope=Rope(2), form=form, dtype=torch.float64, **sizes
    )


@torch.no_grad()
def decode(module, run, prefixes: int) -> list[torch.Tensor]:
    """What ``run`` gives in steps of two, three and four sequences that begin alike."""
    source, outs = torch.Generator().manual_seed(0), []

    def x(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 16, dtype=torch.float64, generator=source)

    cache = make(prefixes, [module.kv_layout])
    (first,) = cache.admit()
    with cache.step(7) as (kv,):
        module(x(1, 7), kv=kv)
    for batch in (2, 3, 4):
        cache.fork(first)
        for _ in range(3):
            with cache.step(1) as (kv,):
                outs.append(run(x(batch, 1), kv=kv))
    return outs


@pytest.mark.parametrize(("kind", "form"), [("gqa", None), ("mla", "absorbed"), ("mla", "expanded")])
def test_layers_decode_forks(kind, form):
    """The expanded form makes views of its own, over other planes and pages."""
    module = layer(kind, form)
    for ours, plain in zip(decode(module, module, 2), decode(module, module, 0), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_forks_decode_in_one_graph(kind):
    torch._dynamo.reset()
    module, counter = layer(kind), CompileCounterWithBackend("aot_eager")
    run = torch.compile(module, fullgraph=True, backend=counter)
    for ours, plain in zip(decode(module, run, 2), decode(module, module, 2), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)
    assert 1 <= counter.frame_count <= 2
    torch._dynamo.reset()
