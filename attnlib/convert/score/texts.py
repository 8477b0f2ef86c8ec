"""Read the texts of a score, and cut them into windows, which are padded to one length."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.errors import RequestError
from ..stock import read_config
from ..text.held_out import LENGTH, STEP, first_of
from ..text.mixture import Text
from ..text.sample import sample_texts
from ..text.tokens import first_tokens, read_text, require_counts, tokenizer_of


class ScoredWindows(NamedTuple):
    """Tokens ``[windows, n]``, how many of each window count, and the name of each window's text."""

    tokens: Tensor
    counts: tuple[int, ...]
    names: tuple[str, ...]


def scored_texts(paths: Sequence[Path]) -> list[Text]:
    """Read the texts to score: a text for each file; the files in a folder have the folder's name.

    Without paths, the texts are the held-out sources of the bundled sample. Files of equal name in different
    folders get a number.

    Raises:
        RequestError: a file cannot be read or is not UTF-8, or a folder has no files.
    """
    if not paths:
        return [Text(text.name, text.held_out or "") for text in sample_texts()]
    names = [path.name or str(path) for path in paths]
    texts = []
    for n, (path, name) in enumerate(zip(paths, names, strict=True), 1):
        name = f"{name} ({n})" if names.count(name) > 1 else name
        texts += [Text(name, read_text(file, "FILE")[0]) for file in _files(path)]
    return texts


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(x for x in path.iterdir() if x.is_file() and not x.name.startswith("."))
    if not files:
        raise RequestError(f"FILE: expected text files in the folder {path}, got none; name a file")
    return files


def scored_windows(folder: Path, texts: Sequence[Text], *, samples: int, length: int | None) -> ScoredWindows:
    """Return the first windows of each text, at most ``samples``, by the tokenizer of a checkpoint's folder.

    A window has ``length`` tokens; None means 512, or all positions of the model if it has fewer. It starts
    with the tokenizer's start token, if there is one. The last window of a text may be shorter.

    Raises:
        CheckpointError: the folder has no tokenizer.
        RequestError: ``samples`` or ``length`` is out of range, or a text has no token to predict.
    """
    most = getattr(read_config(folder).get_text_config(), "max_position_embeddings", None) or 2**31
    if length is None:
        length = min(LENGTH, most)
    require_counts(samples, length)
    if not 2 <= length <= most:
        raise RequestError(f"--length: expected 2 to {most} tokens (the model's positions), got {length}")
    tokenizer = tokenizer_of(folder)
    first = first_of(tokenizer)
    begin = torch.tensor([] if first is None else [first], dtype=torch.int64)
    own, windows, names = length - len(begin), [], []
    for text in texts:
        try:
            tokens = first_tokens(tokenizer, text.calibration, samples=samples * own, length=1).flatten()
        except RequestError:  # the text has no tokens
            tokens = begin[:0]
        cut = [torch.cat((begin, part)) for part in tokens.split(own)]
        cut = [window for window in cut if len(window) > 1]
        if not cut:
            raise RequestError(
                f"FILE: expected at least {2 - len(begin)} tokens in {text.name}, got {len(tokens)}; use a "
                "longer text"
            )
        windows += cut
        names += [text.name] * len(cut)
    return _padded(windows, names, most)


def _padded(windows: Sequence[Tensor], names: Sequence[str], most: int) -> ScoredWindows:
    """Pad windows at their end to the longest one; its length is a multiple of STEP if the model permits."""
    counts = tuple(map(len, windows))
    width = min(-(-max(counts) // STEP) * STEP, most)
    tokens = torch.stack([torch.nn.functional.pad(x, (0, width - len(x))) for x in windows])
    return ScoredWindows(tokens, counts, tuple(names))
