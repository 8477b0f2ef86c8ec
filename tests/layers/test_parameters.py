"""Layers whose modules were replaced are initialised as far as these can be."""

import pytest
import torch
from layer_helpers import HIDDEN, grouped, latent
from torch import nn


class Scale(nn.Module):
    """A norm of one's own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((8,), 3.0))

    def forward(self, x):
        return x * self.gain


class Resettable(Scale):
    def reset_parameters(self):
        nn.init.ones_(self.gain)


def spoil(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)


def spoilt(module):
    return [bool((parameter == 7).all()) for parameter in module.parameters()]


@pytest.mark.parametrize(
    "norm", [nn.Identity(), Resettable(), nn.Sequential(nn.Identity(), nn.RMSNorm(8)), nn.SiLU()]
)
def test_what_has_parameters_is_reset(norm):
    layer = grouped(qk_norm=True, sinks=True)
    layer.q_norm = norm
    spoil(layer)
    layer.reset_parameters()
    assert not any(spoilt(layer))
    assert not layer.sinks.any()
    for parameter in norm.parameters():
        assert (parameter == 1).all()


@pytest.mark.parametrize(
    ("norm", "name"), [(Scale(), "q_norm"), (nn.Sequential(nn.RMSNorm(8), Scale()), "q_norm.1")]
)
def test_what_cannot_be_reset_is_named_and_nothing_is_reset(norm, name):
    layer = grouped(qk_norm=True)
    layer.q_norm = norm
    spoil(layer)
    words = (
        rf"{name}: expected a module with reset_parameters\(\), got Scale, which has parameters \['gain'\]"
    )
    with pytest.raises(TypeError, match=words):
        layer.reset_parameters()
    assert all(spoilt(layer))


def test_a_latent_layer_is_reset_beside_a_norm_without_parameters():
    layer = latent(q_lora_rank=HIDDEN)
    layer.kv_a_layernorm = nn.Identity()
    spoil(layer)
    layer.reset_parameters()
    assert not any(spoilt(layer))
    layer.q_a_layernorm = Scale()
    with pytest.raises(TypeError, match="q_a_layernorm: expected a module with reset_parameters"):
        layer.reset_parameters()
