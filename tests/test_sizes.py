"""Cache bytes: published numbers, and equality with what the cache allocates."""

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnlib.sizes
from attnlib import KVCache, KVLayout
from attnlib.sizes import cache_bytes

dtypes = st.sampled_from([torch.float16, torch.float32, torch.float64])
stores = st.sampled_from([None, torch.int8, torch.float8_e4m3fn])
dims = st.integers(1, 5)


unbounded = st.none()
windows = unbounded | st.integers(1, 9)


@st.composite
def layouts(draw, windows=unbounded):
    stored = {"dtype": draw(dtypes), "store": draw(stores), "window": draw(windows)}
    if draw(st.booleans()):
        return KVLayout.latent(draw(dims), draw(st.integers(0, 3)), **stored)
    return KVLayout.grouped(draw(dims), draw(dims), draw(dims), **stored)


def test_the_example_runs():
    names = {"cache_bytes": cache_bytes, "KVLayout": KVLayout, "torch": torch}
    assert doctest.testmod(attnlib.sizes, extraglobs=names) == doctest.TestResults(failed=0, attempted=1)


def test_published_sizes():
    token = {"page_size": 1, "lengths": [1]}
    deepseek_v3 = [KVLayout.latent(512, 64, dtype=torch.bfloat16)] * 61
    assert cache_bytes(deepseek_v3, **token) == 70_272  # 576 values a token and layer (arXiv 2405.04434)
    llama_3_8b = [KVLayout.grouped(8, 128, dtype=torch.bfloat16)] * 32
    assert cache_bytes(llama_3_8b, **token) == 131_072
    assert cache_bytes([KVLayout.grouped(2, 128, dtype=torch.bfloat16, store=torch.int8)], **token) == 2 * 2 * (128 + 4)
    assert cache_bytes([KVLayout.latent(512, 64, dtype=torch.bfloat16, store=torch.int8)], **token) == 512 + 4 + 128


@given(
    kinds=st.lists(layouts(), min_size=1, max_size=3), pages=st.integers(1, 5), page_size=st.sampled_from([1, 4, 16])
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
    kinds=st.lists(layouts(windows), min_size=1, max_size=3),
    steps=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=4),
    page_size=st.sampled_from([1, 2, 8]),
    rollback=st.integers(0, 4),
)
@settings(deadline=None, max_examples=60)
def test_used_bytes_of_unshared_sequences(kinds, steps, page_size, rollback):
    cache = KVCache.paged(kinds, pages=120, page_size=page_size, max_sequences=3, rollback=rollback)
    handles = cache.admit(3)
    for counts in steps:
        with cache.step(dict(zip(handles, counts, strict=True))):
            pass
        lengths = [cache.length(handle) for handle in handles]
        assert cache.used_bytes == cache_bytes(kinds, lengths, page_size=page_size, rollback=rollback)


@given(kinds=st.lists(layouts(windows), min_size=1), counts=st.lists(st.integers(0, 9)))
@settings(deadline=None, max_examples=40)
def test_a_contiguous_cache_is_the_case_of_one_page(kinds, counts):
    cache = KVCache.contiguous(kinds, max_sequences=max(1, len(counts)), max_length=9)
    handles = cache.admit(len(counts))
    with cache.step(dict(zip(handles, counts, strict=True))):
        pass
    assert cache.used_bytes == cache_bytes(kinds, counts, page_size=9)


def test_nothing_is_stored_for_no_sequence_and_no_token():
    assert cache_bytes([KVLayout.grouped(1, 1)], [], page_size=4) == 0
    assert cache_bytes([KVLayout.grouped(1, 1)], [0, 0], page_size=4) == 0


@pytest.mark.parametrize("wrong", [{"page_size": 0}, {"rollback": -1}, {"lengths": [3, -1]}])
def test_wrong_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match="cache_bytes: expected"):
        cache_bytes([KVLayout.grouped(1, 1)], **{"lengths": [3], "page_size": 4} | wrong)
