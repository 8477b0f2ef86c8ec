"""Choose held-out text, which no calibration has used, to measure the loss of a conversion."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.errors import CheckpointError, RequestError
from ..stock import read_config
from .mixture import Text
from .sample import sample_texts
from .tokens import first_tokens, tokenizer_of

WINDOWS, LENGTH = 8, 512
# MKL 2024.2 rounds products differently on different threads unless the row count is a multiple of 16.
STEP = 16
FEWEST = 64  # of several texts, those with fewer tokens are not scored: all windows have the same length
BEHIND = "the given text, after the calibration part"
SAMPLE = "the held-out sources of the bundled sample"


class HeldOut(NamedTuple):
    """Tokens ``[windows, n]`` of texts, a description for the report, and the name of each window's text.

    ``names`` is empty if all windows are from one text.
    """

    tokens: Tensor
    text: str
    names: tuple[str, ...] = ()


def held_out(
    folder: Path,
    texts: Sequence[Text] = (),
    *,
    used: Sequence[int] | None = None,
    windows: int = WINDOWS,
) -> HeldOut | None:
    """Return windows with up to ``windows`` * 512 tokens, made by the tokenizer in a checkpoint's folder.

    The tokens come from each of ``texts`` in equal shares, after its first tokens, as many as ``used`` says.
    Without texts, or if fewer than 16 tokens are left, they come from the held-out sources of the bundled
    sample. With more texts than ``windows``, each window is shorter. Each window starts with the tokenizer's
    initial special token, if it has one. The result is None if the folder has no tokenizer, or if a token is
    not in the model's vocabulary.
    """
    config = read_config(folder).get_text_config()
    length = min(LENGTH, getattr(config, "max_position_embeddings", LENGTH)) // STEP * STEP
    try:
        tokenizer = tokenizer_of(folder)
    except CheckpointError:
        return None
    first, sample = first_of(tokenizer), [Text(x.name, x.held_out or "") for x in sample_texts()]
    for given, skipped, name in ((texts, used, BEHIND), (sample, None, SAMPLE)):
        skipped = [0] * len(given) if skipped is None else skipped
        rests = [
            _behind(tokenizer, text.calibration, skip, windows * length)
            for text, skip in zip(given, skipped, strict=True)
        ]
        cut = _windows(rests, first, length, windows * length)
        if any(rows.numel() for rows in cut):
            tokens = torch.cat([rows for rows in cut if rows.numel()])
            names = [text.name for text, rows in zip(given, cut, strict=True) for _ in rows]
            names = tuple(names) if len(given) > 1 else ()
            return HeldOut(tokens, name, names) if tokens.max() < config.vocab_size else None
    return None


def _behind(tokenizer: Callable, text: str, skipped: int, wanted: int) -> Tensor:
    """Return up to ``wanted`` tokens after the first ``skipped`` of a text."""
    try:
        return first_tokens(tokenizer, text, samples=skipped + max(wanted, 1), length=1)[skipped:, 0]
    except RequestError:  # the text has no tokens
        return torch.empty(0, dtype=torch.int64)


def _windows(rests: Sequence[Tensor], first: int | None, length: int, budget: int) -> list[Tensor]:
    """Cut equal shares of ``budget`` tokens of each text into windows of one length.

    The length is at most ``length``, the share of a text, and the shortest text. Texts that are too short
    give no windows.
    """
    begin = torch.tensor([] if first is None else [first], dtype=torch.int64)
    fewest = FEWEST if len(rests) > 1 else 1
    lengths = [len(x) + len(begin) for x in rests if len(x) >= fewest]
    share = max(STEP, budget // max(1, len(lengths)))
    length = min(length, share, *lengths) // STEP * STEP if lengths else 0
    if not length:
        return [begin.new_empty(0, 0) for _ in rests]
    own, cut = length - len(begin), []
    for tokens in rests:
        count = min(share // length, len(tokens) // own) if len(tokens) >= fewest else 0
        cut.append(torch.cat((begin.expand(count, -1), tokens[: count * own].view(count, own)), 1))
    return cut


def first_of(tokenizer: Callable) -> int | None:
    """Return the special token that the tokenizer puts before every text; None if it adds none."""
    with_special, plain = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    return None if with_special[: len(plain)] == plain else int(with_special[0])
