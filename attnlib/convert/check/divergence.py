"""How far two models are apart at some places of a text, summed over slices of the vocabulary."""

import torch
from torch import Tensor


class Divergence:
    """Sums over all words, of logits that come some words at a time.

    ``targets`` ``[n]`` are the words that follow; behind the end of a text there is none, which is -1.
    """

    def __init__(self, targets: Tensor):
        self.targets = targets
        self.largest: float = 0.0  # of the old logits
        self.difference: float = 0.0  # of old and new ones
        self._old, self._new, self._apart = _LogSum(), _LogSum(), torch.zeros(())
        self._said = torch.zeros(2, len(targets), dtype=torch.float64, device=targets.device)

    def add(self, first: int, old: Tensor, new: Tensor) -> None:
        """Logits ``[n, words]`` of the words from ``first`` on."""
        old, new = old.double(), new.double()
        apart = old - new
        self.largest = _larger(self.largest, old)
        self.difference = _larger(self.difference, apart)
        before = self._old.highest
        weights = self._old.add(old)
        shrunk = 0.0 if before is None else self._apart * (before - self._old.highest).exp()
        self._apart = shrunk + (weights * apart).sum(-1)
        self._new.add(new)
        here = (self.targets >= first) & (self.targets < first + old.shape[1])
        places = here.nonzero().squeeze(1)
        for said, logits in zip(self._said, (old, new), strict=True):
            said[places] = logits[places, self.targets[places] - first]

    def kl(self) -> Tensor:
        """The divergence of new from old at each place, in nats."""
        return self._apart / self._old.total - self._old.value() + self._new.value()

    def lost(self) -> Tensor:
        """Nats by which the old and the new model miss the words that follow: ``[2, places that have
        one]``.
        """
        sums = torch.stack((self._old.value(), self._new.value()))
        return (sums - self._said)[:, self.targets >= 0]


class _LogSum:
    """The logarithm of a sum of exponentials, relative to the highest so far."""

    def __init__(self):
        self.highest: Tensor | None = None
        self.total: Tensor = torch.zeros(())

    def add(self, x: Tensor) -> Tensor:
        """Add ``[n, words]``; returns what each adds to the total."""
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
    """The larger of a value and all ``abs(x)``; NaN if there is one."""
    return float(torch.maximum(x.new_tensor(value), x.abs().amax()))
