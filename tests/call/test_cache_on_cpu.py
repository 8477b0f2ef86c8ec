"""A call that repeats on a CPU runs torch's fused attention at once, with the bits of the first such call."""

from functools import partial
from weakref import ref

import pytest
import torch
from helpers import assert_same_bits
from torch.utils.checkpoint import checkpoint

from attnlib import (
    CAUSAL,
    FULL,
    KVCache,
    KVLayout,
    Mask,
    attention,
    attention_with_lse,
    cached_attention,
    cached_attention_with_lse,
    sliding,
)
from attnlib.backends._torch import fused
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


@pytest.fixture
def read_at_once(monkeypatch):
    """The calls that were read at once."""
    calls, forward = [], fused.forward_at_end
    monkeypatch.setattr(fused, "forward_at_end", lambda *a: calls.append(forward(*a)) or calls[-1])
    return calls


def stepped(cache, tokens, mask):
    """The results of a step over a layer."""
    with cache.step(tokens) as (kv,):
        q, k, v = (torch.randn(*kv.positions.shape, h, 16, dtype=kv.layout.dtype) for h in (4, 2, 2))
        return cached_attention_with_lse(q, kv.append(k, v), mask=mask)


@pytest.mark.parametrize("storage", [None, torch.int8])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(9), Mask(right=0, prefix=2)], ids=str)
def test_repeated_steps_give_the_same_bits(mask, paged, storage, read_at_once):
    """Over sequences of equal and different lengths, in rows that are adjacent or not."""
    layout = KVLayout.grouped(2, 16, dtype=torch.float32, storage_dtype=storage)
    results = []
    for forget in (False, True):
        torch.manual_seed(0)
        make = partial(KVCache.paged, pages=40, page_size=4) if paged else KVCache.contiguous
        cache = make([layout], max_sequences=4, max_length=60)
        one, two, three = cache.admit(3)
        apart = [{one: 5, two: 20, three: 20}, *(1,) * 3, *({two: 1, three: 1},) * 3, *({two: 2},) * 2]
        found = []
        for plan in (*apart, None, 12, *(1,) * 3, *(2,) * 2):  # None: from here on, all are equally long
            if forget:
                CALL_CACHE.clear()
            if plan is None:
                for handle in (one, two, three):
                    cache.truncate(handle, 8)
            else:
                found.append(stepped(cache, plan, mask))
        results.append(found)
    CALL_CACHE.clear()
    assert any(x is not None for x in read_at_once) == (mask != sliding(9) and not paged and storage is None)
    for repeated, checked in zip(*results, strict=True):
        assert_same_bits(*zip(repeated, checked, strict=True))


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [("table", [-1, 0], "pages in"), ("table", [1, 2], "pages in"), ("lengths", [9, 9], "at most 8 tokens")],
)
def test_a_repeated_step_reads_nothing_outside_the_cache(name, row, message):
    cache = KVCache.contiguous([KVLayout.grouped(2, 16)], max_sequences=2, max_length=8)
    cache.admit(2)
    q, k, v = (torch.randn(2, 1, h, 16) for h in (4, 2, 2))
    with cache.step(1) as (kv,):
        view = kv.append(k, v)
        for _ in range(2):
            cached_attention(q, view, mask=CAUSAL)
        assert CALL_CACHE.count(view) == 2  # the call and the write
        x = getattr(view, name)
        x.copy_(torch.tensor(row).view(x.shape))
        with pytest.raises(ValueError, match=message):
            cached_attention(q, view, mask=CAUSAL)


def test_a_view_is_freed_with_its_calls():
    def attended():
        cache = KVCache.contiguous([KVLayout.grouped(2, 16)], max_sequences=1, max_length=8)
        cache.admit(1)
        with cache.step(1) as (kv,):
            view = kv.append(*(torch.randn(1, 1, 2, 16) for _ in range(2)))
            cached_attention(torch.randn(1, 1, 4, 16), view, mask=CAUSAL)
        return ref(view)

    view = attended()
    assert view() is None
