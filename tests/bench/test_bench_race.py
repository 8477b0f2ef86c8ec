"""Contenders in turns: who is timed, who is not and why, and what one failure leaves of the rest."""

import pytest
import torch
from bench_helpers import place, tiny

from attnlib import CAUSAL, FULL, sliding
from attnlib.bench import race as module
from attnlib.bench.cases import packed
from attnlib.bench.peers import Contender, contender
from attnlib.bench.race import Entry, attempt, disagreements, in_turns, line_up, race

WHATS = ("forward", "backward", "both")


def entries(case, *names):
    return [Entry(name, name, case) for name in names]


@pytest.mark.parametrize("mask", [CAUSAL, FULL])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_contenders_agree_and_are_timed(mask, kv_heads):
    case = tiny(24, mask, batch=2, kv_heads=kv_heads)
    taken = race(place(), entries(case, "ours", "FA2", "eager", "SDPA"), WHATS)
    assert taken == {what: dict.fromkeys(("ours", "FA2", "eager", "SDPA"), 1e-3) for what in WHATS}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(5)], ids=str)
def test_flex_computes_each_mask(mask):
    case = tiny(128, mask)
    ours = contender("ours", case, place()).call
    q, k, v, _ = case.tensors("cpu")
    flex = contender("Flex", case, place()).call(*(x.transpose(1, 2) for x in (q, k, v)))
    torch.testing.assert_close(flex.transpose(1, 2), ours(q, k, v))


def test_packed_contenders_agree():
    case = packed(7, 1, 12)._replace(dtype=torch.float32)
    runs, failures = line_up(place(), entries(case, "ours", "by sequence"))
    assert list(runs) == ["ours", "by sequence"]
    assert not failures


def test_an_unknown_contender_is_named():
    assert "got 'nobody'" in line_up(place(), entries(tiny(), "nobody"))[1]["nobody"]


def test_who_refuses_is_marked_and_the_rest_timed():
    taken = race(place(), entries(tiny(24, sliding(5)), "ours", "FA2", "eager"), ["forward"])["forward"]
    assert taken == {"ours": 1e-3, "FA2": "refuses", "eager": 1e-3}


def _twisted(monkeypatch, **twists):
    """Contenders whose output is changed: it stays right, but not the gradients, or it becomes something else."""

    def changed(name, case, where):
        call, heads_first = contender("eager", case, where)
        twist = twists.get(name.replace(" ", "_"), lambda out, q: out)
        return Contender(lambda q, k, v: twist(call(q, k, v), q), heads_first)

    monkeypatch.setattr(module, "contender", changed)


@pytest.mark.parametrize(
    "twist", [lambda out, q: out * 1.1, lambda out, q: 2 * out - out.detach(), lambda out, q: out + torch.nan]
)
def test_who_computes_something_else_is_not_timed(monkeypatch, twist):
    _twisted(monkeypatch, other=twist)
    three = entries(tiny(), "other", "one", "two")
    taken = race(place(), three, ["backward"])["backward"]
    assert taken["other"].startswith("differs from one by")
    assert taken["one"] == taken["two"] == 1e-3
    assert set(line_up(place(), three)[0]) == {"one", "two"}


def test_nobody_is_timed_without_agreement(monkeypatch):
    _twisted(monkeypatch, two=lambda out, q: 2 * out)
    for names in (("one", "two"), ("one",)):
        assert set(race(place(), entries(tiny(), *names), ["both"])["both"].values()) == {"agrees with nobody"}


def test_who_fails_while_timed_does_not_end_the_race():
    calls = []

    def clock(call):
        calls.append(call)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return len(calls)

    runs, _ = line_up(place(), entries(tiny(), "ours", "eager"))
    assert in_turns(place(clock), runs, "forward") == {"ours": "OOM", "eager": 4}
    assert len(calls) == 5


def test_medians_of_all_rounds():
    seconds = iter([5, 1, 3, 2, 4, 9])
    runs, _ = line_up(place(), entries(tiny(), "ours", "eager"))
    assert in_turns(place(lambda call: next(seconds)), runs, "both") == {"ours": 4, "eager": 2}


def test_untimed_entries_check_and_do_not_show():
    case = tiny()
    judged = [Entry("ours", "ours", case), Entry("judge", "eager", case, timed=False)]
    assert race(place(), judged, ["forward"]) == {"forward": {"ours": 1e-3}}


def test_cases_of_one_row_are_checked_apart():
    long, short = tiny(24), tiny(8)
    mixed = [Entry("long", "ours", long), Entry("short", "ours", short), Entry("judge", "FA2", short, timed=False)]
    assert race(place(), mixed, ["forward"])["forward"] == {"long": "agrees with nobody", "short": 1e-3}


def test_tensors_that_do_not_fit_fail_their_case_alone(monkeypatch):
    class Large(type(tiny())):
        def tensors(self, device):
            raise torch.OutOfMemoryError("CUDA out of memory")

    small, large = tiny(8), Large(*tiny(24))
    mixed = [*entries(small, "ours", "eager"), Entry("large", "ours", large)]
    assert race(place(), mixed, ["both"])["both"] == {"ours": 1e-3, "eager": 1e-3, "large": "OOM"}


def test_disagreements_follow_the_majority():
    right, wrong = [torch.ones(4)], [torch.full((4,), 1.5)]
    assert disagreements({"a": wrong, "b": right, "c": right}) == {"a": "differs from b by 5e-01"}
    assert disagreements({}) == {}
    near = [torch.full((4,), 1.005)]
    assert disagreements({"a": near, "b": right}) == {}


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "OOM"),
        (RuntimeError("No available kernel. Aborting execution."), "refuses"),
        (RuntimeError("No viable backend for scaled_dot_product_attention was found."), "refuses"),
        (NotImplementedError("not for us"), "refuses"),
        (ValueError("a | b\n c"), "fails: ValueError: a / b c"),
    ],
)
def test_failures_say_why(error, why):
    def call():
        raise error

    assert attempt(call) == why


def test_an_interrupt_is_no_failure():
    def call():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(call)
