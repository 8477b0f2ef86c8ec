"""The weights of a layer by the names of transformers' module, and by ours."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .families import Family

PARAMETERS = ("weight", "bias")


def to_ours(family: Family, theirs: Mapping[str, Tensor], layer: nn.Module) -> dict[str, Tensor]:
    """Their tensors by our names, for a layer whose shapes say how fused ones are split.

    Raises:
        ValueError: a name or a shape is not that of the layer.
    """
    left, ours = dict(theirs), {}
    shapes = {name: x.shape for name, x in layer.state_dict().items()}
    for theirs_name, parts, names in _pairs(family, shapes):
        if theirs_name not in left:
            raise ValueError(f"{theirs_name}: expected it among the weights, got {sorted(theirs)}")
        x = left.pop(theirs_name)
        x = x.T.contiguous() if family.is_transposed and x.dim() == 2 else x
        sizes = [shapes[name][0] for name in names]
        if x.shape[0] != sum(sizes) or x.shape[1:] != shapes[names[0]][1:]:
            expected = (sum(sizes), *shapes[names[0]][1:])
            raise ValueError(f"{theirs_name}: expected {expected} as the config says, got {tuple(x.shape)}")
        split = x.split(sizes) if len(parts) > 1 else (x,)
        ours |= dict(zip(names, split, strict=True))
    if left:
        raise ValueError(f"{min(left)}: the layer has no such weight; fold adapters and packed weights first")
    return ours


def to_theirs(family: Family, ours: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`to_ours`, of a layer's own tensors; what it does not know keeps its name."""
    left, theirs = dict(ours), {}
    for theirs_name, parts, names in _pairs(family, ours):
        tensors = [left.pop(name) for name in names]
        x = torch.cat(tensors) if len(parts) > 1 else tensors[0]
        theirs[theirs_name] = x.T.contiguous() if family.is_transposed and x.dim() == 2 else x
    return theirs | left


def _pairs(family: Family, ours: Mapping[str, object]) -> list[tuple[str, tuple[str, ...], list[str]]]:
    """Their name of each of our tensors that there are, our modules in it, and our names."""
    pairs = []
    for module, parts in family.weights:
        if not module:  # parameters of the layer itself
            pairs += [(name, (name,), [name]) for name in parts if name in ours]
            continue
        for parameter in PARAMETERS:
            names = [f"{part}.{parameter}" for part in parts]
            if all(name in ours for name in names):
                pairs.append((f"{module}.{parameter}", parts, names))
    return pairs
