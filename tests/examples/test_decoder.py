"""The decoder: packed equals dense, whatever attends, and the angles are computed once."""

import pytest
import torch
from decoder import Decoder

from attnlib import CAUSAL, MultiHeadAttention, Rope

TOKENS = torch.arange(18).reshape(2, 9) * 7 % 256


def alternating(**options):
    """Two ropes, in turns, and one layer without any."""
    ropes = (Rope(8), Rope(8, theta=500.0), Rope(8), None)
    return Decoder(
        256, 32, 4, attention=lambda i: MultiHeadAttention(32, 4, mask=CAUSAL, rope=ropes[i]), **options
    )


def test_packed_equals_dense(model):
    sequences = [TOKENS[0, :4], TOKENS[1], TOKENS[0, :1]]
    packed = model(torch.cat(sequences), cu_seqlens=torch.tensor([0, 4, 13, 14], dtype=torch.int32))
    alone = torch.cat([model(sequence[None])[0] for sequence in sequences])
    torch.testing.assert_close(packed, alone)


def test_a_token_does_not_see_later_ones(model):
    torch.testing.assert_close(model(TOKENS)[:, :5], model(TOKENS[:, :5]))


def test_positions_are_those_of_every_row(model):
    positions = torch.arange(9)
    expected = model(TOKENS, positions=positions.expand(2, -1))
    torch.testing.assert_close(model(TOKENS), expected)
    torch.testing.assert_close(model(TOKENS, positions=positions), expected)
    torch.testing.assert_close(model(TOKENS), expected)
    assert not torch.allclose(model(TOKENS, positions=3 * positions.expand(2, -1)), expected)


def test_packed_positions_restart(monkeypatch):
    seen = []
    angles = Rope.angles
    monkeypatch.setattr(Rope, "angles", lambda self, x: seen.append(x.tolist()) or angles(self, x))
    alternating()(TOKENS[0, :6], cu_seqlens=torch.tensor([0, 2, 2, 5], dtype=torch.int32))
    assert seen[0] == [0, 1, 0, 1, 2, 0]  # the last row belongs to no sequence


def test_each_distinct_rope_is_computed_once(monkeypatch):
    seen = []
    angles = Rope.angles
    monkeypatch.setattr(Rope, "angles", lambda self, *a, **k: seen.append(self) or angles(self, *a, **k))
    alternating()(TOKENS)
    assert seen == [Rope(8), Rope(8, theta=500.0)]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_one_parameter(tied):
    model = alternating(tie_embeddings=tied)
    assert (model.lm_head.weight is model.embed.weight) == tied
    model(TOKENS).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
