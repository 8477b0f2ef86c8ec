"""What a call allocates beside its inputs and outputs, as torch's own profiler counts it."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from attnlib import (
    CAUSAL,
    FULL,
    KVCache,
    KVLayout,
    Mask,
    attention,
    attention_maxima,
    attention_weights,
    cached_attention,
    sliding,
)


def allocations(call) -> tuple[int, int]:
    """Peak bytes held at once during ``call``, and the largest single allocation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        call()
    held = peak = largest = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak, largest = max(peak, held), max(largest, event.nbytes())
    assert peak > 0
    return peak, largest


def test_a_long_call_stays_far_below_its_score_matrix():
    """Causal, windowed and softcapped, 16k tokens: forward and backward under 5 % of one head's fp32 T x T
    matrix.
    """
    t, d = 16_384, 16
    q, k, v = (torch.randn(1, t, 1, d, requires_grad=True) for _ in range(3))

    def run():
        out = attention(q, k, v, mask=sliding(1024), softcap=20.0)
        torch.autograd.grad(out.sum(), (q, k, v))

    assert allocations(run)[0] < 0.05 * t * t * 4


@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(300)])
@pytest.mark.parametrize("dims", [(32, 32), (32, 8)])
def test_no_mask_and_no_copy_of_keys(mask, dims):
    """Eight query heads on one KV head of 4096 tokens: nothing as large as a repeated K, or a mask, is ever
    made.
    """
    t, (d, e) = 4096, dims
    q, k, v = torch.randn(1, t, 8, d), torch.randn(1, t, 1, d), torch.randn(1, t, 1, e)
    largest = allocations(lambda: attention(q, k, v, mask=mask))[1]
    repeated, boolean_mask, scores = t * 8 * d * 4, t * t, 4 * t * t
    assert largest <= max(t * 8 * e * 4, 4 * 2**19)  # the output, or a tile of scores
    assert largest < min(boolean_mask, scores)
    assert largest <= repeated


def test_recomputed_probabilities_take_the_memory_of_a_tile():
    """Largest scores, mass, and means at chosen keys of 4096 tokens and 8 heads: all scores take 512 MiB."""
    q, k, lse = torch.randn(1, 4096, 8, 16), torch.randn(1, 4096, 2, 16), torch.zeros(1, 8, 4096)
    at = torch.randint(0, 4096, (1, 4096, 8))
    calls = (
        lambda: attention_maxima(q, k, mask=CAUSAL),
        lambda: attention_weights(q, k, lse, mask=CAUSAL, over="queries"),
        lambda: attention_weights(q, k, lse, mask=CAUSAL, over="queries", rows=torch.arange(64)),
        lambda: attention_weights(q, k, lse, mask=CAUSAL, over="heads", at=at),
    )
    for call in calls:
        assert allocations(call)[0] < 64 << 20


def test_grouped_heads_read_the_keys_they_were_given():
    """Peak memory of a decode-like call does not grow with the group."""
    k, v = torch.randn(1, 8192, 2, 64), torch.randn(1, 8192, 2, 64)
    for heads in (2, 16):
        peak, _ = allocations(lambda heads=heads: attention(torch.randn(1, 1, heads, 64), k, v, mask=CAUSAL))
        assert peak < k.nbytes / 4


@pytest.mark.parametrize("layout", [KVLayout.grouped(2, 64), KVLayout.latent(96, 32)])
@pytest.mark.parametrize("page_size", [16, 64, 1024, None])
@torch.no_grad()
def test_cached_decoding_gathers_at_most_512_tokens(layout, page_size):
    length = 5000
    if page_size is None:
        cache = KVCache.contiguous([layout], max_sequences=1, max_length=length + 8)
    else:
        pages = -(-length // page_size) + 1
        cache = KVCache.paged([layout], pages=pages, page_size=page_size, max_sequences=1)
    cache.admit()
    second = (32,) if layout.is_latent else (2, 64)
    first = (96,) if layout.is_latent else (2, 64)
    with cache.step(length) as (kv,):
        kv.append(torch.randn(1, length, *first), torch.randn(1, length, *second))
    q = torch.randn(1, 1, 8, layout.dim + layout.rope_dim)
    with cache.step(1) as (kv,):
        view = kv.append(torch.randn(1, 1, *first), torch.randn(1, 1, *second))
        _, largest = allocations(lambda: cached_attention(q, view, mask=Mask(right=0)))
    assert largest <= 512 * layout.heads * (layout.dim + layout.rope_dim) * 4
