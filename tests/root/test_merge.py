"""merge_states: the algebra of partial attention."""

from itertools import pairwise

import pytest
import torch
from helpers import assert_same_bits, eager, make, problems
from hypothesis import given
from hypothesis import strategies as st

from attnlib import FULL, Mask, attention_with_lse, merge_states

seeds = st.integers(0, 2**16)


def states(seed, n, dtype=torch.float64, packed=False, empty=0.3):
    """``n`` partial states, some rows of which saw no key."""
    torch.manual_seed(seed)
    shape = (7, 3, 5) if packed else (2, 7, 3, 5)
    for _ in range(n):
        out, lse = torch.randn(shape, dtype=dtype), 3 * torch.randn(shape[:-1]).transpose(-1, -2)
        nothing = torch.rand(lse.shape) < empty
        lse = lse.masked_fill(nothing, -torch.inf).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        )
        yield out.masked_fill(nothing.transpose(-1, -2)[..., None], 0), lse


def both_close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)


@given(seeds, st.booleans())
def test_commutative_and_associative(seed, packed):
    a, b, c = states(seed, 3, packed=packed)
    assert_same_bits(*zip(merge_states(*a, *b), merge_states(*b, *a), strict=True))
    both_close(merge_states(*merge_states(*a, *b), *c), merge_states(*a, *merge_states(*b, *c)))


@given(seeds, st.booleans(), st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64)))
def test_nothing_is_the_identity_to_the_bit(seed, packed, dtype):
    (a,) = states(seed, 1, dtype, packed)
    nothing = torch.zeros_like(a[0]), torch.full_like(a[1], -torch.inf)
    assert_same_bits(*zip(merge_states(*a, *nothing), a, strict=True))
    assert_same_bits(*zip(merge_states(*nothing, *a), a, strict=True))
    assert_same_bits(*zip(merge_states(*nothing, *nothing), nothing, strict=True))


@given(
    problems(lengths=(1, 2, 7, 17, 63), options=("scale", "softcap")),
    st.lists(st.integers(0, 63), max_size=4),
)
def test_any_partition_of_the_keys_gives_the_whole(problem, cuts):
    problem = problem.to(torch.float64)
    t = problem.k.shape[1]
    edges = [0, *sorted(min(cut, t) for cut in cuts), t]
    merged = (
        torch.zeros_like(eager(*problem.tensors, mask=FULL)[0]),
        torch.full(problem.lse_shape, -torch.inf).double(),
    )
    for a, b in pairwise(edges):
        # Cutting keys off the end moves the queries, and off the start their numbers: the band moves against
        # both.
        band = problem.mask.shift(t - b)
        mask = Mask(band.left, band.right, max(0, problem.mask.prefix - a))
        part = problem.change(k=problem.k[:, a:b], v=problem.v[:, a:b], mask=mask)
        merged = merge_states(*merged, *part.solve())
    both_close(merged, problem.solve())


def test_sinks_belong_to_one_part():
    problem = make(2, 5, 12, 4, 2, 8, mask=FULL, options=("sinks",)).to(torch.float64)
    first = problem.change(k=problem.k[:, :7], v=problem.v[:, :7]).solve()
    second = problem.change(k=problem.k[:, 7:], v=problem.v[:, 7:], options={}).solve()
    both_close(merge_states(*first, *second), problem.solve())


def test_gradients():
    (a, lse_a), (b, lse_b) = states(0, 2, empty=0)
    leaves = [x.requires_grad_() for x in (a, lse_a, b, lse_b)]
    assert torch.autograd.gradcheck(merge_states, leaves)


def test_gradients_beside_nothing_are_finite():
    (a, lse_a), (b, lse_b) = states(1, 2, empty=0.5)
    leaves = [x.requires_grad_() for x in (a, lse_a, b, lse_b)]
    out, lse = merge_states(*leaves)
    grads = torch.autograd.grad(out.sum() + lse[lse > -torch.inf].sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    alone = (lse_b == -torch.inf) & (lse_a > -torch.inf)
    assert (grads[1][alone] == 1).all()  # lse is lse_a there, and out does not depend on it
    assert (grads[0].transpose(1, 2)[alone] == 1).all()


def test_gradients_flow_through_a_split_call():
    problem = make(2, 5, 12, 4, 2, 8, mask=FULL).to(torch.float64)
    q, k, v = (x.requires_grad_() for x in problem.tensors)
    parts = [attention_with_lse(q, k[:, a:b], v[:, a:b], mask=FULL) for a, b in ((0, 5), (5, 12))]
    out, whole = merge_states(*parts[0], *parts[1])[0], problem.solve()[0]
    weights = torch.randn_like(out)
    both_close(*(torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (out, whole)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_rounded_once(dtype):
    (a, lse_a), (b, lse_b) = states(0, 2, dtype)
    out, lse = merge_states(a, lse_a, b, lse_b)
    wide_out, wide_lse = merge_states(a.float(), lse_a, b.float(), lse_b)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert_same_bits((out, wide_out.to(dtype)), (lse, wide_lse))


def test_magnitudes():
    out = torch.ones(1, 1, 1, 1)
    for low, high in ((-5e4, -4e4), (-3e38, 3e38), (3e38, 3e38)):
        merged, lse = merge_states(out, torch.full((1, 1, 1), low), 3 * out, torch.full((1, 1, 1), high))
        assert lse.item() == torch.tensor(max(low, high)).item()
        assert merged.item() == (2 if low == high else 3)
    merged, lse = merge_states(out, torch.full((1, 1, 1), torch.inf), out, torch.zeros(1, 1, 1))
    assert lse.isnan()  # documented
    assert merged.isnan()
