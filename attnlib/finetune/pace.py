"""Measure how fast a process trains, for the report of a run."""

from dataclasses import dataclass, field
from time import monotonic

import torch


@dataclass(slots=True)
class Pace:
    """The time since a run started in this process, and the steps it has taken with their tokens and time."""

    begun: float = field(default_factory=monotonic)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, since: float) -> None:
        """Count a step of ``tokens`` tokens over all ranks, which started at the time ``since``."""
        self.steps += 1
        self.tokens += tokens
        self.seconds += monotonic() - since

    def report(self, device: torch.device, ranks: int) -> dict[str, object]:
        """Return the entry ``run`` of the report; a resumed run counts only its last process."""
        return {
            "seconds": round(monotonic() - self.begun, 3),
            "steps": self.steps,
            "step_seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else None,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "ranks": ranks,
        }
