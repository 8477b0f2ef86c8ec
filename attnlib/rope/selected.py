"""Ropes made of selected channel pairs of another rope, for checkpoint conversion."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedRope(Rope):
    """A rope whose channel pair ``c`` rotates like pair ``pairs[c]`` of ``source``; made by :func:`select`.

    Pairs may repeat. Checkpoint conversion needs such ropes for the rotary keys of several heads side by
    side, and when only some pairs of a head remain; no ``theta`` gives these frequencies. ``amplitude`` and
    ``latent_scale`` are always 1; the caller of ``select`` folds the source's values into weights or scale.
    """

    source: Rope
    pairs: tuple[int, ...]

    def __post_init__(self) -> None:
        """Skip Rope's checks: ``source`` has passed them, and another number of pairs could fail them."""

    @property
    def amplitude(self) -> float:
        return 1.0

    @property
    def latent_scale(self) -> float:
        return 1.0

    def inverse_frequencies(
        self, *, length: int | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Return by how many radians each selected pair rotates per position, fp32 ``[dim / 2]``."""
        chosen = torch.tensor(self.pairs, device=device)
        return self.source.inverse_frequencies(length=length, device=device)[chosen]

    def _per_pair(self, positions: Tensor) -> Tensor:
        found = self.source._per_pair(positions)
        return found if self.axes is None else found[..., torch.tensor(self.pairs, device=found.device)]


def select(source: Rope, pairs: tuple[int, ...]) -> SelectedRope:
    """Return a rope of ``2 * len(pairs)`` channels that rotate like the given pairs of ``source``.

    The new rope has the same pair layout (half or interleaved) as ``source``.

    >>> select(Rope(8), (0, 0, 3)).inverse_frequencies()
    tensor([1.0000, 1.0000, 0.0010])
    """
    options = (source.theta, source.scaling, source.interleaved, source.axes)
    return SelectedRope(2 * len(pairs), *options, source=source, pairs=pairs)
