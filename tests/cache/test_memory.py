"""``KVCache.paged(memory=)``: never more bytes than given, and no page more would fit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib import KVCache, KVLayout

FULL = KVLayout.grouped(2, 8)
WINDOW = KVLayout.grouped(2, 8, window=20)
SINKS = KVLayout.grouped(1, 8, window=20, first_tokens=3)
LATENT = KVLayout.latent(16, 4, storage_dtype=torch.int8)
INDEXED = KVLayout.latent(16, 4, index_dim=8, index_dtype=torch.float8_e4m3fn)


def made(layouts, memory, **options):
    sizes = {"page_size": 4, "max_sequences": 3, "device": "meta"} | options
    return KVCache.paged(layouts, memory=memory, **sizes)


def counts(cache):
    return {window: allocator.total for window, allocator in cache._sequences.allocators.items()}


@given(
    layouts=st.lists(st.sampled_from([FULL, WINDOW, SINKS, LATENT, INDEXED]), min_size=1, max_size=4),
    memory=st.integers(20_000, 300_000),
    max_length=st.sampled_from([None, 30, 500]),
    most=st.sampled_from([None, 1, 16]),
)
def test_fills_the_memory_and_no_more(layouts, memory, max_length, most):
    cache = made(layouts, memory, max_length=max_length, max_step_tokens=most)
    assert cache.nbytes <= memory
    pages = counts(cache)
    if None in pages and max_length is None:
        page = sum(layout.token_bytes * 4 for layout in layouts if layout.window is None)
        assert memory - cache.nbytes < page
    if max_length is not None:  # sequences of the largest length never need more
        enough = KVCache.pages_for(layouts, [max_length] * 3, page_size=4, max_step_tokens=most)
        assert all(pages[window] <= count for window, count in enough.items())


def test_every_sequence_grows_to_the_same_length():
    """Three sequences reach the length that the pages were counted for, step by step."""
    cache = made([FULL, WINDOW], 60_000, max_step_tokens=8, device="cpu")
    handles = cache.admit(3)
    length = counts(cache)[None] // 3 * 4
    assert length > 100
    for start in range(0, length, 8):
        with cache.step({handle: min(8, length - start) for handle in handles}) as layers:
            for layer in layers:
                tokens = layer.positions.shape
                layer.append(torch.zeros(*tokens, 2, 8), torch.zeros(*tokens, 2, 8))
    assert [cache.length(handle) for handle in handles] == [length] * 3


@pytest.mark.parametrize(("text", "size"), [("64KiB", 65_536), ("65.5 kb", 65_500), ("65536", 65_536)])
def test_takes_sizes_as_text(text, size):
    assert counts(made([FULL], text)) == counts(made([FULL], size))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory": "1 GiBs"}, ValueError, "memory: expected a size such as 5GB or 500MiB, got '1 GiBs'"),
        ({"memory": 1.5}, TypeError, "memory: expected an int"),
        ({"memory": 100}, ValueError, "memory: expected at least 1,536 bytes, for a page of each of 3"),
        ({"memory": None}, ValueError, "pages: expected either a page count or memory="),
        ({"memory": 10_000, "pages": 3}, ValueError, "pages: expected either a page count or memory="),
        (
            {"memory": None, "pages": 3, "max_step_tokens": 4},
            ValueError,
            r"max_step_tokens: expected None with pages=; KVCache\.pages_for",
        ),
    ],
)
def test_wrong_sizes_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        made([FULL], **options)
