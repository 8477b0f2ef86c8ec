"""Shared keys for a principal merge, and linear maps to the old keys, fitted over query-key distances.

A score is ``q^T R k``, where R is rope's rotation by the distance. The merge approximates ``R k`` by ``A R
k'`` with a shared key ``k'``, and A is folded into the query. If A commutes with every rotation (one complex
number for each pair), the error is the same at any distance. If A mixes pairs, it is accurate only while they
rotate almost together, as slow pairs do over a whole sequence. Therefore the error is averaged over
distances. For given shared keys, linear regression finds the best maps, and for given maps it finds the best
shared keys; the search alternates between the two.
"""

import torch
from torch import Tensor

from ..calibration import Calibration
from ..weights import Heads, rows_of
from .distances import Distances
from .factors import Factors, factorise, floored, gram
from .parts import key_parts, keys_of, query_metric

SWEEPS = 50
GAIN = 1e-3  # the search stops if a sweep lowers the error by less than this fraction
EXACT = 1e-14  # smaller errors, as a fraction of the error of dropping all keys, are rounding errors
SINGULAR = 1e-12  # ridge, relative to the mean diagonal, that keeps solutions of singular systems finite


def share_keys(heads: Heads, groups: int, calibration: Calibration, reach: int) -> Factors:
    """Fit a shared key head for each of ``groups`` runs of neighbouring heads, and maps to the old keys.

    The error is averaged over distances up to ``reach``. It is never larger than with
    :func:`commuting_maps`.
    """
    distances = Distances.of(heads, reach)
    k, metric = (x.unflatten(0, (groups, -1)) for x in (heads.k, floored(query_metric(heads, calibration))))
    products = gram(k.flatten(1, 2), calibration).unflatten(-1, k.shape[1:3]).unflatten(1, k.shape[1:3])
    old = distances.rotated(products.diagonal(dim1=1, dim2=3).movedim(-1, 1))
    whole = torch.einsum("rfde,rfed->r", metric, old)
    maps, least = (
        commuting_maps(heads, groups, calibration).unflatten(0, (groups, -1)),
        torch.full_like(whole, torch.inf),
    )
    mix = torch.zeros_like(maps)
    for _ in range(SWEEPS):
        tried = _best_mix(maps, metric, distances)
        maps, across = _best_maps(tried, products, distances)
        lost = torch.einsum("rfde,rfed->r", metric, old - maps @ across.mT)
        mix = tried.where((lost < least)[:, None, None, None], mix)
        ends = (lost >= (1 - GAIN) * least) | (lost <= EXACT * whole)
        least = least.minimum(lost)
        if ends.all():
            break
    maps, _ = _best_maps(mix, products, distances)
    shared = torch.einsum("rfde,rfem->rdm", mix, k)
    return Factors(shared[:, None], maps.flatten(0, 1)[:, None])


def commuting_maps(heads: Heads, groups: int, calibration: Calibration) -> Tensor:
    """Return the maps ``[g, d, d]`` with the least error among those that commute with every rotation."""
    channels = torch.eye(heads.k.shape[1], dtype=heads.k.dtype, device=heads.k.device).expand(groups, -1, -1)
    parts = zip(keys_of(heads, calibration), key_parts(heads, channels), strict=True)
    pairs, free = (factorise(part, groups, calibration).expanded(rows) for part, rows in parts)
    interleaved = heads.rope is not None and heads.rope.interleaved
    return torch.cat((rows_of(pairs[:, :, 0], interleaved=interleaved), free[:, 0]), 1)


def _best_mix(maps: Tensor, metric: Tensor, distances: Distances) -> Tensor:
    """Return matrices ``[r, f, d, d]`` whose products with the old keys add up to the best shared keys."""
    asked = maps.mT @ metric
    return _solved(distances.rotated_back((asked @ maps).sum(1))[:, None], distances.rotated_back(asked))


def _best_maps(mix: Tensor, products: Tensor, distances: Distances) -> tuple[Tensor, Tensor]:
    """Return the best maps ``[r, f, d, d]`` from shared keys, which ``mix`` combines from the old keys.

    The second result is the cross moment of old and shared keys, averaged over rope's rotations.
    """
    across = torch.einsum("rfdje,rjae->rfda", products, mix)
    inside = torch.einsum("rfad,rfdb->rab", mix, across)
    across = distances.rotated(across)
    return _solved(distances.rotated(inside)[:, None], across.mT).mT, across


def _solved(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a^-1 b`` for positive semidefinite ``a`` ``[..., n, n]``; finite even if a is singular."""
    mean = a.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    little = torch.where(mean > 0, SINGULAR * mean, 1.0)
    return torch.linalg.solve(a + little * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device), b)
