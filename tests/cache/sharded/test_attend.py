"""The route of a sharded view on one rank; tests/parallel has several ranks."""

from dataclasses import replace

import pytest
import torch

from attnlib import (
    CAUSAL,
    FULL,
    KVCache,
    KVLayout,
    attention_with_lse,
    cached_attention,
    explain,
    sliding,
)
from attnlib.cache.sharded.attend import LocalShard, ShardedRoute, _with_sinks, new_tokens
from attnlib.cache.sharded.ranks import Ranks

HEADS = 4
LAYOUT = KVLayout.grouped(2, 8)
RANKS = Ranks(None, None, rank=0, count=2)


def stored(layout: KVLayout = LAYOUT):
    """A view of five tokens, and their keys and values."""
    cache = KVCache.paged([layout], pages=4, page_size=4, max_sequences=1)
    cache.admit()
    k, v = torch.randn(2, 1, 5, layout.heads, layout.dim, dtype=layout.dtype)
    with cache.step(5) as (layer,):
        return layer.append(k, v), k, v


def test_a_view_without_its_shard_is_refused():
    """As one is that somebody has changed: its lengths count tokens that this rank does not store."""
    view, *_ = stored()
    q = torch.randn(1, 5, HEADS, 8)
    sharded = view.with_route(ShardedRoute(RANKS, LocalShard(view, is_single=False)))
    assert sharded.is_partial
    for changed in (view.with_route(ShardedRoute(RANKS)), replace(sharded, page_size=sharded.page_size)):
        assert changed.is_partial
        with pytest.raises(RuntimeError, match="kv: expected the view that append"):
            cached_attention(q, changed, mask=FULL)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": sliding(2)}, NotImplementedError, "every query sees all keys before its own"),
        ({"mask": FULL, "alibi_slopes": torch.ones(HEADS)}, NotImplementedError, "no alibi_slopes"),
        ({"mask": CAUSAL}, ValueError, "mask: expected FULL for several queries of a read"),
    ],
)
def test_calls_that_ranks_cannot_share_are_refused(options, error, message):
    view, *_ = stored()
    sharded = view.with_route(ShardedRoute(RANKS, LocalShard(view, is_single=False)))
    with pytest.raises(error, match=message):
        cached_attention(torch.randn(1, 5, HEADS, 8), sharded, **options)


@pytest.mark.parametrize("own_heads", [False, True])
def test_explain_asks_no_other_rank(own_heads):
    view, *_ = stored()
    sharded = view.with_route(ShardedRoute(RANKS, LocalShard(view, is_single=False)))
    sharded = sharded.with_own_heads() if own_heads else sharded
    found = explain(cached_attention, torch.randn(1, 5, HEADS, 8), sharded, mask=FULL)
    assert found.ranks == "over 2 ranks, by collectives"
    assert found.spec.heads == HEADS * (2 if own_heads else 1)


def test_sinks_join_a_result_without_them():
    q, k, v = torch.randn(3, 1, 5, HEADS, 8, dtype=torch.float64)
    sinks = torch.tensor([0.3, -2.0, 5.0, 0.0])
    found = _with_sinks(*attention_with_lse(q, k, v, mask=FULL), sinks)
    expected = attention_with_lse(q, k, v, mask=FULL, sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("store", [None, torch.int8, torch.float8_e4m3fn])
def test_new_tokens_are_what_the_cache_gives_back(store):
    layout = KVLayout.grouped(2, 8, storage_dtype=store)
    view, k, v = stored(layout)
    new = new_tokens(view, None, k, v, None)
    q = torch.randn(1, 5, HEADS, 8)
    expected = cached_attention(q, view, mask=FULL)
    torch.testing.assert_close(attention_with_lse(q, new.k, new.v, mask=FULL)[0], expected)
