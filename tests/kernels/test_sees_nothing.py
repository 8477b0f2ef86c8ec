"""A query that sees no key gives 0, and its sink as the LSE, though the keys of its tile are not numbers."""

from dataclasses import replace

import pytest
import torch
from decode_helpers import Sizes, store
from kernel_helpers import DEVICE

from attnlib import CAUSAL, KVLayout, Mask, attention_with_lse, cached_attention_with_lse

BLIND, SEEING = 2, 3  # queries

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of NaN inputs


@pytest.fixture(params=(False, True), ids=("plain", "sinks"))
def sinks(request):
    return torch.tensor([0.5, -1.0], device=DEVICE) if request.param else None


def assert_nothing(out, lse, sinks):
    assert (out[:, :BLIND] == 0).all()
    assert out[:, BLIND:].isnan().all()
    expected = torch.full((2,), -torch.inf) if sinks is None else sinks.cpu()
    torch.testing.assert_close(lse[..., :BLIND].cpu(), expected[None, :, None].expand(1, 2, BLIND))


def test_forward_and_the_gradient_of_queries(sinks):
    q = torch.randn(1, BLIND + SEEING, 2, 16, device=DEVICE, dtype=torch.float16, requires_grad=True)
    k = torch.full((1, SEEING, 1, 16), torch.nan, device=DEVICE, dtype=torch.float16)
    out, lse = attention_with_lse(q, k, k, mask=CAUSAL, sinks=sinks, backend="triton")
    assert_nothing(out, lse, sinks)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert (dq[:, :BLIND] == 0).all()
    assert dq[:, BLIND:].isnan().all()


@pytest.mark.parametrize("split_size", [0, 16])
def test_cached(sinks, split_size):
    stored = store(KVLayout.grouped(1, 16, dtype=torch.float16), Sizes((BLIND + SEEING,), page_size=8))
    view = replace(stored.view, split_size=split_size)
    view.k.fill_(torch.nan)
    view.v.fill_(torch.nan)
    q = torch.randn(1, BLIND + SEEING, 2, 16, device=DEVICE, dtype=torch.float16)
    assert_nothing(
        *cached_attention_with_lse(q, view, mask=Mask(None, -BLIND), sinks=sinks, backend="triton"), sinks
    )
