"""How a model is trained: steps, rates and losses, as one value."""

import math
from dataclasses import dataclass

from .distillation import Objective

FINAL_RATE = 0.05  # of the peak rate


@dataclass(frozen=True, slots=True)
class Recipe:
    """``steps`` of ``batch`` sequences of ``context`` tokens, in all, with a learning rate whose peak is
    ``rate``.

    In the first ``layerwise`` of the steps attention layers learn by themselves, then end to end after
    ``objective``. The rate rises over ``warm_up`` of the steps and falls to FINAL_RATE of its peak as a
    cosine. A batch is computed in ``accumulate`` parts on each rank. ``decay`` is AdamW's, of matrices alone;
    ``clip`` the largest norm of a gradient. Each ``every`` steps, and at the end, the model is scored and its
    state saved. ``half`` computes in bf16 what bf16 is good enough for; weights stay as they are.
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
        """In how many steps attention layers learn by themselves."""
        return round(self.layerwise * self.steps)

    def rate_at(self, step: int) -> float:
        """The learning rate of the step that ``step`` others precede."""
        warm_up = max(1, round(self.warm_up * self.steps))
        if step < warm_up:
            return self.rate * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return self.rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))

    def progress(self, step: int) -> float:
        """From 0 to 1 through the steps end to end."""
        return (step - self.alone) / max(1, self.steps - self.alone)

    def is_point(self, step: int) -> bool:
        """Whether the model is scored and saved when it has taken ``step`` steps."""
        return step % self.every == 0 or step == self.steps
