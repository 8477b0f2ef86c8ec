"""A call that repeats on a CPU runs torch's fused attention at once, with the bits of the first such call."""

from functools import partial
from weakref import ref

import pytest
import torch
from helpers import assert_same_bits
from torch.utils.checkpoint import checkpoint

from attnlib import CAUSAL, FULL, attention, attention_with_lse, sliding
from attnlib.call.cache import key_of
from attnlib.call.call import Call, Score
from attnlib.dispatch.select import CALL_CACHE


@pytest.fixture(autouse=True)
def _forgotten():
    CALL_CACHE.clear()
    yield
    CALL_CACHE.clear()


def tensors(heads=(4, 2, 2), *, dtype=torch.float32, grad=False, tokens=40):
    return [torch.randn(2, tokens, h, 16, dtype=dtype, requires_grad=grad) for h in heads]


def found(leaves, mask, *, with_lse):
    """The results of a call and its gradients."""
    if not with_lse:
        out = attention(*leaves, mask=mask)
        return out, *torch.autograd.grad(out.sin().sum(), leaves)
    out, lse = attention_with_lse(*leaves, mask=mask)
    return out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 2)], ids=str)
def test_a_repeated_call_gives_the_same_bits(heads, mask, with_lse, dtype):
    first, second = (tensors(heads, dtype=dtype, grad=True) for _ in range(2))
    found(first, mask, with_lse=with_lse)
    assert CALL_CACHE.count() == 1
    again = found(second, mask, with_lse=with_lse)
    CALL_CACHE.clear()
    assert_same_bits(*zip(again, found(second, mask, with_lse=with_lse), strict=True))
    with torch.no_grad():
        once, again = (attention_with_lse(*second, mask=mask) for _ in range(2))
    assert_same_bits(*zip(once, again, strict=True))


def test_other_calls_are_not_repeated():
    q, k, v = tensors()
    attention(q, k, v, mask=CAUSAL)

    def key(q, k, v, mask=CAUSAL, **given):
        return key_of(Call(q, mask, k=k, v=v, **given), None)

    others = [
        key(q, k, v, FULL),
        key(q, k, v, score=Score(0.5)),
        key(q, k, v, lse=True),
        key(q[:1], k[:1], v[:1]),
        key(q.half(), k.half(), v.half()),
    ]
    assert [CALL_CACHE.find(None, other) for other in others] == [None] * len(others)
    for tile_by_tile in (sliding(9), CAUSAL.shift(3)):
        attention(q, k, v, mask=tile_by_tile)
    attention(q, k, v, mask=CAUSAL, backend="reference")
    assert CALL_CACHE.count() == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert key(q, k, v) is None
        assert attention(q, k, v, mask=CAUSAL).dtype == torch.bfloat16


def test_a_repeated_call_has_no_second_derivative():
    leaves = tensors(grad=True)
    for _ in range(2):
        grads = torch.autograd.grad(attention(*leaves, mask=CAUSAL).sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            grads[0].sum().backward()


def test_checkpoints_and_hooks_repeat_it():
    leaves = tensors(grad=True)
    call = partial(attention, mask=CAUSAL)
    expected = torch.autograd.grad(call(*leaves).sum(), leaves)
    for _ in range(2):
        out = checkpoint(call, *leaves, use_reentrant=False)
        assert_same_bits(*zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True))
    strided = lambda x: torch.stack((x, x), -1)[..., 0]  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, strided):
        given = torch.autograd.grad(call(*leaves).sum(), leaves)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("grad", [False, True])
def test_no_tensor_is_kept_alive(grad):
    def attended():
        leaves = tensors(grad=grad)
        attention(*leaves, mask=CAUSAL)
        return [ref(x) for x in leaves]

    kept = attended()
    assert CALL_CACHE.count() == 1
    assert [x() for x in kept] == [None] * 3
