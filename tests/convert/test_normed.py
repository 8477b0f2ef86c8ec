"""Heads that read normalized queries, normalized keys and values: their moments are those of a text."""

import pytest
import torch

from attnlib import CAUSAL, GroupedQueryAttention, Rope
from attnlib.convert import Calibration, weights
from attnlib.convert.latent.normed import normed

EPS = 1e-3


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = GroupedQueryAttention(
        24, 4, num_kv_heads=2, head_dim=6, mask=CAUSAL, rope=Rope(6), qk_norm=True, norm_eps=EPS
    )
    with torch.no_grad():
        for norm in (layer.q_norm, layer.k_norm):
            norm.weight.normal_()
    return layer.double()


@torch.no_grad()
def test_moments_are_those_of_normalized_heads(layer):
    x = torch.randn(50, 24, dtype=torch.float64)
    heads = weights.split(layer.state_dict(), head_dim=6, rope=layer.rope)
    plain, calibration = normed(heads, Calibration.of([x]), eps=EPS)
    assert plain.gains is None
    q, (k, v) = layer.query(x, None), layer.key_value(x)
    for rows, expected in ((plain.q, q), (plain.k, k), (plain.v, v)):
        torch.testing.assert_close(torch.einsum("nm,hdm->nhd", calibration.inputs(), rows), expected)
        mean = expected.square().mean(0).sum(-1)
        torch.testing.assert_close(calibration.energy(rows), mean)


def test_without_a_text_all_channels_count_equally(layer):
    heads = weights.split(layer.state_dict(), head_dim=6, rope=layer.rope)
    plain, calibration = normed(heads, Calibration.white(24), eps=EPS)
    assert calibration.inputs() is None
    for rows in (plain.q, plain.k, plain.v):
        assert calibration.energy(rows).eq(6).all()
