"""Laws of grouped-query attention as a layer."""

import copy
import math

import pytest
import torch
from layer_helpers import (
    HIDDEN,
    Stack,
    cache_for,
    close,
    feed_dense,
    gradients,
    grouped,
    tokens,
)
from torch import nn

from attnlib import (
    CAUSAL,
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiQueryAttention,
    Rope,
    attention,
    rotate,
    sliding,
)

# Heads in groups (P8)


def test_as_many_kv_heads_as_heads_is_multi_head_attention():
    layer, x = grouped(4), tokens(2, 5)
    multi = MultiHeadAttention(HIDDEN, 4, mask=CAUSAL, head_dim=8, rope=Rope(8), dtype=torch.float64)
    multi.load_state_dict(layer.state_dict())
    assert torch.equal(multi(x), layer(x))
    single = MultiQueryAttention(HIDDEN, 4, mask=CAUSAL, head_dim=8, rope=Rope(8), dtype=torch.float64)
    one = grouped(1)
    single.load_state_dict(one.state_dict())
    assert torch.equal(single(x), one(x))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_groups_are_multi_head_attention_with_repeated_heads(kv_heads):
    layer, multi, x = grouped(kv_heads), grouped(4), tokens(2, 5)
    repeats = 4 // kv_heads
    weights = dict(layer.state_dict())
    for name in ("k_proj.weight", "v_proj.weight"):
        weights[name] = weights[name].unflatten(0, (kv_heads, -1)).repeat_interleave(repeats, 0).flatten(0, 1)
    multi.load_state_dict(weights)
    shared, separate = gradients(layer, x, layer), gradients(multi, x, multi)
    for name in ("k_proj.weight", "v_proj.weight"):
        separate[name] = separate[name].unflatten(0, (kv_heads, repeats, -1)).sum(1).flatten(0, 1)
    for name in shared:
        torch.testing.assert_close(shared[name], separate[name], rtol=1e-10, atol=1e-11)


def test_slices_of_heads_add_up():
    """Tensor parallelism by hand: two ranks with two heads and one KV head each."""
    layer, x = grouped(2, sinks=True, alibi=True, qk_norm=True), tokens(2, 6)
    nn.init.normal_(layer.sinks)
    total, cached = 0, 0
    for rank in range(2):
        part = copy.deepcopy(layer)
        for linear in (part.q_proj, part.k_proj, part.v_proj):
            linear.weight = nn.Parameter(linear.weight.chunk(2)[rank].detach())
        part.o_proj.weight = nn.Parameter(part.o_proj.weight.chunk(2, 1)[rank].detach())
        part.sinks = nn.Parameter(part.sinks.chunk(2)[rank].detach())
        part.alibi_slopes = part.alibi_slopes.chunk(2)[rank]
        total = total + part(x)
        assert part.kv_layout.heads == 1
        cache = cache_for(Stack(part))
        cache.admit(2)
        cached = cached + torch.cat(
            [feed_dense(Stack(part), cache, chunk) - chunk for chunk in x.split(2, 1)], 1
        )
    close(total, layer(x))
    close(cached, layer(x).detach())


# Options of a score


def published_slopes(n: int) -> list[float]:
    """As in the repository of Press et al."""

    def power_of_2(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + published_slopes(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 33, 112])
def test_alibi_slopes_are_the_published_ones(heads):
    layer = GroupedQueryAttention(heads * 2, heads, mask=CAUSAL, alibi=True)
    torch.testing.assert_close(layer.alibi_slopes, torch.tensor(published_slopes(heads)), rtol=1e-6, atol=0)


def test_casting_leaves_alibi_slopes_exact():
    layer = GroupedQueryAttention(24, 12, mask=CAUSAL, alibi=True)
    slopes = layer.alibi_slopes.clone()
    for cast in (
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        copy.deepcopy,
        lambda m: m.to("cpu", torch.float16),
    ):
        layer = cast(layer)
        assert torch.equal(layer.alibi_slopes.double(), slopes.double())
    layer = (
        GroupedQueryAttention(24, 12, mask=CAUSAL, alibi=True, device="meta")
        .bfloat16()
        .to_empty(device="cpu")
    )
    layer.reset_parameters()
    assert torch.equal(layer.alibi_slopes.double(), slopes.double())


def test_a_layer_is_its_projections_around_attention():
    """Every option reaches the core: the layer equals the function with the layer's own weights and
    settings.
    """
    layer, x = (
        grouped(sinks=True, alibi=True, qk_norm=True, softcap=1.5, scale=0.7, mask=sliding(3)),
        tokens(2, 7),
    )
    nn.init.normal_(layer.sinks)
    q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    angles = Rope(8).angles(torch.arange(7))
    q, k = rotate(layer.q_norm(q), angles), rotate(layer.k_norm(k), angles)
    options = {"scale": 0.7, "softcap": 1.5, "sinks": layer.sinks, "alibi_slopes": layer.alibi_slopes}
    out = attention(q, k, v, mask=sliding(3), backend="reference", **options)
    close(layer(x), layer.o_proj(out.flatten(-2)))
    for name, value in {
        "softcap": None,
        "scale": 1.0,
        "mask": CAUSAL,
        "sinks": None,
        "alibi_slopes": None,
    }.items():
        other = copy.deepcopy(layer)
        setattr(other, name, value)
        assert not torch.allclose(other(x), layer(x)), name


def test_limits_of_the_options():
    x = tokens(2, 6)
    plain = grouped(mask=CAUSAL)
    limits = {"softcap": 1e9, "mask": sliding(6)}
    for name, value in limits.items():
        other = grouped(**{name: value})
        other.load_state_dict(plain.state_dict())
        torch.testing.assert_close(other(x), plain(x), rtol=1e-8, atol=1e-9)
    sinking = grouped(sinks=True, output_bias=True)
    with torch.no_grad():
        sinking.sinks.fill_(1e4)
    close(sinking(x), sinking.o_proj.bias.expand_as(x))
    alone_only = grouped(mask=sliding(1))
    values = alone_only.v_proj(x).unflatten(-1, (2, 8)).repeat_interleave(2, -2).flatten(-2)
    close(alone_only(x), alone_only.o_proj(values))


def test_qk_norm_makes_scores_independent_of_the_length_of_q_and_k():
    layer, x = grouped(qk_norm=True, norm_eps=1e-30), tokens(2, 6)
    out = layer(x)
    with torch.no_grad():
        layer.q_proj.weight *= 64
        layer.k_proj.weight /= 8
    close(layer(x), out)
