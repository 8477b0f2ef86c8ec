"""Cache bytes: published numbers, equality with what the cache allocates, and the exact inverses."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from size_helpers import layouts, windows

from attnlib import CacheFullError, KVCache, KVLayout
from attnlib.fp8 import E4M3
from attnlib.sizes import cache_bytes, largest_batch, longest_context

page_sizes = st.sampled_from([1, 2, 8])
kinds_of_layers = st.lists(layouts(windows), min_size=1, max_size=3)


def test_published_sizes():
    token = {"page_size": 1, "lengths": [1]}
    deepseek_v3 = [KVLayout.latent(512, 64, dtype=torch.bfloat16)] * 61
    assert cache_bytes(deepseek_v3, **token) == 70_272  # 576 values a token and layer (arXiv 2405.04434)
    llama_3_8b = [KVLayout.grouped(8, 128, dtype=torch.bfloat16)] * 32
    assert cache_bytes(llama_3_8b, **token) == 131_072
    assert cache_bytes(
        [KVLayout.grouped(2, 128, dtype=torch.bfloat16, storage_dtype=torch.int8)], **token
    ) == 2 * 2 * (128 + 4)
    assert (
        cache_bytes([KVLayout.latent(512, 64, dtype=torch.bfloat16, storage_dtype=torch.int8)], **token)
        == 512 + 4 + 128
    )
    deepseek_v32 = KVLayout.latent(512, 64, index_dim=128, index_dtype=E4M3, dtype=torch.bfloat16)
    assert cache_bytes([deepseek_v32], **token) == 1152 + 132  # FlashMLA and DeepGEMM store 132 bytes a key
    minimax_m3 = KVLayout.grouped(4, 128, index_dim=128, index_heads=4, dtype=torch.bfloat16)
    assert cache_bytes([minimax_m3], **token) == 2 * 3 * 4 * 128


@given(
    kinds=st.lists(layouts(), min_size=1, max_size=3),
    pages=st.integers(1, 5),
    page_size=st.sampled_from([1, 4, 16]),
)
@settings(deadline=None, max_examples=40)
def test_a_whole_cache_is_one_sequence_over_all_pages(kinds, pages, page_size):
    cache = KVCache.paged(kinds, pages=pages, page_size=page_size, max_sequences=1)
    assert cache.nbytes == cache_bytes(kinds, [pages * page_size], page_size=page_size)
    storages = {
        plane.untyped_storage().data_ptr(): plane.untyped_storage().nbytes()
        for layer in cache._layers
        for plane in layer.planes.values()
    }
    assert cache.nbytes == sum(storages.values())


@given(
    kinds=kinds_of_layers,
    steps=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=4),
    page_size=page_sizes,
    rollback=st.integers(0, 4),
)
@settings(deadline=None, max_examples=60)
def test_used_bytes_of_unshared_sequences(kinds, steps, page_size, rollback):
    cache = KVCache.paged(kinds, pages=120, page_size=page_size, max_sequences=3, rollback=rollback)
    handles = cache.admit(3)
    for counts in steps:
        with cache.step(dict(zip(handles, counts, strict=True)), replay=True):
            pass
        lengths = [cache.length(handle) for handle in handles]
        assert cache.used_bytes == cache_bytes(kinds, lengths, page_size=page_size, rollback=rollback)


@given(kinds=st.lists(layouts(windows), min_size=1), counts=st.lists(st.integers(0, 9)))
@settings(deadline=None, max_examples=40)
def test_a_contiguous_cache_is_the_case_of_one_page(kinds, counts):
    cache = KVCache.contiguous(kinds, max_sequences=max(1, len(counts)), max_length=9)
    handles = cache.admit(len(counts))
    with cache.step(dict(zip(handles, counts, strict=True)), replay=True):
        pass
    assert cache.used_bytes == cache_bytes(kinds, counts, page_size=9)


@given(kinds=st.lists(layouts(), min_size=1, max_size=3), length=st.integers(0, 60), page_size=page_sizes)
def test_bytes_grow_with_the_context_and_add_up_over_layers_and_sequences(kinds, length, page_size):
    size = cache_bytes(kinds, [length], page_size=page_size)
    grown = cache_bytes(kinds, [length + 1], page_size=page_size)
    assert grown >= size
    assert (grown > size) == (length % page_size == 0)
    assert cache_bytes(kinds, [length] * 5, page_size=page_size) == 5 * size
    assert cache_bytes(kinds * 3, [length], page_size=page_size) == 3 * size
    assert sum(cache_bytes([kind], [length], page_size=page_size) for kind in kinds) == size


@given(window=st.integers(1, 9), length=st.integers(0, 60), page_size=page_sizes)
def test_a_window_caps_the_bytes(window, length, page_size):
    everything = cache_bytes([KVLayout.grouped(2, 4)], [length], page_size=page_size)
    windowed = KVLayout.grouped(2, 4, window=window)
    seen_next = window - 1  # by the next query, besides itself
    at_most = (-(-seen_next // page_size) + 1) * page_size * windowed.token_bytes
    assert cache_bytes([windowed], [length], page_size=page_size) <= min(everything, at_most)
    assert length >= window or cache_bytes([windowed], [length], page_size=page_size) == everything


def peak(kinds, context, page_size):
    """The most that one sequence takes while it grows to ``context``: each step keeps what the one before
    could see.
    """
    sizes = (cache_bytes(kinds, [n], page_size=page_size, rollback=1) for n in range(1, context + 1))
    return max(sizes, default=0)


@given(kinds=kinds_of_layers, share=st.floats(0, 1), batch=st.integers(1, 4), page_size=page_sizes)
@settings(max_examples=100)
def test_the_longest_context_fits_and_one_token_more_does_not(kinds, share, batch, page_size):
    memory = int(share * cache_bytes(kinds, [60] * batch, page_size=page_size))
    longest = longest_context(kinds, memory, batch=batch, page_size=page_size)
    assert batch * peak(kinds, 200 if longest is None else longest, page_size) <= memory
    assert longest is None or batch * peak(kinds, longest + 1, page_size) > memory
    assert longest is not None or all(kind.window is not None for kind in kinds)


@given(kind=layouts(windows), pages=st.integers(1, 12), batch=st.integers(1, 3), page_size=page_sizes)
@settings(max_examples=60)
def test_a_cache_of_so_many_pages_grows_that_far(kind, pages, batch, page_size):
    sizes = {"pages": pages, "page_size": page_size, "max_sequences": batch, "max_length": 200}
    cache = KVCache.paged([kind], **sizes, device="meta")
    handles = cache.admit(batch)
    length = 0
    with contextlib.suppress(CacheFullError):
        while length < 200:
            with cache.step(1, replay=True):
                pass
            length = cache.length(handles[0])
    longest = longest_context([kind], cache.nbytes, batch=batch, page_size=page_size)
    assert length == min(200, 200 if longest is None else longest)


def test_the_longest_context_is_exact_where_numbers_are_large():
    kinds = [KVLayout.grouped(8, 128, dtype=torch.bfloat16)] * 32
    assert longest_context(kinds, 2**60, batch=1, page_size=64) == 2**60 // 2**17
    assert longest_context(kinds, 2**60 - 1, batch=1, page_size=64) == 2**60 // 2**17 - 64


@given(kinds=kinds_of_layers, memory=st.integers(-1, 10**5), context=st.integers(1, 60), page_size=page_sizes)
def test_the_largest_batch_fits_and_one_sequence_more_does_not(kinds, memory, context, page_size):
    batch = largest_batch(kinds, memory, context=context, page_size=page_size)
    size = peak(kinds, context, page_size)
    assert batch * size <= max(0, memory) < (batch + 1) * size
    reached = longest_context(kinds, memory, batch=max(1, batch), page_size=page_size)
    assert reached is None or (reached >= context) == (batch > 0)


def test_nothing_is_stored_for_no_sequence_and_no_token():
    assert cache_bytes([KVLayout.grouped(1, 1)], [], page_size=4) == 0
    assert cache_bytes([KVLayout.grouped(1, 1)], [0, 0], page_size=4) == 0


@pytest.mark.parametrize("wrong", [{"page_size": 0}, {"rollback": -1}, {"lengths": [3, -1]}])
def test_wrong_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match="cache_bytes: expected"):
        cache_bytes([KVLayout.grouped(1, 1)], **{"lengths": [3], "page_size": 4} | wrong)


def test_the_inverses_need_something_to_count():
    with pytest.raises(ValueError, match="context: expected at least 1 token, got 0"):
        largest_batch([KVLayout.grouped(1, 1)], 100, context=0, page_size=4)
    with pytest.raises(ValueError, match="batch: expected at least 1 sequence, got 0"):
        longest_context([KVLayout.grouped(1, 1)], 100, batch=0, page_size=4)
