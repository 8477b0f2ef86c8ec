"""The training recipe: steps, learning rate and losses in one value."""

import math
from dataclasses import dataclass

from .distillation import Objective

FINAL_RATE = 0.05  # as a share of the peak rate


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training recipe: ``steps`` steps on ``batch`` sequences of ``context`` tokens, over all ranks.

    In the first ``layerwise`` share of the steps, each attention layer learns on its own; after that the
    model trains end to end with ``objective``. The learning rate rises over the ``warm_up`` share of the
    steps to its peak ``rate``, then falls as a cosine to ``FINAL_RATE`` times the peak. Each rank computes
    its batch in ``accumulate`` parts. ``decay`` is AdamW's weight decay, on matrices only; ``clip`` is the
    maximum gradient norm. Every ``every`` steps, and at the end, the model is scored and its state is saved.
    ``half`` computes under torch's bf16 autocast; weights keep their dtype.
    """

    steps: int
    batch: int
    context: int
    rate: float
    every: int
    layerwise: float = 0.0
    objective: Objective = "teacher"
    warm_up: float = 0.06
    decay: float = 0.0
    clip: float = 1.0
    accumulate: int = 1
    half: bool = False

    @property
    def alone(self) -> int:
        """The number of steps in which each attention layer learns on its own."""
        return round(self.layerwise * self.steps)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of step ``step``, counted from 0."""
        warm_up = max(1, round(self.warm_up * self.steps))
        if step < warm_up:
            return self.rate * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return self.rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))

    def progress(self, step: int) -> float:
        """Return the progress of the end-to-end steps, from 0 to 1."""
        return (step - self.alone) / max(1, self.steps - self.alone)

    def is_point(self, step: int) -> bool:
        """True if the model is scored and saved after ``step`` steps."""
        return step % self.every == 0 or step == self.steps
