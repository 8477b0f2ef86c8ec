"""Choose held-out text, which no calibration has used, to measure the loss of a conversion."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.errors import CheckpointError, RequestError
from ..stock import read_config
from .sample import held_out as rest_of_sample
from .tokens import tokenizer_of, tokens_of

WINDOWS, LENGTH = 8, 512
# MKL 2024.2 rounds products differently on different threads unless the row count is a multiple of 16.
STEP = 16
BEHIND = "the given text, after the calibration part"
SAMPLE = "the bundled sample's last fifth, which is held out"


class HeldOut(NamedTuple):
    """Tokens ``[windows, n]`` of a text, and a description of the text for the report."""

    tokens: Tensor
    text: str


def held_out(
    folder: Path, text: str | None = None, *, used: int = 0, windows: int = WINDOWS
) -> HeldOut | None:
    """Return up to ``windows`` windows of 512 tokens, made by the tokenizer in a checkpoint's folder.

    The tokens come from ``text``, after its first ``used`` tokens. Without a text, or if fewer than 16 tokens
    are left, they come from the held-out part of the bundled sample. Each window starts with the tokenizer's
    initial special token, if it has one. The result is None if the folder has no tokenizer, or if a
    token is not in the model's vocabulary.
    """
    config = read_config(folder).get_text_config()
    length = min(LENGTH, getattr(config, "max_position_embeddings", LENGTH)) // STEP * STEP
    try:
        first = _first(folder)
        for given, skipped, name in ((text, used, BEHIND), (rest_of_sample().decode(), 0, SAMPLE)):
            tokens = None if given is None else _behind(folder, given, skipped, windows * length)
            if tokens is None or not (cut := _windows(tokens, first, length)).numel():
                continue
            return HeldOut(cut, name) if cut.max() < config.vocab_size else None
    except CheckpointError:
        return None
    return None


def _behind(folder: Path, text: str, skipped: int, wanted: int) -> Tensor | None:
    """Return ``wanted`` tokens after the first ``skipped`` of a text; None if the text has no tokens."""
    try:
        return tokens_of(folder, text, samples=skipped + wanted, length=1)[skipped:, 0]
    except RequestError:  # the text has no tokens
        return None


def _windows(tokens: Tensor, first: int | None, length: int) -> Tensor:
    """Cut tokens into full windows, or into one shorter window if there are too few tokens."""
    begin = tokens.new_tensor([] if first is None else [first])
    length = min(length, (len(tokens) + len(begin)) // STEP * STEP)
    if not length:
        return tokens.new_empty(0, 0)
    count = len(tokens) // (length - len(begin))
    own = tokens[: count * (length - len(begin))].view(count, -1)
    return torch.cat((begin.expand(count, -1), own), 1)


def _first(folder: Path) -> int | None:
    """Return the special token that the tokenizer puts before every text; None if it adds none."""
    tokenizer = tokenizer_of(folder)
    with_special, plain = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    return None if with_special[: len(plain)] == plain else int(with_special[0])
