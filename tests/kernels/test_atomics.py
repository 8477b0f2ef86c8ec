"""The backward in one pass, held against eager torch and against the two passes."""

import pytest
import torch
from helpers import assert_close, assert_same_bits, eager, make
from kernel_helpers import DEVICE, INTERPRETED

from attnlib import CAUSAL, FULL, sliding
from attnlib import attention as two_passes

pytest.importorskip("triton")

from tests.kernels import atomics
from tests.kernels.atomics import LARGE, SMALL, attention

DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


def gradients(problem, dout, call, **options):
    """The output and the gradients of q, k and v, from the kernels."""
    leaves = [x.detach().to(DEVICE).requires_grad_() for x in problem.tensors]
    out = call(*leaves, mask=problem.mask, **options)
    return [x.cpu() for x in (out.detach(), *torch.autograd.grad(out, leaves, dout.to(DEVICE)))]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
@pytest.mark.parametrize("tiles", [LARGE, SMALL], ids=("large", "small"))
@pytest.mark.parametrize("s", [17, 64, 97])
def test_gradients(s, tiles, mask, dtype):
    problem = make(2, s, s, 2, 2, 16, mask=mask, dtype=dtype)
    dout, _ = problem.directions()
    ours = gradients(problem, dout, attention, tiles=tiles)
    nothing = torch.zeros(problem.lse_shape)
    naive = [problem.to(dtype).with_gradients(eager, dout, nothing, order=order) for order in (0, 1)]
    golden = problem.to(torch.float64).with_gradients(eager, dout.double(), nothing.double(), order=2)
    noise = torch.finfo(dtype).eps + 2 * torch.finfo(torch.float32).eps * problem.largest_score()
    for name, x in zip(("out", "dq", "dk", "dv"), ours, strict=True):
        assert_close(name, x, [n[name] for n in naive], golden[name], 3, noise)


@pytest.mark.parametrize("d", [64, 128])
def test_two_passes_agree(d):
    """In fp32 both round only sums, in another order."""
    problem = make(1, 70, 70, 2, 2, d)
    dout, _ = problem.directions()
    once, twice = gradients(problem, dout, attention), gradients(problem, dout, two_passes, backend="triton")
    assert_same_bits((once[0], twice[0]))
    for a, b in zip(once[1:], twice[1:], strict=True):
        assert (a - b).norm() < 1e-6 * b.norm()


# numpy, in which the interpreter computes, tells of what the masks then hide.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_rows_beyond_the_end_add_nothing_where_scores_are_low(mask):
    """A score of 0, which a tile's missing keys would have, would weigh infinitely much."""
    problem = make(1, 70, 70, 1, 1, 16, mask=mask)
    problem = problem.change(q=problem.q / 10 - 6, k=problem.k / 10 + 6)
    dout, _ = problem.directions()
    once, twice = gradients(problem, dout, attention), gradients(problem, dout, two_passes, backend="triton")
    for a, b in zip(once, twice, strict=True):
        assert (a - b).norm() < 2e-3 * b.norm()  # what is left of dq after its terms cancel


def test_strides_are_free():
    """Heads before tokens in memory, and a gradient that autograd expanded."""
    problem = make(2, 19, 19, 2, 2, 16)
    moved = problem.change(
        **{n: getattr(problem, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    )
    dout = torch.randn(16).expand(2, 19, 2, 16)
    ours, expected = gradients(moved, dout, attention), gradients(problem, dout.clone(), attention)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    "problem",
    [
        make(1, 8, 8, 2, 2, 16, mask=sliding(3)),
        make(1, 8, 8, 4, 2, 16),
        make(1, 8, 9, 2, 2, 16),
        make(1, 8, 8, 2, 2, 16, 32),
        make(1, 8, 8, 2, 2, 48),
        make(1, 8, 8, 2, 2, 256),
        make(1, 8, 8, 2, 2, 16, dtype=torch.float64),
    ],
    ids=str,
)
def test_what_it_is_not_for_is_refused(problem):
    with pytest.raises(NotImplementedError, match="one pass"):
        attention(*problem.tensors, mask=problem.mask)


def test_what_is_timed_is_checked_and_takes_turns(monkeypatch):
    called = []

    def clock(call, **options):
        called.append(len(call()))
        return len(called)

    small = (1, 40, 2, 16), CAUSAL, torch.float32, DEVICE
    assert list(atomics.milliseconds(*small, clock).values()) == [4, 5, 6]  # the medians of 1, 4, 7 and so on
    assert called == [3] * 9
    ways = {"right": two_passes, "wrong": lambda q, k, v, mask: 2 * two_passes(q, k, v, mask=mask)}
    monkeypatch.setattr(atomics, "WAYS", ways)
    with pytest.raises(AssertionError):
        atomics.milliseconds(*small, clock)


def test_the_table_that_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(
        atomics, "milliseconds", lambda *case: dict(zip(atomics.WAYS, (4.2, 5.7, 10.9), strict=True))
    )
    atomics.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| ms | two passes | one pass, large tiles | one pass, small tiles |"
    assert lines[3] == "| d64 causal 8k | 4.2 | 5.7 (1.36x) | 10.9 (2.60x) |"
    assert len(lines) == 2 + len(atomics.CASES)
