"""Calls of a torch whose fused attention is missing or computes something else are solved tile by tile."""

import pytest
import torch
from helpers import assert_precise, make
from probing import forgotten
from torch.autograd import profiler

from attnlib import CAUSAL, FULL, KVCache, KVLayout, attention, cached_attention, explain
from attnlib.backends._torch import fused
from attnlib.internal import probes


def missing():
    raise AttributeError("no such name")


@pytest.fixture
def unknown():
    """Takes torch's fused functions away."""
    with forgotten(), pytest.MonkeyPatch.context() as patch:

        def forget():
            probes.ANSWERS.clear()
            patch.setattr(fused, "_look_up", missing)

        yield forget


@pytest.mark.parametrize(("s", "t", "mask"), [(17, 17, CAUSAL), (1, 65, CAUSAL), (33, 65, FULL)])
@pytest.mark.parametrize("options", [(), ("bounds",)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_calls_are_the_same(s, t, mask, options, dtype, unknown):
    problem = make(3, s, t, 4, 2, 8, mask=mask, options=options, dtype=dtype)
    leaves, (dout, _) = [x.requires_grad_() for x in problem.leaves], problem.directions()

    def solve():
        out, lse = problem.solve(backend="torch")
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    known = solve()
    unknown()
    torch.testing.assert_close(solve(), known)


@pytest.mark.parametrize("mask", [CAUSAL, FULL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_are_precise(mask, dtype, unknown):
    unknown()
    assert_precise(make(2, 33, 33, 4, 2, 8, mask=mask, dtype=dtype), "torch")


@torch.no_grad()
@pytest.mark.parametrize("page_size", [4, 64, 600])
def test_cached_calls_are_the_same(page_size, unknown):
    cache = KVCache.paged([KVLayout.grouped(2, 8)], pages=48, page_size=page_size, max_sequences=2)
    cache.admit(2)
    with cache.step(65) as (kv,):
        view = kv.append(torch.randn(2, 65, 2, 8), torch.randn(2, 65, 2, 8))
    q = torch.randn(2, 1, 4, 8)
    known = cached_attention(q, view, mask=CAUSAL, backend="torch")
    unknown()
    torch.testing.assert_close(cached_attention(q, view, mask=CAUSAL, backend="torch"), known)


def other(name, change):
    """torch's functions, one of which gives another result."""
    right = fused._look_up()

    def run(*arguments, **options):
        return change(*getattr(right, name)(*arguments, **options))

    return right._replace(**{name: run})


def ignores_causality(q, k, v, dropout, causal, *, scale):
    return fused.torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, False, scale=scale)


WRONG = {
    "scale": ("forward", lambda out, lse: (out * 1.001, lse)),
    "base of the LSE": ("forward", lambda out, lse: (out, lse * 1.4427)),
    "NaN": ("forward", lambda out, lse: (out.nan_to_num(0), lse)),
    "NaN LSE": ("forward", lambda out, lse: (out, lse.nan_to_num(0))),
    "shape of the LSE": ("forward", lambda out, lse: (out, lse[..., None])),
    "dq": ("backward", lambda dq, dk, dv: (-dq, dk, dv)),
    "order of gradients": ("backward", lambda dq, dk, dv: (dq, dv, dk)),
}


@pytest.mark.parametrize("what", [*WRONG, "causality"])
def test_a_function_that_computes_something_else_is_not_used(what, monkeypatch):
    problem = make(1, 17, 17, 2, 2, 8)
    right = problem.solve(backend="torch")
    is_causal = what == "causality"
    changed = fused._look_up()._replace(forward=ignores_causality) if is_causal else other(*WRONG[what])
    with forgotten():
        probes.ANSWERS.clear()
        monkeypatch.setattr(fused, "_look_up", lambda: changed)
        torch.testing.assert_close(problem.solve(backend="torch"), right)
        (failure,) = fused.failures()
        assert "tile by tile" in failure
        assert failure in str(explain(attention, *problem.leaves[:3], mask=CAUSAL))


def test_this_torch_computes_the_same():
    with forgotten():
        assert fused.failures() == []


def test_it_runs_where_its_trial_passed(monkeypatch):
    ran = []
    right = fused._look_up()
    with forgotten():
        monkeypatch.setattr(fused, "_look_up", lambda: right._replace(forward=count(ran, right.forward)))
        make(1, 17, 17, 2, 2, 8).solve()
        trials = len(ran)
        make(1, 17, 17, 2, 2, 8).solve()
    assert len(ran) > trials


def count(ran, function):
    def run(*arguments, **options):
        ran.append(function)
        return function(*arguments, **options)

    return run


def test_it_is_not_tried_where_somebody_would_follow():
    problem = make(1, 17, 17, 2, 2, 8)
    with forgotten():
        with profiler.emit_itt():
            problem.solve()
        assert fused.FUSED not in probes.ANSWERS
        problem.solve()
        assert fused.FUSED in probes.ANSWERS
