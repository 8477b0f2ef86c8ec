"""Calls of a torch whose fused attention is not known are solved tile by tile, and are the same."""

import pytest
import torch
from helpers import assert_precise, make

from attnlib import CAUSAL, FULL, KVCache, KVLayout, cached_attention
from attnlib.backends._torch import fused


def never(*arguments, **options):
    raise AssertionError("fused attention ran")


@pytest.fixture
def unknown(monkeypatch):
    """Makes torch an unknown one, whose fused operators may not run."""

    def forget():
        for name, value in (("IS_KNOWN", False), ("FORWARD", never), ("BACKWARD", never)):
            monkeypatch.setattr(fused, name, value)

    return forget


@pytest.mark.parametrize(("s", "t", "mask"), [(17, 17, CAUSAL), (1, 65, CAUSAL), (33, 65, FULL)])
@pytest.mark.parametrize("bounds", [(), ("key_starts",)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_calls_are_the_same(s, t, mask, bounds, dtype, unknown):
    problem = make(3, s, t, 4, 2, 8, mask=mask, options=bounds, dtype=dtype)
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


def test_a_known_torch_runs_it(unknown, monkeypatch):
    problem = make(1, 17, 17, 2, 2, 8)
    unknown()
    problem.solve()
    monkeypatch.setattr(fused, "IS_KNOWN", True)
    with pytest.raises(AssertionError, match="fused attention ran"):
        problem.solve()
