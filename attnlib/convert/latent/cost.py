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

    ``keys`` ``[g, n, n]`` and ``values`` ``[g, e, e]``; ``all_keys``, rotated ones too, and ``all_values`` are what it
    would cost to miss everything, and relative to these errors of both weigh alike.
    """

    keys: Tensor
    values: Tensor
    all_keys: Tensor
    all_values: Tensor

    @classmethod
    def of(cls, latent: Latent, heads: Heads, calibration: Calibration, seen: Attended, *, reach: int) -> "Cost":
        """Scores feel ``(q^T e)^2`` of the queries over a calibration, outputs ``|O e|^2``, both summed over a group.

        As a merge of heads is measured; ``seen`` are the inputs that keys and values are made of.
        """
        turns = 1.0 if heads.rope is None else heads.rope.amplitude**2 / temperature(heads)  # what scale has of it
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
            eyes(latent.k_up), eyes(latent.v_up), seen.costs(eyes(heads.k), heads.k), seen.costs(eyes(heads.v), heads.v)
        )

    def shares(self, whole: Latent, cut: Latent, seen: Attended) -> tuple[float, float]:
        """What ``cut`` misses of the keys and of the values of ``whole``, as shares of missing all of them."""
        group, found = len(whole.k_up) // len(self.keys), []
        for metric, all_of_it, up, cut_up in (
            (self.keys, self.all_keys, whole.k_up, cut.k_up),
            (self.values, self.all_values, whole.v_up, cut.v_up),
        ):
            lost = seen.costs(metric, up[::group] @ whole.down - cut_up[::group] @ cut.down)
            found.append(max(0.0, float(lost / all_of_it)) if all_of_it > 0 else 0.0)
        return found[0], found[1]
