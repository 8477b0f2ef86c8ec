"""SelectedRope: a rope made of selected pairs of another rope."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedRope(Rope):
    """A rope whose pair ``c`` rotates like pair ``pairs[c]`` of ``source``; made by :func:`select`.

    Pairs may repeat. Checkpoint conversion needs such ropes, whose frequencies no ``theta`` gives: for the
    rotary keys of several heads side by side, and for the pairs that remain after concentrating them.
    ``amplitude`` and ``latent_scale`` are 1 whatever the source has; the caller of ``select`` folds the
    source's into weights or scale.
    """

    source: Rope
    pairs: tuple[int, ...]

    def __post_init__(self) -> None:
        """Skip the checks of Rope: the source is valid, and it may have more pairs."""

    @property
    def amplitude(self) -> float:
        return 1.0

    @property
    def latent_scale(self) -> float:
        return 1.0

    def inverse_frequencies(
        self, *, length: int | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Return the source's frequencies of the selected pairs, fp32 ``[dim / 2]``."""
        chosen = torch.tensor(self.pairs, device=device)
        return self.source.inverse_frequencies(length=length, device=device)[chosen]


def select(source: Rope, pairs: tuple[int, ...]) -> SelectedRope:
    """Return a rope of ``2 * len(pairs)`` channels from these pairs of ``source``, in the same layout.

    >>> select(Rope(8), (0, 0, 3)).inverse_frequencies()
    tensor([1.0000, 1.0000, 0.0010])
    """
    options = {"theta": source.theta, "scaling": source.scaling, "interleaved": source.interleaved}
    return SelectedRope(2 * len(pairs), **options, source=source, pairs=pairs)
