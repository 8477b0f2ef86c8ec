"""What errors of a latent layer's keys and values cost where they are read: in scores, and in outputs."""

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
    """An error e of KV head i costs ``e^T keys[i] e`` of what is not rotated, ``e^T values[i] e`` of values.

    ``keys`` ``[g, n, n]`` and ``values`` ``[g, e, e]``; ``all_keys``, rotated ones too, and ``all_values``
    are what it would cost to miss everything, and relative to these errors of both weigh alike.
    """

    keys: Tensor
    values: Tensor
    all_keys: Tensor
    all_values: Tensor

    @classmethod
    def of(
        cls, latent: Latent, heads: Heads, calibration: Calibration, seen: Attended, *, reach: int
    ) -> "Cost":
        """Scores feel ``(q^T e)^2`` of the queries over a calibration, outputs ``|O e|^2``, both summed over
        a group.

        As a merge of heads is measured; ``seen`` are the inputs that keys and values are made of.
        """
        turns = (
            1.0 if heads.rope is None else heads.rope.amplitude**2 / temperature(heads)
        )  # what scale has of it
        q = latent.q_nope * turns
        values, turned = values_of(heads).weights[:, 0], Distances.of(heads, reach).turned
        keys = turned(heads.k @ seen.moment @ heads.k.mT)
        return cls(
            (q @ calibration.moment @ q.mT).unflatten(0, (len(heads.k), -1)).sum(1),
            values,
            torch.einsum("gij,gji->", query_metric(heads, calibration), keys),
            seen.costs(values, heads.v),
        )

    @classmethod
    def plain(cls, latent: Latent, heads: Heads, seen: Attended) -> "Cost":
        """All channels of all heads count alike."""

        def eyes(up: Tensor) -> Tensor:
            return torch.eye(up.shape[1], dtype=up.dtype, device=up.device).expand(len(heads.k), -1, -1)

        return cls(
            eyes(latent.k_up),
            eyes(latent.v_up),
            seen.costs(eyes(heads.k), heads.k),
            seen.costs(eyes(heads.v), heads.v),
        )

    def parts(self, whole: Latent, cut: Latent) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of keys and of values what an error costs, what missing all costs, and the ups of both latents.

        Ups are those of one query head of each group, as others of it read the same.
        """
        group = len(whole.k_up) // len(self.keys)
        return [
            (self.keys, self.all_keys, whole.k_up[::group], cut.k_up[::group]),
            (self.values, self.all_values, whole.v_up[::group], cut.v_up[::group]),
        ]

    def shares(self, whole: Latent, cut: Latent, seen: Attended) -> list[float]:
        """What ``cut`` misses of the keys and of the values of ``whole``, as shares of missing all of
        them.
        """
        return [
            max(0.0, relative(seen.costs(metric, up @ whole.down - cut_up @ cut.down), size))
            for metric, size, up, cut_up in self.parts(whole, cut)
        ]


def relative(lost: Tensor, whole: Tensor) -> float:
    """What was lost of a whole; of nothing 0."""
    return float(lost / whole) if whole > 0 else 0.0
