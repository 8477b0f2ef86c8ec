"""What ``python -m attnlib finetune`` is asked for, and whether that can be meant."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ..convert.checkpoint.errors import RequestError
from .distillation import Objective
from .recipe import Recipe

Trained = Literal["attention", "all"]
Precision = Literal["bf16", "fp32"]
# Larger models want less and small ones more: one of 600,000 parameters learns best at 3e-3, adapters of it
# at 1e-2.
RATE, LORA_RATE = 3e-4, 1e-3
POINTS = 8  # on the curve, unless told otherwise
PLACES = ("source", "out", "teacher", "text", "quiet", "tensorboard")  # what decides no number


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of the command, by their names; its help says what each is."""

    source: Path
    out: Path
    teacher: Path
    text: tuple[Path, ...]
    steps: int = 1000
    batch: int = 8
    context: int = 512
    rate: float | None = None
    # With 300 steps 2.147 bits a byte, and 2.155 with a share of 0.1; with 1,000 2.132 and 2.135; all at
    # 1e-3, of a GQA model that starts at 2.778, of an original of 2.122 (tiny preset of
    # examples/finetune_gqa.py).
    layerwise: float = 0.5
    objective: Objective = "teacher"
    train: Trained = "attention"
    lora: int | None = None
    accumulate: int = 1
    warm_up: float = 0.06
    clip: float = 1.0
    decay: float = 0.0
    precision: Precision | None = None
    checkpointing: bool = False
    save_every: int | None = None
    windows: int = 256
    seed: int = 0
    device: str = "cpu"
    tensorboard: bool = False
    quiet: bool = False

    def check(self) -> None:
        """Raises RequestError for an option that cannot be meant, and its name."""
        for name in ("steps", "batch", "context", "accumulate", "windows", "lora", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{option(name)}: expected a positive count, got {value}")
        for name in ("rate", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(f"{option(name)}: expected a positive number, got {value}")
        if not 0 <= self.decay < math.inf:
            raise RequestError(f"--decay: expected a number of at least 0, got {self.decay}")
        for name in ("layerwise", "warm_up"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise RequestError(f"{option(name)}: expected a share of the steps from 0 to 1, got {value}")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"--seed: expected an integer from 0 to 2^63 - 1, got {self.seed}")
        if not self.text:
            raise RequestError("--text: expected a file, got none")

    def check_parts(self, ranks: int) -> None:
        """Raises RequestError where so many ranks cannot share a batch."""
        parts = ranks * self.accumulate
        if self.batch % parts:
            raise RequestError(
                f"--batch: expected a multiple of {parts}, the ranks ({ranks}) times --accumulate, got "
                f"{self.batch}"
            )

    @property
    def half(self) -> bool:
        """Whether matrices are multiplied in bf16: by default on a GPU."""
        return self.precision == "bf16" if self.precision is not None else self.device == "cuda"

    @property
    def recipe(self) -> Recipe:
        """How the student is trained."""
        return Recipe(
            self.steps,
            self.batch,
            self.context,
            self.rate or (LORA_RATE if self.lora else RATE),
            self.save_every or -(-self.steps // POINTS),
            layerwise=self.layerwise,
            objective=self.objective,
            warm_up=self.warm_up,
            decay=self.decay,
            clip=self.clip,
            accumulate=self.accumulate,
            half=self.half,
        )

    def identity(self) -> dict[str, object]:
        """Of the options all that decides a number, as plain JSON, with what they are by default."""
        told = {name: value for name, value in asdict(self).items() if name not in PLACES}
        recipe = self.recipe
        return told | {
            "rate": recipe.rate,
            "save_every": recipe.every,
            "precision": "bf16" if self.half else "fp32",
        }


def option(name: str) -> str:
    """An option as it is written."""
    return f"--{name.replace('_', '-')}"
