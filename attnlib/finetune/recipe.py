"""The training recipe: steps, learning rate and losses in one value."""

import math
from dataclasses import dataclass

from .distillation import Objective

FINAL_RATE = 0.05  # the final learning rate, as a fraction of the peak


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training recipe: ``steps`` steps on ``batch`` sequences of ``context`` tokens, over all ranks.

    ``layerwise`` is the fraction of steps, at the start, in which each attention layer learns on its own;
    after that the model trains end to end with ``objective``. ``warm_up`` is the fraction of steps in which
    the learning rate rises to its peak ``rate``; then it falls as a cosine to ``FINAL_RATE`` times the peak.
    Each rank splits its batch into ``accumulate`` parts, and adds up their gradients. ``decay`` is AdamW's
    weight decay, on matrices only; ``clip`` is the maximum gradient norm. Every ``every`` steps, and at the
    end, the model is scored and its state is saved. ``half`` computes under torch's bf16 autocast; weights
    keep their dtype.

    With an ``index_rate``, the student has index branches, and only they learn in the ``layerwise`` fraction
    of steps. Each of the two stages then has a learning rate that rises and falls, with ``index_rate`` as the
    peak of the first.
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
    index_rate: float | None = None

    @property
    def alone(self) -> int:
        """The number of steps in which each attention layer learns on its own."""
        return round(self.layerwise * self.steps)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step; steps count from 0."""
        if self.index_rate is None:
            return self._rate_in_stage(step, self.steps, self.rate)
        if step < self.alone:
            return self._rate_in_stage(step, self.alone, self.index_rate)
        return self._rate_in_stage(step - self.alone, self.steps - self.alone, self.rate)

    def _rate_in_stage(self, step: int, steps: int, rate: float) -> float:
        """Return the learning rate of a step in a stage of ``steps`` steps with peak ``rate``."""
        warm_up = max(1, round(self.warm_up * steps))
        if step < warm_up:
            return rate * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, steps - warm_up)
        return rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))

    def progress(self, step: int) -> float:
        """Return how far end-to-end training has come at ``step``, from 0 at its start to 1 at its end."""
        return (step - self.alone) / max(1, self.steps - self.alone)

    def is_point(self, step: int) -> bool:
        """True if the model is scored and saved after ``step`` steps."""
        return step % self.every == 0 or step == self.steps
