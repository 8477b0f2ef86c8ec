"""A latent of lower rank: what is kept of it is what its inputs use."""

from dataclasses import replace

import torch
from torch import Tensor

from ..calibration import Calibration
from ..weights import Heads
from .embedding import Latent


def truncate(latent: Latent, rank: int, calibration: Calibration, *, balance: float = 1.0) -> Latent:
    """The layer of latent rank ``rank`` with the least ``balance * E |K - K'|^2 + E |V - V'|^2`` over a calibration.

    K and V are those of all heads that are made from the latent; rotary keys are not touched. With C the moment of the
    inputs, ``W`` what makes K and V from them, scaled by the balance, and ``U`` the first singular vectors of
    ``W C^(1/2)``, the best is ``U U^T W``: CARE (Zhou et al., 2026, arXiv 2603.17946) writes it
    ``U S V^T C^(-1/2)``, which needs an inverse. With ``Calibration.white`` it is the plain SVD of the weights.

    Raises:
        ValueError: ``rank`` is not between 1 and the latent's.
    """
    if not 1 <= rank <= len(latent.down):
        raise ValueError(f"rank: expected 1 to {len(latent.down)}, the rank of the whole latent, got {rank}")
    root, rows = _weighed(latent, balance)
    basis = torch.linalg.eigh(rows @ calibration.moment @ rows.T).eigenvectors[:, -rank:].flip(-1)
    up = torch.linalg.solve_triangular(root, basis, upper=True)
    return replace(latent, down=basis.T @ rows, k_up=latent.k_up @ up, v_up=latent.v_up @ up)


def lost_by_rank(latent: Latent, calibration: Calibration, *, balance: float = 1.0) -> Tensor:
    """The sum that :func:`truncate` makes least, at each rank from 0 to the latent's: ``[r + 1]``."""
    _, rows = _weighed(latent, balance)
    kept = torch.linalg.eigvalsh(rows @ calibration.moment @ rows.T).clamp(min=0)
    return torch.nn.functional.pad(kept.cumsum(0), (1, 0)).flip(0)


def _weighed(latent: Latent, balance: float) -> tuple[Tensor, Tensor]:
    """A root, and rows ``root @ down`` whose products with inputs are as long as K and V together."""
    metric = balance * torch.einsum("hnr,hnk->rk", latent.k_up, latent.k_up)
    metric += torch.einsum("her,hek->rk", latent.v_up, latent.v_up)
    root = torch.linalg.cholesky(metric, upper=True)
    return root, root @ latent.down


def balance(heads: Heads, calibration: Calibration) -> float:
    """The weight of keys in :func:`truncate` that counts relative errors: ``E |V|^2 / E |K|^2`` over all heads.

    Keys are often tens of times larger than values, and without a balance take all of the rank (TransMLA, arXiv
    2502.07864).
    """
    keys, values = (calibration.energy(rows).sum().item() for rows in (heads.k, heads.v))
    return values / keys if keys and values else 1.0


def errors(exact: Latent, other: Latent, calibration: Calibration) -> tuple[float, float]:
    """What ``other`` of the same channels loses of K that is not rotated, and of V: ``E |K - K'|^2 / E |K|^2``."""

    def lost(up, other_up) -> float:
        whole = up @ exact.down
        size = calibration.energy(whole).sum()
        return (calibration.energy(whole - other_up @ other.down).sum() / size).item() if size else 0.0

    return lost(exact.k_up, other.k_up), lost(exact.v_up, other.v_up)
