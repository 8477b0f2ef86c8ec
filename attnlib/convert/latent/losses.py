"""What a layer of DeepSeek's form loses of what is read of keys and values, the norm of its latents
included.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .attended import Attended
from .cost import Cost, relative
from .embedding import Latent
from .norm import Constant

BASELINE = "svd_"  # begins the names of errors that are not the layer's own
MEASURED = ("key_error", "value_error", "norm_error")


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """Measures latents made from the ``whole`` one, which is the identity here, by what its errors cost.

    ``seen`` are whole latents, and ``ones`` ``[n]`` the constant channel beside each that is known. Ups are
    those of one query head of each group, as others of it read the same.
    """

    whole: Latent
    cost: Cost
    seen: Attended
    constant: Constant
    ones: Tensor | None

    @classmethod
    def of_inputs(cls, whole: Latent, cost: Cost, seen: Attended, constant: Constant) -> "Losses":
        """In the latent's own coordinates, whose moments are much smaller than those of the inputs."""
        group = len(whole.k_up) // len(cost.keys)
        eye = torch.eye(len(whole.down), dtype=whole.down.dtype, device=whole.down.device)
        inner = replace(whole, down=eye, k_up=whole.k_up[::group], v_up=whole.v_up[::group])
        ones = None if seen.inputs is None else seen.inputs @ constant.row
        return cls(inner, cost, seen.through(whole.down), constant, ones)

    def beside(self, cut: Latent) -> Constant:
        """The constant of the size that is best beside these latents."""
        if self.ones is None or self.constant.is_bias:
            return self.constant
        return self.constant.steadied(self.seen.inputs @ cut.down.T, self.ones, self.seen.weights)

    def of(self, cut: Latent, constant: Constant) -> dict[str, float]:
        """``key_error``, ``value_error`` and ``norm_error``; NaN where they hang on inputs of which none is
        known.
        """
        if constant.is_bias:
            return self._by_moments(cut)
        if self.ones is None:
            return dict.fromkeys(MEASURED, math.nan)
        latents = self.seen.inputs @ cut.down.T
        return self._by_inputs(cut, latents, constant.factors(latents, self.ones))

    def _by_moments(self, cut: Latent) -> dict[str, float]:
        """Where latents pass the norm as they are, so that moments tell all."""
        return _named(*self.cost.shares(self.whole, cut, self.seen), 0.0)

    def _by_inputs(self, cut: Latent, latents: Tensor, factors: Tensor) -> dict[str, float]:
        """Where the norm multiplies each latent by a factor of its own."""
        passed, weights, shares = latents * factors[:, None], self.seen.weights, []
        for metric, size, up, cut_up in self.cost.parts(self.whole, cut):
            missed = torch.einsum("tr,gir->tgi", self.seen.inputs, up) - torch.einsum(
                "tr,gir->tgi", passed, cut_up
            )
            shares.append(relative(torch.einsum("tgi,gij,tgj->t", missed, metric, missed) @ weights, size))
        sizes = weights * latents.square().sum(-1)
        return _named(*shares, float(sizes @ (factors - 1).square() / sizes.sum()))


def _named(*shares: float) -> dict[str, float]:
    """Root mean squares of these shares, by the names of MEASURED."""
    return {name: max(share, 0.0) ** 0.5 for name, share in zip(MEASURED, shares, strict=True)}
