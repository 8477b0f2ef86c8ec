"""The options of ``python -m attnlib finetune``, validated."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ..convert.checkpoint.errors import RequestError
from .distillation import Objective
from .recipe import Recipe

Trained = Literal["attention", "all"]
Precision = Literal["bf16", "fp32"]
# Default peak learning rates, for all weights and for LoRA adapters. Larger models need lower rates, smaller
# models higher ones. For a model with 600,000 parameters, 3e-3 is best for the weights and 1e-2 for adapters.
RATE, LORA_RATE = 3e-4, 1e-3
# Students with index branches: the rates of DeepSeek-V3.2-Exp (DeepSeek-AI, 2025, arXiv 2512.02556), which
# warmed branches up in 1,000 steps of 16 sequences of 128k tokens, and then trained 15,000 steps of 480
# sequences over 2,048 chosen keys.
INDEX_RATE, SPARSE_RATE = 1e-3, 7.3e-6
POINTS = 8  # by default, the model is scored this many times during training
# Default numbers of steps. A step of a model with 135M weights takes about 40 s on two CPU cores.
STEPS = MappingProxyType({"cuda": 1000, "cpu": 200})
# A step takes at least as long as three forward passes over its batch: one of the teacher, and two for the
# student's forward and its backward through attention only. By default, scores take at most SHARE of the time
# of the steps, and read at most MOST windows.
PASSES, SHARE, MOST = 3, 0.1, 256
# Fields that do not identify every run: input files are identified by content, some change no result, and
# index_rate is added for students with index branches.
PLACES = ("source", "out", "teacher", "text", "quiet", "tensorboard", "index_rate", "keys")


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of ``python -m attnlib finetune`` by name; the command's help explains each of them."""

    source: Path
    out: Path
    teacher: Path
    text: tuple[Path, ...]
    steps: int | None = None
    batch: int = 8
    context: int = 512
    rate: float | None = None
    index_rate: float | None = None
    # Bits per byte of a GQA student after training (tiny preset of examples/finetune_gqa.py, learning rate
    # 1e-3). The student starts at 2.778, and the original has 2.122.
    #                  layerwise=0.5   layerwise=0.1
    #     300 steps    2.147           2.155
    #     1,000 steps  2.132           2.135
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
    windows: int | None = None
    seed: int = 0
    device: str = "cpu"
    tensorboard: bool = False
    quiet: bool = False
    keys: int | None = None  # how many keys the index branches of the source choose; no option

    def check(self) -> None:
        """Raise RequestError for an invalid option; the message names it."""
        for name in ("steps", "batch", "context", "accumulate", "windows", "lora", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{option(name)}: expected a positive count, got {value}")
        for name in ("rate", "index_rate", "clip"):
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
        """Raise RequestError unless a batch can be split evenly into ``ranks * accumulate`` parts."""
        parts = ranks * self.accumulate
        if self.batch % parts:
            raise RequestError(
                f"--batch: expected a multiple of {parts}, the ranks ({ranks}) times --accumulate, got "
                f"{self.batch}"
            )

    def check_branches(self) -> None:
        """Raise RequestError if an option does not fit a source with index branches, or one without."""
        if self.keys is None and self.index_rate is not None:
            raise RequestError(
                f"--index-rate: expected index branches in {self.source}, got none; add them with convert "
                "--select, or leave it out"
            )
        if self.keys is not None and self.lora is not None:
            raise RequestError("--lora: expected none for index branches, which train whole; leave it out")
        if self.keys is not None and self.context <= self.keys:
            raise RequestError(
                f"--context: expected more than the {self.keys} keys that index branches choose, got "
                f"{self.context}; use for example {4 * self.keys}"
            )

    @property
    def half(self) -> bool:
        """True if matrices are multiplied in bf16, the default on a GPU."""
        return self.precision == "bf16" if self.precision is not None else self.device == "cuda"

    @property
    def scored_windows(self) -> int:
        """The number of held-out windows per score."""
        if self.windows is not None:
            return self.windows
        recipe = self.recipe
        # Also of the original, the start and the written result, and of that with a window of keys.
        scores = 3 + (self.keys is not None) + -(-recipe.steps // recipe.every)
        return max(1, min(MOST, int(SHARE * PASSES * recipe.steps * recipe.batch / scores)))

    @property
    def recipe(self) -> Recipe:
        """The training recipe for these options."""
        steps = STEPS[self.device] if self.steps is None else self.steps
        rate, index_rate = LORA_RATE if self.lora else RATE, None
        if self.keys is not None:
            rate, index_rate = SPARSE_RATE, self.index_rate or INDEX_RATE
        return Recipe(
            steps,
            self.batch,
            self.context,
            self.rate or rate,
            self.save_every or -(-steps // POINTS),
            layerwise=self.layerwise,
            objective=self.objective,
            warm_up=self.warm_up,
            decay=self.decay,
            clip=self.clip,
            accumulate=self.accumulate,
            half=self.half,
            index_rate=index_rate,
        )

    def identity(self) -> dict[str, object]:
        """Return the options that affect the trained weights, with defaults filled in, as plain JSON data."""
        options = {name: value for name, value in asdict(self).items() if name not in PLACES}
        recipe = self.recipe
        branches = {} if self.keys is None else {"index_rate": recipe.index_rate}
        return (
            options
            | branches
            | {
                "steps": recipe.steps,
                "windows": self.scored_windows,
                "rate": recipe.rate,
                "save_every": recipe.every,
                "precision": "bf16" if self.half else "fp32",
            }
        )


def option(name: str) -> str:
    """Return the command-line spelling of an option, such as ``--warm-up`` for ``warm_up``."""
    return f"--{name.replace('_', '-')}"
