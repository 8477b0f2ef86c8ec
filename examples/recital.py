"""A small model that memorizes a real text: the beginning of a module of Python's standard library.

A byte model this small writes nothing sensible, and at temperature 0 it soon repeats one word. Real text
shows better how forks share a prompt and how many guessed tokens are right, so the model trains on one text
until it can recite it. The text is ``bisect``, whose functions resemble each other: a reader of the first one
can guess parts of the next.
"""

import bisect
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
import variants
from decoder import Decoder
from text import byte_tokens
from torch import Tensor
from training import make_optimizer, optimise, text_bits
from variants import PRESETS, Preset

LENGTH = 2048  # length of the text in bytes
PROMPT = 1024  # length of the prompt in bytes
LEARNING = {"layers": 2, "batch": 1, "steps": 200, "learning_rate": 4e-3}


def load_text(path: Path = Path(bisect.__file__)) -> Tensor:
    """Return the first LENGTH bytes of a file, as tokens ``[t]`` int64.

    Raises:
        ValueError: the file is too short.
    """
    data = path.read_bytes()[:LENGTH]
    if len(data) <= PROMPT:
        raise ValueError(f"text: expected more than {PROMPT} bytes, got {len(data)} ({path})")
    return byte_tokens(data).long()


def load_or_learn(variant: str, text: Tensor, folder: Path, device: torch.device) -> Decoder:
    """Load the model that memorized this text from ``folder``; if it is missing, train and save it first."""
    digest = hashlib.sha256(bytes(text.tolist())).hexdigest()[:8]
    path = folder / f"{variant}-by-heart-{digest}.safetensors"
    if not path.exists():
        print(
            f"a small {variant} model memorizes {len(text):,} bytes first, and is saved to {path}",
            flush=True,
        )
        preset = PRESETS["tiny"]._replace(context=len(text) - 1, **LEARNING)
        torch.manual_seed(0)
        model = variants.make_model(variant, preset).to(device)
        learn(model, text, preset, label=variant.upper())
        folder.mkdir(parents=True, exist_ok=True)
        variants.save(model, variant, preset, path)
    return variants.load(path, device=device)[0]


def learn(model: Decoder, text: Tensor, preset: Preset, *, label: str) -> list[float]:
    """Train on the whole text in every step; return the loss of each step in bits per byte."""

    def shown() -> Iterator[Tensor]:
        for _ in range(preset.steps):
            yield text[None]

    options = {"steps": preset.steps, "rate": preset.learning_rate, "label": label}
    losses = optimise(make_optimizer(model), lambda tokens, _: text_bits(model, tokens), shown(), **options)
    return torch.stack(list(losses)).tolist()
