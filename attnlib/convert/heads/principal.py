"""The principal merge: replace each head of a group by a linear map of one shared head.

The maps ``K_i = A_i K'`` cost nothing at run time: ``A_i`` is folded into the queries that read head i, and
the maps of values are folded into the output projection. Principal component analysis of the stacked heads
gives the shared head with the least weighted error (Yu et al., 2024, arXiv 2406.07056). Keys are then refined
over distances (shared_keys.py). Averaging and orthogonal alignment are special cases.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ..calibration import Calibration
from ..weights import Heads
from .factors import Factors, factorise, gram, roots_of
from .grouping import Groups, annealed
from .parts import Part, amplitudes, keys_of, values_of
from .shared_keys import share_keys


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """The result of a merge: merged heads, and the maps folded into q and o (None without maps)."""

    heads: Heads
    reach: int
    keys: Factors | None = None
    values: Factors | None = None


def merge_principal(heads: Heads, groups: int, calibration: Calibration, *, reach: int, keys: bool) -> Merged:
    """Merge runs of neighbouring heads into ``groups`` KV heads, and fold the linear maps into q and o.

    If ``keys`` is False, only values are merged, and the caller merges the keys by another method.
    """
    values = factorise(values_of(heads), groups, calibration)
    o = values.absorbed(heads.o.permute(1, 2, 0)[:, None])[:, 0].permute(2, 0, 1)
    merged = replace(heads, v=values.shared[:, 0], o=o)
    if not keys:
        return Merged(merged, reach, values=values)
    shared, gain = share_keys(heads, groups, calibration, reach), amplitudes(heads)[:, None]
    q = shared.absorbed((heads.q * gain)[:, None])[:, 0] / gain
    return Merged(replace(merged, q=q, k=shared.shared[:, 0]), reach, shared, values)


def group_by_loss(heads: Heads, groups: int, calibration: Calibration, *, keys: bool) -> Groups:
    """Search for the head groups that lose least when merged, by simulated annealing (fixed seed)."""
    return annealed(group_loss(heads, calibration, keys=keys), len(heads.k), groups)


def group_loss(heads: Heads, calibration: Calibration, *, keys: bool) -> Callable[[tuple[int, ...]], float]:
    """Return a function that computes the loss of merging one group of heads.

    The loss of values is relative to all values; if ``keys`` is True, the loss of keys relative to all keys
    is added. For keys, only maps that commute with rope are considered, so the loss is a sum of eigenvalues.
    """
    kinds = [[values_of(heads)], *([list(keys_of(heads, calibration))] if keys else [])]
    losses = [_loss_of(parts, calibration) for parts in kinds]
    return cache(lambda group: sum(loss(group) for loss in losses))


def _loss_of(parts: list[Part], calibration: Calibration) -> Callable[[tuple[int, ...]], float]:
    """Return a function that computes the loss of merging one group, relative to dropping all heads."""
    products = [_products(part, calibration) for part in parts]
    whole = sum(float(x.flatten(3, 4).flatten(1, 2).diagonal(dim1=1, dim2=2).real.sum()) for x in products)

    def loss(group: tuple[int, ...]) -> float:
        members, tails = torch.tensor(group, device=products[0].device), 0.0
        for x in products:
            own = x[:, members][:, :, :, members].flatten(3, 4).flatten(1, 2)
            tails += float(torch.linalg.eigvalsh(own)[:, : own.shape[-1] - x.shape[2]].sum())
        return max(tails, 0.0) / whole if whole else 0.0

    return loss


def _products(part: Part, calibration: Calibration) -> Tensor:
    """Return the Gram matrix ``[c, g, n, g, n]`` of all heads, with errors weighted as in ``part``."""
    rows = (roots_of(part.weights)[0] @ part.rows).transpose(0, 1)  # [c, g, n, m + 1]
    heads = rows.shape[1:3]
    return gram(rows.flatten(1, 2), calibration).unflatten(-1, heads).unflatten(1, heads)
