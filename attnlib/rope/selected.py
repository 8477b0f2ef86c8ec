"""A rope whose pairs turn as chosen pairs of another one do."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedRope(Rope):
    """Pair c turns as pair ``pairs[c]`` of ``source`` does, which may be repeated; made by :func:`select`.

    The rotary keys of several heads side by side need it, and what a concentration leaves of them: no
    ``theta`` has such frequencies. Its temperature is 1, whatever the source's: who selects puts that into
    weights or scale.
    """

    source: Rope
    pairs: tuple[int, ...]

    def __post_init__(self) -> None:
        """Nothing more to check: the source is a rope, and it may have more pairs."""

    @property
    def amplitude(self) -> float:
        return 1.0

    @property
    def latent_scale(self) -> float:
        return 1.0

    def inverse_frequencies(
        self, *, length: int | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """As :meth:`attnlib.Rope.inverse_frequencies`."""
        chosen = torch.tensor(self.pairs, device=device)
        return self.source.inverse_frequencies(length=length, device=device)[chosen]


def select(source: Rope, pairs: tuple[int, ...]) -> SelectedRope:
    """The rope of ``2 * len(pairs)`` channels with these pairs of ``source``, in its layout.

    >>> select(Rope(8), (0, 0, 3)).inverse_frequencies()
    tensor([1.0000, 1.0000, 0.0010])
    """
    options = {"theta": source.theta, "scaling": source.scaling, "interleaved": source.interleaved}
    return SelectedRope(2 * len(pairs), **options, source=source, pairs=pairs)
