"""What each kind of model calls the weights of its attention on disk: one table, and two functions that use it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import CheckpointError
from .layer import LayerShape

PARAMETERS = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose attention is stored alike.

    ``prefix`` matches what comes before the name of a projection; its group is the layer. ``projections`` pairs the
    name on disk with ours; several of ours are fused, one after another. ``transposed`` weights are ``[in, out]``.
    The rest are the keys of config.json.
    """

    model_types: tuple[str, ...]
    prefix: str
    projections: tuple[tuple[str, tuple[str, ...]], ...]
    transposed: bool = False
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    width: str = "hidden_size"


FAMILIES = (
    Family(
        ("llama", "mistral", "qwen2", "qwen3"),
        r"(?:model\.)?layers\.([0-9]{1,6})\.self_attn\.",
        tuple((name, (name,)) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    ),
    Family(
        ("gpt2",),
        r"(?:transformer\.)?h\.([0-9]{1,6})\.attn\.",
        (("c_attn", ("q_proj", "k_proj", "v_proj")), ("c_proj", ("o_proj",))),
        transposed=True,
        layers="n_layer",
        heads="n_head",
        width="n_embd",
    ),
    Family(
        ("bert",),
        r"(?:bert\.)?encoder\.layer\.([0-9]{1,6})\.attention\.",
        (
            ("self.query", ("q_proj",)),
            ("self.key", ("k_proj",)),
            ("self.value", ("v_proj",)),
            ("output.dense", ("o_proj",)),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's attention on disk: what precedes its names, and the names of its tensors after that."""

    prefix: str
    stored: tuple[str, ...]


def family_of(model_type: object) -> Family:
    """The family of config.json's ``model_type``.

    Raises:
        CheckpointError: none of the table; its attention may differ from all of these by more than its names.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise CheckpointError(f"config.json: model_type: expected one of {known}, got {str(model_type)[:80]!r}")


def find_layers(family: Family, tensors: Iterable[str]) -> tuple[dict[int, Layer], list[str]]:
    """The attention of each layer, and the tensors inside an attention that the table does not know.

    Raises:
        CheckpointError: a layer occurs under two prefixes, or a known projection has an unknown part, such as the
            scale of a packed weight.
    """
    pattern, found, unknown = re.compile(family.prefix), {}, []
    for tensor in sorted(tensors):
        if not (match := pattern.match(tensor)):
            continue
        name = tensor[match.end() :]
        layer = found.setdefault(int(match[1]), Layer(match[0], ()))
        if layer.prefix != match[0]:
            raise CheckpointError(f"{tensor!r}: expected layer {match[1]} as {layer.prefix!r} only")
        projection = next((disk for disk, _ in family.projections if name.startswith(f"{disk}.")), None)
        if projection is None:
            unknown.append(tensor)
        elif name[len(projection) + 1 :] not in PARAMETERS:
            raise CheckpointError(
                f"{tensor!r}: expected weight or bias; packed or adapted weights must be merged first"
            )
        else:
            found[int(match[1])] = Layer(layer.prefix, (*layer.stored, name))
    return dict(sorted(found.items())), unknown


def split(family: Family, stored: Mapping[str, Tensor], shape: LayerShape) -> dict[str, Tensor]:
    """A layer's tensors by their names on disk (prefix excluded) as weights by our names."""
    weights = {}
    for name, tensor in stored.items():
        disk, parameter = name.rsplit(".", 1)
        ours = dict(family.projections)[disk]
        tensor = tensor.T if family.transposed and tensor.ndim == 2 else tensor
        parts = tensor.split([shape.rows[part] for part in ours]) if len(ours) > 1 else (tensor,)
        weights |= {f"{part}.{parameter}": value.contiguous() for part, value in zip(ours, parts, strict=True)}
    return weights


def join(family: Family, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`split`. Weights that the family has no name for keep ours, and our orientation."""
    left, stored = dict(weights), {}
    for disk, ours in family.projections:
        for parameter in PARAMETERS:
            names = [f"{part}.{parameter}" for part in ours]
            if all(name in left for name in names):
                parts = [left.pop(name) for name in names]
                tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
                tensor = tensor.T if family.transposed and tensor.ndim == 2 else tensor
                stored[f"{disk}.{parameter}"] = tensor.contiguous()
    return stored | left
