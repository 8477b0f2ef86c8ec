"""Tokens that no calibration has seen, to say on them what a conversion lost."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.errors import CheckpointError, RequestError
from ..stock import read_config
from .sample import held_out as rest_of_sample
from .tokens import tokenizer_of, tokens_of

WINDOWS, LENGTH = 8, 512
STEP = 16  # products of other numbers of rows have bits that differ from thread to thread (MKL 2024.2)
BEHIND = "the given text, behind what calibrated"
SAMPLE = "the bundled sample's last fifth, which calibrates nothing"


class HeldOut(NamedTuple):
    """Windows ``[windows, n]`` of a text, and which text that is."""

    tokens: Tensor
    text: str


def held_out(
    folder: Path, text: str | None = None, *, used: int = 0, windows: int = WINDOWS
) -> HeldOut | None:
    """Up to so many ``windows`` of 512 tokens, by the tokenizer in a checkpoint's folder.

    They are those of ``text`` behind its first ``used`` tokens, and the bundled sample's where that has too
    few left for one window of 16, or there is no text. Each window begins with the token that the tokenizer
    puts before every text, if it does. None: the folder has no tokenizer, or one that is not its model's.
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
    """Some tokens of a text behind its first ones."""
    try:
        return tokens_of(folder, text, samples=skipped + wanted, length=1)[skipped:, 0]
    except RequestError:  # none at all
        return None


def _windows(tokens: Tensor, first: int | None, length: int) -> Tensor:
    """As many windows of ``length`` as there are tokens for, or one that is shorter; of none ``[0, 0]``."""
    begin = tokens.new_tensor([] if first is None else [first])
    length = min(length, (len(tokens) + len(begin)) // STEP * STEP)
    if not length:
        return tokens.new_empty(0, 0)
    count = len(tokens) // (length - len(begin))
    own = tokens[: count * (length - len(begin))].view(count, -1)
    return torch.cat((begin.expand(count, -1), own), 1)


def _first(folder: Path) -> int | None:
    """The token before every text, if there is one."""
    tokenizer = tokenizer_of(folder)
    said, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    return None if said[: len(plain)] == plain else int(said[0])
