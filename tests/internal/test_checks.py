"""bind(): named sizes, and what its messages say; and remedies that messages name."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib import CAUSAL, GroupedQueryAttention, attention, varlen_attention
from attnlib.internal.checks import bind

sizes = st.dictionaries(st.sampled_from("bshgtde"), st.integers(0, 9), min_size=7)


@given(sizes)
def test_it_gives_every_size_once(wanted):
    q, k = (torch.empty([wanted[x] for x in dims]) for dims in ("bshd", "btgd"))
    assert bind(("q", q, "bshd"), ("k", k, "btgd")) == {x: wanted[x] for x in "bshdtg"}


@given(sizes, st.sampled_from("bd"))
def test_a_letter_with_two_sizes_names_both_tensors(wanted, dim):
    q = torch.empty([wanted[x] for x in "bshd"])
    k = torch.empty([wanted[x] + (x == dim) for x in "btgd"])
    with pytest.raises(ValueError, match=r"^k: expected") as caught:
        bind(("q", q, "bshd"), ("k", k, "btgd"))
    message = str(caught.value)
    assert f"{dim}={wanted[dim]}" in message
    assert f"got {tuple(k.shape)}" in message
    assert f"q has {dim}={wanted[dim]}" in message


def test_known_sizes_are_kept_and_not_changed():
    known = {"b": 2}
    assert bind(("q", torch.empty(2, 3), "bs"), known=known) == {"b": 2, "s": 3}
    assert known == {"b": 2}
    with pytest.raises(ValueError, match=r"q: expected \[b=2, s\], got \(4, 3\); the call has b=2"):
        bind(("q", torch.empty(4, 3), "bs"), known=known)


def test_another_rank_is_refused():
    with pytest.raises(ValueError, match=r"k: expected \[b, t, g, d\], got \(2, 3\)"):
        bind(("k", torch.empty(2, 3), "btgd"))


def test_one_tensor_with_a_letter_twice():
    assert bind(("x", torch.empty(3, 3), "aa")) == {"a": 3}
    with pytest.raises(ValueError, match=r"x: expected \[a=3, a=3\], got \(3, 4\)"):
        bind(("x", torch.empty(3, 4), "aa"))


Q, WIDE = torch.randn(2, 5, 4, 8), torch.tensor([0, 5])


@pytest.mark.parametrize(
    "call",
    [
        lambda: varlen_attention(Q[0], Q[0], Q[0], cu_seqlens_q=WIDE, cu_seqlens_k=WIDE, mask=CAUSAL),
        lambda: attention(Q, Q, Q, key_starts=WIDE, mask=CAUSAL),
        lambda: GroupedQueryAttention(32, 4, mask=CAUSAL)(Q[0].flatten(1), cu_seqlens=WIDE),
    ],
)
def test_wide_integers_are_to_be_cast(call):
    with pytest.raises(TypeError, match=r"got torch.int64.*; cast it with .int\(\)$"):
        call()
