"""Inputs as keys and values are made of them: a token counts by the attention that it gets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...rope.rope import Rope
from ..calibration import Calibration
from ..weights import Heads
from .embedding import temperature

# Of a token's weight that is attention; the rest is the same for all. Held-out KL of a model of 135M weights,
# with latents of 191 and of 63 channels: 0.206 and 0.960 nats for 0; 0.184 and 0.761 for a quarter, 0.187 and
# 0.755 for a half; and for a quarter of attention that is not squared 0.183 and 0.850 (2026-11).
SHARE = 0.25
QUERIES = 512  # that attend to the sample, of up to 4,096


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """The weighed mean ``moment`` of ``y y^T``, and some of the y ``[n, m]`` with their ``weights`` ``[n]``.

    ``inputs`` is None where no y is known.
    """

    moment: Tensor
    inputs: Tensor | None
    weights: Tensor | None

    @classmethod
    def white(cls, width: int, device: torch.device) -> "Attended":
        """No text: uncorrelated y of variance 1."""
        return cls(torch.eye(width, dtype=torch.float64, device=device), None, None)

    def through(self, rows: Tensor) -> "Attended":
        """The same of ``rows @ y``."""
        inputs = None if self.inputs is None else self.inputs @ rows.T
        return Attended(rows @ self.moment @ rows.T, inputs, self.weights)

    def costs(self, metric: Tensor, rows: Tensor) -> Tensor:
        """The mean of ``e^T M e`` over errors ``e = rows_i y`` and their metrics M, summed over heads i: a
        number.
        """
        return torch.einsum("gij,gji->", metric, rows @ self.moment @ rows.mT)


def attended(heads: Heads, calibration: Calibration, *, scale: float) -> Attended:
    """The inputs of a calibration, weighed by attention as its sample shows it; without a sample all
    alike.
    """
    y = calibration.inputs()
    if y is None:
        return Attended(calibration.moment, None, None)
    got = attention(heads, y, scale=scale)
    moment = (1 - SHARE) * calibration.moment + SHARE * (y.T * got) @ y
    return Attended(moment, y, (1 - SHARE) / len(y) + SHARE * got)


def usual_scale(rope: Rope | None, head_dim: int) -> float:
    """The softmax scale of most models, which has a rope's temperature where all channels of a head turn."""
    return head_dim**-0.5 * (rope.amplitude**2 if rope is not None and rope.dim == head_dim else 1.0)


def attention(heads: Heads, y: Tensor, *, scale: float) -> Tensor:
    """How much ``[n, m + 1]`` inputs are attended to, the sum of squares over queries and heads: ``[n]``, 1
    in all.

    Squares, as the errors of a token's values reach an output times its attention. Any input attends to all,
    without a distance: they are not the whole of a text, and what draws attention from everywhere, as first
    tokens do, draws it by what it is.
    """
    q = heads.q * scale
    q[:, : heads.rotated] *= temperature(heads)
    some = y[:: -(-len(y) // QUERIES)]
    got = torch.zeros_like(y[:, 0])
    for index, rows in enumerate(q):
        keys = y @ heads.k[index // heads.group].T
        got += ((some @ rows.T) @ keys.T).softmax(-1).square().sum(0)
    return got / got.sum()
