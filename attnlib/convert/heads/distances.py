"""Second moments of keys, rotated by rope and averaged over the distances between queries and keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..weights import Heads


@dataclass(frozen=True, slots=True, eq=False)
class Distances:
    """Weighted means of key moments over query-key distances up to a maximum.

    Distance n has the weight ``1 / (n + 1)``, so each doubling of the distance counts equally. In the unitary
    ``basis`` ``[d, d]``, rope at distance n multiplies channel ``a`` by ``exp(i w_a n)``. ``alike``
    ``[d, d]`` holds the weighted mean of ``exp(i (w_a - w_b) n)`` for each pair of channels a and b; it is
    near 1 if they rotate together.
    """

    basis: Tensor
    alike: Tensor

    @classmethod
    def of(cls, heads: Heads, reach: int) -> "Distances":
        d, device = heads.k.shape[1], heads.k.device
        channels = torch.eye(d, dtype=torch.float64, device=device)
        pairs, free = heads.pairs(channels) / 2**0.5, channels[heads.rotated :].to(torch.complex128)
        speeds = torch.zeros(d, dtype=torch.float64, device=device)
        if heads.rope is not None:
            length = reach if heads.rope.needs_length else None
            frequencies = heads.rope.inverse_frequencies(length=length, device=device).double()
            speeds[: heads.rotated] = torch.cat((-frequencies, frequencies))
        distances = torch.arange(reach, dtype=torch.float64, device=device)
        weights = 1 / (distances + 1)
        phases = torch.polar((weights / weights.sum()).sqrt().expand(d, -1), speeds[:, None] * distances)
        return cls(torch.cat((pairs, pairs.conj(), free)), phases @ phases.mH)

    def rotated(self, products: Tensor) -> Tensor:
        """Return the mean of ``R P R^T`` over rope's rotations R, for real P ``[..., d, d]``."""
        return self._mean(products, self.alike)

    def rotated_back(self, products: Tensor) -> Tensor:
        """Return the mean of ``R^T P R`` over rope's rotations R, for real P ``[..., d, d]``."""
        return self._mean(products, self.alike.conj())

    def _mean(self, products: Tensor, alike: Tensor) -> Tensor:
        inside = self.basis @ products.to(self.basis.dtype) @ self.basis.mH
        return (self.basis.mH @ (inside * alike) @ self.basis).real
