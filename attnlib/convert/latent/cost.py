"""The cost of errors in a latent layer's keys and values, measured in scores and in outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration import Calibration
from ..heads.distances import Distances
from ..heads.parts import query_metric, values_of
from ..weights import Heads
from .attended import Attended
from .embedding import Latent, temperature


@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    """The cost of errors in keys and values: an error e of KV head i costs ``e^T metric[i] e``.

    ``keys`` ``[g, n, n]`` is the metric for key channels without rope, and ``values`` ``[g, e, e]`` is the
    metric for values. ``all_keys`` is the cost of replacing all keys by zeros, including the rotated ones;
    ``all_values`` is the same for values. Errors are divided by these costs, so keys and values count
    equally.
    """

    keys: Tensor
    values: Tensor
    all_keys: Tensor
    all_values: Tensor

    @classmethod
    def of(
        cls, latent: Latent, heads: Heads, calibration: Calibration, seen: Attended, *, reach: int
    ) -> "Cost":
        """Return a cost that weights key errors by the queries and value errors by the output projection.

        A key error e costs ``(q^T e)^2``, averaged over the calibration's queries q. A value error costs
        ``|O e|^2``. Both are summed over the query heads of a group, as in a merge of heads. ``seen`` holds
        the inputs from which keys and values are computed.
        """
        # The part of rope's amplitude that is in the softmax scale and thus multiplies all channels.
        amplitude = 1.0 if heads.rope is None else heads.rope.amplitude**2 / temperature(heads)
        q = latent.q_nope * amplitude
        values, rotated = values_of(heads).weights[:, 0], Distances.of(heads, reach).rotated
        keys = rotated(heads.k @ seen.moment @ heads.k.mT)
        return cls(
            (q @ calibration.moment @ q.mT).unflatten(0, (len(heads.k), -1)).sum(1),
            values,
            torch.einsum("gij,gji->", query_metric(heads, calibration), keys),
            seen.costs(values, heads.v),
        )

    @classmethod
    def plain(cls, latent: Latent, heads: Heads, seen: Attended) -> "Cost":
        """Return a cost that counts all channels of all heads equally."""

        def eyes(up: Tensor) -> Tensor:
            return torch.eye(up.shape[1], dtype=up.dtype, device=up.device).expand(len(heads.k), -1, -1)

        return cls(
            eyes(latent.k_up),
            eyes(latent.v_up),
            seen.costs(eyes(heads.k), heads.k),
            seen.costs(eyes(heads.v), heads.v),
        )

    def parts(self, whole: Latent, cut: Latent) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return a tuple for keys and one for values, to compare a truncated latent with the untruncated one.

        A tuple holds the metric, the cost of dropping all keys or values, and the up projections of both
        latents. Query heads of a group have equal up projections, so only the first head's are returned.
        """
        group = len(whole.k_up) // len(self.keys)
        return [
            (self.keys, self.all_keys, whole.k_up[::group], cut.k_up[::group]),
            (self.values, self.all_values, whole.v_up[::group], cut.v_up[::group]),
        ]

    def shares(self, whole: Latent, cut: Latent, seen: Attended) -> list[float]:
        """Return the cost of replacing the latent ``whole`` by ``cut``, for keys and for values.

        Each result is a fraction of the cost of dropping all keys or all values.
        """
        return [
            max(0.0, relative(seen.costs(metric, up @ whole.down - cut_up @ cut.down), size))
            for metric, size, up, cut_up in self.parts(whole, cut)
        ]


def relative(lost: Tensor, whole: Tensor) -> float:
    """Return ``lost / whole``, or 0 if ``whole`` is 0."""
    return float(lost / whole) if whole > 0 else 0.0
