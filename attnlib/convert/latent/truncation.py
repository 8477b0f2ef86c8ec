"""Truncation of a latent to a lower rank: keep the directions that matter most to scores and outputs."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..heads.factors import FLOOR
from .attended import Attended
from .cost import Cost
from .embedding import Latent


def truncate(latent: Latent, rank: int, seen: Attended, cost: Cost) -> Latent:
    """Return the latent of rank ``rank`` with the least costly errors of keys and values.

    The costs are relative to dropping all keys or all values. Rotary keys do not pass through the latent and
    do not change. Let C be the second moment of the inputs, W the square root of the cost metric times the
    map from inputs to K and V, and U the first ``rank`` left singular vectors of ``W C^(1/2)``. The best
    approximation is ``U U^T W``. CARE (Zhou et al., 2026, arXiv 2603.17946) writes it as ``U S V^T
    C^(-1/2)``, which needs an inverse. With ``Cost.plain`` and no text, it is a plain SVD of the weights.

    Raises:
        ValueError: ``rank`` is not between 1 and the latent's rank.
    """
    if not 1 <= rank <= len(latent.down):
        raise ValueError(f"rank: expected 1 to {len(latent.down)}, the rank of the whole latent, got {rank}")
    return Spectrum.of(latent, seen, cost).cut(latent, rank)


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """The principal directions of a latent, from which it can be truncated to any rank.

    ``root`` ``[r, r]`` is the square root of the latent's cost metric. ``basis`` ``[r, r]`` holds the
    directions, the most important first. ``lost`` ``[r + 1]`` holds the loss at each rank from 0 to r.
    """

    root: Tensor
    basis: Tensor
    lost: Tensor

    @classmethod
    def of(cls, latent: Latent, seen: Attended, cost: Cost) -> "Spectrum":
        root, moments = _weighed(latent, seen, cost)
        values, vectors = torch.linalg.eigh(moments)
        lost = torch.nn.functional.pad(values.clamp(min=0).cumsum(0), (1, 0)).flip(0)
        return cls(root, vectors.flip(-1), lost)

    def cut(self, latent: Latent, rank: int) -> Latent:
        """Keep only the ``rank`` most important directions of ``latent``, which :meth:`of` has decomposed."""
        basis = self.basis[:, :rank]
        up = torch.linalg.solve_triangular(self.root, basis, upper=True)
        return replace(
            latent, down=basis.T @ self.root @ latent.down, k_up=latent.k_up @ up, v_up=latent.v_up @ up
        )


def _weighed(latent: Latent, seen: Attended, cost: Cost) -> tuple[Tensor, Tensor]:
    """Return the square root R of the cost metric of latents z, and the second moments of ``R z``.

    ``|R z|^2`` is the cost of dropping the keys and values that are computed from z.
    """
    group = len(latent.k_up) // len(cost.keys)
    inner = latent.down @ seen.moment @ latent.down.T
    metric = _relative(latent.k_up[::group], cost.keys, cost.all_keys, inner)
    metric += _relative(latent.v_up[::group], cost.values, cost.all_values, inner)
    root = torch.linalg.cholesky(metric, upper=True)
    return root, root @ inner @ root.T


def _relative(up: Tensor, metric: Tensor, whole: Tensor, inner: Tensor) -> Tensor:
    """Return the metric ``[r, r]`` of latent errors that reach keys or values through ``up`` ``[g, n, r]``.

    The metric is divided by ``whole``, the cost of dropping all keys or values. A small unweighted term
    gives directions without any cost a defined order.
    """
    plain = torch.einsum("gir,gik->rk", up, up)
    size = (plain * inner).sum()
    weighed = torch.einsum("gir,gij,gjk->rk", up, metric, up)
    return weighed / (whole if whole > 0 else 1.0) + FLOOR * plain / (size if size > 0 else 1.0)
