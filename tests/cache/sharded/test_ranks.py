"""Ranks that share a cache: which tokens each has, and how they merge what each found of its own keys."""

import pytest
import torch

from attnlib import FULL, attention_with_lse
from attnlib.cache.sharded.ranks import Collectives, Ranks, Rehearsal


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_token_is_with_one_rank(count):
    ranks = [Ranks(None, None, rank, count) for rank in range(count)]
    for tokens in range(3 * count + 2):
        gained = [rank.local_tokens(tokens + 1) - rank.local_tokens(tokens) for rank in ranks]
        assert sum(rank.local_tokens(tokens) for rank in ranks) == tokens
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


@pytest.mark.parametrize("have_own_heads", [False, True])
def test_a_rehearsal_has_the_shapes_of_an_exchange(have_own_heads):
    """So that explain() sees the calls that would run."""
    q, exchange = torch.randn(2, 3, 4, 8), Rehearsal(3, have_own_heads)
    asked = exchange.queries(q, 2)
    assert asked.shape == (2, 3, 12 if have_own_heads else 4, 8)
    out, lse = exchange.merged(asked, asked[..., 0].transpose(1, 2), 2, dtype=torch.float16)
    assert (out.shape, out.dtype, lse.shape) == (q.shape, torch.float16, (2, 4, 3))
