"""Why rope must be decoupled: a rotation between up-projection and score cannot be absorbed (arXiv
2405.04434, 2.1.3).

Letters as everywhere: latents ``c [t, r]``, queries ``q [s, h, d]``, and the up-projection ``k_up [h, d, r]``
of keys.
"""

import pytest
import torch
from layer_helpers import close, latent, tokens

from attnlib import CAUSAL, Rope, rotate

H, D, R, T = 3, 8, 12, 7
ROPE = Rope(D)


@pytest.fixture
def head():
    """A query, latents and an up-projection of keys, fp64."""
    return (torch.randn(*shape, dtype=torch.float64) for shape in ((T, H, D), (T, R), (H, D, R)))


def expanded(q, c, k_up, positions):
    """Scores ``[h, s, t]`` of keys that are projected up and then rotated, as a rotated head would have
    them.
    """
    k = torch.einsum("tr,hdr->thd", c, k_up)
    angles = ROPE.angles(positions)
    return torch.einsum("shd,thd->hst", rotate(q, angles), rotate(k, angles))


def absorbed(q, c, k_up, positions):
    """The same with the up-projection moved to the rotated query: the key's own rotation has nowhere to
    go.
    """
    q = torch.einsum("shd,hdr->shr", rotate(q, ROPE.angles(positions)), k_up)
    return torch.einsum("shr,tr->hst", q, c)


def test_absorbing_through_a_rotated_head_is_right_at_position_zero_alone(head):
    q, c, k_up = head
    nowhere = torch.zeros(T, dtype=torch.int64)
    close(absorbed(q, c, k_up, nowhere), expanded(q, c, k_up, nowhere))
    positions = torch.arange(T)
    ours, right = absorbed(q, c, k_up, positions), expanded(q, c, k_up, positions)
    close(ours[..., 0], right[..., 0])  # the key at position 0 is not turned
    assert ((ours - right).abs()[..., 1:].amax((0, 1)) > 0.1 * right.std()).all()  # and every other one is


def test_turning_the_query_back_needs_another_query_for_every_distance(head):
    """Exact, but the absorbed query then depends on the key's position as well: nothing is left to store
    once.
    """
    q, c, k_up = head
    positions = torch.arange(T)
    right = expanded(q, c, k_up, positions)
    for j in range(T):
        relative = torch.einsum("shd,hdr->shr", rotate(q, ROPE.angles(positions - j)), k_up)
        torch.testing.assert_close(
            torch.einsum("shr,r->hs", relative, c[j]), right[..., j], rtol=1e-6, atol=1e-6
        )


def test_equal_positions_may_be_absorbed_when_both_rotations_are_left_out(head):
    """Scores depend on distances alone, and here all are zero."""
    q, c, k_up = head
    here = torch.full((T,), 5)
    nowhere = torch.zeros(T, dtype=torch.int64)
    torch.testing.assert_close(
        absorbed(q, c, k_up, nowhere), expanded(q, c, k_up, here), rtol=1e-6, atol=1e-6
    )


def test_the_decoupled_form_is_absorbed_exactly():
    """The layer at positions that are far apart: its rotated key is shared by the heads and never projected
    up.
    """
    both = [latent(form, mask=CAUSAL) for form in ("expanded", "absorbed")]
    both[1].load_state_dict(both[0].state_dict())
    x, positions = tokens(2, 9), torch.tensor([0, 1, 5, 40, 41, 300, 1000, 4096, 100_000])
    outs = [layer(x, positions=positions) for layer in both]
    close(*outs)
    assert not torch.allclose(outs[0], both[0](x), rtol=1e-3, atol=1e-3)  # positions matter
