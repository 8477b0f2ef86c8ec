"""What a merge loses where it counts: keys weighed by the queries that meet them, values by the output projection.

A score is ``Re(q conj(k))`` summed over pairs, turned by their distance. Over all distances, what a key misses in one
pair costs ``E|q|^2 E|e|^2`` of that pair, so pairs are weighed one by one. Channels that no rope turns are weighed
together, by ``E q q^T``; values by ``O^T O``. (Yu et al., 2024, arXiv 2406.07056 weigh by activations likewise.)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..calibration import Calibration
from ..weights import Heads


class Part(NamedTuple):
    """Channels of all KV heads that belong together: ``c`` sets of ``n`` each.

    ``rows`` ``[g, c, n, m + 1]`` are real, or complex for pairs that rope turns, where n is 1; ``weights``
    ``[g, c, n, n]`` are Hermitian: an error e of a head costs ``e^H W e``.
    """

    rows: Tensor
    weights: Tensor

    def lost(self, rows: Tensor, calibration: Calibration) -> Tensor:
        """What other rows instead of these cost, over the calibration: a number."""
        error = self.rows - rows
        moments = (error @ calibration.moment.to(error.dtype)) @ error.mH
        return torch.einsum("gcij,gcji->", self.weights, moments).real

    def size(self, calibration: Calibration) -> Tensor:
        """What nothing at all instead of these would cost."""
        return self.lost(torch.zeros_like(self.rows), calibration)


def key_parts(heads: Heads, k: Tensor) -> tuple[Tensor, Tensor]:
    """Key rows ``[g, d, m + 1]`` as those of parts: pairs ``[g, p / 2, 1, m + 1]``, the rest ``[g, 1, n, m + 1]``."""
    return heads.pairs(k)[:, :, None], k[:, None, heads.rotated :]


def keys_of(heads: Heads, calibration: Calibration) -> tuple[Part, Part]:
    """The keys of heads, weighed by the queries that meet them; under norms of q and k by nothing."""
    pairs, free = key_parts(heads, heads.k)
    if heads.gains is not None:
        return Part(pairs, _ones(pairs)), Part(free, _ones(free))
    q = key_parts(heads, heads.q)
    weights = [((x @ calibration.moment.to(x.dtype)) @ x.mH).unflatten(0, (-1, heads.group)).sum(1) for x in q]
    return Part(pairs, weights[0]), Part(free, weights[1])


def values_of(heads: Heads) -> Part:
    """The values of heads, weighed by the columns of o that meet them."""
    weights = torch.einsum("mhd,mhe->hde", heads.o, heads.o).unflatten(0, (-1, heads.group)).sum(1)
    return Part(heads.v[:, None], weights[:, None])


def relative_errors(heads: Heads, k: Tensor, v: Tensor, calibration: Calibration) -> tuple[float, float]:
    """What keys and values ``[g, d, m + 1]`` miss of those of heads, relative to what missing all would cost."""
    parts, read = keys_of(heads, calibration), key_parts(heads, k)
    keys = _root(
        sum(part.lost(rows, calibration) for part, rows in zip(parts, read, strict=True)),
        sum(part.size(calibration) for part in parts),
    )
    values = values_of(heads)
    return keys, _root(values.lost(v[:, None], calibration), values.size(calibration))


def _root(lost: Tensor, whole: Tensor) -> float:
    return float((lost.clamp(min=0) / whole.clamp(min=torch.finfo(whole.dtype).tiny)).sqrt())


def _ones(rows: Tensor) -> Tensor:
    n = rows.shape[2]
    return torch.eye(n, dtype=rows.dtype, device=rows.device).expand(*rows.shape[:2], n, n)
