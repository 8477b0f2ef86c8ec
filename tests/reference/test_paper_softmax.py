"""Softmax in three passes, two and one: equal to torch's, whatever the chunks; counted; and never a NaN of
its own.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paper_problems import EXACT

from attnlib.reference import formulas
from attnlib.reference.softmax import advance, correction, one_pass, three_pass, two_pass
from attnlib.reference.traffic import SlowMemory

close = torch.testing.assert_close


@st.composite
def logits(draw) -> torch.Tensor:
    """``[s, t]`` with -inf here and there, in whole rows too; as large as exp() alone could not bear."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    s, t = draw(st.integers(0, 6)), draw(st.integers(0, 12))
    x = torch.randn(s, t, dtype=torch.float64) * draw(st.sampled_from((1.0, 1000.0)))
    return x.masked_fill(torch.rand(s, t) < draw(st.sampled_from((0.0, 0.5, 1.0))), -torch.inf)


def golden(x):
    """Softmax and LSE with the whole row in hand."""
    nothing = (x == -torch.inf).all(1, keepdim=True)
    lse = torch.logsumexp(x, 1) if x.shape[1] else x.new_full((len(x),), -torch.inf)
    return torch.softmax(x.masked_fill(nothing, 0), 1).masked_fill(nothing, 0), lse


@pytest.mark.parametrize("passes", [three_pass, two_pass])
@given(x=logits(), columns=st.integers(1, 14))
def test_softmax_is_softmax(passes, x, columns):
    memory = SlowMemory()
    for ours, theirs in zip(passes(x, columns=columns, memory=memory), golden(x), strict=True):
        close(ours, theirs, **EXACT)
    assert memory.traffic == getattr(formulas, passes.__name__)(*x.shape)


@given(logits(), st.integers(1, 14), st.integers(0, 3))
def test_one_pass_is_softmax_times_values(x, columns, e):
    memory, v = SlowMemory(), torch.randn(x.shape[1], e, dtype=torch.float64)
    out, lse = one_pass(x, v, columns=columns, memory=memory)
    softmax, golden_lse = golden(x)
    close(out, softmax @ v, **EXACT)
    close(lse, golden_lse, **EXACT)
    assert memory.traffic == formulas.one_pass(*x.shape, e)


@given(logits().filter(lambda x: x.shape[1] > 0))
def test_a_maximum_that_stays_corrects_nothing(x):
    """The correction is 1, to the bit, where the maximum stays, -inf included; below 1, and no NaN, where it
    moves.
    """
    c, pi, _, _ = advance(x.new_full((len(x),), -torch.inf), x.new_zeros(len(x)), x)
    for later in (x, x - 1, x + 1, x.flip(0)):
        new, _, alpha, _ = advance(c, pi, later)
        assert (alpha[new == c] == 1).all()
        assert ((alpha[new > c] >= 0) & (alpha[new > c] < 1)).all()
        assert not alpha.isnan().any()


def test_correction_cases():
    old, new = torch.tensor([[-torch.inf, -torch.inf, 2.0, 2.0], [-torch.inf, 5.0, 2.0, 3.0]])
    assert correction(old, new).tolist() == [1.0, 0.0, 1.0, torch.tensor(-1.0).exp().item()]
