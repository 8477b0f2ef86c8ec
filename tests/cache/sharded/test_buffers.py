"""Sequences that ranks share token by token: one rank stores each token of a step, in a slot of its own."""

from random import Random

import pytest
import torch

from attnlib import KVLayout
from attnlib.cache.pages import PageAllocator
from attnlib.cache.sequences import Sequences
from attnlib.cache.sharded.buffers import ShardedBuffers, Sharding
from attnlib.cache.sharded.ranks import Ranks


def of_all_ranks(count: int) -> tuple[Sequences, PageAllocator, list[ShardedBuffers]]:
    """Sequences of a cache that so many ranks share, and the buffers of each rank."""
    cached = Sequences({None: 40}, 4, max_sequences=3, max_length=99, shards=count)
    allocator, table = cached.allocators[None], torch.zeros(3, 9)
    buffers = [ShardedBuffers(Ranks(None, None, rank, count), allocator, table) for rank in range(count)]
    for one in buffers:
        one.add(KVLayout.grouped(1, 8))
    return cached, allocator, buffers


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_token_of_a_step_is_stored_by_one_rank(count):
    """Packed steps of any tokens; and of a sequence's first ``n`` tokens a rank has those that it counts."""
    cached, allocator, buffers = of_all_ranks(count)
    draw, handles = Random(0), cached.admit(3)
    taken = [set() for _ in buffers]
    for _ in range(6):
        request = cached.request({handle: draw.randrange(5) for handle in handles})
        before = [holding.length for holding in request.holdings]
        plans = cached.reserve(request)
        slots = allocator.slots(request.tokens)
        mine = [one.local_slots(slots).tolist() for one in buffers]
        for one in buffers:
            one.update(request, counted=True, same_rows=False)
        ranks = [at % count for n, new in zip(before, request.tokens.values(), strict=True)
                 for at in range(n, n + new)]  # fmt: skip
        for token, rank in enumerate(ranks):
            stored = [slots[token] for slots in mine]
            assert [n for n, slot in enumerate(stored) if slot >= 0] == [rank]
            assert stored[rank] not in taken[rank], "a slot is written twice"
            taken[rank].add(stored[rank])
        shown = torch.stack([one.slices(request, writing=False).lengths for one in buffers])
        cached.commit(plans)
        assert shown.sum(0).tolist() == [cached.holding(handle).length for handle in handles]


def test_a_replay_of_several_tokens_of_a_sequence_is_refused():
    cached, _, (buffers, _) = of_all_ranks(2)
    first, second = cached.admit(2)
    several = cached.request({first: 2, second: 0})
    with pytest.raises(RuntimeError, match=r"replay: .* got \[2, 0\]"):
        Sharding(buffers.ranks).check_replay(several)
    Sharding(buffers.ranks).check_replay(cached.request({first: 1, second: 1}))
