"""Groups of head channels that linear maps may mix: single rope pairs, keys without rope, and values.

Maps that mix channels of only one group commute with rope, so they are correct at any distance. The cost of
an error depends on its reader: errors of a pair are weighted by ``E |q|^2`` of its queries, key channels
without rope by ``E q q^T``, and values by ``O^T O`` of the output projection. (Yu et al., 2024, arXiv
2406.07056 also weight by activations.)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..calibration import Calibration
from ..weights import Heads


class Part(NamedTuple):
    """Keys or values of all KV heads, as ``c`` sets of ``n`` channels that linear maps may mix.

    ``rows`` ``[g, c, n, m + 1]`` are the projections that compute the channels. They are real, or complex
    with n = 1 for pairs that rope rotates. ``weights`` ``[g, c, n, n]`` are Hermitian: an error e of a head
    costs ``e^H W e``.
    """

    rows: Tensor
    weights: Tensor

    def lost(self, rows: Tensor, calibration: Calibration) -> Tensor:
        """Return the cost, summed over heads, of replacing this part's rows with the given ``rows``."""
        error = self.rows - rows
        moments = (error @ calibration.moment.to(error.dtype)) @ error.mH
        return torch.einsum("gcij,gcji->", self.weights, moments).real

    def size(self, calibration: Calibration) -> Tensor:
        """Return the cost, summed over heads, of replacing this part's rows with zeros."""
        return self.lost(torch.zeros_like(self.rows), calibration)


def query_metric(heads: Heads, calibration: Calibration) -> Tensor:
    """Return the metric ``[g, d, d]`` of key errors for each KV head: ``E q q^T`` over its queries q.

    For layers with norms of q and k, the metric is the identity, because the effect of an error after the
    norm is unknown.
    """
    if heads.gains is not None:
        return torch.eye(heads.k.shape[1], dtype=heads.k.dtype, device=heads.k.device).expand(
            len(heads.k), -1, -1
        )
    q = heads.q * amplitudes(heads)[:, None]
    return (q @ calibration.moment @ q.mT).unflatten(0, (-1, heads.group)).sum(1)


def amplitudes(heads: Heads) -> Tensor:
    """Return the factor of each channel in scores: rope's squared amplitude for rotated channels, else 1."""
    gain = torch.ones(heads.k.shape[1], dtype=heads.k.dtype, device=heads.k.device)
    if heads.rope is not None:
        gain[: heads.rotated] = heads.rope.amplitude**2
    return gain


def key_parts(heads: Heads, k: Tensor) -> tuple[Tensor, Tensor]:
    """Split key rows into complex rope pairs ``[g, p / 2, 1, m + 1]`` and the rest ``[g, 1, n, m + 1]``."""
    return heads.pairs(k)[:, :, None], k[:, None, heads.rotated :]


def keys_of(heads: Heads, calibration: Calibration) -> tuple[Part, Part]:
    """Return the keys of heads as two parts, rope pairs and the rest, weighted by :func:`query_metric`."""
    pairs, free = key_parts(heads, heads.k)
    metric, rotated = query_metric(heads, calibration), heads.rotated
    # The mean squares of the queries in the two channels of each pair, as one complex number.
    both = heads.pairs(metric.diagonal(dim1=1, dim2=2)[..., None])
    sizes = (both.real + both.imag)[..., None].to(pairs.dtype)
    return Part(pairs, sizes), Part(free, metric[:, None, rotated:, rotated:])


def values_of(heads: Heads) -> Part:
    """Return the values of heads as a :class:`Part`, weighted by the columns of o that read them."""
    weights = torch.einsum("mhd,mhe->hde", heads.o, heads.o).unflatten(0, (-1, heads.group)).sum(1)
    return Part(heads.v[:, None], weights[:, None])
