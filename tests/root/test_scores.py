"""Ready-made scores: each against its definition, and the sizes of a bias against those of a call."""

from functools import partial

import pytest
import torch

from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    MultiHeadLatentAttention,
    attention,
    cached_attention,
    scores,
    varlen_attention,
)

B, S, T, H = 2, 9, 14, 4
FIRST = T - S


def test_scores_plus_a_tensor():
    q, k = torch.randn(B, S, H, 8), torch.randn(B, T, H, 8)
    for shape in ((B, H, S, T), (1, H, 1, T), (B, 1, S, 1), (1, 1, 1, 1)):
        bias = torch.randn(shape)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, k)), attn_mask=bias
        )
        found = attention(q, k, k, mask=FULL, score=scores.bias_tensor(bias))
        torch.testing.assert_close(found, expected.transpose(1, 2))


def test_scores_by_distance():
    bias, q, k = torch.randn(H, 5), torch.randn(B, S, H, 8), torch.randn(B, T, H, 8)
    behind = (torch.arange(FIRST, T)[:, None] - torch.arange(T)).clamp(0, 4)
    expected = attention(q, k, k, mask=CAUSAL, score=scores.bias_tensor(bias[:, behind][None]))
    torch.testing.assert_close(attention(q, k, k, mask=CAUSAL, score=scores.distance_bias(bias)), expected)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5s_bias_is_that_of_transformers(bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    relative = torch.arange(300) - torch.arange(300)[:, None]
    bucket = t5._relative_position_bucket(
        relative, bidirectional=bidirectional, num_buckets=32, max_distance=128
    )
    bias, q = torch.randn(H, 32), torch.randn(1, 300, H, 8)
    expected = attention(q, q, q, mask=FULL, score=scores.bias_tensor(bias[:, bucket][None]))
    found = attention(q, q, q, mask=FULL, score=scores.t5_bias(bias, bidirectional=bidirectional))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5s_own_table_has_heads_last(bidirectional):
    bias, q = torch.randn(H, 12), torch.randn(1, 40, H, 8)
    ours, theirs = (
        attention(q, q, q, mask=FULL, score=scores.t5_bias(x, bidirectional=bidirectional, heads_last=last))
        for x, last in ((bias, False), (bias.T, True))
    )
    assert torch.equal(ours, theirs)


# Biases of 4 heads, for calls [2, 9 queries, 4 heads] over 14 keys, as their makers document them.
TABLES = {
    "by distance": (scores.distance_bias, (H, 5), {0: "h=4"}),
    "T5's buckets": (scores.t5_bias, (H, 12), {0: "h=4"}),
    "T5's own": (partial(scores.t5_bias, heads_last=True), (12, H), {1: "h=4"}),
    "of pairs": (scores.bias_tensor, (B, H, S, T), {0: "b=2", 1: "h=4", 2: "s=9", 3: "t=14"}),
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("added", [-1, 1])
def test_a_bias_is_compared_with_the_sizes_of_the_call(kind, added):
    """A clamped index would read another head's, or another query's, without a word."""
    make, shape, checked_dims = TABLES[kind]
    q, k = torch.randn(B, S, H, 8), torch.randn(B, T, 2, 8)
    attention(q, k, k, mask=FULL, score=make(torch.randn(shape)))
    for dim, expected in checked_dims.items():
        other = [size + added * (n == dim) for n, size in enumerate(shape)]
        if other[dim] > 1:  # a dimension of 1 serves all
            with pytest.raises(
                ValueError, match=rf"score: expected a bias \[.*{expected}.*got \({other[0]}, "
            ):
                attention(q, k, k, mask=FULL, score=make(torch.randn(other)))


@pytest.mark.parametrize("kind", ["by distance", "T5's buckets", "T5's own"])
def test_a_bias_of_other_heads_is_refused_packed_cached_and_by_layers(kind):
    make, shape, _ = TABLES[kind]
    score = make(torch.randn([2 if size == H else size for size in shape]))
    q, offsets = torch.randn(S, H, 8), torch.tensor([0, 4, S], dtype=torch.int32)
    sections = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "mask": CAUSAL}
    with pytest.raises(ValueError, match=r"score: .*h=4"):
        varlen_attention(q, q, q, score=score, **sections)
    cache = KVCache.contiguous([KVLayout.grouped(2, 8)], max_sequences=1, max_length=8)
    cache.admit()
    with cache.step(3) as (layer,):
        view = layer.append(*torch.randn(2, 1, 3, 2, 8))
        with pytest.raises(ValueError, match=r"score: .*h=4"):
            cached_attention(torch.randn(1, 3, H, 8), view, mask=CAUSAL, score=score)
    for layer, sizes in (
        (GroupedQueryAttention, {"num_kv_heads": 2}),
        (
            MultiHeadLatentAttention,
            {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 0, "v_head_dim": 4},
        ),
    ):
        with pytest.raises(ValueError, match=r"score: .*h=4"):
            layer(32, H, mask=CAUSAL, score=score, **sizes)


def test_t5s_own_table_is_told_apart_where_heads_and_buckets_differ():
    q = torch.randn(1, S, H, 8)
    with pytest.raises(ValueError, match=r"expected a bias \[h=4, n\].*got \(12, 4\).*heads_last=True"):
        attention(q, q, q, mask=FULL, score=scores.t5_bias(torch.randn(12, H)))
