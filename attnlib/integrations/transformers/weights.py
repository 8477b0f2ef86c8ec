"""Convert weight names and shapes between transformers' attention modules and attnlib's layers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...models.families import fused, parted
from .family import Family

PARAMETERS = (".weight", ".bias", "")  # "" for a parameter that the table names itself


def to_ours(family: Family, theirs: Mapping[str, Tensor], layer: nn.Module) -> dict[str, Tensor]:
    """Convert transformers' tensors to attnlib's names, and split fused ones into the shapes of ``layer``.

    Raises:
        ValueError: a name or a shape does not fit the layer.
    """
    left, ours = dict(theirs), {}
    own = layer.state_dict()
    for name, names in _pairs(family, own):
        if name not in left:
            raise ValueError(f"{name}: expected it among the weights, got {sorted(theirs)}")
        ours |= _split(
            family, name, left.pop(name), {part: own[part].shape for part in names}, layer.num_heads
        )
    if left:
        raise ValueError(
            f"{min(left)}: the layer has no such weight; merge adapters and unpack weights first"
        )
    return ours


def theirs_of(family: Family, layer: nn.Module) -> dict[str, str]:
    """Map each attnlib tensor name to the transformers tensor that contains it."""
    return {part: name for name, names in _pairs(family, layer.state_dict()) for part in names}


def rename_saved(
    family: Family, inner: str, owner: nn.Module, state: dict[str, Any], prefix: str, _: object
) -> None:
    """Convert the attnlib tensors in a state dict to transformers' names and shapes, in place.

    This is a state-dict hook of the module ``owner``, whose attnlib layer is at ``inner``. Tensors that
    transformers does not have, such as an adapter and the layer that it wraps, keep their names.
    """
    begin, heads = prefix + inner, owner.get_submodule(inner.removesuffix(".")).num_heads
    own = {name.removeprefix(begin): x for name, x in state.items() if name.startswith(begin)}
    for name, names in _pairs(family, own):
        parts = [state.pop(begin + part) for part in names]
        state[prefix + name] = fused(_storage(family, name), parts, heads).contiguous()


def rename_loaded(
    family: Family, inner: str, owner: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Convert transformers' tensors in a state dict to attnlib's before it is loaded into ``owner``.

    This is the state-dict hook that undoes :func:`rename_saved`.
    """
    layer = owner.get_submodule(inner.removesuffix("."))
    own = layer.state_dict()
    for name, names in _pairs(family, own):
        if prefix + name in state:
            shapes = {part: own[part].shape for part in names}
            split = _split(family, name, state.pop(prefix + name), shapes, layer.num_heads)
            state |= {prefix + inner + part: x for part, x in split.items()}


def _split(
    family: Family, name: str, x: Tensor, shapes: Mapping[str, tuple[int, ...]], heads: int
) -> dict[str, Tensor]:
    """Split a transformers tensor, which may be transposed or fused, into the attnlib tensors in it."""
    sizes, rest = [shape[0] for shape in shapes.values()], next(iter(shapes.values()))[1:]
    wanted = (sum(sizes), *rest)
    wanted = wanted[::-1] if family.is_transposed else wanted
    if x.shape != wanted:
        raise ValueError(f"{name}: expected {wanted} as the config says, got {tuple(x.shape)}")
    found = parted(_storage(family, name), x, sizes, heads)
    return {part: value.contiguous() for part, value in zip(shapes, found, strict=True)}


def _storage(family: Family, name: str) -> Family:
    """Return the family that describes how a tensor is stored; index branches have heads of their own."""
    return replace(family, is_by_head=False) if name.startswith("indexer.") else family


def _pairs(family: Family, own: Mapping[str, object]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each transformers tensor, and the names of the attnlib tensors in it."""
    for module, parts in family.weights:
        if not module:  # parameters of the layer itself have the same names in both
            yield from ((name, [name]) for name in parts if name in own)
            continue
        for parameter in PARAMETERS:
            names = [part + parameter for part in parts]
            if all(name in own for name in names):
                yield module + parameter, names
