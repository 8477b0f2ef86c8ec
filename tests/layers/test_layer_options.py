"""Options of grouped layers that one family or another has: their definition, and the same from every
path.
"""

import dataclasses
import math

import pytest
import torch
from layer_helpers import HIDDEN, Stack, alone, cache_for, close, feed, feed_dense, grouped, latent, tokens
from torch import nn
from torch.nn import functional as F

from attnlib import CAUSAL, Gate, GroupedQueryAttention, Rope, rotate
from attnlib.convert.heads.layers import mha_to_gqa
from attnlib.masks.ready_made import chunked
from attnlib.rope.scaling import QueryTemperature, YaRNScaling
from attnlib.scores import t5_bias

GROWING = QueryTemperature(0.7, 4, offset=1)


class Centred(nn.Module):
    """A norm of another kind: of all heads together, with a gain for each channel of each."""

    def __init__(self, heads: int, dim: int):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(heads, dim, dtype=torch.float64) + 0.5)

    def forward(self, x):
        return self.gain * F.layer_norm(x, x.shape[-2:])


def with_other_norms() -> GroupedQueryAttention:
    layer = grouped(qk_norm=True)
    layer.q_norm, layer.k_norm = Centred(4, 8), Centred(2, 8)
    return layer


def with_gains(layer):
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.uniform_(norm.weight, 0.5, 2)
    return layer


def with_distance_bias() -> GroupedQueryAttention:
    table = nn.Parameter(torch.randn(4, 8, dtype=torch.float64))
    return grouped(rope=False, score=t5_bias(table, max_distance=10))


KINDS = {
    "norms after rope": lambda: with_gains(grouped(qk_norm=True, norm_after_rope=True)),
    "temperature": lambda: grouped(temperature=GROWING),
    "temperature without rope": lambda: grouped(rope=False, temperature=GROWING),
    "norms of another kind": with_other_norms,
    "some biases": lambda: grouped(bias=("q_proj", "v_proj", "o_proj")),
    "a learned distance bias": with_distance_bias,
    "a gate for each head": lambda: grouped(gate=Gate("head", bias=True)),
    "a gate for each channel": lambda: grouped(gate=Gate("channel", "softplus"), v_head_dim=8),
    "chunks": lambda: grouped(mask=CAUSAL & chunked(5)),
}


@pytest.fixture(params=KINDS)
def layer(request):
    torch.manual_seed(0)
    return KINDS[request.param]()


def defined(layer, x):
    """What the options mean, of one sequence ``[n, m]``, query by query."""
    positions = torch.arange(len(x))
    q, k, v = (getattr(layer, f"{n}_proj")(x).unflatten(-1, (-1, 8)) for n in "qkv")

    def turned(x, norm):
        for norms in (True, False) if not layer.norm_after_rope else (False, True):
            if norms and norm is not None:
                x = norm(x)
            elif not norms and layer.rope is not None:
                x = rotate(x, layer.rope.angles(positions))
        return x

    q, k = turned(q, layer.q_norm), turned(k, layer.k_norm).repeat_interleave(2, -2)
    if layer.temperature is not None:
        q = q * (1 + 0.7 * torch.log1p(((positions + 1) // 4).double()))[:, None, None]
    scores = torch.einsum("shd,thd->hst", q, k) * 8**-0.5
    i, j = positions[:, None], positions
    if layer.score is not None:
        h = torch.arange(4)[:, None, None]
        scores = layer.score().definition(scores, torch.tensor(0), h, i, j, torch.tensor([0]))
    shown = i >= j if not isinstance(layer.mask, type(CAUSAL & chunked(5))) else (i >= j) & (i // 5 == j // 5)
    out = scores.masked_fill(~shown, -torch.inf).softmax(-1) @ v.repeat_interleave(2, -2).transpose(0, 1)
    out = out.transpose(0, 1)
    if layer.gate is not None:
        gate = layer.g_proj(x).unflatten(-1, (4, -1))
        out = out * (torch.log1p(gate.exp()) if layer.gate.per == "channel" else 1 / (1 + (-gate).exp()))
    return layer.o_proj(out.flatten(1))


def test_definition(layer):
    x = tokens(11)
    close(alone(layer, x), defined(layer, x).detach())


def test_every_path_gives_the_same(layer):
    model, x, y = Stack(layer), tokens(11), tokens(7, seed=1)
    whole = [alone(model, x), alone(model, y)]
    packed = model(torch.cat((x, y)), cu_seqlens=torch.tensor([0, 11, 18], dtype=torch.int32))
    close(packed.detach(), torch.cat(whole))
    cache = cache_for(model)
    first, second = cache.admit(2)
    got = [feed(model, cache, {first: x[:8], second: y[:4]})]
    got += [feed(model, cache, {first: x[n + 8 :][:1], second: y[n + 4 :][:1]}) for n in range(3)]
    close(torch.cat([step[first] for step in got]), whole[0])
    close(torch.cat([step[second] for step in got]), whole[1])


def test_left_padding_moves_positions(layer):
    """But not those of chunks, which count what is stored."""
    if layer.mask != CAUSAL:
        return
    model, x = Stack(layer), tokens(2, 9)
    cache = cache_for(model)
    cache.admit(2, left_padding=[0, 4])
    got = torch.cat([feed_dense(model, cache, x[:, :6]), feed_dense(model, cache, x[:, 6:])], 1)
    close(got[0], alone(model, x[0]))
    close(got[1, 4:], alone(model, x[1, 4:]))


def test_gradients_reach_every_parameter(layer):
    layer(tokens(2, 9)).square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.any(), name


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_a_temperature_of_latents(form):
    """Is a scale for each query, from every path."""
    layer, x = latent(form, temperature=GROWING), tokens(11)
    whole = alone(layer, x)
    plain = latent(form)
    plain.load_state_dict(layer.state_dict())
    for i in (0, 2, 3, 7, 10):
        plain.scale = layer.scale * (1 + 0.7 * math.log1p((i + 1) // 4))
        close(whole[i], alone(plain, x)[i])
    model = Stack(layer)
    cache = cache_for(model)
    [handle] = cache.admit(1)
    got = [feed(model, cache, {handle: part})[handle] for part in x.split([7, 1, 3])]
    close(torch.cat(got), alone(model, x))


def test_biases_by_name():
    assert {n for n, _ in grouped(bias=("q_proj", "v_proj")).named_parameters() if "bias" in n} == {
        "q_proj.bias",
        "v_proj.bias",
    }


def test_a_layout_for_autocast():
    layer = grouped()
    assert layer.kv_layout_as(torch.bfloat16) == dataclasses.replace(layer.kv_layout, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bias": "q_proj"}, TypeError, "bias: expected a bool or a tuple of projection names, got str"),
        ({"bias": ("q",)}, ValueError, "bias: expected a bool or some of q_proj, .* got 'q'"),
        ({"bias": ("q_proj",), "output_bias": True}, ValueError, "got output_bias=True with names"),
        ({"output_bias": 1}, TypeError, "output_bias: expected a bool, got int"),
        ({"temperature": 2.0}, TypeError, "temperature: expected a QueryTemperature or None, got float"),
        ({"norm_after_rope": 1}, TypeError, "norm_after_rope: expected a bool, got int"),
        (
            {"norm_after_rope": True, "rope": Rope(8, scaling=YaRNScaling(4.0, 64))},
            ValueError,
            "norm_after_rope: expected a rope of amplitude 1",
        ),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        GroupedQueryAttention(HIDDEN, 4, mask=CAUSAL, head_dim=8, **options)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: QueryTemperature(0.0, 4), ValueError, "QueryTemperature.weight"),
        (lambda: QueryTemperature(1.0, 0), ValueError, "QueryTemperature.interval"),
        (lambda: QueryTemperature(1.0, 4, -1), ValueError, "QueryTemperature.offset"),
    ],
)
def test_wrong_temperatures_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_a_temperature_needs_integer_positions():
    layer, x = grouped(temperature=GROWING), tokens(1, 5)
    positions = torch.arange(5)
    close(layer(x, positions=positions), layer(x))
    close(layer(x, positions=positions, angles=layer.rope.angles(positions)), layer(x))
    with pytest.raises(ValueError, match="positions: the layer's temperature needs them"):
        layer(x, angles=layer.rope.angles(positions))


@pytest.mark.parametrize("kind", ["norms after rope", "temperature", "norms of another kind"])
def test_conversion_refuses_what_it_does_not_know(kind):
    with pytest.raises(NotImplementedError, match="conversion does not support"):
        mha_to_gqa(KINDS[kind](), 1)
