"""The best shared keys: old keys as linear maps of them, at the distances at which queries meet them.

A score is ``q^T R k``, with R rope's turn by the distance. With ``A k'`` in the place of ``R k`` it is ``q^T
A R k'``, and A moves into the query. What commutes with every turn, a complex number for each pair, costs the
same at any distance; a matrix that mixes pairs is good where these turn alike, as slow pairs do over all of a
text. So what is lost is averaged over distances. The best maps of given shared keys, and the best shared keys
of given maps, are linear regressions, and are found in turns.
"""

import torch
from torch import Tensor

from ..calibration import Calibration
from ..weights import Heads, rows_of
from .distances import Distances
from .factors import Factors, factorise, floored, gram
from .parts import key_parts, keys_of, query_metric

SWEEPS = 50
GAIN = 1e-3  # of what is lost: when a sweep gains less, the search ends
EXACT = 1e-14  # of what there is: less is rounding
SINGULAR = 1e-12  # of the mean diagonal: keeps what is solved for finite where nothing says what it is


def share_keys(heads: Heads, groups: int, calibration: Calibration, reach: int) -> Factors:
    """Shared keys ``[r, 1, d, m + 1]`` of runs of neighbours, and maps ``[g, 1, d, d]``: never worse than
    commuting.
    """
    distances = Distances.of(heads, reach)
    k, metric = (x.unflatten(0, (groups, -1)) for x in (heads.k, floored(query_metric(heads, calibration))))
    products = gram(k.flatten(1, 2), calibration).unflatten(-1, k.shape[1:3]).unflatten(1, k.shape[1:3])
    old = distances.turned(products.diagonal(dim1=1, dim2=3).movedim(-1, 1))
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
    """The best maps ``[g, d, d]`` among those that commute with every turn."""
    channels = torch.eye(heads.k.shape[1], dtype=heads.k.dtype, device=heads.k.device).expand(groups, -1, -1)
    parts = zip(keys_of(heads, calibration), key_parts(heads, channels), strict=True)
    pairs, free = (factorise(part, groups, calibration).expanded(rows) for part, rows in parts)
    interleaved = heads.rope is not None and heads.rope.interleaved
    return torch.cat((rows_of(pairs[:, :, 0], interleaved=interleaved), free[:, 0]), 1)


def _best_mix(maps: Tensor, metric: Tensor, distances: Distances) -> Tensor:
    """What each old head gives to the best shared keys of these maps: ``[r, f, d, d]``."""
    asked = maps.mT @ metric
    return _solved(distances.turned_back((asked @ maps).sum(1))[:, None], distances.turned_back(asked))


def _best_maps(mix: Tensor, products: Tensor, distances: Distances) -> tuple[Tensor, Tensor]:
    """The best maps of these shared keys, ``[r, f, d, d]``, and the products of old keys with these,
    turned.
    """
    across = torch.einsum("rfdje,rjae->rfda", products, mix)
    inside = torch.einsum("rfad,rfdb->rab", mix, across)
    across = distances.turned(across)
    return _solved(distances.turned(inside)[:, None], across.mT).mT, across


def _solved(a: Tensor, b: Tensor) -> Tensor:
    """``a^-1 b`` for positive ``a`` ``[..., n, n]``, finite where it is singular."""
    mean = a.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    little = torch.where(mean > 0, SINGULAR * mean, 1.0)
    return torch.linalg.solve(a + little * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device), b)
