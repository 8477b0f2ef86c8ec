"""A latent of lower rank: what is kept of it is what is made of its inputs, and read."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..heads.factors import FLOOR
from .attended import Attended
from .cost import Cost
from .embedding import Latent


def truncate(latent: Latent, rank: int, seen: Attended, cost: Cost) -> Latent:
    """The layer of latent rank ``rank`` with the least cost of its errors of K and V, relative to missing all
    of each.

    K and V are those that are made from the latent; rotary keys are not touched. With C the moment of the
    inputs, ``W`` the root of the cost times what makes K and V from them, and ``U`` the first singular
    vectors of ``W C^(1/2)``, the best is ``U U^T W``: CARE (Zhou et al., 2026, arXiv 2603.17946) writes it
    ``U S V^T C^(-1/2)``, which needs an inverse. With ``Cost.plain`` and no text it is the plain SVD of the
    weights.

    Raises:
        ValueError: ``rank`` is not between 1 and the latent's.
    """
    if not 1 <= rank <= len(latent.down):
        raise ValueError(f"rank: expected 1 to {len(latent.down)}, the rank of the whole latent, got {rank}")
    return Spectrum.of(latent, seen, cost).cut(latent, rank)


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """One decomposition, from which a latent is cut to any rank.

    ``root`` ``[r, r]`` is that of :func:`_weighed`, ``basis`` ``[r, r]`` the directions that are kept, the
    first ones longest, and ``lost`` ``[r + 1]`` what is lost at each rank from 0 to the latent's.
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
        """The latent that this is of, with the best ``rank`` directions alone."""
        basis = self.basis[:, :rank]
        up = torch.linalg.solve_triangular(self.root, basis, upper=True)
        return replace(
            latent, down=basis.T @ self.root @ latent.down, k_up=latent.k_up @ up, v_up=latent.v_up @ up
        )


def _weighed(latent: Latent, seen: Attended, cost: Cost) -> tuple[Tensor, Tensor]:
    """The root R for which ``|R z|^2`` is what it costs to miss K and V of a latent z, and the moments of R
    z.
    """
    group = len(latent.k_up) // len(cost.keys)
    inner = latent.down @ seen.moment @ latent.down.T
    metric = _relative(latent.k_up[::group], cost.keys, cost.all_keys, inner)
    metric += _relative(latent.v_up[::group], cost.values, cost.all_values, inner)
    root = torch.linalg.cholesky(metric, upper=True)
    return root, root @ inner @ root.T


def _relative(up: Tensor, metric: Tensor, whole: Tensor, inner: Tensor) -> Tensor:
    """What an error of the latent costs through ``up`` ``[g, n, r]``, relative to ``whole``: ``[r, r]``.

    With a little for what nothing reads, so that it keeps an order of its own.
    """
    plain = torch.einsum("gir,gik->rk", up, up)
    size = (plain * inner).sum()
    weighed = torch.einsum("gir,gij,gjk->rk", up, metric, up)
    return weighed / (whole if whole > 0 else 1.0) + FLOOR * plain / (size if size > 0 else 1.0)
