"""Projections of normalized heads: those of q map each head by its own rows, those of k read x too."""

import pytest
import torch
from torch import nn

from attnlib.layers.normed_heads import NormedKeys, NormedQueries

HEADS, DIM, WIDTH = 3, 4, 10


@pytest.fixture
def parts():
    torch.manual_seed(0)
    linear, norm = nn.Linear(WIDTH, HEADS * DIM), nn.RMSNorm(DIM, eps=1e-3)
    nn.init.normal_(norm.weight)
    return linear, norm


@pytest.mark.parametrize("shape", [(5,), (2, 5), (1, 1)])
def test_each_query_head_has_its_own_rows(parts, shape):
    queries, x = NormedQueries(*parts, 7), torch.randn(*shape, WIDTH)
    linear, norm = parts
    heads = norm(linear(x).unflatten(-1, (HEADS, DIM)))
    rows = queries.weight.unflatten(0, (HEADS, 7))
    expected = torch.cat([heads[..., n, :] @ rows[n].T for n in range(HEADS)], -1)
    torch.testing.assert_close(queries(x), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_keys_are_linear_in_normalized_heads_and_in_the_input(parts, bias):
    keys, x = NormedKeys(*parts, 7, bias=bias), torch.randn(2, 5, WIDTH)
    linear, norm = parts
    heads = norm(linear(x).unflatten(-1, (HEADS, DIM))).flatten(-2)
    expected = heads @ keys.weight[:, : HEADS * DIM].T + x @ keys.weight[:, HEADS * DIM :].T
    torch.testing.assert_close(keys(x), expected + (keys.bias if bias else 0))


def test_all_weights_learn(parts):
    for module in (NormedQueries(*parts, 2), NormedKeys(*parts, 2, bias=True)):
        module(torch.randn(5, WIDTH)).square().sum().backward()
        assert all(weight.grad.any() for weight in module.parameters())
        module.zero_grad()
