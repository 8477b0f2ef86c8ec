"""Old heads as linear maps of shared ones, and the best of them where one metric weighs an error."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration import Calibration
from .parts import Part

FLOOR = (
    1e-6  # of a weight's mean eigenvalue: directions that no query asks for keep an order among themselves
)
RIDGE = 1e-8  # of the inputs' mean square: so do directions that the text never shows


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """One shared head for each group and the maps from it: ``shared`` ``[r, c, n, m + 1]``, ``maps`` ``[g, c,
    n, n]``.

    Head i of group r is ``maps[i] @ shared[r]``; groups are runs of ``g / r`` neighbours.
    """

    shared: Tensor
    maps: Tensor

    def expanded(self, shared: Tensor) -> Tensor:
        """What the heads ``[g, c, n, m + 1]`` become of rows in the shared one's place."""
        return self.maps @ shared.repeat_interleave(len(self.maps) // len(shared), 0)

    def absorbed(self, rows: Tensor) -> Tensor:
        """Rows ``[h, c, n, m]`` that meet the heads as rows that meet the shared one."""
        return self.maps.repeat_interleave(len(rows) // len(self.maps), 0).mH @ rows


def factorise(part: Part, groups: int, calibration: Calibration) -> Factors:
    """The best factors of each of ``groups`` runs of neighbours; what they lose is the tail of the
    spectrum.
    """
    size = len(part.rows) // groups
    roots, inverses = roots_of(part.weights)
    rows = (
        (roots @ part.rows).unflatten(0, (groups, size)).transpose(1, 2).flatten(2, 3)
    )  # [r, c, f * n, m + 1]
    n = part.rows.shape[2]
    basis = torch.linalg.eigh(gram(rows, calibration)).eigenvectors[..., -n:]
    shared = basis.mH @ rows
    maps = inverses.unflatten(0, (groups, size)) @ basis.unflatten(2, (size, n)).transpose(
        1, 2
    )  # [r, f, c, n, n]
    place = _balance(shared, maps, part.weights.unflatten(0, (groups, size)))
    place = place * _level(place @ shared, part.rows.unflatten(0, (groups, size)), calibration)
    factors = Factors(place @ shared, (maps @ torch.linalg.inv(place)[:, None]).flatten(0, 1))
    return _kept_where_equal(factors, part)


def floored(metric: Tensor) -> Tensor:
    """A metric ``[..., n, n]`` with a little for every direction; the identity where it has nothing at
    all.
    """
    mean = metric.diagonal(dim1=-2, dim2=-1).real.mean(-1)[..., None, None]
    eye = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    return metric + torch.where(mean > 0, FLOOR * mean, 1.0) * eye


def roots_of(metric: Tensor) -> tuple[Tensor, Tensor]:
    """The Hermitian square root of a :func:`floored` metric, and its inverse."""
    values, vectors = torch.linalg.eigh(floored(metric))
    root = values.sqrt()[..., None, :]
    return (vectors * root) @ vectors.mH, (vectors / root) @ vectors.mH


def gram(rows: Tensor, calibration: Calibration) -> Tensor:
    """``E (W y) (W y)^H`` of rows W ``[..., n, m + 1]``, and a little of ``W W^H``."""
    moment = calibration.moment.to(rows.dtype)
    ridge = RIDGE * moment.diagonal().real.mean()
    return (rows @ moment) @ rows.mH + ridge * (rows @ rows.mH)


def _balance(shared: Tensor, maps: Tensor, weights: Tensor) -> Tensor:
    """Channels for shared heads in which their rows and what reads them have the same products, ``[r, c, n,
    n]``.

    Any channels say the same, but training does not find its way in all of them alike: with values whose rows
    are large where those of o are small, half of the heads ended 1.2 % above the original, and balanced 0.2 %
    (2026-11). ``M^H M`` is the geometric mean of what reads and the inverse of what is read. Of these M the
    one is taken that brings channels nearest to those of the heads.
    """
    read = (maps.mH @ weights @ maps).sum(1)
    root, inverse = roots_of(shared @ shared.mH)
    between, _ = roots_of(root @ floored(read) @ root)
    half, undone = roots_of(inverse @ between @ inverse)
    u, _, vh = torch.linalg.svd(maps.mean(1) @ undone)
    return u @ vh @ half


def _kept_where_equal(factors: Factors, part: Part) -> Factors:
    """The same factors, but heads that are equal to the bit stay what they are."""
    heads = part.rows.unflatten(0, (len(factors.shared), -1))
    equal = (heads == heads[:, :1]).flatten(1).all(1)
    shared = torch.where(equal[:, None, None, None], heads[:, 0], factors.shared)
    one = torch.eye(part.rows.shape[2], dtype=part.rows.dtype, device=part.rows.device)
    each = equal.repeat_interleave(heads.shape[1])[:, None, None, None]
    return Factors(shared, torch.where(each, one, factors.maps))


def _level(shared: Tensor, rows: Tensor, calibration: Calibration) -> Tensor:
    """The factor ``[r, c, 1, 1]`` that gives shared rows the mean square of the heads that they stand for."""
    wanted = calibration.energy(rows).mean(1)
    got = calibration.energy(shared)
    known = (wanted > 0) & (got > 0)
    return (wanted.where(known, 1.0) / got.where(known, 1.0)).sqrt()[..., None, None]
