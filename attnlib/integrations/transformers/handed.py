"""The masks ``[b, t]`` that attention gets for models, which expect masks ``[b, 1, s, t]``.

Models hand masks on as they are, and attention then reads what the mask door wrote beside them. A model that
computes with its mask gets the one that ``eager`` would have got; if nobody knows that, it is refused by
name.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SAME = frozenset({"to", "bool", "clone", "contiguous", "cpu", "cuda", "detach"})
MADE_FOR = ("bounds", "meaning", "keys", "is_whole", "is_changed", "numbers", "eager")


class HandedMask(Tensor):
    """Bool or int32 ``[b, t]``: keys that are there, or documents.

    ``plain`` is the same tensor without a class; ``bounds`` are the first key of each row and that after its
    last, ``meaning`` is what else the mask says ("full", "causal", "window"; None if there is one query
    only), and ``keys`` how many keys it was made for. ``is_whole`` masks hide nothing; ``is_changed`` ones
    came of a mask that left something to flags. ``numbers`` is the mask of documents of which a bool one was
    made, as transformers does with one that it gets back. ``eager`` makes the additive mask ``[b, 1, s, t]``
    of the same keys and meaning.
    """

    plain: Tensor
    bounds: tuple[Tensor, Tensor] | None = None
    meaning: str | None = None
    keys: int | None = None
    is_whole: bool = False
    is_changed: bool = False
    numbers: "HandedMask | None" = None
    eager: Callable[[], Tensor] | None = None

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with plain tensors. The same values stay what they are; others are known to be changed.

        Raises:
            NotImplementedError: the model computes with a mask of four dimensions that nobody can make.
        """
        if func == Tensor.dtype.__get__:  # what the model computes for this dtype does not fit another mask
            args[0].eager = None
            return args[0].plain.dtype
        masks = [x for x in _flat((args, kwargs or {})) if isinstance(x, cls)]
        beside = [x for x in _flat((args, kwargs or {})) if isinstance(x, Tensor) and not isinstance(x, cls)]
        if any(x.dim() > 2 for x in beside) and all(mask.plain.dim() == 2 for mask in masks):
            return _with_eager_masks(func, masks, args, kwargs or {})
        try:
            made = func(*_plain(args), **_plain(kwargs or {}))
        except (IndexError, RuntimeError):
            return _with_eager_masks(func, masks, args, kwargs or {})
        if not isinstance(made, Tensor) or made.dim() == 0 or not masks:
            return made
        if getattr(func, "__name__", "") in SAME and made.shape == masks[0].plain.shape:
            kept = handed(made, **{name: getattr(masks[0], name) for name in MADE_FOR})
            if made.dtype == torch.bool and masks[0].plain.dtype != torch.bool:
                kept.numbers = masks[0]
            return kept
        # What says the same of every query may become a mask of another form; what leaves something to flags
        # may not.
        return handed(made, is_changed=any(x.is_changed or x.meaning not in (None, "full") for x in masks))


def handed(mask: Tensor, **made_for: Any) -> HandedMask:
    """The ``mask`` with what it was made for."""
    made = mask.as_subclass(HandedMask)
    made.plain = mask
    for name, value in made_for.items():
        setattr(made, name, value)
    return made


def read(mask: Tensor) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
    """The bounds of a mask if it was made here, and the mask without a class."""
    if not isinstance(mask, HandedMask):
        return None, mask
    return None if torch.compiler.is_compiling() else mask.bounds, mask.plain


def _with_eager_masks(func: Callable, masks: list[HandedMask], args: Any, kwargs: Any) -> Any:
    """Compute with masks of four dimensions; not in place, where the model would not see the result."""
    name = getattr(func, "__name__", str(func))
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if is_in_place or not all(mask.eager for mask in masks):
        raise NotImplementedError(
            f"attention_mask: the model computes with its mask ({name}), of which "
            'attn_implementation="attnlib" makes one of keys [b, t]; use "eager" or "sdpa"'
        )
    return func(*_plain(args, as_eager=True), **_plain(kwargs, as_eager=True))


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
