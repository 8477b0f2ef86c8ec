"""Positions of a layer's tokens: shifted, left out or computed before, and none without a rope."""

import pytest
import torch
from layer_helpers import (
    BOTH,
    KINDS,
    close,
    make,
    tokens,
)


@pytest.mark.parametrize("kind", KINDS)
def test_shifting_all_positions_changes_nothing(kind):
    layer, x = make(kind), tokens(2, 9)
    shift = 256
    here, there = (layer(x, positions=torch.arange(9) + n) for n in (0, shift))
    # Phases are fp32 products; a wrong use of positions is wrong by the order of the output.
    bound = 16 * shift * 2**-24 * here.abs().max().item()
    torch.testing.assert_close(there, here, rtol=0, atol=bound)
    assert (layer(x, positions=torch.arange(9) * 5) - here).abs().max() > 10 * bound


@pytest.mark.parametrize("kind", KINDS)
def test_positions_may_be_left_out_or_computed_once(kind):
    layer, x = make(kind), tokens(2, 5)
    out = layer(x)
    for positions in (torch.arange(5), torch.arange(5).expand(2, 5)):
        assert torch.equal(layer(x, positions=positions), out)
        assert torch.equal(layer(x, angles=layer.rope.angles(positions)), out)
    each = torch.stack((torch.arange(5), 3 * torch.arange(5)))
    close(layer(x, positions=each)[1:], layer(x[1:], positions=each[1:]))


@pytest.mark.parametrize("kind", BOTH)
def test_positions_say_nothing_to_a_layer_without_rope(kind):
    layer, x = make(kind, rope=False), tokens(2, 5)
    assert torch.equal(layer(x, positions=torch.arange(5) * 7), layer(x))
