"""fp8 calls, and how far their results may be from attention over the numbers that e4m3 and descales stand
for.
"""

from typing import NamedTuple

import torch
from helpers import Problem, eager
from torch import Tensor

from attnlib import Fp8Inputs, quantize_fp8

E4M3 = torch.float8_e4m3fn
HALF_OF_BF16 = 2.0**-8  # the largest relative error of rounding


class Rounding(NamedTuple):
    """What a probability may lose, relative to itself, and to the largest of its row where it is subnormal.

    And what a score may lose, relative to the largest: Hopper adds products of e4m3 up in about 13 bits.
    """

    relative: float
    absolute: float
    of_scores: float = 2.0**-21


NONE, TO_FP16, TO_E4M3 = Rounding(0, 0), Rounding(2.0**-11, 2.0**-25), Rounding(2.0**-4, 2.0**-14, 2.0**-11)


def quantized(problem: Problem, **options) -> Fp8Inputs:
    """The tensors of a problem in e4m3."""
    return quantize_fp8(*problem.tensors, **options)


def dequantized(x: Fp8Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Dense q, k and v in fp64."""
    scaled = ((x.q, x.q_descale), (x.k, x.k_descale), (x.v, x.v_descale))
    return tuple(value.double() * scale.double()[:, None, :, None] for value, scale in scaled)


def assert_fp8(
    problem: Problem,
    x: Fp8Inputs,
    results: tuple[Tensor, Tensor],
    *,
    of_p: Rounding,
    of_out: float = HALF_OF_BF16,
) -> None:
    """Each element is within what rounding P and the output can do, if those are at most these."""
    out, lse = results
    q, k, v = dequantized(x)
    options = problem.to(torch.float64).options
    golden, golden_lse = eager(q, k, v, mask=problem.mask, **options)
    sums, _ = eager(q, k, v.abs(), mask=problem.mask, **options)
    noise = 2.0**-14 + of_p.of_scores * problem.change(q=q, k=k, v=v).largest_score()
    lost = (
        of_p.absolute * v.abs().sum(1, keepdim=True).amax(2, keepdim=True) / (1 - options.get("dropout_p", 0))
    )
    allowed = 1.01 * of_out * golden.abs() + (of_p.relative + noise) * sums + lost + 1e-30
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert out.shape == golden.shape
    over = (out.double() - golden).abs() - allowed
    assert not out.isnan().any()
    assert (over <= 0).all(), (
        f"{problem}: {over.max():.3g} beyond what rounding explains, of {golden.abs().max():.3g}"
    )
    assert (lse.isneginf() == golden_lse.isneginf()).all()
    finite = golden_lse.isfinite()
    torch.testing.assert_close(lse.double()[finite], golden_lse[finite], rtol=1e-5, atol=2 * noise)
