"""A window with the first tokens (StreamingLLM), over caches that keep no more than these."""

import pytest
import torch

from attnlib import (
    CAUSAL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    Mask,
    MultiHeadLatentAttention,
    Rope,
    sliding,
)
from attnlib.cache import buffer
from attnlib.masks.function import RetainedKeys
from attnlib.masks.ready_made import attention_sinks, documents

SIZES = {"page_size": 4, "max_sequences": 2, "max_length": 90}
STEPS = (9, 1, 1, (5, 0), (0, 5), 17, 1, 1, (3, 1), (0, 2), 26)  # tokens of each sequence, dense or packed


def a_layer(kind: str, mask, backend: str = "torch") -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "grouped":
        return GroupedQueryAttention(32, 4, num_kv_heads=2, mask=mask, backend=backend)
    widths = {
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    return MultiHeadLatentAttention(
        32, 4, **widths, mask=mask, rope=Rope(4, interleaved=True), backend=backend
    )


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("kind", ["grouped", "latent"])
@torch.no_grad()
def test_a_stream_as_the_whole_sequence(kind, backend, monkeypatch):
    """Dropped pages are NaN and go to the other sequence; rows change places; pages stay few."""
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    layer = a_layer(kind, attention_sinks(5, 8), backend)
    assert (layer.kv_layout.window, layer.kv_layout.first_tokens) == (8, 5)
    x = torch.randn(2, sum(max(n) if isinstance(n, tuple) else n for n in STEPS), 32)
    whole = layer(x)
    cache, done = KVCache.paged([layer.kv_layout], pages=24, **SIZES), [0, 0]
    first, second = cache.admit(2)
    for counts in STEPS:
        if isinstance(counts, tuple):
            tokens = {second: counts[1], first: counts[0]}  # not in the order of admission
            parts = [x[1, done[1] : done[1] + counts[1]], x[0, done[0] : done[0] + counts[0]]]
            expected = [whole[1, done[1] : done[1] + counts[1]], whole[0, done[0] : done[0] + counts[0]]]
            with cache.step(tokens) as (kv,):
                y = layer(torch.cat(parts), kv=kv)
            torch.testing.assert_close(y, torch.cat(expected))
        else:
            assert done[0] == done[1]
            with cache.step(counts) as (kv,):
                y = layer(x[:, done[0] : done[0] + counts], kv=kv)
            torch.testing.assert_close(y, whole[:, done[0] : done[0] + counts])
        done = [
            n + m
            for n, m in zip(done, counts if isinstance(counts, tuple) else (counts, counts), strict=True)
        ]
    allocator = cache._sequences.allocators[(8, 5)]
    assert allocator.used <= 2 * (2 + 3)  # two pages for five first tokens, three for a window


def test_what_masks_keep():
    sinks = attention_sinks(4, 16)
    numbers = torch.zeros(1, 8, dtype=torch.int32)
    assert sinks.kept == RetainedKeys(16, 4)
    assert (sinks & documents(numbers)).kept == (documents(numbers) & sinks).kept == RetainedKeys(16, 4)
    assert (sinks & sliding(8)).kept == RetainedKeys(8, 4)
    assert (sinks & attention_sinks(6, 12)).kept == RetainedKeys(12, 6)
    assert (sinks & CAUSAL).kept == RetainedKeys(16, 4)
    assert (sinks | CAUSAL).kept == (~sinks).kept == RetainedKeys(None)
    assert Mask(left=-3).kept == RetainedKeys(None)


def test_pages_of_such_layers_are_counted_by_window_and_first_tokens():
    layouts = [a_layer("grouped", mask).kv_layout for mask in (attention_sinks(4, 8), sliding(8))]
    cache = KVCache.paged(layouts, pages={(8, 4): 5, 8: 4}, page_size=4, max_sequences=1)
    assert [allocator.total for allocator in cache._sequences.allocators.values()] == [5, 4]


@pytest.mark.parametrize("heads", [(2, 8), (2, 2)])
@pytest.mark.parametrize("order", [1, -1])
def test_layouts_of_a_window_and_other_first_tokens_have_schedules_of_their_own(heads, order, monkeypatch):
    """A CPU makes none; so one is put in its place that only tells who asked for it, and what it was updated
    with.
    """
    reaches = {}

    def made(layout, rows, device, **sizes):
        return torch.full((layout.heads, rows), float(layout.first_tokens))

    def updated(schedule, starts, lengths, *, reach, **options):
        reaches[id(schedule)] = reach

    monkeypatch.setattr(buffer, "new_schedule", made)
    monkeypatch.setattr(buffer, "update_schedule", updated)
    layouts = [
        KVLayout.grouped(n, 4, window=8, first_tokens=first) for n, first in zip(heads, (0, 5), strict=True)
    ][::order]
    cache = KVCache.paged(layouts, pages=16, page_size=4, max_sequences=2)
    cache.admit(2)
    with cache.step(1) as layers:
        views = [layer.append(*torch.randn(2, 2, 1, layer.layout.heads, 4)) for layer in layers]
    for view in views:
        assert view.schedule is not None
        assert view.schedule.shape[0] == view.layout.heads
        assert bool((view.schedule == view.layout.first_tokens).all())
        assert reaches[id(view.schedule)] == (None if view.layout.first_tokens else 8 + 1)
    assert len(reaches) == 2  # and nobody else has one, to be updated for nothing
