"""A call that repeats on a GPU runs what the first found: the same bits, and anew wherever something
differs.
"""

from functools import partial
from weakref import ref

import pytest
import torch
from helpers import assert_same_bits
from torch.utils.checkpoint import checkpoint

from attnlib import CAUSAL, FULL, attention, attention_with_lse, sliding
from attnlib.call.cache import key_of
from attnlib.call.call import Call, Dropout, Packing, Score
from attnlib.dispatch.select import CALL_CACHE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def _forgotten():
    CALL_CACHE.clear()
    yield
    CALL_CACHE.clear()


def tensors(*, dtype=torch.bfloat16, tokens=300):
    return [torch.randn(2, tokens, h, 64, device="cuda", dtype=dtype) for h in (4, 2, 2)]


def key(q, k, v, mask=CAUSAL, *, name=None, **given):
    return key_of(Call(q, mask, k=k, v=v, **given), name)


def test_a_repeated_call_reads_the_new_tensors():
    first, second = tensors(), tensors()
    attention_with_lse(*first, mask=CAUSAL)
    assert CALL_CACHE.find(None, key(*second, lse=True)) is not None
    again = attention_with_lse(*second, mask=CAUSAL)
    CALL_CACHE.clear()
    assert_same_bits(*zip(again, attention_with_lse(*second, mask=CAUSAL), strict=True))


def test_a_repeated_call_has_its_own_gradients():
    def gradients(leaves):
        out, lse = attention_with_lse(*leaves, mask=CAUSAL)
        return torch.autograd.grad(out.float().sin().sum() + lse.cos().sum(), leaves)

    first, second = ([x.requires_grad_() for x in tensors()] for _ in range(2))
    gradients(first)
    assert CALL_CACHE.find(None, key(*second, lse=True)) is not None
    again = gradients(second)
    CALL_CACHE.clear()
    assert_same_bits(*zip(again, gradients(second), strict=True))


def leaves_and_gradient(*, heads_first=False):
    leaves = [
        x.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else x for x in tensors(tokens=700)
    ]
    return [x.requires_grad_() for x in leaves], torch.randn_like(leaves[0].contiguous())


def gradients(leaves, dout, **options):
    return torch.autograd.grad(
        attention(*leaves, mask=CAUSAL, backend="triton:generic"), leaves, dout, **options
    )


@pytest.mark.parametrize("heads_first", [False, True])
def test_what_hooks_give_back_may_lie_otherwise(heads_first):
    """Copies through the CPU are contiguous, whatever was saved was; and one begins at an odd address."""
    leaves, dout = leaves_and_gradient(heads_first=heads_first)
    expected = gradients(leaves, dout)
    assert_same_bits(*zip(gradients(leaves, dout), expected, strict=True))
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        assert_same_bits(*zip(gradients(leaves, dout), expected, strict=True))

    def odd(x):
        return torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, odd):
        found = gradients(leaves, dout)
    assert all((x - y).float().norm() < 0.02 * y.float().norm() for x, y in zip(found, expected, strict=True))


def test_a_gradient_that_lies_otherwise():
    leaves, dout = leaves_and_gradient()
    expected = gradients(leaves, dout)
    odd = torch.empty(dout.numel() + 1, device="cuda", dtype=dout.dtype)[1:].view(dout.shape).copy_(dout)
    for other in (dout.transpose(1, 2).contiguous().transpose(1, 2), odd):
        assert_same_bits(*zip(gradients(leaves, other), expected, strict=True))
    one = torch.ones((), device="cuda", dtype=dout.dtype).expand(dout.shape)
    assert_same_bits(*zip(gradients(leaves, one), gradients(leaves, one.contiguous()), strict=True))


def test_a_graph_that_is_kept_or_differentiated():
    leaves, dout = leaves_and_gradient()
    expected = gradients(leaves, dout)
    out = attention(*leaves, mask=CAUSAL, backend="triton:generic")
    for _ in range(2):
        assert_same_bits(
            *zip(torch.autograd.grad(out, leaves, dout, retain_graph=True), expected, strict=True)
        )
    found = torch.autograd.grad(out, leaves, dout, create_graph=True)
    assert_same_bits(*zip((x.detach() for x in found), expected, strict=True))
    with pytest.raises(RuntimeError, match="no second derivative"):
        found[0].sum().backward()
    out, lse = attention_with_lse(*leaves, mask=CAUSAL, backend="triton:generic")
    of_lse = torch.autograd.grad(lse.sum(), leaves[:2], retain_graph=True)
    out, lse = attention_with_lse(*leaves, mask=CAUSAL, backend="triton:generic")
    assert_same_bits(*zip(torch.autograd.grad(lse.sum(), leaves[:2], retain_graph=True), of_lse, strict=True))
    assert_same_bits(*zip(torch.autograd.grad(out, leaves, dout), expected, strict=True))


def test_a_checkpoint_of_a_first_call_runs_a_repeated_one():
    """It holds what is saved then against what was saved before."""
    leaves, dout = leaves_and_gradient()
    call = partial(attention, mask=CAUSAL, backend="triton:generic")
    found = [
        torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False), leaves, dout) for _ in range(2)
    ]
    assert CALL_CACHE.count() == 1
    assert_same_bits(*zip(*found, strict=True))


def test_gradients_on_other_streams_and_in_a_graph():
    leaves, dout = leaves_and_gradient()
    expected = gradients(leaves, dout)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = [gradients(leaves, dout) for _ in range(3)]
    torch.cuda.current_stream().wait_stream(stream)
    for found in on_stream:
        assert_same_bits(*zip(found, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(leaves, dout)
    for _ in range(2):
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        assert_same_bits(*zip(found, expected, strict=True))


def test_deterministic_gradients_are_asked_for_and_not():
    """Hopper's own backward adds to dq in any order; asked not to, the plain one runs, whatever ran
    before.
    """
    leaves, dout = leaves_and_gradient()
    plain = gradients(leaves, dout)

    def automatic():
        return torch.autograd.grad(attention(*leaves, mask=CAUSAL), leaves, dout)

    for asked in (False, True, False, True):
        torch.use_deterministic_algorithms(asked)
        try:
            for found in (automatic(), automatic()):
                assert all(
                    (x - y).float().norm() < 0.02 * y.float().norm()
                    for x, y in zip(found, plain, strict=True)
                )
            if asked:
                assert_same_bits(*zip(automatic(), found, strict=True))
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_prepared_keeps_no_tensor_alive(grad):
    kept = [ref(x) for x in attended(grad)]
    assert CALL_CACHE.count() == 1
    assert [x() for x in kept] == [None] * 3


def attended(grad):
    """What a call has read, which nobody else holds."""
    leaves = [x.requires_grad_(grad) for x in tensors()]
    attention(*leaves, mask=CAUSAL)
    return leaves


def test_what_differs_is_another_call():
    q, k, v = tensors()
    attention(q, k, v, mask=CAUSAL)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    others = [
        key(q, k, v, FULL),
        key(q, k, v, sliding(9)),
        key(q, k, v, score=Score(0.5)),
        key(q, k, v, score=Score(None, 3.0)),
        key(q, k, v, name="strict"),
        key(q, k, v, lse=True),
        key(q[:1], k[:1], v[:1]),
        key(*heads_first),
        key(q.half(), k.half(), v.half()),
    ]
    assert all(other is not None and CALL_CACHE.find(None, other) is None for other in others)
    assert len({key(q, k, v), *others}) == len(others) + 1


def test_what_others_follow_or_decide_is_not_remembered():
    q, k, v = tensors()
    assert key(q, k, v) is not None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    assert key(*leaves) != key(q, k, v)
    with torch.no_grad():
        assert key(*leaves) == key(q, k, v)
    assert key(torch.nn.Parameter(q, requires_grad=False), k, v) is None
    with torch.autocast("cuda", torch.float16):
        assert key(q, k, v) is None
        assert attention(q.float(), k.float(), v.float(), mask=CAUSAL).dtype == torch.float16
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert key(q, k, v) is None
    assert key(q, k, v, dropout=Dropout(0.1)) is None
    for score in (Score(2), Score(True), Score(sinks=torch.zeros(4, device="cuda"))):
        assert key(q, k, v, score=score) is None
    assert key(q, k, v, packing=Packing(None, None)) is None
    assert key(q.cpu(), k.cpu(), v.cpu()) is None


def test_wrong_calls_raise_however_often():
    q, k, v = tensors()
    for _ in range(2):
        with pytest.raises(ValueError, match="k: expected"):
            attention(q, k[:, :, :, :32], v, mask=CAUSAL)
        with pytest.raises(TypeError, match="k: expected"):
            attention(q, k.half(), v, mask=CAUSAL)


def test_an_address_that_descriptors_refuse():
    """The same layout at an odd address: pointers load it, into other tiles, which add up in another
    order.
    """
    q, k, v = (torch.randn(1, 4096, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attention(q, k, v, mask=CAUSAL)
    odd = torch.empty(k.numel() + 1, device="cuda", dtype=torch.bfloat16)[1:].view(k.shape).copy_(k.flip(1))
    even = odd.clone()
    assert odd.data_ptr() & 15
    assert not even.data_ptr() & 15
    expected = attention(q, even, v, mask=CAUSAL)
    torch.testing.assert_close(attention(q, odd, v, mask=CAUSAL), expected, rtol=2e-2, atol=2e-3)


def test_more_calls_than_are_remembered(monkeypatch):
    monkeypatch.setattr(CALL_CACHE, "limit", 2)
    q, k, v = tensors(tokens=9)
    for n in (3, 4, 5, 3):
        torch.testing.assert_close(
            attention(q[:, :n], k[:, :n], v[:, :n], mask=CAUSAL), attention(q, k, v, mask=CAUSAL)[:, :n]
        )
    assert CALL_CACHE.count() <= 2
