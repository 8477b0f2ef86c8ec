"""Moments of a layer's inputs, in which tokens that get more attention have more weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...rope.rope import Rope
from ..calibration import Calibration
from ..weights import Heads
from .embedding import temperature

# Fraction of a token's weight that depends on the attention it gets; the rest is equal for all tokens. KL
# divergence in nats on held-out text, for a model with 135M weights and two latent widths (2026-11):
#
#   fraction                    191 channels  63 channels
#   0                                  0.206        0.960
#   0.25                               0.184        0.761
#   0.5                                0.187        0.755
#   0.25, attention unsquared          0.183        0.850
SHARE = 0.25
QUERIES = 512  # attention is computed for at most this many queries of the sample of up to 4,096 tokens


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """Inputs y of a layer, weighted by attention: the mean ``moment`` of ``y y^T``, and a sample of y.

    ``inputs`` ``[n, m]`` is the sample and ``weights`` ``[n]`` its weights; both are None without a sample.
    """

    moment: Tensor
    inputs: Tensor | None
    weights: Tensor | None

    @classmethod
    def white(cls, width: int, device: torch.device) -> "Attended":
        """Return the moment of uncorrelated inputs of variance 1, for conversions without a text."""
        return cls(torch.eye(width, dtype=torch.float64, device=device), None, None)

    def through(self, rows: Tensor) -> "Attended":
        """Apply a linear map to the inputs: return the moment and sample of ``rows @ y``."""
        inputs = None if self.inputs is None else self.inputs @ rows.T
        return Attended(rows @ self.moment @ rows.T, inputs, self.weights)

    def costs(self, metric: Tensor, rows: Tensor) -> Tensor:
        """Return the mean cost of errors in heads, summed over the heads.

        Head i has the error ``e = rows[i] @ y`` and the cost ``e^T metric[i] e``.
        """
        return torch.einsum("gij,gji->", metric, rows @ self.moment @ rows.mT)


def attended(heads: Heads, calibration: Calibration, *, scale: float) -> Attended:
    """Weight calibration inputs by the attention they get, or all equally if no sample was retained."""
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
    """Return the fraction of attention that each of the inputs ``[n, m + 1]`` gets: ``[n]``, with sum 1.

    Attention is squared and summed over queries and heads, because an error in a token's value reaches the
    output multiplied by the attention weight. Queries attend to all inputs, without mask or rope: the sample
    is not a contiguous sequence, and tokens that attract attention from all positions, such as first tokens,
    attract it by their content.
    """
    q = heads.q * scale
    q[:, : heads.rotated] *= temperature(heads)
    queries = y[:: -(-len(y) // QUERIES)]
    weights = torch.zeros_like(y[:, 0])
    for index, rows in enumerate(q):
        keys = y @ heads.k[index // heads.group].T
        weights += ((queries @ rows.T) @ keys.T).softmax(-1).square().sum(0)
    return weights / weights.sum()
