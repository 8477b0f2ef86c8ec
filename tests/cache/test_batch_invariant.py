"""Batch-invariant caches without a GPU: who runs them, what is refused, and the form that MLA takes."""

from random import Random

import pytest
import torch
from helpers import assert_same_bits

from attnlib import CAUSAL, KVCache, KVLayout, MultiHeadLatentAttention, cached_attention, explain
from attnlib.layers import latent_forms

LAYOUT = KVLayout.grouped(2, 8)


def cache_of(layout: KVLayout = LAYOUT, **options) -> KVCache:
    return KVCache.paged([layout], pages=64, page_size=4, max_sequences=4, batch_invariant=True, **options)


@torch.no_grad()
def test_the_definition_keeps_the_contract():
    """One query at a time, whatever is beside it; torch's products do not, and are not taken."""
    q, k, v = torch.randn(3, 13, 2, 8)
    results = []
    for seed in range(3):
        rng, cache, at, ours = Random(seed), cache_of(), 0, []
        first, other = cache.admit(2)
        while at < 13:
            n = min(13 - at, rng.choice((1, 4, 13)))
            with cache.step({other: 3, first: n}) as (layer,):
                mine = [torch.cat((torch.randn(3, 2, 8), x[at : at + n])) for x in (q, k, v)]
                view = layer.append(*mine[1:])
                assert explain(cached_attention, mine[0], view, mask=CAUSAL).chosen in ("reference", "triton")
                with pytest.raises(NotImplementedError, match="batch_invariant: torch may sum"):
                    cached_attention(mine[0], view, mask=CAUSAL, backend="torch")
                ours.append(cached_attention(mine[0], view, mask=CAUSAL, backend="reference")[3:])
            at += n
        results.append(torch.cat(ours))
    assert_same_bits((results[0], results[1]), (results[0], results[2]))


def test_what_is_refused():
    with pytest.raises(ValueError, match="batch_invariant: expected no shared_prefixes"):
        cache_of(shared_prefixes=1)
    with pytest.raises(TypeError, match="batch_invariant: expected a bool, got int"):
        KVCache.contiguous([LAYOUT], max_sequences=1, max_length=4, batch_invariant=1)


@torch.no_grad()
def test_a_prompt_is_absorbed_too(monkeypatch):
    """In the form that later tokens have; the other one is refused."""
    sizes = {
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 0,
        "v_head_dim": 4,
    }
    layer, x = (
        MultiHeadLatentAttention(16, 2, mask=CAUSAL, backend="reference", **sizes),
        torch.randn(1, 40, 16),
    )
    for form in ("auto", "expanded"):
        layer.form = form
        cache = cache_of(layer.kv_layout)
        cache.admit()
        monkeypatch.setattr(latent_forms, "varlen_attention_with_lse", None)
        monkeypatch.setattr(MultiHeadLatentAttention, "_attend_tokens", None)
        with cache.step(40) as (kv,):
            if form == "auto":
                layer(x, kv=kv)
            else:
                with pytest.raises(NotImplementedError, match="expected the absorbed form"):
                    layer(x, kv=kv)
                kv.append(torch.randn(1, 40, 8))


@torch.no_grad()
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_left_padding_may_arrive_in_pieces(batch_invariant):
    """A sequence of which nothing but padding is stored sees nothing; later ones agree with torch's
    backend.
    """
    cache = KVCache.paged([LAYOUT], pages=9, page_size=4, max_sequences=2, batch_invariant=batch_invariant)
    cache.admit(2, left_padding=[5, 0])
    for tokens in (2, 2, 3):
        q, k, v = torch.randn(3, 2, tokens, 2, 8)
        with cache.step(tokens) as (layer,):
            view = layer.append(k, v)
            defined = cached_attention(q, view, mask=CAUSAL, backend="reference")
            if not batch_invariant:
                torch.testing.assert_close(defined, cached_attention(q, view, mask=CAUSAL, backend="torch"))
        assert defined[0].any() == (int(view.lengths[0]) > 5)
        assert defined[1].any()
