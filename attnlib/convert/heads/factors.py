"""Factorisation of heads into shared heads and linear maps that restore the old heads with least error."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration import Calibration
from .parts import Part

# Small multiples of the identity are added to metrics and to moments. Without them, rounding errors would
# decide the order of directions whose weight is 0.
FLOOR = 1e-6  # relative to the mean eigenvalue of a metric, for directions that q or o does not read
RIDGE = 1e-8  # relative to the inputs' mean square, for directions missing from the calibration text


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """A shared head for each group, and the maps that restore the old heads from it.

    ``shared`` is ``[r, c, n, m + 1]`` for r groups, and ``maps`` is ``[g, c, n, n]`` for g old heads. Each
    group is a run of ``g / r`` neighbouring heads. Old head i in group j is about ``maps[i] @ shared[j]``.
    """

    shared: Tensor
    maps: Tensor

    def expanded(self, shared: Tensor) -> Tensor:
        """Apply the maps to shared heads, to restore the old heads ``[g, c, n, m + 1]``."""
        return self.maps @ shared.repeat_interleave(len(self.maps) // len(shared), 0)

    def absorbed(self, rows: Tensor) -> Tensor:
        """Fold the maps into rows ``[h, c, n, m]`` of q or o; the new rows read shared heads directly."""
        return self.maps.repeat_interleave(len(rows) // len(self.maps), 0).mH @ rows


def factorise(part: Part, groups: int, calibration: Calibration) -> Factors:
    """Find the shared head and the linear maps with the least error for each group of heads.

    The ``groups`` groups are runs of neighbouring heads. A shared head holds the first principal components
    of its group; the error is the sum of the remaining eigenvalues.
    """
    size = len(part.rows) // groups
    roots, inverses = roots_of(part.weights)
    # rows: [r, c, f * n, m + 1]
    rows = (roots @ part.rows).unflatten(0, (groups, size)).transpose(1, 2).flatten(2, 3)
    n = part.rows.shape[2]
    basis = torch.linalg.eigh(gram(rows, calibration)).eigenvectors[..., -n:]
    shared = basis.mH @ rows
    # maps: [r, f, c, n, n]
    maps = inverses.unflatten(0, (groups, size)) @ basis.unflatten(2, (size, n)).transpose(1, 2)
    basis_change = _balance(shared, maps, part.weights.unflatten(0, (groups, size)))
    basis_change = basis_change * _energy_scale(
        basis_change @ shared, part.rows.unflatten(0, (groups, size)), calibration
    )
    factors = Factors(basis_change @ shared, (maps @ torch.linalg.inv(basis_change)[:, None]).flatten(0, 1))
    return _exact_if_equal(factors, part)


def floored(metric: Tensor) -> Tensor:
    """Add FLOOR times the mean eigenvalue to a metric ``[..., n, n]``; a zero metric becomes the identity."""
    mean = metric.diagonal(dim1=-2, dim2=-1).real.mean(-1)[..., None, None]
    eye = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    return metric + torch.where(mean > 0, FLOOR * mean, 1.0) * eye


def roots_of(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Hermitian square root of a :func:`floored` metric, and the inverse of that root."""
    values, vectors = torch.linalg.eigh(floored(metric))
    root = values.sqrt()[..., None, :]
    return (vectors * root) @ vectors.mH, (vectors / root) @ vectors.mH


def gram(rows: Tensor, calibration: Calibration) -> Tensor:
    """Return the second moment of the outputs ``W y`` of ``rows`` W, plus a small multiple of ``W W^H``."""
    moment = calibration.moment.to(rows.dtype)
    ridge = RIDGE * moment.diagonal().real.mean()
    return (rows @ moment) @ rows.mH + ridge * (rows @ rows.mH)


def _balance(shared: Tensor, maps: Tensor, weights: Tensor) -> Tensor:
    """Return a basis in which the weights of shared heads and of their readers have equal Gram matrices.

    The basis M is ``[r, c, n, n]``. The layer computes the same function for every invertible M, but Adam
    does not train all of them equally well. A model converted to half of its heads ended training with 1.2 %
    more loss than the original if value rows were large and o rows small, and with 0.2 % more if they were
    balanced (2026-11).

    ``M^H M`` is the geometric mean of the readers' Gram matrix and the inverse of the shared rows' Gram
    matrix. Among the matrices M with this property, we take the one that changes the channels least.
    """
    read = (maps.mH @ weights @ maps).sum(1)
    root, inverse = roots_of(shared @ shared.mH)
    between, _ = roots_of(root @ floored(read) @ root)
    half, undone = roots_of(inverse @ between @ inverse)
    u, _, vh = torch.linalg.svd(maps.mean(1) @ undone)
    return u @ vh @ half


def _exact_if_equal(factors: Factors, part: Part) -> Factors:
    """If all heads of a group are bit-identical, make the first one the shared head, with identity maps."""
    heads = part.rows.unflatten(0, (len(factors.shared), -1))
    equal = (heads == heads[:, :1]).flatten(1).all(1)
    shared = torch.where(equal[:, None, None, None], heads[:, 0], factors.shared)
    one = torch.eye(part.rows.shape[2], dtype=part.rows.dtype, device=part.rows.device)
    each = equal.repeat_interleave(heads.shape[1])[:, None, None, None]
    return Factors(shared, torch.where(each, one, factors.maps))


def _energy_scale(shared: Tensor, rows: Tensor, calibration: Calibration) -> Tensor:
    """Return factors ``[r, c, 1, 1]`` that scale shared heads to the mean square of their old heads."""
    wanted = calibration.energy(rows).mean(1)
    got = calibration.energy(shared)
    known = (wanted > 0) & (got > 0)
    return (wanted.where(known, 1.0) / got.where(known, 1.0)).sqrt()[..., None, None]
