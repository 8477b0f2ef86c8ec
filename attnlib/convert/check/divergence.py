"""Compute how far two models' predictions differ, from logits of one vocabulary slice at a time."""

import torch
from torch import Tensor

LAST, PADDING = -1, -2  # targets of the last position of a text, and of positions after it


class Divergence:
    """KL divergence and cross-entropy of two models at n positions, added up over vocabulary slices.

    ``targets`` ``[n]`` are the next tokens. LAST marks a position at the end of a text, where no token
    follows. PADDING marks a position that no measure counts.
    """

    def __init__(self, targets: Tensor):
        self._counted = targets != PADDING
        targets = targets[self._counted]
        self.targets = targets
        self.largest: float = 0.0  # largest absolute logit of the old model
        self.difference: float = 0.0  # largest absolute difference between old and new logits
        self._old, self._new, self._weighted = _LogSum(), _LogSum(), torch.zeros(())
        self._target_logits = torch.zeros(2, len(targets), dtype=torch.float64, device=targets.device)

    def add(self, first: int, old: Tensor, new: Tensor) -> None:
        """Add both models' logits ``[n, words]`` for the slice of the vocabulary that starts at ``first``."""
        if not len(self.targets):
            return
        old, new = old[self._counted].double(), new[self._counted].double()
        gap = old - new
        self.largest = _larger(self.largest, old)
        self.difference = _larger(self.difference, gap)
        before = self._old.highest
        weights = self._old.add(old)
        shrunk = 0.0 if before is None else self._weighted * (before - self._old.highest).exp()
        self._weighted = shrunk + (weights * gap).sum(-1)
        self._new.add(new)
        here = (self.targets >= first) & (self.targets < first + old.shape[1])
        places = here.nonzero().squeeze(1)
        for target_logits, logits in zip(self._target_logits, (old, new), strict=True):
            target_logits[places] = logits[places, self.targets[places] - first]

    def kl(self) -> Tensor:
        """Return the KL divergence of the new model from the old one at each position, in nats."""
        return self._weighted / self._old.total - self._old.value() + self._new.value()

    def lost(self) -> Tensor:
        """Return ``[2, positions]``: both models' cross-entropy in nats where a next token exists."""
        sums = torch.stack((self._old.value(), self._new.value()))
        return (sums - self._target_logits)[:, self.targets >= 0]


class _LogSum:
    """A running log-sum-exp: the maximum so far, and the sum of exponentials relative to it."""

    def __init__(self):
        self.highest: Tensor | None = None
        self.total: Tensor = torch.zeros(())

    def add(self, x: Tensor) -> Tensor:
        """Add logits ``[n, words]`` and return their exponentials relative to the maximum so far."""
        highest = x.amax(-1)
        if self.highest is not None:
            highest = highest.maximum(self.highest)
            self.total = self.total * (self.highest - highest).exp()
        self.highest = highest
        parts = (x - highest[:, None]).exp()
        self.total = self.total + parts.sum(-1)
        return parts

    def value(self) -> Tensor:
        return self.highest + self.total.log()


def _larger(value: float, x: Tensor) -> float:
    """Return the larger of ``value`` and the maximum of ``abs(x)``; NaN if ``x`` contains a NaN."""
    return float(torch.maximum(x.new_tensor(value), x.abs().amax()))
