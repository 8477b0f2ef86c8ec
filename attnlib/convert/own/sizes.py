"""The sizes of all layers: each the same, or of one cache what lets them lose least."""

import re
from collections.abc import Sequence

import torch

from ..bars import steps
from ..checkpoint.errors import CheckpointError, RequestError
from ..stock import class_of, quiet
from .allotment import allot
from .kind import Kind


def allotted(kind: Kind, total: int, *, progress: bool) -> list[int]:
    """The sizes of all layers that lose least together in a cache of ``total`` bytes a token."""
    advance = steps("measuring" if progress else None, len(kind.model.layers), " layers")
    losses = []
    for index in kind.model.layers:
        found = kind.losses(index)
        losses.append({kind.token_bytes(index, size): (loss, size) for size, loss in found.items()})
        advance()
    stored = allot([{count: loss for count, (loss, _) in options.items()} for options in losses], total)
    return [options[count][1] for options, count in zip(losses, stored, strict=True)]


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
        raise RequestError(f"--cache: expected bytes a token, or a share of the source's such as 25%, got {asked!r}")
    total = int(whole * float(match[1]) / 100) if match[2] else int(match[1])
    if total > whole:
        raise RequestError(f"--cache: expected at most the source's {whole} bytes a token, got {total}")
    return total


def require_loadable(kind: Kind, sizes: Sequence[int]) -> None:
    """Raises RequestError unless :func:`attnlib.load` knows the model, and layers of these sizes for it."""
    from ...integrations.transformers.own import config_from
    from ...own_form import own_config

    said = own_config(kind.model.checkpoint.config, [*map(kind.form, kind.model.layers, sizes)])
    try:
        with quiet(), torch.device("meta"):
            config = config_from(said)
            class_of(config)(config)
    except (CheckpointError, ValueError, TypeError, NotImplementedError, KeyError) as error:
        raise RequestError(f"--to attnlib: attnlib.load does not know the result: {error}") from error
