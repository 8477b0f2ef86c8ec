"""Ready-made masks and scores, each against what its docstring says, written once more."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    Mask,
    MultiHeadLatentAttention,
    attention,
    attention_with_lse,
    cached_attention,
    masks,
    scores,
    sliding,
    varlen_attention,
)
from attnlib.call.call import Call, Dropout, Origin, Score, checked
from attnlib.dispatch.run import packed_by_documents

B, S, T, H = 2, 9, 14, 4
FIRST = T - S
NUMBERS = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3], [-1] * 4 + [5] * 3 + [-1] * 2 + [6] * 5])
WINDOWS, LENGTHS = torch.tensor([1, 3, 7, 99]), torch.tensor([8, 3])
SHOWN = torch.rand(S, S) > 0.4
PAIRS = torch.rand(B, 1, S, T) > 0.3
LISTED = torch.randint(-1, 4, (B, H, 3, 2))
QUERIES, KEYS = torch.tensor([9, 4]), torch.tensor([14, 6])


CASES = {
    "documents": (masks.documents(NUMBERS), lambda b, h, i, j: NUMBERS[b, i] == NUMBERS[b, j]),
    "prefix": (masks.prefix_lm(LENGTHS), lambda b, h, i, j: j <= i or j < LENGTHS[b]),
    "dilated": (masks.dilated(3), lambda b, h, i, j: (i - j) % 3 == 0),
    "global": (sliding(3) | masks.global_tokens(6), lambda b, h, i, j: i - 3 < j <= i or i < 6 or j < 6),
    "sinks": (masks.attention_sinks(2, 3), lambda b, h, i, j: j <= i and (j < 2 or j > i - 3)),
    "chunked": (masks.chunked(4), lambda b, h, i, j: j <= i and i // 4 == j // 4),
    "spans": (
        masks.bidirectional_spans(NUMBERS),
        lambda b, h, i, j: j <= i or (NUMBERS[b, i] == NUMBERS[b, j] and NUMBERS[b, i] >= 0),
    ),
    "windows of heads": (masks.head_windows(WINDOWS), lambda b, h, i, j: i - WINDOWS[h] < j <= i),
    "tree": (masks.tree(SHOWN), lambda b, h, i, j: j < FIRST or SHOWN[i - FIRST, j - FIRST]),
    "used": (
        masks.used(QUERIES, KEYS),
        lambda b, h, i, j: i - FIRST < QUERIES[b] and j < KEYS[b] and KEYS[b] - j >= QUERIES[b] - (i - FIRST),
    ),
    "blocks": (
        masks.block_list(LISTED, 4, T),
        lambda b, h, i, j: j // 4 in LISTED[b, h, (i - FIRST) // 4],
    ),
    "a tensor": (masks.mask_tensor(PAIRS), lambda b, h, i, j: PAIRS[b, 0, i - FIRST, j]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mask_is_what_it_says(name, monkeypatch):
    monkeypatch.setenv("ATTNLIB_CHECK", "1")  # no index is outside of its tensor
    mask, shows = CASES[name]
    seen = torch.tensor(
        [
            [[[bool(shows(b, h, i, j)) for j in range(T)] for i in range(FIRST, T)] for h in range(H)]
            for b in range(B)
        ]
    )
    at = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    i, j = torch.arange(FIRST, T)[:, None], torch.arange(T)
    found = mask.visible(i, j) if isinstance(mask, Mask) else mask.visible(*at, i, j, torch.tensor(FIRST))
    assert torch.equal(found.broadcast_to(seen.shape), seen)
    q, k, v = torch.randn(B, S, H, 8), torch.randn(B, T, 2, 8), torch.randn(B, T, 2, 8)
    torch.testing.assert_close(
        attention(q, k, v, mask=mask), attention(q, k, v, mask=masks.mask_tensor(seen))
    )


def test_documents_are_packed_sequences():
    lengths = torch.tensor([0, 5, 5, 13, 20])
    q = torch.randn(20, 4, 8)
    cu = lengths.int()
    packed = varlen_attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=CAUSAL)
    q = q[None]
    torch.testing.assert_close(attention(q, q, q, mask=CAUSAL & masks.documents_of(lengths, 20))[0], packed)


@pytest.mark.parametrize("ends", [[0, 5, 5, 13, 20], [0, 0, 7], [0, 30], [2, 9, 20], [0]], ids=str)
@pytest.mark.parametrize("band", [FULL, CAUSAL, sliding(4)], ids=str)
def test_documents_by_offsets_are_documents_by_numbers(band, ends):
    offsets = torch.tensor(ends)
    numbers = torch.bucketize(torch.arange(20), offsets[1:], right=True)[None]
    results = []
    for mask in (masks.documents_of(offsets, 20), masks.documents(numbers)):
        q, k, v = (
            torch.linspace(-1, 1, 20 * h * 8).sin().view(1, 20, h, 8).requires_grad_() for h in (4, 2, 2)
        )
        out, lse = attention_with_lse(q, k, v, mask=band & mask, sinks=torch.zeros(4))
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_documents_run_packed_where_nothing_else_depends_on_places():
    mask, q = CAUSAL & masks.documents_of(torch.tensor([0, 5, 20]), 20), torch.randn(1, 20, 4, 8)

    def packed(q=q, k=None, mask=mask, **options):
        k = q if k is None else k
        return packed_by_documents(checked(Call(q, mask, Score(), k, k)._replace(**options)))

    call = packed()
    assert call.q.shape == (20, 4, 8)
    assert call.mask == CAUSAL
    assert call.packing.cu_seqlens_q.tolist() == [0, 5, 20, 20]
    assert packed(mask=sliding(3) & mask).mask == sliding(3)
    for others in (
        {"mask": masks.chunked(4) & mask},
        {"mask": mask | sliding(3)},
        {"mask": ~mask},
        {"mask": Mask(None, 0, 3) & masks.documents_of(torch.tensor([0, 5, 20]), 20)},
        {"q": q[:, 3:], "k": q},
        {"score": Score(alibi_slopes=torch.rand(4))},
        {"score": Score(function=scores.distance_bias(torch.randn(4, 9)))},
        {"dropout": Dropout(0.5)},
        {"key_starts": torch.zeros(1, dtype=torch.int32)},
        {"origin": Origin(head=1)},
    ):
        assert packed(**others) is None, others


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


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: scores.t5_bias(torch.zeros(4, 1)),
            ValueError,
            r"at least 2 buckets in \[h, buckets\], got 1; heads_",
        ),
        (
            lambda: scores.t5_bias(torch.zeros(4, 7), bidirectional=True),
            ValueError,
            "an even number of .* got 7",
        ),
        (lambda: masks.documents(torch.zeros(3)), TypeError, "numbers: expected integers, got torch.float32"),
        (
            lambda: masks.documents(torch.zeros(3).int()),
            ValueError,
            r"numbers: expected 2 dimensions, got \(3,\)",
        ),
        (lambda: masks.tree(torch.zeros(3, 3)), TypeError, "shown: expected torch.bool"),
        (lambda: masks.mask_tensor(None), TypeError, "shown: expected a tensor, got NoneType"),
        (lambda: masks.chunked(0), ValueError, "size: expected at least 1, got 0"),
        (lambda: scores.bias_tensor(torch.zeros(1, 1, 1, 1).int()), TypeError, "bias: expected floats"),
        (lambda: scores.t5_bias(torch.zeros(3)), ValueError, "bias: expected 2 dimensions"),
        (lambda: scores.distance_bias([1]), TypeError, "bias: expected a tensor"),
    ],
)
def test_what_does_not_fit_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


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
    "fewer counts": (lambda: masks.used(torch.ones(3).int(), torch.ones(2).int()), "b=3"),
    "fewer lists": (lambda: masks.block_list(torch.zeros(2, 1, 1, 1).int(), 8, 5), "b=3"),
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


def test_layers_know_the_heads_of_a_mask():
    with pytest.raises(ValueError, match=r"mask: expected a tensor \[h=4\].*got \(2,\)"):
        GroupedQueryAttention(32, H, num_kv_heads=2, mask=masks.head_windows(torch.tensor([1, 2])))
