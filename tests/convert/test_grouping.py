"""Groups are balanced, the same every time, never worse than neighbours, and find clusters that are there."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib.convert.heads.grouping import neighbours, similar, within

sizes = st.sampled_from([(2, 1), (4, 2), (6, 2), (6, 3), (8, 2), (12, 4), (5, 5)])


def symmetric(n, seed):
    s = torch.rand(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    return (s + s.T) / 2


@given(sizes, st.integers(0, 2**16))
def test_balanced_and_never_worse_than_neighbours_or_any_exchange(size, seed):
    n, groups = size
    s = symmetric(n, seed)
    found = similar(s, groups)
    assert sorted(i for group in found for i in group) == list(range(n))
    assert {len(group) for group in found} == {n // groups}
    assert found == similar(s, groups) == tuple(sorted(tuple(sorted(group)) for group in found))
    reached = within(s, found)
    assert reached >= within(s, neighbours(n, groups)) - 1e-12
    for a in range(groups):
        for b in range(a):
            for i in found[a]:
                for j in found[b]:
                    swapped = [{i: j, j: i}.get(k, k) for group in found for k in group]
                    swapped = torch.tensor(swapped).unflatten(0, (groups, -1)).tolist()
                    assert within(s, swapped) <= reached + 1e-12


@given(sizes, st.integers(0, 2**16), st.randoms(use_true_random=False))
def test_clusters_are_found_wherever_they_lie(size, seed, random):
    n, groups = size
    order = list(range(n))
    random.shuffle(order)
    cluster = torch.arange(n) // (n // groups)
    s = (cluster[:, None] == cluster).double()[order][:, order] + 0.1 * symmetric(n, seed)
    assert {frozenset(order[i] for i in group) for group in similar(s, groups)} == {
        frozenset(group) for group in neighbours(n, groups)
    }


@pytest.mark.parametrize("seed", [1, 8, 12, 61, 97, 143])
def test_of_two_climbs_the_better_is_taken(seed):
    """Pairs of six heads for which a climb from neighbours, or one from grown groups, ends below the best of
    all 15.
    """
    s = symmetric(6, seed)
    pairings = {
        tuple(sorted(tuple(sorted(order[i : i + 2])) for i in (0, 2, 4)))
        for order in itertools.permutations(range(6))
    }
    assert len(pairings) == 15
    assert similar(s, 3) == max(pairings, key=lambda groups: within(s, groups))


def test_within_counts_each_pair_twice_and_no_head_with_itself():
    s = torch.tensor([[5.0, 1, 2], [1, 5, 4], [2, 4, 5]])
    assert within(s, ((0, 1), (2,))) == 2
    assert within(s, ((0, 1, 2),)) == 14


def test_neighbours_share_out_the_heads_in_order():
    assert neighbours(6, 3) == ((0, 1), (2, 3), (4, 5))
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of the 6 KV heads, got 4"):
        neighbours(6, 4)
