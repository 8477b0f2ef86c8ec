"""Measure the errors that truncation and the latent norm cause in a DeepSeek-V3 layer's keys and values."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .attended import Attended
from .cost import Cost, relative
from .embedding import Latent
from .norm import Constant

BASELINE = "svd_"  # prefix of errors that a plain SVD of the weights would have, reported for comparison
MEASURED = ("key_error", "value_error", "norm_error")


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """Measures the errors of truncated latents compared with the untruncated latent ``whole``.

    ``cost`` weights errors of keys and values. The untruncated latent takes the place of the layer's inputs,
    so ``whole.down`` is the identity, and ``seen`` holds the moment and a sample of untruncated latents.
    ``ones`` ``[n]`` holds the value of the constant channel (norm.py) for each token of the sample. Query
    heads of a group have equal up projections, so only those of each group's first query head are stored.
    """

    whole: Latent
    cost: Cost
    seen: Attended
    constant: Constant
    ones: Tensor | None

    @classmethod
    def of_inputs(cls, whole: Latent, cost: Cost, seen: Attended, constant: Constant) -> "Losses":
        """Return the measure for inputs ``seen``, mapped to latents because their moments are smaller."""
        group = len(whole.k_up) // len(cost.keys)
        eye = torch.eye(len(whole.down), dtype=whole.down.dtype, device=whole.down.device)
        inner = replace(whole, down=eye, k_up=whole.k_up[::group], v_up=whole.v_up[::group])
        ones = None if seen.inputs is None else seen.inputs @ constant.row
        return cls(inner, cost, seen.through(whole.down), constant, ones)

    def beside(self, cut: Latent) -> Constant:
        """Return ``constant``, scaled so that the latent norm changes the truncated latent least."""
        if self.ones is None or self.constant.is_bias:
            return self.constant
        return self.constant.steadied(self.seen.inputs @ cut.down.T, self.ones, self.seen.weights)

    def of(self, cut: Latent, constant: Constant) -> dict[str, float]:
        """Return ``key_error``, ``value_error`` and ``norm_error`` of a truncated latent.

        All three are NaN if the constant channel is not a bias and there is no sample of inputs.
        """
        if constant.is_bias:
            # The norm does not change the latents, so their second moments suffice to compute the errors.
            return _named(*self.cost.shares(self.whole, cut, self.seen), 0.0)
        if self.ones is None:
            return dict.fromkeys(MEASURED, math.nan)
        latents = self.seen.inputs @ cut.down.T
        return self._by_inputs(cut, latents, constant.factors(latents, self.ones))

    def _by_inputs(self, cut: Latent, latents: Tensor, factors: Tensor) -> dict[str, float]:
        """Return the errors on the sample; the norm multiplies the latent of token t by ``factors[t]``."""
        passed, weights, shares = latents * factors[:, None], self.seen.weights, []
        for metric, size, up, cut_up in self.cost.parts(self.whole, cut):
            missed = torch.einsum("tr,gir->tgi", self.seen.inputs, up) - torch.einsum(
                "tr,gir->tgi", passed, cut_up
            )
            shares.append(relative(torch.einsum("tgi,gij,tgj->t", missed, metric, missed) @ weights, size))
        sizes = weights * latents.square().sum(-1)
        return _named(*shares, float(sizes @ (factors - 1).square() / sizes.sum()))


def _named(*shares: float) -> dict[str, float]:
    """Return the square roots of relative mean square errors, under the names in MEASURED."""
    return {name: max(share, 0.0) ** 0.5 for name, share in zip(MEASURED, shares, strict=True)}
