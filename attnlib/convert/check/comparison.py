"""Compare the logits of two checkpoints on the same tokens, with one layer of one model in memory at a time.

After the last layer, the logits are computed for one slice of the vocabulary at a time. If a model type
cannot run layer by layer, the whole model is loaded, provided that it is small enough.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ...checkpoint_files.folder import Checkpoint
from ..checkpoint.errors import CheckpointError
from ..stock import load_model
from ..text.freed import give_back
from ..text.layers import TextLayers, through
from ..text.workers import side_by_side
from .divergence import Divergence
from .head import Head

WHOLE = 2 * 10**9  # a model with more bytes of weights is never loaded as a whole
WORDS, PLACES = 8192, 128  # each worker computes logits of this many tokens at this many positions
ROWS = 16  # convert the logits of only 16 positions at a time to fp64, to save memory
NONE = "none: the model has no head"

Measures = dict[str, object]
Outputs = tuple[list[Tensor], Head]  # the final hidden states [n, m] of each window, and the model's head


def compare(
    old: Checkpoint,
    new: Checkpoint,
    tokens: Tensor,
    *,
    names: Sequence[str] = (),
    device: torch.device | str = "cpu",
    advance: Callable[[], object] = lambda: None,
) -> Measures | str:
    """Measure how far the logits of ``new`` are from those of ``old``, in fp32.

    ``tokens`` is ``[windows, n]``. Return the largest logit of ``old``, the largest difference, the mean KL
    divergence, and both models' perplexities over each window's tokens after the first. If ``names`` has the
    name of each window's text, ``by_text`` has the same for each text, the largest divergence first. If there
    is nothing to compare, return the reason as a string. ``advance`` is called after each layer. On a CPU,
    results are bit-identical for any number of torch threads if n is a multiple of 16.

    Raises:
        CheckpointError: a weight is missing or has the wrong size, or a token has no embedding.
    """
    try:
        streams = [TextLayers(checkpoint, device) for checkpoint in (old, new)]
    except CheckpointError as error:
        size = max(sum(shard.size for shard in checkpoint.shards) for checkpoint in (old, new))
        if size > WHOLE:
            return f"not compared: {error}; the model has {size:,} bytes, too many to load at once"
        outputs = [_whole(checkpoint, tokens, device) for checkpoint in (old, new)]
    else:
        outputs = [_streamed(layers, tokens, device, advance) for layers in streams]
    if None in outputs:
        return NONE
    return _measures(outputs[0], outputs[1], tokens.to(device), names, device)


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
    return [through(norm, x)[0] for x in states], head


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
    return seen, Head.of_model(model)


def _measures(
    old: Outputs, new: Outputs, tokens: Tensor, names: Sequence[str], device: torch.device | str
) -> Measures | str:
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-1)
    cut = [[x for window in states for x in window.split(PLACES)] for states in (old[0], new[0], targets)]
    places = [
        (x, y, [Divergence(some) for some in words.split(ROWS)]) for x, y, words in zip(*cut, strict=True)
    ]
    for first in range(0, old[1].words, WORDS):
        for head in (old[1], new[1]):
            head.take(first, min(first + WORDS, head.words))
        with side_by_side(device) as workers:
            list(workers.map(partial(_add, old[1], new[1], first), places))  # waits until all are done
        give_back()
    found = [divergence for _, _, some in places for divergence in some]
    if not all(math.isfinite(divergence.largest) for divergence in found):
        return "none: the source's logits are not finite"
    of_text: dict[str, list[Divergence]] = {name: [] for name in names}
    per_window = len(found) // len(tokens)
    for n, name in enumerate(names):
        of_text[name] += found[n * per_window : (n + 1) * per_window]
    return {
        "tokens": tokens.numel(),
        "largest_logit": max(divergence.largest for divergence in found),
        "largest_logit_difference": float(
            torch.tensor([divergence.difference for divergence in found]).double().max()
        ),
        **_means(found),
        **({"by_text": _by_text(of_text)} if names else {}),
    }


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
