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
    """The metrics of errors in keys and values: an error e of KV head i costs ``e^T metric[i] e``.

    ``keys`` ``[g, n, n]`` is the metric of keys that are not rotated, ``values`` ``[g, e, e]`` the metric of
    values. ``all_keys`` (with rotated keys) and ``all_values`` are the costs of dropping everything. Key and
    value errors have equal weight relative to them.
    """

    keys: Tensor
    values: Tensor
    all_keys: Tensor
    all_values: Tensor

    @classmethod
    def of(
        cls, latent: Latent, heads: Heads, calibration: Calibration, seen: Attended, *, reach: int
    ) -> "Cost":
        """Return the cost ``(q^T e)^2`` in scores, over calibration queries, and ``|O e|^2`` in outputs.

        Both are summed over the query heads of a group, as for a merge of heads. ``seen`` are the inputs that
        keys and values are made from.
        """
        # The part of rope's amplitude that scale contains.
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
        """Return one tuple for keys and one for values: metric, cost of dropping all, and both latents' ups.

        The up projections are those of one query head of each group, since the others read the same.
        """
        group = len(whole.k_up) // len(self.keys)
        return [
            (self.keys, self.all_keys, whole.k_up[::group], cut.k_up[::group]),
            (self.values, self.all_values, whole.v_up[::group], cut.v_up[::group]),
        ]

    def shares(self, whole: Latent, cut: Latent, seen: Attended) -> list[float]:
        """Return the cost of replacing ``whole`` by ``cut``, for keys and for values.

        Each is a fraction of the cost of dropping everything.
        """
        return [
            max(0.0, relative(seen.costs(metric, up @ whole.down - cut_up @ cut.down), size))
            for metric, size, up, cut_up in self.parts(whole, cut)
        ]


def relative(lost: Tensor, whole: Tensor) -> float:
    """Return ``lost / whole``, or 0 if ``whole`` is 0."""
    return float(lost / whole) if whole > 0 else 0.0
