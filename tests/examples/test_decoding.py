"""Greedy decoding from a cache is greedy decoding; what parts the two must be a tie."""

import pytest
import torch
from decoding import TIE, check_same, decode_uncached, greedy, paged_cache, prefill, stream

PROMPTS = [torch.arange(n) * 37 % 256 for n in (5, 1, 23)]


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_cached_greedy_is_uncached_greedy(model, page_size):
    plain, _ = decode_uncached(model, PROMPTS, 12)
    cache = paged_cache(model, sequences=3, length=23 + 12, page_size=page_size)
    handles, logits = prefill(model, cache, PROMPTS)
    cached = torch.stack(list(stream(model, cache, handles, logits, choose=greedy, steps=12)), 1)
    assert cached.tolist() == plain.tolist()
    assert len(plain.unique()) > 6  # or this test would show little
    assert [cache.length(handle) for handle in handles] == [5 + 11, 1 + 11, 23 + 11]


def test_sequences_part_at_ties_only():
    plain, cached = torch.tensor([[1, 2], [1, 2]]), torch.tensor([[1, 2], [1, 0]])
    logits = torch.zeros(2, 2, 3)
    logits[..., 2] = 4.0
    with pytest.raises(
        SystemExit, match=r"sequence 1 diverges at new token 1: 0 cached, 2 uncached, logit gap 4\.00e"
    ):
        check_same(cached, plain, logits)
    logits[1, 1, 0] = 4.0 - 2 * TIE  # half of what a tie may be, at logits of 4
    assert "a tie" in check_same(cached, plain, logits)
    assert check_same(plain, plain, logits) == ""


def test_a_nan_is_no_tie():
    with pytest.raises(SystemExit):
        check_same(torch.tensor([[0]]), torch.tensor([[1]]), torch.full((1, 1, 2), torch.nan))
