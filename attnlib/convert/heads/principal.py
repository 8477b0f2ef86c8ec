"""A merge by principal directions: each head of a group becomes a linear map of one shared head.

Queries of a group need not be alike, so ``K_i = A_i K'`` costs nothing: ``A_i`` moves into the queries that read head
i, and what maps the shared values into the output projection. The best ``K'`` for a weighed error is principal
component analysis of the stacked heads (Yu et al., 2024, arXiv 2406.07056). Rope turns each pair, a complex number,
by a phase; a complex ``A_i`` of one pair commutes with it, and a matrix across pairs would not. Averaging and
orthogonal alignment are special cases.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ..calibration import Calibration
from ..weights import Heads, rows_of
from .grouping import Groups, annealed
from .measure import Part, key_parts, keys_of, values_of

FLOOR = 1e-6  # of a weight's mean eigenvalue: directions that no query asks for keep an order among themselves
RIDGE = 1e-8  # of the inputs' mean square: so do directions that the text never shows
SQUEEZE = 1e-2  # of the largest: how small a direction may become when shared heads take their channels' places


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """One shared head for each group and the maps from it: ``shared`` ``[r, c, n, m + 1]``, ``maps`` ``[g, c, n, n]``.

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
    """The best factors of each of ``groups`` runs of neighbours; what they lose is the tail of the spectrum."""
    size = len(part.rows) // groups
    roots, inverses = _roots(part.weights)
    rows = (roots @ part.rows).unflatten(0, (groups, size)).transpose(1, 2).flatten(2, 3)  # [r, c, f * n, m + 1]
    n = part.rows.shape[2]
    basis = torch.linalg.eigh(_gram(rows, calibration)).eigenvectors[..., -n:]
    shared = basis.mH @ rows
    maps = inverses.unflatten(0, (groups, size)) @ basis.unflatten(2, (size, n)).transpose(1, 2)  # [r, f, c, n, n]
    place = _place(maps.mean(1))
    place = place * _level(place @ shared, part.rows.unflatten(0, (groups, size)), calibration)
    return Factors(place @ shared, (maps @ torch.linalg.inv(place)[:, None]).flatten(0, 1))


def _roots(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of Hermitian weights, no eigenvalue below FLOOR of their mean, and its inverse."""
    values, vectors = torch.linalg.eigh(weights)
    mean = values.mean(-1, keepdim=True)
    values = torch.where(mean > 0, values.maximum(FLOOR * mean) / mean, 1.0) * mean.where(mean > 0, 1.0)
    root = values.sqrt()[..., None, :]
    return (vectors * root) @ vectors.mH, (vectors / root) @ vectors.mH


def _gram(rows: Tensor, calibration: Calibration) -> Tensor:
    moment = calibration.moment.to(rows.dtype)
    ridge = RIDGE * moment.diagonal().real.mean()
    return (rows @ moment) @ rows.mH + ridge * (rows @ rows.mH)


def _place(mean_maps: Tensor) -> Tensor:
    """What brings shared channels near those of the heads: the mean map, not more singular than SQUEEZE."""
    u, s, vh = torch.linalg.svd(mean_maps)
    largest = s[..., :1].where(s[..., :1] > 0, 1.0)
    return (u * s.maximum(SQUEEZE * largest)[..., None, :]) @ vh


def _level(shared: Tensor, rows: Tensor, calibration: Calibration) -> Tensor:
    """The factor ``[r, c, 1, 1]`` that gives shared rows the mean square of the heads that they stand for."""
    wanted = calibration.energy(rows).mean(1)
    got = calibration.energy(shared)
    known = (wanted > 0) & (got > 0)
    return (wanted.where(known, 1.0) / got.where(known, 1.0)).sqrt()[..., None, None]


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """Fewer KV heads in the place of ``count``, and what they stand for: factors, or without any themselves."""

    heads: Heads
    count: int
    keys: tuple[Factors, Factors] | None = None  # of pairs, and of channels that are not rotated
    values: Factors | None = None

    def read(self, stored: Heads) -> tuple[Tensor, Tensor]:
        """The keys and values ``[count, d, m + 1]`` that queries and o find in the place of the old ones."""
        k, v = (rows.repeat_interleave(self.count // len(rows), 0) for rows in (stored.k, stored.v))
        if self.values is not None:
            v = self.values.expanded(stored.v[:, None])[:, 0]
        if self.keys is not None:
            parts = zip(self.keys, key_parts(stored, stored.k), strict=True)
            k = _joined(stored, *(factors.expanded(rows) for factors, rows in parts))
        return k, v


def merge_principal(heads: Heads, groups: int, calibration: Calibration, *, keys: bool) -> Merged:
    """Each of ``groups`` runs of neighbours as one KV head, with queries and o to fit.

    Without ``keys`` they are left as they are, for another merge.
    """
    values = factorise(values_of(heads), groups, calibration)
    o = values.absorbed(heads.o.permute(1, 2, 0)[:, None])[:, 0].permute(2, 0, 1)
    merged = replace(heads, v=values.shared[:, 0], o=o)
    if not keys:
        return Merged(merged, len(heads.k), values=values)
    factors = tuple(factorise(part, groups, calibration) for part in keys_of(heads, calibration))
    k = _joined(heads, *(part.shared for part in factors))
    parts = zip(factors, key_parts(heads, heads.q), strict=True)
    q = _joined(heads, *(part.absorbed(rows) for part, rows in parts))
    return Merged(replace(merged, q=q, k=k), len(heads.k), factors, values)


def _joined(heads: Heads, pairs: Tensor, free: Tensor) -> Tensor:
    """The inverse of :func:`key_parts`."""
    interleaved = heads.rope is not None and heads.rope.interleaved
    return torch.cat((rows_of(pairs[:, :, 0], interleaved=interleaved), free[:, 0]), 1)


def group_by_loss(heads: Heads, groups: int, calibration: Calibration, *, keys: bool) -> Groups:
    """Which heads become one so that their principal merge loses least: annealed, always the same."""
    kinds = [[values_of(heads)], *([list(keys_of(heads, calibration))] if keys else [])]
    losses = [_loss_of(parts, calibration) for parts in kinds]
    return annealed(cache(lambda group: sum(loss(group) for loss in losses)), len(heads.k), groups)


def _loss_of(parts: list[Part], calibration: Calibration) -> Callable[[tuple[int, ...]], float]:
    """What a group of heads loses when it becomes one, as a share of what all heads are."""
    grams = []
    for part in parts:
        rows = (_roots(part.weights)[0] @ part.rows).transpose(0, 1)  # [c, g, n, m + 1]
        grams.append(
            _gram(rows.flatten(1, 2), calibration).unflatten(-1, rows.shape[1:3]).unflatten(1, rows.shape[1:3])
        )
    whole = sum(float(gram.flatten(3, 4).flatten(1, 2).diagonal(dim1=1, dim2=2).real.sum()) for gram in grams)

    def loss(group: tuple[int, ...]) -> float:
        members = torch.tensor(group, device=grams[0].device)
        tails = 0.0
        for gram in grams:
            n = gram.shape[2]
            own = gram[:, members][:, :, :, members].flatten(3, 4).flatten(1, 2)
            tails += float(torch.linalg.eigvalsh(own)[:, : own.shape[-1] - n].sum())
        return max(tails, 0.0) / whole if whole else 0.0

    return loss
