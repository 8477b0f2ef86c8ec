"""What layers lose when they are smaller, and how much that matters to what a model says: of each layer
alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..check.divergence import Divergence
from ..check.head import Head
from ..checkpoint.errors import CheckpointError
from ..checkpoint.layer import ConvertedLayer
from ..checkpoint.plan import weights_of
from ..stock import read_config
from ..text.freed import give_back
from ..text.layers import TextLayers
from ..text.workers import side_by_side
from .kind import Kind, Measured

TOKENS = 512  # of a text; fewer where what is kept of them would take more than ROOM
ROOM = 2**30  # bytes
WORDS, PLACES = 8192, 128  # logits that are in memory at once

States = list[Tensor]  # hidden states [1, length, m] of each window
BySize = list[dict[int, float]]  # of each layer


class Found(NamedTuple):
    """``losses`` of each layer at every size that it may have, as its kind measures them; and ``nats``.

    These are the KL divergence, in nats a token, of the model in which one layer alone has the size; None: no
    text.
    """

    losses: BySize
    nats: BySize | None


def losses_alone(kind: Kind, advance: Callable[[], object] = lambda: None) -> Found:
    """What layers lose, where no text tells how much that matters. ``advance`` is told of each layer."""
    losses = []
    for index in kind.model.layers:
        losses.append(_measured(kind, index, ()).losses)
        give_back()
        advance()
    return Found(losses, None)


def found_on(
    kind: Kind, sizes: Sequence[Sequence[int]], tokens: Tensor, advance: Callable[[], object] = lambda: None
) -> Found:
    """What layers lose, and the nats that it costs when one layer alone has each of its ``sizes``.

    ``tokens`` ``[samples, length]`` are a text, of which some are read. All these models are run side by
    side, one layer at a time: each leaves the source's path at its own layer, and goes the source's way from
    there. ``advance`` is told of each layer.
    """
    model, device = kind.model, kind.device
    layers, config = TextLayers(model.checkpoint, device), read_config(model.checkpoint).get_text_config()
    read = _some(tokens, 4 * model.shape.width * sum(map(len, sizes)))
    path, apart, losses = layers.embedded(read), [], []
    for index in model.layers:
        measured = _measured(kind, index, sizes[index])
        losses.append(measured.losses)
        with layers.layer(index) as layer, side_by_side(device) as workers, torch.no_grad():
            for branches in apart:
                for size, states in branches.items():
                    branches[size] = _moved(layer, states, workers.map)
            apart.append({})
            for size, made in measured.layers.items():
                with _attending(layer.layer, model.family.attention, _attention(kind, config, index, made)):
                    apart[-1][size] = _moved(layer, path, workers.map)
            path = _moved(layer, path, workers.map)
        del measured  # before the next layer takes its memory
        give_back()
        advance()
    return Found(losses, _nats(_head(kind), layers.load_norm(), path, apart))


def _measured(kind: Kind, index: int, sizes: Sequence[int]) -> Measured:
    return kind.measured(weights_of(kind.model, index), replace(kind.model.shape, index=index), sizes)


def _some(tokens: Tensor, token_bytes: int) -> Tensor:
    """The first windows of a text, or the beginning of one, that are not more than can be kept."""
    count = max(1, min(TOKENS, ROOM // token_bytes))
    length = min(tokens.shape[1], count)
    return tokens[: max(1, count // length), :length]


def _moved(layer: nn.Module, states: States, map_: Callable) -> States:
    def through(x: Tensor) -> Tensor:
        with torch.no_grad():  # which is a thread's own
            return layer(x)

    return list(map_(through, states))


@contextmanager
def _attending(layer: nn.Module, name: str, attention: nn.Module) -> Iterator[None]:
    """The decoder layer has this attention in the place of its own, which it calls ``name``, until the block
    ends.
    """
    own = getattr(layer, name)
    setattr(layer, name, attention)
    try:
        yield
    finally:
        setattr(layer, name, own)


def _attention(kind: Kind, config: object, index: int, made: ConvertedLayer) -> nn.Module:
    """A layer that was made, as transformers calls its attention."""
    from ...integrations.transformers.own import attention_alone

    state = {name: value.to(kind.device, torch.float32) for name, value in made.weights.items()}
    return attention_alone(config, index, made.form, state)


def _head(kind: Kind) -> Head:
    """Raises CheckpointError for a model without one."""
    head = Head.of_checkpoint(kind.model.checkpoint, kind.device)
    if head is None:
        raise CheckpointError(
            "config.json: expected a language model, whose words tell layers apart, got no head"
        )
    return head


def _nats(head: Head, norm: nn.Module, path: States, apart: Sequence[Mapping[int, States]]) -> BySize:
    """What the final states of each branch say apart from those of the source."""
    nowhere = torch.full((PLACES,), -1, device=path[0].device)
    places = [x for states in _normed(norm, path) for x in states.split(PLACES)]
    found = []
    for branches in apart:
        found.append({})
        for size, states in branches.items():
            cut = [x for moved in _normed(norm, states) for x in moved.split(PLACES)]
            found[-1][size] = [
                (x, y, Divergence(nowhere[: len(x)])) for x, y in zip(places, cut, strict=True)
            ]
    for first in range(0, head.words, WORDS):
        head.take(first, min(first + WORDS, head.words))
        said = {id(x): head(x) for x in places}
        for some in (some for branches in found for some in branches.values()):
            for x, y, divergence in some:
                divergence.add(first, said[id(x)], head(y))
            give_back()  # logits leave holes between the sums that stay: 6 GB of 60 branches of a model of 135M weights
    return [{size: _mean(some) for size, some in branches.items()} for branches in found]


def _mean(places: Sequence[tuple[Tensor, Tensor, Divergence]]) -> float:
    return float(torch.cat([divergence.kl() for _, _, divergence in places]).mean())


def _normed(norm: nn.Module, states: States) -> Iterator[Tensor]:
    for x in states:
        with torch.no_grad():
            yield norm(x)[0]
