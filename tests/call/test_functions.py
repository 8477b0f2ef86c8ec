"""The tensors that masks by function read, compared with the sizes of dense, packed and cached calls."""

from dataclasses import replace

import pytest
import torch

from attnlib import (
    CAUSAL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    MultiHeadLatentAttention,
    attention,
    cached_attention,
    masks,
    scores,
    varlen_attention,
)

B, S, T, H = 2, 9, 14, 4
NUMBERS = torch.tensor([[0, 0, 1], [0, 1, 1]])

# Ready-made masks of other sizes than calls [3, 5 queries, 4 heads] over 5 keys, and the dimension that does
# not fit.
SHORT = {
    "other heads": (lambda: masks.mask_tensor(torch.ones(1, 2, 5, 5) > 0), "h=4"),
    "another batch": (lambda: masks.mask_tensor(torch.ones(2, 1, 5, 5) > 0), "b=3"),
    "fewer pairs": (lambda: masks.mask_tensor(torch.ones(1, 1, 3, 3) > 0), "s=5, t=5"),
    "fewer tokens": (lambda: masks.documents(torch.zeros(3, 3).int()), "t>=5"),
    "one row": (lambda: masks.documents(torch.zeros(1, 5).int()), "b=3"),
    "a row of offsets": (lambda: masks.documents_of(torch.tensor([0, 5]), 5), "b=3"),
    "spans": (lambda: masks.bidirectional_spans(torch.zeros(3, 4).int()), "t>=5"),
    "fewer prompts": (lambda: masks.prefix_lm(torch.tensor([1, 2])), "b=3"),
    "fewer windows": (lambda: masks.head_windows(torch.tensor([1, 2])), "h=4"),
    "a small tree": (lambda: masks.tree(torch.ones(3, 3) > 0), "s=5, s=5"),
    "fewer counts": (lambda: masks.seqused(torch.ones(3).int(), torch.ones(2).int()), "b=3"),
    "fewer lists": (lambda: masks.block_list(torch.zeros(2, 1, 1, 1).int(), 8, 5), "b=3"),
    "few lists": (lambda: masks.block_list(torch.zeros(3, 1, 1, 1).int(), 4, 5), r"s/4=2, t/4\+1=3"),
    "lists of more keys": (lambda: masks.block_list(torch.zeros(3, 1, 1, 1).int(), 8, 9), r"t/8\+1=2"),
    "lists of fewer keys": (lambda: masks.block_list(torch.zeros(3, 1, 2, 1).int(), 4, 4), r"t/4\+1=3"),
}


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("composed", [lambda x: x, lambda x: ~x, lambda x: (CAUSAL & x) | masks.dilated(2)])
def test_a_mask_is_compared_with_the_sizes_of_the_call(name, composed):
    """A clamped index would read another sequence's, head's or query's, without a word."""
    make, expected = SHORT[name]
    mask, q = composed(make()), torch.randn(3, 5, H, 8)
    with pytest.raises(
        ValueError, match=rf"mask: expected a tensor \[.*{expected}.*\] as the call has them, got \("
    ):
        attention(q, q, q, mask=mask)
    with pytest.raises(ValueError, match=rf"mask: expected a tensor \[.*{expected}"):
        mask.block_mask(3, H, 5, 5)


def test_one_tensor_may_have_other_dimensions_in_another_mask():
    counts, q = torch.tensor([1, 2, 3]), torch.randn(3, 5, 3, 8)
    both = masks.prefix_lm(counts) | masks.head_windows(counts)
    assert both.dims == ("b", "h")
    attention(q, q, q, mask=both)
    with pytest.raises(ValueError, match=r"mask: expected a tensor \[h=4\]"):
        attention(*[torch.randn(3, 5, H, 8)] * 3, mask=both)
    assert (masks.documents(NUMBERS) & masks.documents(NUMBERS)).dims == ("bT",)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("mask", {"mask": masks.mask_tensor(torch.ones(1, 1, 3, 3) > 0)}),
        ("score", {"mask": CAUSAL, "score": scores.bias_tensor(torch.randn(1, 1, 3, 3))}),
    ],
)
class TestLengthsThatTheHostKnows:
    def test_packed_calls_compare_their_bounds(self, name, option, monkeypatch):
        q, offsets = torch.randn(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
        sections = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        with pytest.raises(ValueError, match=rf"{name}: .*\[1, 1, s>=4, t>=4\]"):
            varlen_attention(q, q, q, **option, **sections, max_seqlen_q=4, max_seqlen_k=4)
        varlen_attention(q, q, q, **option, **sections)  # whose lengths are known on the device alone
        monkeypatch.setenv("ATTNLIB_CHECK", "1")
        with pytest.raises(ValueError, match=rf"{name}: .*\[1, 1, s>=4, t>=4\]"):
            varlen_attention(q, q, q, **option, **sections)

    @pytest.mark.parametrize("latent", [False, True])
    @torch.no_grad()
    def test_steps_compare_their_queries(self, name, option, latent):
        """The first step is a call on its own tokens, and what is stored comes with the second."""
        sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 0, "v_head_dim": 4}
        kind = MultiHeadLatentAttention if latent else GroupedQueryAttention
        layer = kind(32, 2, **(sizes if latent else {"num_kv_heads": 2}), **option)
        for form in ("absorbed", "expanded") if latent else (None,):
            layer.form = form
            cache = KVCache.contiguous([layer.kv_layout], max_sequences=1, max_length=8)
            cache.admit()
            with cache.step(3) as (kv,):
                layer(torch.randn(1, 3, 32), kv=kv)
            for tokens in (1, 2):
                with pytest.raises(ValueError, match=rf"{name}: .* s={tokens}"), cache.step(tokens) as (kv,):
                    layer(torch.randn(1, tokens, 32), kv=kv)

    def test_calls_over_a_cache_compare_the_keys_that_they_know(self, name, option, monkeypatch):
        changed = {x: y.reading([y.tensors[0][:, :, :1]]) for x, y in option.items() if x == name}
        changed = {name: replace(changed[name], dims=("11st",))}
        cache = KVCache.contiguous([KVLayout.grouped(2, 8)], max_sequences=1, max_length=8)
        cache.admit()
        with cache.step(5) as (layer,):
            layer.append(*torch.randn(2, 1, 5, 2, 8))
        with cache.step(1) as (layer,):
            view, q = layer.append(*torch.randn(2, 1, 1, 2, 8)), torch.randn(1, 1, 2, 8)
            cached_attention(q, view, **option | changed)
            monkeypatch.setenv("ATTNLIB_CHECK", "1")
            with pytest.raises(ValueError, match=rf"{name}: .* t>=6"):
                cached_attention(q, view, **option | changed)


@torch.no_grad()
def test_block_lists_of_a_cache_may_cover_more_keys(monkeypatch):
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    layer = GroupedQueryAttention(32, H, mask=masks.block_list(torch.tensor([[[[0, 1]]]]), 4, 8))
    cache = KVCache.contiguous([layer.kv_layout], max_sequences=1, max_length=16)
    cache.admit()
    for tokens in (3, 1, 4):
        with cache.step(tokens) as (kv,):
            layer(torch.randn(1, tokens, 32), kv=kv)
    with (
        pytest.raises(ValueError, match=r"t/4\+1>=4.*\(1, 1, 1, 3\); list the blocks .* to block_list"),
        cache.step(1) as (kv,),
    ):
        layer(torch.randn(1, 1, 32), kv=kv)


def test_layers_know_the_heads_of_a_mask():
    with pytest.raises(ValueError, match=r"mask: expected a tensor \[h=4\].*got \(2,\)"):
        GroupedQueryAttention(32, H, num_kv_heads=2, mask=masks.head_windows(torch.tensor([1, 2])))
