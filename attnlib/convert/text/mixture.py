"""Choose windows of several texts: some to calibrate on, and others, held out, to score on.

Texts of equal weight give equally many calibration windows, and they alternate: the first n windows hold
every text if n is at least the number of texts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.errors import RequestError
from .tokens import first_tokens, require_counts, tokenizer_of

SCORED = 4096  # hold out this many tokens of a text for scores, or
SHARE = 5  # the last fifth of a shorter text


class Text(NamedTuple):
    """A text with a name for reports: a kind of the bundled sample, or one of the user's files.

    ``held_out`` is a text of other sources. If it is None, the tokens of ``calibration`` that follow its
    calibration windows are held out. A text of ``weight`` 2 gives twice as many calibration windows.
    """

    name: str
    calibration: str
    held_out: str | None = None
    weight: int = 1


class Windows(NamedTuple):
    """Calibration windows ``[samples, length]``, and how many of them each text gave."""

    tokens: Tensor
    counts: tuple[int, ...]

    @property
    def used(self) -> tuple[int, ...]:
        """The tokens of each text that the windows used."""
        return tuple(count * self.tokens.shape[1] for count in self.counts)


def calibration_windows(folder: Path, texts: Sequence[Text], *, samples: int, length: int) -> Windows:
    """Return up to ``samples`` windows, taken from the texts in turn; short texts give fewer than others.

    Raises:
        RequestError, CheckpointError: as :func:`~attnlib.convert.text.tokens.tokens_of`; each text must
            have enough tokens for one window.
    """
    require_counts(samples, length)
    tokenizer = tokenizer_of(folder)
    cut = []
    for text in texts:
        try:
            cut.append(_windows(tokenizer, text, samples, length))
        except RequestError as error:
            raise error if len(texts) == 1 else RequestError(f"{error} (in {text.name})") from None
    order = turns([len(windows) for windows in cut], samples, [text.weight for text in texts])
    left = [iter(windows) for windows in cut]
    tokens = torch.stack([next(left[n]) for n in order])
    return Windows(tokens, tuple(order.count(n) for n in range(len(texts))))


def turns(most: Sequence[int], total: int, weights: Sequence[int] | None = None) -> list[int]:
    """Return the index of the text that gives each of ``total`` windows; text n has ``most[n]`` windows.

    In each round, all texts that have windows left give one, and then those of weight w another w - 1.
    """
    weights = [1] * len(most) if weights is None else weights
    one_round = [n for extra in range(max(weights)) for n, weight in enumerate(weights) if weight > extra]
    counts, order = [0] * len(most), []
    while left := [n for n in one_round if counts[n] < most[n]][: total - len(order)]:
        for n in left:
            if counts[n] < most[n]:
                counts[n] += 1
                order.append(n)
    return order


def joined(texts: Sequence[Text], passage: int) -> Text:
    """Return one text that has passages of ``passage`` characters of all calibration texts in turn."""
    cut = [[x.calibration[n : n + passage] for n in range(0, len(x.calibration), passage)] for x in texts]
    return Text("all", "".join(in_turn(cut)), "")


def _windows(tokenizer: Callable, text: Text, samples: int, length: int) -> Tensor:
    """Return the windows that a text can give, without the tokens to hold out."""
    held_out = SCORED if text.held_out is None else 0
    tokens = first_tokens(
        tokenizer, text.calibration, samples=samples * length + held_out, length=1
    ).flatten()
    if len(tokens) < length:  # raises with the length that is needed
        return first_tokens(tokenizer, text.calibration, samples=samples, length=length)
    usable = len(tokens) - min(held_out, len(tokens) // SHARE)
    count = min(samples, max(1, usable // length))
    return tokens[: count * length].view(count, length)


def in_turn(rows: Sequence[Sequence]) -> list:
    """Return the first items of all rows, then the second ones, and so on."""
    return [row[n] for n in range(max(map(len, rows))) for row in rows if n < len(row)]
