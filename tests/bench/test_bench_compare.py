"""Implementations in turns: who is timed, who is not and why, and what one failure leaves of the rest."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from bench_helpers import place, tiny

from attnlib import CAUSAL, FULL, sliding
from attnlib.bench import compare as compare_module
from attnlib.bench import speed
from attnlib.bench.cases import packed
from attnlib.bench.compare import Failure, agreeing, attempt, compare_calls, in_turns
from attnlib.bench.implementations import Implementation, implementation
from attnlib.bench.speed import Column, Run, compare, line_up, same_case

WHATS = ("inference", "forward", "backward", "both")


@pytest.mark.parametrize("mask", [CAUSAL, FULL])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_implementations_agree_and_are_timed(mask, kv_heads):
    case = tiny(24, mask, batch=2, kv_heads=kv_heads)
    names = ("ours", "FA2", "eager", "SDPA", "transposed")
    assert compare(place(), same_case(case, names), WHATS) == {
        what: dict.fromkeys(names, 1e-3) for what in WHATS
    }


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(5)], ids=str)
def test_flex_computes_each_mask(monkeypatch, mask):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = tiny(128, mask)
    ours = implementation("ours", case, place()).call
    q, k, v, _ = case.tensors("cpu")
    flex = implementation("Flex", case, place()).call(*(x.transpose(1, 2) for x in (q, k, v)))
    torch.testing.assert_close(flex.transpose(1, 2), ours(q, k, v))


def test_without_a_backward_only_outputs_are_compared():
    def call(q, k, v):
        if q.requires_grad:
            raise NotImplementedError("no backward")
        return q

    leaves = tuple(x.requires_grad_() for x in tiny().tensors("cpu")[:3])
    assert Run(call, leaves, leaves[0], heads_first=False).results(gradients=False)[0].equal(leaves[0])
    with pytest.raises(NotImplementedError, match="no backward"):
        Run(call, leaves, leaves[0], heads_first=False).results()


def test_packed_implementations_agree():
    case = packed(7, 1, 12)._replace(dtype=torch.float32)
    ready = line_up(place(), same_case(case, ("ours", "by sequence")))
    assert {name: type(run) for name, run in ready.items()} == {"ours": Run, "by sequence": Run}


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match=r"expected one of ours, .* got 'nobody'"):
        implementation("nobody", tiny(), place())


def test_who_refuses_is_marked_and_the_rest_timed():
    taken = compare(place(), same_case(tiny(24, sliding(5)), ("ours", "FA2", "eager")), ["forward"])[
        "forward"
    ]
    assert taken == {"ours": 1e-3, "FA2": "refuses", "eager": 1e-3}


def _twisted(monkeypatch, **twists):
    """Implementations whose output is changed: it stays right, but not the gradients, or it becomes something
    else.
    """

    def changed(name, case, where):
        call, heads_first = implementation("eager", case, where)
        twist = twists.get(name.replace(" ", "_"), lambda out, q: out)
        return Implementation(lambda q, k, v: twist(call(q, k, v), q), heads_first)

    monkeypatch.setattr(speed, "implementation", changed)


@pytest.mark.parametrize(
    "twist", [lambda out, q: out * 1.1, lambda out, q: 2 * out - out.detach(), lambda out, q: out + torch.nan]
)
def test_who_computes_something_else_is_not_timed(monkeypatch, twist):
    _twisted(monkeypatch, other=twist)
    three = same_case(tiny(), ("other", "one", "two"))
    taken = compare(place(), three, ["backward"])["backward"]
    assert taken["other"].startswith("differs from one by")
    assert taken["one"] == taken["two"] == 1e-3
    assert [name for name, run in line_up(place(), three).items() if isinstance(run, Run)] == ["one", "two"]


def test_nobody_is_timed_without_agreement(monkeypatch):
    _twisted(monkeypatch, two=lambda out, q: 2 * out)
    for names in (("one", "two"), ("one",)):
        assert set(compare(place(), same_case(tiny(), names), ["both"])["both"].values()) == {
            "agrees with nobody"
        }


def test_who_fails_while_timed_does_not_end_the_comparison():
    calls = []

    def clock(call):
        calls.append(call)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return len(calls)

    columns = same_case(tiny(), ("ours", "eager"))
    assert compare(place(clock), columns, ["forward"]) == {"forward": {"ours": "OOM", "eager": 4}}
    assert len(calls) == 5


def test_medians_of_all_rounds():
    seconds = iter([5, 1, 3, 2, 4, 9])
    actions = {"ours": "call", "eager": "call", "lost": Failure("OOM")}
    assert in_turns(actions, lambda call: next(seconds), 3) == {"ours": 4, "eager": 2, "lost": "OOM"}


@pytest.mark.parametrize(("rounds", "calls"), [(1, 6), (9, 9)])
def test_rounds_fill_the_budget(monkeypatch, rounds, calls):
    passed = []
    monkeypatch.setattr(compare_module, "time", SimpleNamespace(perf_counter=lambda: len(passed)))
    in_turns({"ours": "call"}, lambda call: passed.append(call) or 1.0, rounds, budget=6)
    assert len(passed) == calls


def test_untimed_columns_check_and_do_not_show():
    case = tiny()
    checked = [Column("ours", "ours", case), Column("check", "eager", case, timed=False)]
    assert compare(place(), checked, ["forward"]) == {"forward": {"ours": 1e-3}}


def test_cases_of_one_row_are_checked_apart():
    long, short = tiny(24), tiny(8)
    mixed = [
        Column("long", "ours", long),
        Column("short", "ours", short),
        Column("check", "FA2", short, timed=False),
    ]
    assert compare(place(), mixed, ["forward"])["forward"] == {"long": "agrees with nobody", "short": 1e-3}


def test_tensors_that_do_not_fit_fail_their_case_alone(monkeypatch):
    class Large(type(tiny())):
        def tensors(self, device):
            raise torch.OutOfMemoryError("CUDA out of memory")

    small, large = tiny(8), Large(*tiny(24))
    mixed = [*same_case(small, ("ours", "eager")), Column("large", "ours", large)]
    assert compare(place(), mixed, ["both"])["both"] == {"ours": 1e-3, "eager": 1e-3, "large": "OOM"}


def agree(ours=(), bound=1e-2, **results):
    """What is left of implementations that give these numbers: themselves, or a Failure."""
    made = {name: torch.tensor(x) for name, x in results.items()}
    return {
        name: x if isinstance(x, Failure) else None
        for name, x in agreeing(made, lambda x: [x], ours, bound).items()
    }


def test_who_differs_from_all_others_fails():
    assert agree(a=1.5, b=1.0, c=1.0) == {"a": "differs from b by 5e-01", "b": None, "c": None}
    assert agree(a=1.005, b=1.0) == {"a": None, "b": None}
    assert agree(a=1.04, b=1.0, bound=5e-2) == {"a": None, "b": None}
    assert agree(a=torch.nan, b=1.0, c=1.0)["a"] == "differs from b by nan"
    assert agree(a=1.0, b=1.0, c=3.0, d=3.0) == {
        "a": None,
        "b": None,
        "c": "differs from a by 2e+00",
        "d": "differs from a by 2e+00",
    }
    assert agree(a=1.0) == {"a": "agrees with nobody"}
    assert agree() == {}


def test_the_gradient_that_differs_most_decides():
    made = {"a": (1.0, 1.0), "b": (1.0, 1.5), "c": (1.0, 1.0)}
    differ = agreeing(made, lambda x: [torch.tensor(y) for y in x])
    assert differ == made | {"b": "differs from a by 5e-01"}


def test_ours_do_not_vouch_for_each_other():
    wrong = agree(("one", "two"), one=2.0, two=2.0, FA2=1.0, cuDNN=1.0)
    assert wrong == {
        "one": "differs from FA2 by 1e+00",
        "two": "differs from FA2 by 1e+00",
        "FA2": None,
        "cuDNN": None,
    }
    one = agree(("one", "two"), one=1.0, two=3.0, FA2=1.0, Flex=1.001)
    assert one == {"one": None, "two": "differs from one by 2e+00", "FA2": None, "Flex": None}
    assert agree(("one", "two"), one=1.0, two=1.0) == {"one": None, "two": None}
    assert set(agree(("one", "two"), one=2.0, two=2.0, FA2=1.0).values()) == {"agrees with nobody"}


def test_who_fails_is_no_witness():
    made = {"ours": 1.0, "other": Failure("OOM"), "third": 1.0}
    assert agreeing(made, lambda x: [torch.tensor(x)], ("ours",)) == made
    del made["third"]
    assert agreeing(made, lambda x: [torch.tensor(x)]) == {"ours": "agrees with nobody", "other": "OOM"}


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


def made(**results):
    return {name: partial(lambda x: lambda: x, torch.tensor(x)) for name, x in results.items()}


def test_calls_are_compared_one_by_one_or_captured():
    assert compare_calls(place(), made(ours=1.0, FA2=1.0), ours=("ours",)) == {"ours": 1e-3, "FA2": 1e-3}
    assert compare_calls(place(), made(ours=1.0, FA2=1.0), captured=4) == {"ours": 1e-3 / 4, "FA2": 1e-3 / 4}
    lost = compare_calls(place(), made(ours=1.0, other=1.0, FA2=2.0, cuDNN=2.0), ours=("ours", "other"))
    assert lost["ours"] == lost["other"] == "differs from FA2 by 5e-01"
    assert lost["FA2"] == lost["cuDNN"] == 1e-3


def test_a_check_is_not_timed():
    assert compare_calls(place(), made(ours=1.0, check=1.0), ours=("ours",), checks=("check",)) == {
        "ours": 1e-3
    }


def test_who_cannot_be_captured_or_made_does_not_end_the_comparison():
    def broken():
        raise NotImplementedError("not here")

    def capture(call, calls):
        if float(call()) > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return call

    where = place()._replace(capture=capture)
    cells = compare_calls(where, {"ours": broken, **made(FA2=1.0, cuDNN=1.001)}, captured=5, ours=("ours",))
    assert cells == {
        "ours": "refuses",
        "FA2": 1e-3 / 5,
        "cuDNN": "fails: RuntimeError: operation not permitted when stream is capturing",
    }
