"""Score a result against its source on windows of text."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint_files.folder import COPIED, Checkpoint
from ..check.comparison import NOT_FINITE, Measures, Outputs, compare, measures_of, outputs_of
from ..checkpoint.errors import CheckpointError, RequestError, VerificationError
from ..stock import read_config
from ..text.tokens import tokens_of
from .cached import cached_outputs
from .stores import Store
from .texts import ScoredWindows

COMPARED = 1024  # both tokenizers must agree on this many characters of a text
Advance = Callable[[], object]


def require_pair(source: Checkpoint, result: Checkpoint, text: str) -> None:
    """Raise CheckpointError unless both models have one vocabulary, and the same tokens for ``text``."""
    expected, got = (getattr(read_config(x).get_text_config(), "vocab_size", None) for x in (source, result))
    if expected != got:
        raise CheckpointError(
            f"RESULT: expected vocab_size {expected} as in SOURCE, got {got}; as SOURCE, name the "
            "folder that RESULT was converted from"
        )
    start = text[:COMPARED]
    if start and all(_has_tokenizer(x.folder) for x in (source, result)):
        count = len(start.encode())
        try:
            found = [tokens_of(x.folder, start, samples=count, length=1) for x in (source, result)]
        except RequestError:  # no token, which scored_windows refuses
            return
        if not torch.equal(*found):
            raise CheckpointError(
                "RESULT: expected a tokenizer with the tokens of SOURCE, got other tokens for the same text; "
                "as SOURCE, name the folder that RESULT was converted from"
            )


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in COPIED if "token" in name or "vocab" in name)


def scored(
    source: Checkpoint,
    result: Checkpoint,
    windows: ScoredWindows,
    *,
    store: Store | None = None,
    device: torch.device | str = "cpu",
    follow_links: bool = False,
    advance: Advance = lambda: None,
) -> Measures:
    """Return the measures of :func:`~attnlib.convert.check.comparison.compare` for each text.

    With a ``store``, the result reads its keys and values from a cache that stores them so.

    Raises:
        CheckpointError: a model cannot be run, has no head or gives logits that are not finite.
        VerificationError: the logits of the result are not finite.
        RequestError: the result has no paged cache.
    """
    options = {"names": windows.names, "counts": windows.counts, "device": device}
    if store is None:
        return complete(compare(source, result, windows.tokens, **options, advance=advance))
    before = outputs_before(source, windows.tokens, device=device, advance=advance)
    after = cached_outputs(
        result.folder, windows.tokens, store, device=device, follow_links=follow_links, advance=advance
    )
    return measured(before, after, windows, device=device)


def outputs_before(
    source: Checkpoint, tokens: Tensor, *, device: torch.device | str, advance: Advance
) -> Outputs:
    """Return the outputs of the source, which several results may be compared with.

    Raises:
        CheckpointError: the model cannot be run, or has no head.
    """
    outputs = outputs_of([source], tokens, device=device, advance=advance)
    if isinstance(outputs, str):
        raise CheckpointError(_reason("SOURCE", outputs))
    return outputs[0]


def measured(
    before: Outputs, after: Outputs | str, windows: ScoredWindows, *, device: torch.device | str
) -> Measures:
    """Return the measures of two models' outputs for the same windows.

    Raises:
        CheckpointError, VerificationError: as :func:`scored`.
    """
    if isinstance(after, str):
        raise CheckpointError(_reason("RESULT", after))
    tokens = windows.tokens.to(device)
    return complete(
        measures_of(before, after, tokens, names=windows.names, counts=windows.counts, device=device)
    )


def complete(measures: Measures | str) -> Measures:
    """Return the measures if there are any, and all are numbers; raise an error otherwise."""
    if isinstance(measures, str):
        raise CheckpointError(_reason("SOURCE" if measures == NOT_FINITE else "RESULT", measures))
    rows = [measures, *measures["by_text"]]
    if wrong := [row.get("name", "all texts") for row in rows if not math.isfinite(row["kl_nats"])]:
        raise VerificationError(
            f"RESULT: expected finite logits, got NaN or infinity on {wrong[-1]}; convert the source again"
        )
    return measures


def _reason(what: str, reason: str) -> str:
    reason = reason.removeprefix("none: ").removeprefix("not compared: ")
    return f"{what}: expected a language model with finite logits, but {reason}"
