"""Errors of a DeepSeek-V3 layer's keys and values as scores and outputs see them, latent norm included."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .attended import Attended
from .cost import Cost, relative
from .embedding import Latent
from .norm import Constant

BASELINE = "svd_"  # prefix for the errors of a baseline, not of the layer
MEASURED = ("key_error", "value_error", "norm_error")


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """The loss of latents that approximate the ``whole`` latent, weighted by ``cost``.

    The coordinates are those of the whole latent, so ``whole.down`` is the identity. ``seen`` holds whole
    latents, and ``ones`` ``[n]`` the constant channel beside each of its samples. The up projections are
    those of one query head of each group, since the others read the same.
    """

    whole: Latent
    cost: Cost
    seen: Attended
    constant: Constant
    ones: Tensor | None

    @classmethod
    def of_inputs(cls, whole: Latent, cost: Cost, seen: Attended, constant: Constant) -> "Losses":
        """Return the losses in the coordinates of ``whole``, where moments are much smaller matrices."""
        group = len(whole.k_up) // len(cost.keys)
        eye = torch.eye(len(whole.down), dtype=whole.down.dtype, device=whole.down.device)
        inner = replace(whole, down=eye, k_up=whole.k_up[::group], v_up=whole.v_up[::group])
        ones = None if seen.inputs is None else seen.inputs @ constant.row
        return cls(inner, cost, seen.through(whole.down), constant, ones)

    def beside(self, cut: Latent) -> Constant:
        """Return the constant with the best size beside these latents."""
        if self.ones is None or self.constant.is_bias:
            return self.constant
        return self.constant.steadied(self.seen.inputs @ cut.down.T, self.ones, self.seen.weights)

    def of(self, cut: Latent, constant: Constant) -> dict[str, float]:
        """Return ``key_error``, ``value_error`` and ``norm_error``.

        All are NaN if the constant is not a bias and no inputs are known.
        """
        if constant.is_bias:
            # Latents pass the norm unchanged, so second moments suffice.
            return _named(*self.cost.shares(self.whole, cut, self.seen), 0.0)
        if self.ones is None:
            return dict.fromkeys(MEASURED, math.nan)
        latents = self.seen.inputs @ cut.down.T
        return self._by_inputs(cut, latents, constant.factors(latents, self.ones))

    def _by_inputs(self, cut: Latent, latents: Tensor, factors: Tensor) -> dict[str, float]:
        """Return the errors for a norm that multiplies each latent by its own factor."""
        passed, weights, shares = latents * factors[:, None], self.seen.weights, []
        for metric, size, up, cut_up in self.cost.parts(self.whole, cut):
            missed = torch.einsum("tr,gir->tgi", self.seen.inputs, up) - torch.einsum(
                "tr,gir->tgi", passed, cut_up
            )
            shares.append(relative(torch.einsum("tgi,gij,tgj->t", missed, metric, missed) @ weights, size))
        sizes = weights * latents.square().sum(-1)
        return _named(*shares, float(sizes @ (factors - 1).square() / sizes.sum()))


def _named(*shares: float) -> dict[str, float]:
    """Return the roots of these relative mean squares, under the names in MEASURED."""
    return {name: max(share, 0.0) ** 0.5 for name, share in zip(MEASURED, shares, strict=True)}
