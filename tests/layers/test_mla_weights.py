"""The absorbed form follows kv_b_proj whatever happens to it (faults 99 and 103)."""

import pytest
import torch
from layer_helpers import EXPANDED, Stack, cache_for, calls, close, feed_dense, latent, tokens
from torch import nn
from torch.nn.utils import parametrize, prune


def in_place(layer):
    with torch.no_grad():
        layer.kv_b_proj.weight.mul_(3).add_(0.1)


def by_data(layer):
    layer.kv_b_proj.weight.data = torch.randn_like(layer.kv_b_proj.weight)


def by_load(layer):
    layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})


def by_optimizer(layer):
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(tokens(1, 4)).square().sum().backward()
    optimizer.step()


def by_new_parameter(layer):
    layer.kv_b_proj.weight = nn.Parameter(torch.randn_like(layer.kv_b_proj.weight))


@pytest.mark.parametrize("update", [in_place, by_data, by_load, by_optimizer, by_new_parameter])
def test_new_weights_are_used_at_once(update):
    layer = latent("absorbed")
    model, x = Stack(layer), tokens(2, 4)
    cache = cache_for(model)
    cache.admit(2)
    before = layer(x).detach()
    feed_dense(model, cache, x[:, :3])
    update(layer)
    expanded = latent("expanded")
    expanded.load_state_dict(layer.state_dict())
    assert not torch.allclose(layer(x), before)
    close(layer(x), expanded(x))
    fresh = cache_for(model)
    fresh.admit(2)
    feed_dense(Stack(expanded), fresh, x[:, :3])
    for old, new in zip(
        cache._layers, fresh._layers, strict=True
    ):  # the latents are of the weights of their time
        for name, plane in old.planes.items():
            plane.copy_(new.planes[name])
    close(feed_dense(model, cache, x[:, 3:]), feed_dense(Stack(expanded), fresh, x[:, 3:]))


class LoRA(nn.Module):
    """An adapter as peft makes them: the base layer's weight shows, and is not all that is computed."""

    def __init__(self, base: nn.Linear, *, shows_weight: bool):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)
        if shows_weight:
            self.weight = base.weight

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def with_bias(linear):
    biased = nn.Linear(linear.in_features, linear.out_features, dtype=linear.weight.dtype)
    biased.weight = linear.weight
    return biased


def with_hook(linear):
    linear.register_forward_hook(lambda module, args, out: out + 1)
    return linear


def with_own_forward(linear):
    plain = linear.forward
    linear.forward = lambda x: plain(x) * 2
    return linear


def pruned(linear):
    """Its pre-hook remakes the weight, a plain tensor that may be stale between calls."""
    prune.random_unstructured(linear, "weight", amount=0.5)
    with torch.no_grad():
        linear.weight_orig.add_(1)
    return linear


WRAPPERS = {
    "lora": lambda linear: LoRA(linear, shows_weight=True),
    "lora-without-weight": lambda linear: LoRA(linear, shows_weight=False),
    "subclass": lambda linear: Doubled(
        linear.in_features, linear.out_features, bias=False, dtype=torch.float64
    ),
    "parametrization": lambda linear: parametrize.register_parametrization(linear, "weight", Halved()),
    "bias": with_bias,
    "hook": with_hook,
    "own-forward": with_own_forward,
    "prune": pruned,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_more_than_a_weight_is_expanded_or_refused(wrapper):
    torch.manual_seed(0)
    layer, x = latent("auto"), tokens(1, 6)  # rank 12 and one query: a plain weight would be absorbed
    layer.kv_b_proj = WRAPPERS[wrapper](layer.kv_b_proj)
    model, cache = Stack(layer), cache_for(Stack(latent()))
    cache.admit(1)
    with calls() as seen:
        out = torch.cat([feed_dense(model, cache, x[:, i : i + 1]) for i in range(6)], 1)
    assert {shape[-1] for _, shape in seen} == {EXPANDED}
    layer.form = "expanded"
    close(out - x, layer(x))
    layer.form = "absorbed"
    with pytest.raises(NotImplementedError, match=r"kv_b_proj: .*form='expanded'"):
        layer(x)


def test_functional_call_reaches_the_absorbed_form():
    layer, x = latent("absorbed"), tokens(1, 4)
    weights = {name: value.detach() * 2 for name, value in layer.state_dict().items()}
    out = torch.func.functional_call(layer, weights, (x,))
    layer.load_state_dict(weights)
    close(out, layer(x))
