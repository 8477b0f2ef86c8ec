"""A rope of chosen pairs of another one rotates each pair as its source does."""

import pytest
import torch

from attnlib import Rope, rotate
from attnlib.rope.selected import select
from attnlib.scaling import YaRNScaling

PAIRS = (3, 0, 0, 2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_pair_is_rotated_as_in_the_source(interleaved):
    """Any order and repetition of pairs: their channels, rotated by the source, and chosen then."""
    source = Rope(8, interleaved=interleaved)
    channels = torch.arange(8).view(-1, 2) if interleaved else torch.arange(8).view(2, -1).T
    chosen = channels[[*PAIRS]]
    chosen = chosen.flatten() if interleaved else chosen.T.flatten()
    x, positions = torch.randn(2, 5, 3, 8), torch.randint(0, 9_000, (2, 5))
    ours = rotate(x[..., chosen], select(source, PAIRS).angles(positions))
    assert torch.equal(ours, rotate(x, source.angles(positions))[..., chosen])


def test_the_temperature_of_the_source_is_left_to_the_caller():
    source = Rope(8, scaling=YaRNScaling(40.0, original_max_position=1024, mscale=1.0, mscale_all_dim=0.5))
    assert source.amplitude != 1
    rope = select(source, PAIRS)
    assert (rope.dim, rope.amplitude, rope.latent_scale) == (8, 1.0, 1.0)
    assert torch.equal(rope.inverse_frequencies(), source.inverse_frequencies()[[*PAIRS]])
    angles = rope.angles(torch.arange(9))
    torch.testing.assert_close(angles.cos**2 + angles.sin**2, torch.ones(9, 4))
