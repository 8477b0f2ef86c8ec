"""Compare the logits of two checkpoints on the same tokens, with one layer of one model in memory at a time.

After the last layer, the logits are computed for one slice of the vocabulary at a time. If a model type
cannot run layer by layer, the whole model is loaded, provided that it is small enough.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoint_files.folder import Checkpoint
from ..checkpoint.errors import CheckpointError
from ..stock import load_model
from ..text.freed import give_back
from ..text.layers import TextLayers, through
from ..text.workers import side_by_side
from .divergence import LAST, PADDING, Divergence
from .head import Head

WHOLE = 2 * 10**9  # a model with more bytes of weights is never loaded as a whole
WORDS, PLACES = 8192, 128  # each worker computes logits of this many tokens at this many positions
ROWS = 16  # convert the logits of only 16 positions at a time to fp64, to save memory
NONE = "none: the model has no head"
NOT_FINITE = "none: the source's logits are not finite"

Measures = dict[str, object]


class Outputs(NamedTuple):
    """The final hidden states ``[n, m]`` of each window, and the model's head."""

    states: list[Tensor]
    head: Head


def compare(
    old: Checkpoint,
    new: Checkpoint,
    tokens: Tensor,
    *,
    names: Sequence[str] = (),
    counts: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    advance: Callable[[], object] = lambda: None,
) -> Measures | str:
    """Measure how far the logits of ``new`` are from those of ``old``, in fp32.

    ``tokens`` is ``[windows, n]``. Return the largest logit of ``old``, the largest difference, the mean KL
    divergence, and both models' perplexities over each window's tokens after the first. If ``names`` has the
    name of each window's text, ``by_text`` has the same for each text, the largest divergence first. Only the
    first ``counts[i]`` tokens of window i count; the rest is padding. If there is nothing to compare, return
    the reason as a string. ``advance`` is called after each layer. On a CPU, results are bit-identical for
    any number of torch threads if n is a multiple of 16.

    Raises:
        CheckpointError: a weight is missing or has the wrong size, or a token has no embedding.
    """
    outputs = outputs_of((old, new), tokens, device=device, advance=advance)
    if isinstance(outputs, str):
        return outputs
    return measures_of(*outputs, tokens.to(device), names=names, counts=counts, device=device)


def outputs_of(
    checkpoints: Sequence[Checkpoint],
    tokens: Tensor,
    *,
    device: torch.device | str = "cpu",
    advance: Callable[[], object] = lambda: None,
) -> list[Outputs] | str:
    """Return the outputs of each model for ``tokens`` ``[windows, n]``, or the reason why there are none.

    Raises:
        CheckpointError: as :func:`compare`.
    """
    try:
        streams = [TextLayers(checkpoint, device) for checkpoint in checkpoints]
    except CheckpointError as error:
        size = max(sum(shard.size for shard in checkpoint.shards) for checkpoint in checkpoints)
        if size > WHOLE:
            return f"not compared: {error}; the model has {size:,} bytes, too many to load at once"
        outputs = [_whole(checkpoint, tokens, device) for checkpoint in checkpoints]
    else:
        outputs = [_streamed(layers, tokens, device, advance) for layers in streams]
    found = [x for x in outputs if x is not None]
    return found if len(found) == len(outputs) else NONE


def _streamed(
    layers: TextLayers, tokens: Tensor, device: torch.device | str, advance: Callable[[], object]
) -> Outputs | None:
    head = Head.of_checkpoint(layers.checkpoint, device)
    if head is None:
        return None
    states = layers.embedded(tokens)
    for index in range(len(layers)):
        with layers.layer(index) as layer, side_by_side(device) as workers:
            for n, x in enumerate(workers.map(partial(through, layer), states)):
                states[n] = x
        give_back()
        advance()
    norm = layers.load_norm()
    return Outputs([through(norm, x)[0] for x in states], head)


def _whole(checkpoint: Checkpoint, tokens: Tensor, device: torch.device | str) -> Outputs | None:
    seen = []
    model = load_model(checkpoint, dtype=torch.float32, device=device, allow_nonfinite=True)
    head = model.get_output_embeddings()
    if head is None:
        return None
    hook = head.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    with torch.no_grad():
        for window in tokens:
            model(window[None].to(device))
    hook.remove()
    return Outputs(seen, Head.of_model(model))


def measures_of(
    old: Outputs,
    new: Outputs,
    tokens: Tensor,
    *,
    names: Sequence[str] = (),
    counts: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Measures | str:
    """Return the measures of :func:`compare` from the outputs of two models over the same tokens."""
    by_window = [
        [[Divergence(some) for some in place.split(ROWS)] for place in row.split(PLACES)]
        for row in _targets(tokens, counts)
    ]
    places = [
        place
        for before, after, some in zip(old.states, new.states, by_window, strict=True)
        for place in zip(before.split(PLACES), after.split(PLACES), some, strict=True)
    ]
    for first in range(0, old.head.words, WORDS):
        for head in (old.head, new.head):
            head.take(first, min(first + WORDS, head.words))
        with side_by_side(device) as workers:
            list(workers.map(partial(_add, old.head, new.head, first), places))  # waits until all are done
        give_back()
    counted = [[x for some in window for x in some if len(x.targets)] for window in by_window]
    found = [divergence for window in counted for divergence in window]
    if not all(math.isfinite(divergence.largest) for divergence in found):
        return NOT_FINITE
    of_text: dict[str, list[Divergence]] = {name: [] for name in names}
    for name, window in zip(names, counted, strict=bool(names)):
        of_text[name] += window
    return {
        "tokens": tokens.numel() if counts is None else sum(counts),
        "largest_logit": max(divergence.largest for divergence in found),
        "largest_logit_difference": float(
            torch.tensor([divergence.difference for divergence in found]).double().max()
        ),
        **_means(found),
        **({"by_text": _by_text(of_text)} if names else {}),
    }


def _targets(tokens: Tensor, counts: Sequence[int] | None) -> Tensor:
    """Return the next token of each position in ``[windows, n]``; LAST or PADDING if none follows."""
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=LAST)
    for row, count in zip(targets, counts or (), strict=counts is not None):
        row[count - 1 :] = PADDING
        row[count - 1] = LAST
    return targets


def _by_text(of_text: Mapping[str, Sequence[Divergence]]) -> list[Measures]:
    """Return the measures of each text; the text with the largest KL divergence, or NaN, comes first."""
    rows = [{"name": name, **_means(found)} for name, found in of_text.items()]
    return sorted(rows, key=lambda row: row["kl_nats"] if math.isfinite(row["kl_nats"]) else math.inf)[::-1]


def _means(found: Sequence[Divergence]) -> dict[str, float | None]:
    lost = torch.cat([divergence.lost() for divergence in found], 1).mean(1)
    return {
        "kl_nats": float(torch.cat([divergence.kl() for divergence in found]).mean()),
        "perplexity_before": _perplexity(float(lost[0])),
        "perplexity_after": _perplexity(float(lost[1])),
    }


def _add(old: Head, new: Head, first: int, place: tuple[Tensor, Tensor, list[Divergence]]) -> None:
    x, y, found = place
    for divergence, before, after in zip(found, old(x).split(ROWS), new(y).split(ROWS), strict=True):
        divergence.add(first, before, after)


def _perplexity(nats: float) -> float | None:
    """Return ``exp(nats)``; None if that overflows or is NaN."""
    return math.exp(nats) if nats < 700 else None
