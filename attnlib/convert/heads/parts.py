"""Channels of heads that may be mixed at any distance: pairs that rope turns one by one, the rest together,
values.

Each weighed by what meets it: a pair by ``E |q|^2`` of its queries, channels without a turn by ``E q q^T``,
values by ``O^T O`` of the output projection. (Yu et al., 2024, arXiv 2406.07056 weigh by activations
likewise.)
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


def query_metric(heads: Heads, calibration: Calibration) -> Tensor:
    """What an error of the keys of each KV head costs: ``E q q^T`` of its queries, ``[g, d, d]``.

    Between projections and scores may be norms of q and k. What they make of an error is not known here, and
    all channels count alike.
    """
    if heads.gains is not None:
        return torch.eye(heads.k.shape[1], dtype=heads.k.dtype, device=heads.k.device).expand(
            len(heads.k), -1, -1
        )
    q = heads.q * amplitudes(heads)[:, None]
    return (q @ calibration.moment @ q.mT).unflatten(0, (-1, heads.group)).sum(1)


def amplitudes(heads: Heads) -> Tensor:
    """What scores multiply each channel by, ``[d]``: the square of rope's amplitude where it turns."""
    gain = torch.ones(heads.k.shape[1], dtype=heads.k.dtype, device=heads.k.device)
    if heads.rope is not None:
        gain[: heads.rotated] = heads.rope.amplitude**2
    return gain


def key_parts(heads: Heads, k: Tensor) -> tuple[Tensor, Tensor]:
    """Key rows ``[g, d, m + 1]`` as those of parts: pairs ``[g, p / 2, 1, m + 1]``, the rest ``[g, 1, n, m +
    1]``.
    """
    return heads.pairs(k)[:, :, None], k[:, None, heads.rotated :]


def keys_of(heads: Heads, calibration: Calibration) -> tuple[Part, Part]:
    """The keys of heads, weighed by the queries that meet them; under norms of q and k by nothing."""
    pairs, free = key_parts(heads, heads.k)
    metric, rotated = query_metric(heads, calibration), heads.rotated
    both = heads.pairs(
        metric.diagonal(dim1=1, dim2=2)[..., None]
    )  # what is asked of either channel of a pair
    sizes = (both.real + both.imag)[..., None].to(pairs.dtype)
    return Part(pairs, sizes), Part(free, metric[:, None, rotated:, rotated:])


def values_of(heads: Heads) -> Part:
    """The values of heads, weighed by the columns of o that meet them."""
    weights = torch.einsum("mhd,mhe->hde", heads.o, heads.o).unflatten(0, (-1, heads.group)).sum(1)
    return Part(heads.v[:, None], weights[:, None])
