"""What a layer says of tokens that a step was not asked for, before it computes anything."""

from unittest import mock

import pytest
import torch
from layer_helpers import BOTH, Stack, cache_for, close, feed_dense, grouped, make, tokens
from torch import nn

from attnlib import FULL

PER_SEQUENCE = r"step\(1\) takes \[b, s=1, m\], step"
DENSE = {
    "another batch": (tokens(3, 1), rf"\[b=2, s=1, m=24\] .* got \(3, 1, 24\); {PER_SEQUENCE}"),
    "another count": (tokens(2, 2), rf"\[b=2, s=1, m=24\] .* got \(2, 2, 24\); {PER_SEQUENCE}"),
    "packed": (tokens(2), r"\[b=2, s=1, m=24\] .* got \(2, 24\); .*step\({handle: n}\) packed \[t, m\]"),
}
PACKED = {
    "another count": (tokens(4), r"\[t=3, m=24\] .* got \(4, 24\)"),
    "dense": (tokens(1, 3), r"\[t=3, m=24\] .* got \(1, 3, 24\); step\({handle: n}\) is for packed tokens"),
}


@pytest.fixture(params=BOTH)
def layer(request):
    """A layer without rope, which could have spoken of the angles' shape first."""
    return make(request.param, rope=False, mask=FULL)


def check(layer, kv, x, words):
    """x is refused by that name, and as a context by that one; no projection is called."""
    with mock.patch.object(nn.Linear, "forward", side_effect=AssertionError), torch.no_grad():
        with pytest.raises(ValueError, match=f"^x: expected {words}"):
            layer(x, kv=kv)
        with pytest.raises(ValueError, match=f"^context: expected {words}"):
            layer.append_context(x, kv)


@pytest.mark.parametrize("case", DENSE)
def test_x_of_another_dense_step_is_refused(layer, case):
    cache = cache_for(Stack(layer))
    cache.admit(2)
    with cache.step(1) as (kv,), torch.no_grad():
        check(layer, kv, *DENSE[case])
        layer(tokens(2, 1), kv=kv)


@pytest.mark.parametrize("case", PACKED)
def test_x_of_another_packed_step_is_refused(layer, case):
    cache = cache_for(Stack(layer))
    one, two = cache.admit(2)
    with cache.step({two: 2, one: 1}) as (kv,), torch.no_grad():
        check(layer, kv, *PACKED[case])
        layer(tokens(3), kv=kv)


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("kind", BOTH)
def test_a_step_without_sequences_says_to_admit_some(kind, rope):
    layer = make(kind, rope=rope)
    cache = cache_for(Stack(layer))
    words = (
        r"x: expected \[b=0, s=3, m=24\] .* got \(2, 3, 24\); "
        r"no sequence is live: call cache.admit\(n\) first"
    )
    with pytest.raises(ValueError, match=words):
        feed_dense(Stack(layer), cache, tokens(2, 3))
    assert feed_dense(Stack(layer), cache, tokens(0, 3)).shape == (0, 3, 24)


def test_a_context_is_stored_within_a_step(layer):
    cache = cache_for(Stack(layer))
    cache.admit(1)
    with (
        cache.read(2) as (kv,),
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"kv: .*with cache.step\(...\)"),
    ):
        layer.append_context(tokens(1, 2), kv)


def test_a_hook_may_bring_the_tokens_together():
    """As sequence parallelism does, whose ranks have a part of x each."""
    layer, x = grouped(rope=False), tokens(2, 4)
    expected = layer(x).detach()
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        projection.register_forward_pre_hook(lambda module, inputs: (x,))
    cache = cache_for(Stack(layer))
    cache.admit(2)
    with torch.no_grad(), cache.step(4) as (kv,):
        close(layer(x[:, :2], kv=kv), expected)
