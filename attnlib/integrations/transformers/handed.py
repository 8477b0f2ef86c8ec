"""The masks ``[b, t]`` that attention gets for models, which expect masks ``[b, 1, s, t]``.

Models hand masks on as they are, and attention then reads what the mask door wrote beside them. A model that computes
with its mask would take ``[b, t]`` for something else: it is refused by name.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SAME = frozenset({"to", "bool", "clone", "contiguous", "cpu", "cuda", "detach"})
MADE_FOR = ("bounds", "meaning", "keys", "is_whole", "is_changed", "numbers")


class HandedMask(Tensor):
    """Bool or int32 ``[b, t]``: keys that are there, or documents.

    ``plain`` is the same tensor without a class; ``bounds`` are the first key of each row and that after its last,
    ``meaning`` is what else the mask says ("full", "causal", "window"; None if there is one query only), and ``keys``
    how many keys it was made for. ``is_whole`` masks hide nothing; ``is_changed`` ones came of a mask that left
    something to flags. ``numbers`` is the mask of documents of which a bool one was made, as transformers does with one
    that it gets back.
    """

    plain: Tensor
    bounds: tuple[Tensor, Tensor] | None = None
    meaning: str | None = None
    keys: int | None = None
    is_whole: bool = False
    is_changed: bool = False
    numbers: "HandedMask | None" = None

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with plain tensors. The same values stay what they are; others are known to be changed.

        Raises:
            NotImplementedError: the model computes with a mask of four dimensions.
        """
        masks = [x for x in _flat((args, kwargs or {})) if isinstance(x, cls)]
        beside = [x for x in _flat((args, kwargs or {})) if isinstance(x, Tensor) and not isinstance(x, cls)]
        if any(x.dim() > 2 for x in beside) and all(mask.plain.dim() == 2 for mask in masks):
            raise NotImplementedError(_computes(func))
        try:
            made = func(*_plain(args), **_plain(kwargs or {}))
        except (IndexError, RuntimeError) as error:
            raise NotImplementedError(_computes(func)) from error
        if not isinstance(made, Tensor) or made.dim() == 0 or not masks:
            return made
        if getattr(func, "__name__", "") in SAME and made.shape == masks[0].plain.shape:
            kept = handed(made, **{name: getattr(masks[0], name) for name in MADE_FOR})
            if made.dtype == torch.bool and masks[0].plain.dtype != torch.bool:
                kept.numbers = masks[0]
            return kept
        # What says the same of every query may become a mask of another form; what leaves something to flags may not.
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


def _computes(func: Callable) -> str:
    return (
        f"attention_mask: the model computes with its mask ({getattr(func, '__name__', func)}), of which "
        'attn_implementation="attnlib" makes one of keys [b, t]; use "eager" or "sdpa"'
    )


def _flat(x: Any) -> list:
    if isinstance(x, dict):
        x = list(x.values())
    return [part for inner in x for part in _flat(inner)] if isinstance(x, list | tuple) else [x]


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _plain(value) for name, value in x.items()}
    if isinstance(x, list | tuple) and type(x) in (list, tuple):
        return type(x)(_plain(inner) for inner in x)
    return x.plain if isinstance(x, HandedMask) else x
