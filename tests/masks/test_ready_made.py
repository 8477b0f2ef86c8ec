"""Ready-made masks, each against what its docstring says, written once more."""

import pytest
import torch

from attnlib import (
    CAUSAL,
    FULL,
    Mask,
    attention,
    attention_with_lse,
    masks,
    scores,
    sliding,
    varlen_attention,
)

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
        masks.seqused(QUERIES, KEYS),
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


@pytest.mark.parametrize("wrong", [2, -2, 2**40])
def test_numbers_of_no_block_are_refused_where_values_are_read(wrong, monkeypatch):
    listed = torch.tensor([[[[1, -1, wrong]]]])
    masks.block_list(listed, 4, 8)
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    with pytest.raises(ValueError, match=f"indices: expected -1 or less than 2, .* 4 in 8 keys, got {wrong}"):
        masks.block_list(listed, 4, 8)
    masks.block_list(listed[..., :2], 4, 8)


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
