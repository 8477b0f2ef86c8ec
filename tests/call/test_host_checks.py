"""ATTNLIB_CHECK=1 turns what kernels would clamp into errors that name it."""

from dataclasses import replace

import pytest
import torch

from attnlib import CAUSAL, KVCache, KVLayout, KVView, cached_attention

WRONG = {
    r"lengths\[1\]: expected 0 to 16, the capacity of its table, got 17": {"lengths": (5, 17)},
    r"lengths\[0\]: expected 0 to 16, the capacity of its table, got -1": {"lengths": (-1, 3)},
    r"starts\[1\]: expected 0 or more, got -2": {"starts": (0, -2)},
    r"table\[0, 1\]: expected one of 8 pages, got 8": {"table": ((0, 8, 99, 99), (2, 99, 99, 99))},
    r"table\[1, 0\]: expected one of 8 pages, got -1": {"table": ((0, 1, 99, 99), (-1, 99, 99, 99))},
    r"cu_seqlens_q: .*from 0 that grow to 3 at most, got \[0, 2, 1\]": {"cu_seqlens_q": (0, 2, 1)},
    r"cu_seqlens_q: .*got \[1, 2, 3\]": {"cu_seqlens_q": (1, 2, 3)},
    r"cu_seqlens_q: .*got \[0, 2, 4\]": {"cu_seqlens_q": (0, 2, 4)},
}


def view_of(**changes) -> KVView:
    """Sequences of 5 and 3 tokens in pages of 4, the rest of whose table is garbage."""
    given = {
        "table": ((0, 1, 99, 99), (2, 99, 99, 99)),
        "starts": (0, 1),
        "lengths": (5, 3),
        "cu_seqlens_q": (0, 2, 3),
    }
    tensors = {name: torch.tensor(x, dtype=torch.int32) for name, x in (given | changes).items()}
    plane = torch.randn(8, 4, 1, 8)
    return KVView(KVLayout.grouped(1, 8), 4, plane, plane.clone(), **tensors)


@pytest.mark.parametrize(
    ("what", "changes"), WRONG.items(), ids=lambda x: str(x)[:20] if isinstance(x, dict) else ""
)
def test_what_is_wrong_is_named(what, changes, monkeypatch):
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    with pytest.raises(ValueError, match=what):
        cached_attention(torch.randn(3, 2, 8), view_of(**changes), mask=CAUSAL)


def test_what_is_right_passes(monkeypatch):
    """Garbage behind the lengths, padding that is still to come, and a call that is being compiled
    included.
    """
    q, view = torch.randn(3, 2, 8), view_of()
    expected = cached_attention(q, view, mask=CAUSAL)
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    assert cached_attention(q, view, mask=CAUSAL).equal(expected)
    assert not cached_attention(q, view_of(starts=(9, 0)), mask=CAUSAL)[:2].any()
    dense = replace(view, cu_seqlens_q=None)
    compiled = torch.compile(
        lambda q: cached_attention(q, dense, mask=CAUSAL), fullgraph=True, backend="eager"
    )
    assert compiled(q[:2, None]).isfinite().all()


@torch.no_grad()
def test_a_cache_passes(monkeypatch):
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    cache = KVCache.paged([KVLayout.grouped(1, 8)], pages=9, page_size=4, max_sequences=3)
    one, other = cache.admit(2, left_padding=[0, 1])
    with cache.step(2) as (layer,):
        q = torch.randn(2, 2, 1, 8)
        cached_attention(q, layer.append(q, q), mask=CAUSAL)
    with cache.step({other: 1, one: 0}) as (layer,):
        q = torch.randn(1, 1, 8)
        cached_attention(q, layer.append(q, q), mask=CAUSAL)
