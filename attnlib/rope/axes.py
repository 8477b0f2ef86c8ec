"""Ropes of several axes (:class:`Axes`): the axis and the frequency of each channel pair."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

import torch
from torch import Tensor

from ..internal.checks import check_count
from ..internal.signatures import kind

Order = Literal["blocks", "interleaved", "alternating", "ladders", "even_odd"]


@kind
@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a rope whose tokens have several positions, such as the time, row and column of a patch.

    ``sections[a]`` channel pairs rotate by the position on axis ``a``, in 1 to 4 axes. With ``n`` axes,
    ``order`` selects the pairs of each axis:

    - "blocks": the pairs of axis 0, then those of axis 1, and so on (M-RoPE: Qwen2-VL, arXiv 2409.12191).
    - "interleaved": pair ``c`` belongs to axis ``a = c % n`` if ``c < n * sections[a]``, and to axis 0
      otherwise (Qwen3-VL, arXiv 2511.21631).
    - "alternating": axes 1 to ``n - 1`` alternate, pair by pair, and axis 0 has the last pairs (Ernie 4.5
      VL, whose config lists rows, columns and time: axis 0 here is the last of them).
    - "ladders": blocks, each of which has its own ladder of frequencies, from 1 down to nearly
      ``1 / theta`` (vision encoders of Qwen2-VL and its successors).
    - "even_odd": blocks, of which block ``a`` has the frequencies ``a``, ``a + n``, ``a + 2 * n``, ... of
      the rope (Pixtral's vision encoder, arXiv 2410.07073: even frequencies for rows, odd for columns).

    In the first three orders, pair ``c`` has frequency ``c``, so a token with equal positions on all axes
    rotates as without axes.

    Raises:
        TypeError: ``sections`` is not a tuple of ints, or ``order`` is not a string.
        ValueError: the order is unknown, or the sections do not fit it.

    >>> axes = Axes((4, 2, 2), "interleaved")
    >>> axes.pair_axes
    (0, 1, 2, 0, 1, 2, 0, 0)
    >>> positions = torch.tensor([[7, 7, 7, 7], [0, 0, 1, 1], [0, 1, 0, 1]])  # of 4 patches
    >>> attnlib.Rope(16, axes=axes).angles(positions).cos.shape
    torch.Size([4, 8])
    """

    sections: tuple[int, ...]
    order: Order

    def __post_init__(self) -> None:
        sections, known = self.sections, get_args(Order)
        if not isinstance(sections, tuple):
            raise TypeError(f"axes.sections: expected a tuple of ints, got {sections!r}")
        if not 1 <= len(sections) <= 4:
            raise ValueError(f"axes.sections: expected 1 to 4 axes, got {len(sections)}")
        for section in sections:
            check_count("axes.sections", section, least=1)
        if not isinstance(self.order, str):
            raise TypeError(f"axes.order: expected one of {', '.join(known)}, got {self.order!r}")
        if self.order not in known:
            near = get_close_matches(self.order, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"axes.order: expected one of {', '.join(known)}, got {self.order!r}{hint}")
        if (expected := self._misfit()) is not None:
            raise ValueError(f"axes.sections: expected {expected} with order={self.order!r}, got {sections}")

    def _misfit(self) -> str | None:
        """Return what the order expects of the sections, or None if they fit."""
        sections, pairs, n = self.sections, sum(self.sections), len(self.sections)
        if self.order == "interleaved":
            most = [(pairs - 1 - axis) // n + 1 for axis in range(1, n)]
            if any(got > limit for got, limit in zip(sections[1:], most, strict=True)):
                return f"at most {', '.join(map(str, most))} of {pairs} pairs for the axes after the first"
        if self.order == "alternating" and len({*sections[1:]}) > 1:
            return "equal sections for all axes after the first (Ernie's config lists the first axis last)"
        if self.order == "ladders" and any(pairs % section for section in sections):
            return f"divisors of their sum {pairs}"
        return "equal sections" if self.order == "even_odd" and len({*sections}) > 1 else None

    @property
    def pair_axes(self) -> tuple[int, ...]:
        """The axis by whose position each channel pair rotates."""
        return tuple(self.per_pair(torch.arange(len(self.sections), device="cpu")).tolist())

    @property
    def frequency_indices(self) -> tuple[int, ...]:
        """The index of each channel pair's frequency, among those of a rope without axes."""
        return tuple(self.reordered(torch.arange(sum(self.sections), device="cpu")).tolist())

    def per_pair(self, positions: Tensor) -> Tensor:
        """Return the position by which each channel pair rotates, ``[..., pairs]``, of ``[axes, ...]``."""
        n = len(self.sections)
        found = positions[0].unsqueeze(-1).repeat(*[1] * (positions.dim() - 1), sum(self.sections))
        # Slices with constant bounds, not an index tensor, which a CUDA graph could not copy to the device.
        for axis in range(1, n):
            start, end, step = sum(self.sections[:axis]), sum(self.sections[: axis + 1]), 1
            if self.order == "interleaved":
                start, end, step = axis, n * self.sections[axis], n
            elif self.order == "alternating":
                start, end, step = axis - 1, (n - 1) * self.sections[axis], n - 1
            found[..., start:end:step] = positions[axis].unsqueeze(-1)
        return found

    def reordered(self, frequencies: Tensor) -> Tensor:
        """Return the frequency of each channel pair, given those of a rope without axes, ``[pairs]``."""
        n, pairs = len(self.sections), sum(self.sections)
        if self.order == "ladders":
            return torch.cat([frequencies[:: pairs // section] for section in self.sections])
        if self.order == "even_odd":
            return torch.cat([frequencies[axis::n] for axis in range(n)])
        return frequencies
