"""Choose the size of every layer so that the total loss is least within one cache budget."""

import re
from collections.abc import Sequence

import torch

from ...checkpoint_files.config import plain_config
from ...internal.bars import steps
from ..checkpoint.errors import RequestError
from ..stock import class_of, quiet
from ..text.kept import CalibrationStore
from .allotment import allot
from .kind import Kind
from .measuring import BySize, Found, found_on, losses_alone, nats_together

VERSION = 1  # increment this if the same model and text give different measurements than before
# A layer's importance is measured on little text and is therefore noisy. So an importance is at least LEAST
# times the mean, and its power POWER is used, which brings all values closer together. The table shows a
# converted model's KL divergence from its source (135M weights) in nats per token. The columns are cache
# budgets: as many bytes as rank 128, or rank 64, in every layer (2026-11).
#                              rank 128   rank 64
#   same rank for all layers      0.268     0.779
#   equal importance              0.276     0.772
#   importance as measured        0.265     0.669
#   importance ** 0.7             0.259     0.669
#   importance ** 0.5             0.259     0.678
LEAST, POWER = 0.05, 0.7


def allotted(kind: Kind, total: int, kept: CalibrationStore | None, *, progress: bool) -> list[int]:
    """Return the layer sizes with the least total loss in a cache of ``total`` bytes per token.

    A layer's loss is weighted by its importance to the model, measured on a text; without calibrations, all
    layers have equal weight. Measurements are stored next to the calibrations, and later runs reuse them.
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
    """Return two sizes of each layer to try on a text: the one that fits an equal share, and the largest."""
    usual = equal_sizes(kind, total)
    return [
        sorted({size, max(kind.sizes(index))}) for index, size in zip(kind.model.layers, usual, strict=True)
    ]


def equal_sizes(kind: Kind, total: int) -> list[int]:
    """Return the largest size of each layer that fits an equal share of ``total`` bytes.

    If none fits, it is the smallest one.
    """
    share, found = total // len(kind.model.layers), []
    for index in kind.model.layers:
        sizes = kind.sizes(index)
        fitting = (size for size in sizes if kind.token_bytes(index, size) <= share)
        found.append(max(fitting, default=min(sizes)))
    return found


def with_best_rope(kinds: Sequence[Kind], total: int, kept: CalibrationStore, *, progress: bool) -> Kind:
    """Return the kind whose layers of an equal share of ``total`` bytes give the least KL divergence.

    The divergence is measured on the text of ``kept``, and stored next to the calibrations.
    """
    if len(kinds) == 1:
        return kinds[0]
    sizes = [equal_sizes(kind, total) for kind in kinds]
    asked = {"version": VERSION, "options": [dict(kind.options) for kind in kinds], "together": sizes}
    known = kept.recalled(asked)
    if known is None:
        advance = steps("measuring rope" if progress else None, len(sizes[0]), " layers")
        title = "comparing logits" if progress else None
        known = {"nats": nats_together(kinds, sizes, kept.tokens, advance, title=title)}
        kept.remember(asked, known)
    return min(zip(known["nats"], range(len(kinds)), kinds, strict=True))[-1]


def _found(
    kind: Kind, compared: Sequence[Sequence[int]], kept: CalibrationStore | None, *, progress: bool
) -> Found:
    """Measure the layers, or return the stored measurements of an earlier run."""
    advance = steps("measuring" if progress else None, len(compared), " layers")
    if kept is None:
        return losses_alone(kind, advance)
    asked = {
        "version": VERSION,
        "kind": type(kind).__name__,
        "options": dict(kind.options),
        "compared": compared,
    }
    known = kept.recalled(asked)
    if known is not None:
        losses, nats = (
            [{int(size): x for size, x in one.items()} for one in known[name]] for name in Found._fields
        )
        return Found(losses, nats)
    title = "comparing logits" if progress else None
    found = found_on(kind, compared, kept.tokens, advance, title=title)
    kept.remember(asked, {name: _plain(value) for name, value in found._asdict().items()})
    return found


def _plain(values: BySize) -> list[dict[str, float]]:
    return [{str(size): x for size, x in of_layer.items()} for of_layer in values]


def _weights(losses: BySize, nats: BySize) -> list[float]:
    """Return the importance of each layer: the model's KL divergence per unit of the layer's loss.

    Divergence and loss are those of a layer with an equal share of the cache, minus those at its largest
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
    """Return the smallest possible size of each layer."""
    return [min(kind.sizes(index)) for index in kind.model.layers]


def require_room(kind: Kind, total: int, indexed: int = 0) -> None:
    """Raise RequestError if layers of the smallest sizes exceed ``total`` cache bytes per token."""
    if total < (least := _least_bytes(kind)):
        raise RequestError(
            f"--cache: expected at least {least + indexed} bytes, the size of the smallest layers"
            f"{' with index keys' if indexed else ''}, got {total + indexed}"
        )


def alternatives(kind: Kind, total: int) -> list[Kind]:
    """Return the kinds to choose from whose smallest layers fit into ``total`` bytes, or ``kind`` if none do.

    The default is the first one, if it fits.
    """
    return [x for x in kind.alternatives(total) if _least_bytes(x) <= total] or [kind]


def _least_bytes(kind: Kind) -> int:
    return sum(map(kind.token_bytes, kind.model.layers, smallest(kind)))


def cache_bytes(asked: str, whole: int) -> int:
    """Parse ``--cache``: bytes per token, or a percentage of the ``whole`` bytes that the source takes.

    Raises:
        RequestError: the value is malformed, or larger than the source's cache.

    >>> cache_bytes("25%", 4096), cache_bytes("1536", 4096)
    (1024, 1536)
    """
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)( ?%)?", asked.strip())
    if match is None or (not match[2] and "." in match[1]):
        raise RequestError(
            f"--cache: expected bytes per token, or a share of the source's such as 25%, got {asked!r}"
        )
    total = int(whole * float(match[1]) / 100) if match[2] else int(match[1])
    if total > whole:
        raise RequestError(f"--cache: expected at most the source's {whole} bytes per token, got {total}")
    return total


def require_loadable(kind: Kind, sizes: Sequence[int]) -> None:
    """Raise RequestError unless :func:`attnlib.load_pretrained` loads a model with layers of these sizes."""
    from ...integrations.transformers.loading import BROKEN
    from ...integrations.transformers.own import config_from
    from ...models.own_form import own_config

    base = plain_config(kind.model.checkpoint)  # as it is loaded: without keys that name code
    config_json = own_config(base, [*map(kind.form, kind.model.layers, sizes)])
    try:
        with quiet(), torch.device("meta"):
            config = config_from(config_json)
            class_of(config)(config)
    except (*BROKEN, NotImplementedError) as error:
        raise RequestError(
            f"--to attnlib: attnlib.load_pretrained cannot load the result: {error}"
        ) from error
