"""Held-out tokens: text that no calibration has seen, to measure what a conversion lost."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.errors import CheckpointError, RequestError
from ..stock import read_config
from .sample import held_out as rest_of_sample
from .tokens import tokenizer_of, tokens_of

WINDOWS, LENGTH = 8, 512
# Matrix products whose row count is not a multiple of 16 have bits that differ between threads (MKL 2024.2).
STEP = 16
BEHIND = "the given text, after the calibration part"
SAMPLE = "the bundled sample's last fifth, which is held out"


class HeldOut(NamedTuple):
    """Windows ``[windows, n]`` of a text, and a description of that text for the report."""

    tokens: Tensor
    text: str


def held_out(
    folder: Path, text: str | None = None, *, used: int = 0, windows: int = WINDOWS
) -> HeldOut | None:
    """Return up to ``windows`` windows of 512 tokens, by the tokenizer in a checkpoint's folder.

    They come from ``text`` after its first ``used`` tokens. The held-out part of the bundled sample is used
    if there is no text, or if it has too few tokens left for one window of 16. Each window starts with the
    tokenizer's initial special token, if it has one. The result is None if the folder has no tokenizer, or if
    the tokenizer does not match the model's vocabulary.
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
    """Return some tokens of a text after the first ``skipped``; None if the text has no tokens."""
    try:
        return tokens_of(folder, text, samples=skipped + wanted, length=1)[skipped:, 0]
    except RequestError:  # not a single token
        return None


def _windows(tokens: Tensor, first: int | None, length: int) -> Tensor:
    """Return as many full windows as there are tokens for, else one shorter window, else ``[0, 0]``."""
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
