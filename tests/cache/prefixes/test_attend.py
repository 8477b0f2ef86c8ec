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
from prefix_cases import CALLS, GROUPED, HEADS, LATENT, LAYOUTS, MOST, Pair, forked, make
from torch._dynamo.testing import CompileCounterWithBackend

from attnlib import (
    CAUSAL,
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    Rope,
    cached_attention,
    explain,
)
from attnlib import cached_attention_with_lse as attend
from attnlib.cache.prefixes.attend import PrefixRoute
from attnlib.call.call import checked
from attnlib.dispatch import run as running
from attnlib.dispatch.select import CALL_CACHE


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
    q = torch.randn(4, 1, HEADS, layout.dim + layout.rope_dim, dtype=torch.float64)
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
    CALL_CACHE.clear()  # repeated calls are not checked again
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
    assert str(alone).startswith("cached attention\n")


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
