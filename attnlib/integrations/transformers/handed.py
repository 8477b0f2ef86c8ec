"""Small masks ``[b, t]`` that transformers models accept in place of masks ``[b, 1, s, t]``.

Most models pass their mask to attention unchanged, and attention reads the attributes that the mask function
attached to it. If a model computes with its mask, the small mask turns into the mask that ``eager`` attention
would get. If that mask cannot be made, an error names the operation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SAME = frozenset({"to", "bool", "clone", "contiguous", "cpu", "cuda", "detach"})
MADE_FOR = ("bounds", "meaning", "keys", "is_whole", "is_changed", "numbers", "eager", "tree")


class HandedMask(Tensor):
    """A bool or int32 mask ``[b, t]`` of visible keys or documents, with attributes for attention.

    - ``plain``: the same mask as an ordinary tensor.
    - ``bounds``: the first visible key of each row, and the key after the last one.
    - ``meaning``: the mask that applies on top ("full", "causal", "window"); None if there is only one query.
    - ``keys``: the number of keys that the mask was made for.
    - ``is_whole``: True if the mask hides nothing.
    - ``is_changed``: True if the model computed it from a mask that only applies with the model's flags.
    - ``numbers``: the document mask from which this bool mask was made; transformers converts a mask to bool
      when it gets it back.
    - ``eager``: a function that makes the additive mask ``[b, 1, s, t]`` of the same keys and meaning.
    - ``tree``: the arguments of :func:`attnlib.masks.until`, if the mask is that of a tree of sequences.
    """

    plain: Tensor
    bounds: tuple[Tensor, Tensor] | None = None
    meaning: str | None = None
    keys: int | None = None
    is_whole: bool = False
    is_changed: bool = False
    numbers: "HandedMask | None" = None
    eager: Callable[[], Tensor] | None = None
    tree: tuple[Tensor, Tensor] | None = None

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function on the mask as an ordinary tensor; copies of the mask keep its attributes.

        Raises:
            NotImplementedError: the model needs a mask ``[b, 1, s, t]``, and none can be made.
        """
        if func == Tensor.dtype.__get__:  # the model may rely on this dtype, which eager masks lack
            args[0].eager = None
            return args[0].plain.dtype
        if func == Tensor.__getitem__ and _keeps_all(args[1]):
            return args[0]
        masks = [x for x in _flat((args, kwargs or {})) if isinstance(x, cls)]
        beside = [x for x in _flat((args, kwargs or {})) if isinstance(x, Tensor) and not isinstance(x, cls)]
        if beside:
            _refuse_tree(func, masks)
        if any(x.dim() > 2 for x in beside) and all(mask.plain.dim() == 2 for mask in masks):
            return _with_eager_masks(func, masks, args, kwargs or {})
        try:
            made = func(*_plain(args), **_plain(kwargs or {}))
        except (IndexError, RuntimeError):
            _refuse_tree(func, masks)
            return _with_eager_masks(func, masks, args, kwargs or {})
        if not isinstance(made, Tensor) or not masks:
            return made
        name = getattr(func, "__name__", "")
        if name not in SAME:
            _refuse_tree(func, masks)
        if name in SAME and made.shape == masks[0].plain.shape:
            kept = handed(made, **{name: getattr(masks[0], name) for name in MADE_FOR})
            if made.dtype == torch.bool and masks[0].plain.dtype != torch.bool:
                kept.numbers = masks[0]
            return kept
        if made.dim() == 0:
            return made
        # If a mask is the same for every query, the result may still be used as a mask. If the mask needs the
        # model's flags (causal, window) to be complete, `is_changed` makes attention refuse the result.
        return handed(made, is_changed=any(x.is_changed or x.meaning not in (None, "full") for x in masks))


def handed(mask: Tensor, **made_for: Any) -> HandedMask:
    """Turn a mask ``[b, t]`` into a HandedMask with the given attributes."""
    made = mask.as_subclass(HandedMask)
    made.plain = mask
    for name, value in made_for.items():
        setattr(made, name, value)
    return made


def read(mask: Tensor) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
    """Return the bounds of a mask ``[b, t]`` (None if unknown), and the mask itself as an ordinary tensor."""
    if not isinstance(mask, HandedMask):
        return None, mask
    return None if torch.compiler.is_compiling() else mask.bounds, mask.plain


def _refuse_tree(func: Callable, masks: list[HandedMask]) -> None:
    """Raise NotImplementedError if one of the masks that ``func`` computes with is that of a tree."""
    if any(mask.tree is not None for mask in masks):
        raise NotImplementedError(
            "attention_mask: expected attention by attnlib over a tree of sequences, got "
            f'{getattr(func, "__name__", func)}; select attn_implementation="attnlib", and a model that does '
            "not compute with its mask"
        )


def _with_eager_masks(func: Callable, masks: list[HandedMask], args: Any, kwargs: Any) -> Any:
    """Run a torch function on masks ``[b, 1, s, t]``; in-place changes would be lost, so they are refused."""
    name = getattr(func, "__name__", str(func))
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if is_in_place or not all(mask.eager for mask in masks):
        raise NotImplementedError(
            f"attention_mask: the model computes with its mask ({name}), but "
            'attn_implementation="attnlib" only makes masks [b, t]; use "eager" or "sdpa"'
        )
    return func(*_plain(args, as_eager=True), **_plain(kwargs, as_eager=True))


def _keeps_all(index: Any) -> bool:
    """True for an index such as ``[:, :, 0:, :]``, with which Gemma 4 keeps all queries."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, slice) and part in (slice(None), slice(0, None)) for part in parts)


def _flat(x: Any) -> list:
    if isinstance(x, dict):
        x = list(x.values())
    return [part for inner in x for part in _flat(inner)] if isinstance(x, list | tuple) else [x]


def _plain(x: Any, *, as_eager: bool = False) -> Any:
    if isinstance(x, dict):
        return {name: _plain(value, as_eager=as_eager) for name, value in x.items()}
    if isinstance(x, list | tuple) and type(x) in (list, tuple):
        return type(x)(_plain(inner, as_eager=as_eager) for inner in x)
    if not isinstance(x, HandedMask):
        return x
    return x.eager() if as_eager and x.eager else x.plain
