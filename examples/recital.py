"""A small model that knows a real text by heart: the beginning of a module of Python's standard library.

A byte model as small as these writes nothing sensible, and at temperature 0 soon repeats one word. What forks
share and what a draft guesses right is better seen on a real text. So the model learns one until it recites
it. In ``bisect`` one function is much like the next, and a reader of the first can guess some of the others.
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

LENGTH = 2048  # bytes of the text
PROMPT = 1024  # of them a prompt
LEARNING = {"layers": 2, "batch": 1, "steps": 200, "learning_rate": 4e-3}


def load_text(path: Path = Path(bisect.__file__)) -> Tensor:
    """The first bytes of a file, as tokens ``[t]`` int64.

    Raises:
        ValueError: the file is too short.
    """
    data = path.read_bytes()[:LENGTH]
    if len(data) <= PROMPT:
        raise ValueError(f"text: expected more than {PROMPT} bytes, got {len(data)} ({path})")
    return byte_tokens(data).long()


def load_or_learn(variant: str, text: Tensor, folder: Path, device: torch.device) -> Decoder:
    """The model in ``folder`` that knows this text; if it is not there, it learns the text and is kept
    there.
    """
    digest = hashlib.sha256(bytes(text.tolist())).hexdigest()[:8]
    path = folder / f"{variant}-by-heart-{digest}.safetensors"
    if not path.exists():
        print(
            f"a small {variant} model learns {len(text):,} bytes by heart first, and is kept in {path}",
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
    """Show the whole text to the model once a step; returns the loss of each in bits per byte."""

    def shown() -> Iterator[Tensor]:
        for _ in range(preset.steps):
            yield text[None]

    options = {"steps": preset.steps, "rate": preset.learning_rate, "label": label}
    losses = optimise(make_optimizer(model), lambda tokens, _: text_bits(model, tokens), shown(), **options)
    return torch.stack(list(losses)).tolist()
