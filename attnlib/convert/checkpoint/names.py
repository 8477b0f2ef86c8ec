"""Translate weight names between checkpoints and attnlib, by the table of model families."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ...models.families import SEEING, STORED, UNCONVERTED, AttentionStorage, fused, known_types, parted
from .errors import CheckpointError
from .layer import LayerShape

PARAMETERS = ("weight", "bias")
TEXT = "text_config"
PAGE = "docs/conversion_commands.md"
BESIDE_TEXT = r"(?:(?:model\.)?language_model\.)?"  # prefix of a text model in a larger model


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensor names of a layer's attention on disk: their common prefix, and the rest of each name."""

    prefix: str
    stored: tuple[str, ...]


def text_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``text_config`` from a vision-language model's config.json, or any other config unchanged.

    The ``model_type`` of the result is that of the text model which transformers builds. Older Qwen 2 VL
    files store the fields of their text model at the top level, without ``text_config``.

    Raises:
        CheckpointError: ``text_config`` is not an object.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in SEEING:
        return config
    part = config.get(TEXT, config if kind.startswith("qwen2") else None)
    if not isinstance(part, Mapping):
        raise CheckpointError(f"config.json: {TEXT}: expected an object, got {str(part)[:80]}")
    # llava and mistral3 load any text model, according to the model_type in text_config. All other classes
    # ignore that model_type and always load the same text model.
    known = part.get("model_type") if kind in ("llava", "mistral3") and part is not config else None
    return {**part, "model_type": known or SEEING[kind]}


def family_of(model_type: object) -> AttentionStorage:
    """Return how the model family with this ``model_type`` stores its attention weights.

    Raises:
        CheckpointError: the model type is unknown, so more than its weight names may differ; or the table
            cannot describe its attention, and the message says why.
    """
    kind = str(model_type)[:80]
    if not isinstance(model_type, str) or model_type not in {**STORED, **UNCONVERTED}:
        raise CheckpointError(
            f"config.json: model_type: expected {known_types(kind, [*STORED, *SEEING], PAGE)}, got {kind!r}"
        )
    if model_type in UNCONVERTED:
        raise CheckpointError(
            f"config.json: model_type: {kind} cannot be converted, because {UNCONVERTED[kind]}; {PAGE} lists "
            "the types that can"
        )
    return STORED[model_type]


def find_layers(family: AttentionStorage, tensors: Iterable[str]) -> tuple[dict[int, Layer], list[str]]:
    """Find the attention tensors of each layer; also return attention tensors with unknown names.

    Raises:
        CheckpointError: a layer occurs under two prefixes, or a known projection has an unknown part,
            such as the scale of a packed weight.
    """
    pattern, found, unknown = re.compile(rf"{BESIDE_TEXT}{family.stem}{family.path}\."), {}, []
    for tensor in sorted(tensors):
        if not (match := pattern.match(tensor)):
            continue
        name = tensor[match.end() :]
        layer = found.setdefault(int(match[1]), Layer(match[0], ()))
        if layer.prefix != match[0]:
            raise CheckpointError(f"{tensor!r}: expected layer {match[1]} as {layer.prefix!r} only")
        projection = next((disk for disk, _ in family.weights if name.startswith(f"{disk}.")), None)
        if projection is None:
            unknown.append(tensor)
        elif name[len(projection) + 1 :] not in PARAMETERS:
            raise CheckpointError(
                f"{tensor!r}: expected weight or bias; packed or adapted weights must be merged first"
            )
        else:
            found[int(match[1])] = Layer(layer.prefix, (*layer.stored, name))
    return dict(sorted(found.items())), unknown


def split(family: AttentionStorage, stored: Mapping[str, Tensor], shape: LayerShape) -> dict[str, Tensor]:
    """Return a layer's tensors by attnlib's names, from ``stored`` by names on disk without the prefix."""
    weights = {}
    for name, tensor in stored.items():
        disk, parameter = name.rsplit(".", 1)
        ours = dict(family.weights)[disk]
        rows = [shape.rows[part] for part in ours] if len(ours) > 1 else [len(tensor)]
        parts = parted(family, tensor, rows, shape.heads)
        weights |= {
            f"{part}.{parameter}": value.contiguous() for part, value in zip(ours, parts, strict=True)
        }
    return weights


def join(family: AttentionStorage, weights: Mapping[str, Tensor], shape: LayerShape) -> dict[str, Tensor]:
    """Return a layer's tensors by their names on disk: the inverse of :func:`split`.

    A weight that the family has no name for retains attnlib's name and orientation.

    Raises:
        CheckpointError: the family fuses queries, keys and values head by head, and their head counts
            differ.
    """
    left, stored = dict(weights), {}
    for disk, ours in family.weights:
        for parameter in PARAMETERS:
            names = [f"{part}.{parameter}" for part in ours]
            if all(name in left for name in names):
                parts = [left.pop(name) for name in names]
                _require_equal_heads(family, parts, shape)
                stored[f"{disk}.{parameter}"] = fused(family, parts, shape.heads).contiguous()
    return stored | left


def _require_equal_heads(family: AttentionStorage, parts: list[Tensor], shape: LayerShape) -> None:
    heads = [len(part) // shape.head_dim for part in parts]
    if family.is_by_head and len({*heads}) > 1:
        raise CheckpointError(
            f"layer {shape.index}: expected as many KV heads as query heads, since this model type stores "
            f"them fused head by head, got {', '.join(map(str, heads))}"
        )
