"""The sizes of all layers: each the same, or of one cache what lets them lose least."""

import re
from collections.abc import Sequence

import torch

from ..bars import steps
from ..checkpoint.errors import CheckpointError, RequestError
from ..stock import class_of, quiet
from ..text.kept import CalibrationStore
from .allotment import allot
from .kind import Kind
from .measuring import BySize, Found, found_on, losses_alone

VERSION = 1  # counts up when the same model and text give other measures
# Importance is measured on little text: none is taken for less than a share of the mean, and the rest is
# drawn towards it. KL of a model of 135M weights in the cache of ranks 128 and 64 for all, 0.268 and 0.779
# nats: with all layers alike 0.276 and 0.772, by importance itself 0.265 and 0.669, by its power of 0.7 0.259
# and 0.669, of 0.5 0.259 and 0.678 (2026-11).
LEAST, POWER = 0.05, 0.7


def allotted(kind: Kind, total: int, kept: CalibrationStore | None, *, progress: bool) -> list[int]:
    """The sizes of all layers that lose least together in a cache of ``total`` bytes a token.

    What a layer loses is weighed by how much it matters on a text; without calibrations of one all layers
    matter alike. What is measured is ``kept`` beside these, and not measured again.
    """
    found = _found(kind, _compared(kind, total), kept, progress=progress)
    weights = [1.0] * len(found.losses) if found.nats is None else _weights(found.losses, found.nats)
    sizes = [
        {kind.token_bytes(index, size): size for size in losses} for index, losses in enumerate(found.losses)
    ]
    weighed = [
        {stored: weight * losses[size] for stored, size in options.items()}
        for options, weight, losses in zip(sizes, weights, found.losses, strict=True)
    ]
    return [options[stored] for options, stored in zip(sizes, allot(weighed, total), strict=True)]


def _compared(kind: Kind, total: int) -> list[list[int]]:
    """The sizes of each layer that are tried on a text: that of an equal share of the cache, and the
    largest.
    """
    share, compared = total // len(kind.model.layers), []
    for index in kind.model.layers:
        sizes = kind.sizes(index)
        usual = max((size for size in sizes if kind.token_bytes(index, size) <= share), default=min(sizes))
        compared.append(sorted({usual, max(sizes)}))
    return compared


def _found(
    kind: Kind, compared: Sequence[Sequence[int]], kept: CalibrationStore | None, *, progress: bool
) -> Found:
    """What is measured, or was by another run."""
    advance = steps("measuring" if progress else None, len(compared), " layers")
    if kept is None:
        return losses_alone(kind, advance)
    asked = {
        "version": VERSION,
        "kind": type(kind).__name__,
        "options": dict(kind.options),
        "compared": compared,
    }
    held = kept.recalled(asked)
    if held is not None:
        losses, nats = (
            [{int(size): x for size, x in one.items()} for one in held[name]] for name in Found._fields
        )
        return Found(losses, nats)
    found = found_on(kind, compared, kept.tokens, advance)
    kept.remember(asked, {name: _plain(value) for name, value in found._asdict().items()})
    return found


def _plain(values: BySize) -> list[dict[str, float]]:
    return [{str(size): x for size, x in of_layer.items()} for of_layer in values]


def _weights(losses: BySize, nats: BySize) -> list[float]:
    """The nats that a layer costs for a unit of its loss: at an equal share of the cache, beyond its largest
    size.
    """
    weights = []
    for found, cost in zip(losses, nats, strict=True):
        size, whole = min(cost), max(cost)
        loss = found[size] - found[whole]
        weights.append(max(0.0, cost[size] - cost[whole]) / loss if loss > 0 else 0.0)
    least = LEAST * sum(weights) / len(weights)
    return [max(weight, least) ** POWER for weight in weights] if least else [1.0] * len(weights)


def smallest(kind: Kind) -> list[int]:
    """All layers as small as they can be."""
    return [min(kind.sizes(index)) for index in kind.model.layers]


def require_room(kind: Kind, total: int) -> None:
    """Raises RequestError unless the smallest layers of a kind fit into ``total`` bytes a token."""
    least = sum(map(kind.token_bytes, kind.model.layers, smallest(kind)))
    if total < least:
        raise RequestError(f"--cache: expected at least {least} bytes, of the smallest layers, got {total}")


def cache_bytes(asked: str, whole: int) -> int:
    """What ``--cache`` asks for, bytes a token or a share of the source's ``whole`` such as 25%.

    Raises:
        RequestError: neither.

    >>> cache_bytes("25%", 4096), cache_bytes("1536", 4096)
    (1024, 1536)
    """
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)( ?%)?", asked.strip())
    if match is None or (not match[2] and "." in match[1]):
        raise RequestError(
            f"--cache: expected bytes a token, or a share of the source's such as 25%, got {asked!r}"
        )
    total = int(whole * float(match[1]) / 100) if match[2] else int(match[1])
    if total > whole:
        raise RequestError(f"--cache: expected at most the source's {whole} bytes a token, got {total}")
    return total


def require_loadable(kind: Kind, sizes: Sequence[int]) -> None:
    """Raises RequestError unless :func:`attnlib.load` knows the model, and layers of these sizes for it."""
    from ...integrations.transformers.own import config_from
    from ...models.own_form import own_config

    said = own_config(kind.model.checkpoint.config, [*map(kind.form, kind.model.layers, sizes)])
    try:
        with quiet(), torch.device("meta"):
            config = config_from(said)
            class_of(config)(config)
    except (CheckpointError, ValueError, TypeError, NotImplementedError, KeyError) as error:
        raise RequestError(f"--to attnlib: attnlib.load does not know the result: {error}") from error
