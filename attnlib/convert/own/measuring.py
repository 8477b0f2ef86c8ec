"""Measure the loss of each layer at smaller sizes, and the effect on the model if only one layer shrinks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...internal.bars import steps
from ..check.divergence import Divergence
from ..check.head import Head
from ..checkpoint.errors import CheckpointError
from ..checkpoint.layer import ConvertedLayer
from ..checkpoint.plan import weights_of
from ..stock import read_config
from ..text.freed import give_back
from ..text.layers import TextLayers, through
from ..text.workers import side_by_side
from .kind import Kind, Measured

TOKENS = 512  # measure on this many tokens, or fewer if their hidden states would exceed ROOM
ROOM = 2**30  # memory for hidden states, in bytes
WORDS, PLACES = 8192, 128  # compute logits of this many vocabulary entries and positions at a time

States = list[Tensor]  # hidden states [1, length, m] of each window
BySize = list[dict[int, float]]  # one dict for each layer, from size to value


class Found(NamedTuple):
    """The losses of each layer at every possible size, and the effect of each layer on the whole model.

    ``nats`` holds the KL divergence from the source model, in nats per token, of models in which only one
    layer is converted. It is None if there was no text to run.
    """

    losses: BySize
    nats: BySize | None


def losses_alone(kind: Kind, advance: Callable[[], object] = lambda: None) -> Found:
    """Measure the losses of each layer without a text; ``advance`` is called after each layer."""
    losses = []
    for index in kind.model.layers:
        losses.append(_measured(kind, index, ()).losses)
        give_back()
        advance()
    return Found(losses, None)


def found_on(
    kind: Kind,
    sizes: Sequence[Sequence[int]],
    tokens: Tensor,
    advance: Callable[[], object] = lambda: None,
    *,
    title: str | None = None,
) -> Found:
    """Measure the losses of each layer, and the model's KL divergence if only this layer is converted.

    ``sizes[i]`` lists the sizes to which layer i is converted. ``tokens`` ``[samples, length]`` is a text, of
    which only the beginning may be used. The models with one converted layer run side by side: each branches
    off the source model at its converted layer and then continues with the source's layers. ``advance`` is
    called after each layer; then a progress bar with ``title`` (None: no bar) shows the comparison of logits.
    """
    model, device = kind.model, kind.device
    layers, config = TextLayers(model.checkpoint, device), read_config(model.checkpoint).get_text_config()
    read = _first_tokens(tokens, 4 * model.shape.width * sum(map(len, sizes)))
    path, apart, losses = layers.embedded(read), [], []
    for index in model.layers:
        measured = _measured(kind, index, sizes[index])
        losses.append(measured.losses)
        with layers.layer(index) as layer, side_by_side(device) as workers, torch.no_grad():
            for branches in apart:
                for size, states in branches.items():
                    branches[size] = _run_layer(layer, states, workers.map)
            apart.append({})
            for size, made in measured.layers.items():
                with _converted(layer.layer, kind, config, index, made):
                    apart[-1][size] = _run_layer(layer, path, workers.map)
            path = _run_layer(layer, path, workers.map)
        del measured  # free the memory for the next layer
        give_back()
        advance()
    return Found(losses, _nats(head_of(kind), layers.load_norm(), path, apart, title))


def nats_together(
    kinds: Sequence[Kind],
    sizes: Sequence[Sequence[int]],
    tokens: Tensor,
    advance: Callable[[], object] = lambda: None,
    *,
    title: str | None = None,
) -> list[float]:
    """Return the KL divergence from the source of models with all layers converted, in nats per token.

    ``kinds[n]`` converts the layers of model n to ``sizes[n]``. The other arguments are those of
    :func:`found_on`. All models run side by side.
    """
    model, device = kinds[0].model, kinds[0].device
    layers, config = TextLayers(model.checkpoint, device), read_config(model.checkpoint).get_text_config()
    path = layers.embedded(_first_tokens(tokens, 4 * model.shape.width * len(kinds)))
    streams = [path] * len(kinds)
    for place, index in enumerate(model.layers):
        weights, shape = weights_of(model, index), replace(model.shape, index=index)
        made = [kind.made(weights, shape, some[place]) for kind, some in zip(kinds, sizes, strict=True)]
        with layers.layer(index) as layer, side_by_side(device) as workers, torch.no_grad():
            for n, kind in enumerate(kinds):
                with _converted(layer.layer, kind, config, index, made[n]):
                    streams[n] = _run_layer(layer, streams[n], workers.map)
            path = _run_layer(layer, path, workers.map)
        del made
        give_back()
        advance()
    [nats] = _nats(head_of(kinds[0]), layers.load_norm(), path, [dict(enumerate(streams))], title)
    return [nats[n] for n in range(len(kinds))]


def _measured(kind: Kind, index: int, sizes: Sequence[int]) -> Measured:
    return kind.measured(weights_of(kind.model, index), replace(kind.model.shape, index=index), sizes)


def _first_tokens(tokens: Tensor, token_bytes: int) -> Tensor:
    """Return the tokens to measure on: the first windows of the text, or only a part of the first."""
    count = max(1, min(TOKENS, ROOM // token_bytes))
    length = min(tokens.shape[1], count)
    return tokens[: max(1, count // length), :length]


def _run_layer(layer: nn.Module, states: States, map_: Callable) -> States:
    return list(map_(partial(through, layer), states))


@contextmanager
def _converted(
    layer: nn.Module, kind: Kind, config: object, index: int, made: ConvertedLayer
) -> Iterator[None]:
    """Replace the attention of a decoder layer by its conversion until the ``with`` block ends."""
    name = kind.model.family.attention
    own = getattr(layer, name)
    setattr(layer, name, _attention(kind, config, index, made))
    try:
        yield
    finally:
        setattr(layer, name, own)


def _attention(kind: Kind, config: object, index: int, made: ConvertedLayer) -> nn.Module:
    """Return a converted layer as an attention module that transformers' decoder layers can call."""
    from ...integrations.transformers.own import attention_alone

    state = {name: value.to(kind.device, torch.float32) for name, value in made.weights.items()}
    return attention_alone(config, index, made.form, state)


def head_of(kind: Kind) -> Head:
    """Return the head of the source model.

    Raises:
        CheckpointError: the model has no head.
    """
    head = Head.of_checkpoint(kind.model.checkpoint, kind.device)
    if head is None:
        raise CheckpointError(
            "--cache: expected a language model with a head, to measure layers by their logits, got none; "
            "use --kv-heads or --rank, or --no-calibration, which compares layers by their weights"
        )
    return head


def _nats(
    head: Head, norm: nn.Module, path: States, apart: Sequence[Mapping[int, States]], title: str | None = None
) -> BySize:
    """Compute KL divergences from the source model for every layer and size, from final hidden states.

    ``path`` are the hidden states of the source model. ``apart`` has one entry per layer, with the hidden
    states of the models in which only this layer is converted, by its size.
    """
    nowhere = torch.full((PLACES,), -1, device=path[0].device)
    places = [x for states in path for x in through(norm, states)[0].split(PLACES)]
    found = []
    for branches in apart:
        found.append({})
        for size, states in branches.items():
            cut = [x for moved in states for x in through(norm, moved)[0].split(PLACES)]
            found[-1][size] = [
                (x, y, Divergence(nowhere[: len(x)])) for x, y in zip(places, cut, strict=True)
            ]
    slices = range(0, head.words, WORDS)
    compared = steps(title, len(slices) * sum(map(len, found)), " comparisons")
    for first in slices:
        head.take(first, min(first + WORDS, head.words))
        old_logits = {id(x): head(x) for x in places}
        for some in (some for branches in found for some in branches.values()):
            for x, y, divergence in some:
                divergence.add(first, old_logits[id(x)], head(y))
            # Freed logits leave unused memory between the sums that remain allocated: 6 GB in total for 60
            # models with 135M weights.
            give_back()
            compared()
    return [{size: _mean(some) for size, some in branches.items()} for branches in found]


def _mean(places: Sequence[tuple[Tensor, Tensor, Divergence]]) -> float:
    return float(torch.cat([divergence.kl() for _, _, divergence in places]).mean())
