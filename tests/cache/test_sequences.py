"""The sequences of a cache, which every page allocator holds in equal lengths."""

import pytest
from cache_model import allocator_state

from attnlib import CacheFullError
from attnlib.cache.sequences import Sequences


def test_sequences_reserve_in_all_allocators_or_in_none():
    cached = Sequences({None: 8, 4: 1}, 4, max_sequences=2, max_length=32)  # only the second lacks pages
    first, _ = cached.admit(2)
    before = [allocator_state(allocator) for allocator in cached.allocators.values()]
    with pytest.raises(CacheFullError, match=r"needs 2 pages and 1 is free \(page_size=4, window=4\)"):
        cached.reserve(cached.request({first: 5}))
    assert [allocator_state(allocator) for allocator in cached.allocators.values()] == before
