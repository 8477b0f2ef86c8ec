"""Moments of the inputs that keys and values are made from, with each token weighted by its attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...rope.rope import Rope
from ..calibration import Calibration
from ..weights import Heads
from .embedding import temperature

# Fraction of a token's weight that depends on its attention; the rest is the same for all tokens. Held-out KL
# in nats of a model of 135M weights (2026-11), by latent channels:
#
#   fraction                    191 channels  63 channels
#   0                                  0.206        0.960
#   0.25                               0.184        0.761
#   0.5                                0.187        0.755
#   0.25, attention unsquared          0.183        0.850
SHARE = 0.25
QUERIES = 512  # maximum queries taken from the sample, which has up to 4,096 tokens


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """The weighted mean ``moment`` of ``y y^T``, and a sample of y ``[n, m]`` with its ``weights`` ``[n]``.

    ``inputs`` and ``weights`` are None if there is no sample.
    """

    moment: Tensor
    inputs: Tensor | None
    weights: Tensor | None

    @classmethod
    def white(cls, width: int, device: torch.device) -> "Attended":
        """Return the moment of uncorrelated y of variance 1, for conversions without a text."""
        return cls(torch.eye(width, dtype=torch.float64, device=device), None, None)

    def through(self, rows: Tensor) -> "Attended":
        """Return the moment and sample of ``rows @ y``."""
        inputs = None if self.inputs is None else self.inputs @ rows.T
        return Attended(rows @ self.moment @ rows.T, inputs, self.weights)

    def costs(self, metric: Tensor, rows: Tensor) -> Tensor:
        """Return the mean of ``e^T M e`` over errors ``e = rows_i y`` with metric M, summed over heads i."""
        return torch.einsum("gij,gji->", metric, rows @ self.moment @ rows.mT)


def attended(heads: Heads, calibration: Calibration, *, scale: float) -> Attended:
    """Weight the inputs of a calibration by the attention they get; without a sample, weight all equally."""
    y = calibration.inputs()
    if y is None:
        return Attended(calibration.moment, None, None)
    weights = attention(heads, y, scale=scale)
    moment = (1 - SHARE) * calibration.moment + SHARE * (y.T * weights) @ y
    return Attended(moment, y, (1 - SHARE) / len(y) + SHARE * weights)


def usual_scale(rope: Rope | None, head_dim: int) -> float:
    """Return the softmax scale of most models, with the rope temperature if rope rotates whole heads."""
    return head_dim**-0.5 * (rope.amplitude**2 if rope is not None and rope.dim == head_dim else 1.0)


def attention(heads: Heads, y: Tensor, *, scale: float) -> Tensor:
    """Return the share of attention that each of the inputs ``[n, m + 1]`` gets: ``[n]``, with sum 1.

    Attention is squared and summed over queries and heads, because the error of a token's values reaches the
    output multiplied by its attention. Queries attend to all inputs, without mask or rope: the sample is not
    a contiguous sequence, and tokens that attract attention from everywhere, such as first tokens, do so by
    their content.
    """
    q = heads.q * scale
    q[:, : heads.rotated] *= temperature(heads)
    queries = y[:: -(-len(y) // QUERIES)]
    weights = torch.zeros_like(y[:, 0])
    for index, rows in enumerate(q):
        keys = y @ heads.k[index // heads.group].T
        weights += ((queries @ rows.T) @ keys.T).softmax(-1).square().sum(0)
    return weights / weights.sum()
