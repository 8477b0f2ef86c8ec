"""Ranks that share a cache: which tokens each has, and how they merge what each found of its own keys."""

from types import SimpleNamespace

import pytest
import torch

from attnlib import FULL, attention_with_lse
from attnlib.ranks import Collectives, Ranks, check_mesh


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_token_is_with_one_rank(count):
    ranks = [Ranks(None, None, rank, count) for rank in range(count)]
    for tokens in range(3 * count + 2):
        gained = [rank.held(tokens + 1) - rank.held(tokens) for rank in ranks]
        assert sum(rank.held(tokens) for rank in ranks) == tokens
        assert gained.index(1) == tokens % count


class UpToNow(Collectives):
    """The collectives of ranks that come one after another: each finds what those before it have sent."""

    def _gathered(self, x):
        self.group.append(x)
        return torch.stack(self.group)


@pytest.mark.parametrize("packed", [False, True])
def test_what_ranks_found_merges_to_the_whole(packed):
    """Attention to the keys of all ranks; one without keys adds nothing."""
    q, k, v = torch.randn(2, 5, 4, 8), *torch.randn(2, 2, 14, 2, 8)
    exchange = UpToNow([], 2, have_own_heads=False)

    def attend(keys):
        out, lse = attention_with_lse(q, k[:, keys], v[:, keys], mask=FULL)
        return (out.flatten(0, 1), lse.transpose(0, 1).flatten(1)) if packed else (out, lse)

    for first, last in ((0, 3), (3, 3), (3, 9), (9, 14)):
        merged = exchange.merged(*attend(slice(first, last)), 2, dtype=torch.float32)
        torch.testing.assert_close(merged, attend(slice(0, last)))
    out, lse = attend(slice(0, 14))
    assert exchange.merged(out, lse, 2, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_the_same_queries_are_not_sent():
    q = torch.randn(2, 1, 4, 8)
    assert Collectives(None, 2, have_own_heads=False).queries(q, 2) is q


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        (2, TypeError, "mesh: expected a DeviceMesh, .* got int"),
        (torch.zeros(2), TypeError, "mesh: expected a DeviceMesh, .* got Tensor"),
        (SimpleNamespace(ndim=2), ValueError, r"mesh: expected one dimension, as of mesh\['cp'\], got 2"),
    ],
)
def test_what_is_no_mesh_of_one_dimension_is_refused(mesh, error, message):
    with pytest.raises(error, match=message):
        check_mesh(mesh, "cp")
