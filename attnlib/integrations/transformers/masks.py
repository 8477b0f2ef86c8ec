"""Make the attention masks that transformers requests, in the smallest form that attention can use.

A mask has one of four forms:

- None: the flags of the model (causal, window) already describe the mask.
- bool ``[b, t]``: True for keys that are not padding.
- int32 ``[b, t]``: document numbers of packed sequences from 1, with 0 for tokens outside all documents.
- bool ``[b, 1, s, t]``: anything else.

transformers may pass a mask back as a padding mask; it then has the same meaning. All layers share one mask.
Making it reads two flags from the device: is anything padded, and does the padding have holes? transformers
reads the first flag, too. Compiled models get transformers' own masks instead, or a bool ``[b, t]`` if there
is only one query.
"""

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils.import_utils import is_tracing

from ...internal.padding import are_holed, edges_of
from .handed import handed, read

# transformers builds mask functions from closures, which are recognized by these qualified names.
JOINED, WINDOW, PACKED, REMAPPED = (
    f"{name}.<locals>.{inner}"
    for name, inner in (
        ("and_masks", "and_mask"),
        ("sliding_window_overlay", "inner_mask"),
        ("packed_sequence_mask_function", "inner_mask"),
        ("remap_positions_for_packed_sequence", "inner_mask"),
    )
)


PLACES = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask")


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Return the mask of ``q_length`` queries from index ``q_offset`` over keys from index ``kv_offset``.

    transformers calls this function and passes more arguments, which are in ``options``.
    """
    attention_mask = None if attention_mask is None else read(attention_mask)[1]
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    if torch.compiler.is_compiling() or (attention_mask is not None and is_tracing(attention_mask)):
        traced = sdpa_mask(*sizes, **options)
        fields = ("index_topk", "indexer_n_heads")  # of configs whose indexers read a mask [b, 1, s, t]
        if q_length > 1 or traced is None or any(hasattr(options.get("config"), x) for x in fields):
            return traced
        return traced[:, 0, 0]
    skips = options.get("allow_is_causal_skip", True)

    def definition() -> Tensor:
        kept = {name: options[name] for name in ("use_vmap", "device") if name in options}
        return sdpa_mask(*sizes, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kept)

    if not skips and hasattr(options.get("config"), "indexer_n_heads"):
        return definition()  # Qwen 4's own indexer reads a mask [b, 1, s, t]
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    padding = None if padding is None else padding[:, kv_offset : kv_offset + kv_length].bool()
    kinds, visible = (
        list(_kinds(mask_function)),
        int(q_offset) + q_length - kv_offset,
    )  # visible: the number of keys up to the last query
    if kinds == [bidirectional_mask_function] and options.get("allow_is_bidirectional_skip"):
        return None if padding is None else _smallest(padding, kv_offset, may_skip=True, or_else=definition)
    fits = 0 < visible <= kv_length and (visible == kv_length or kv_offset == 0)
    if q_length == 1 and not (
        skips and fits and kinds == [causal_mask_function]
    ):  # the mask of a single query is one row ``[b, t]``
        row = definition()[:, 0, 0]
        return _smallest(row, kv_offset, may_skip=skips, or_else=lambda: row[:, None, None])
    if skips and fits and _is_band(kinds, options):
        if padding is None and visible < kv_length:  # the end of a static cache is unused
            padding = torch.ones(batch_size, visible, dtype=torch.bool, device=options.get("device"))
        if padding is None:
            return None
        return _smallest(padding[:, :visible], kv_offset, may_skip=visible == kv_length, or_else=definition)
    numbers = _documents(mask_function, options) if padding is None else None
    return definition() if numbers is None else handed(numbers)


def _smallest(there: Tensor, offset: int, *, may_skip: bool, or_else: Callable[[], Tensor]) -> Tensor | None:
    """Return the smallest form of a padding mask: None, a mask ``[b, t]``, or ``or_else()`` if it has holes.

    ``there`` marks the visible keys from index ``offset`` on. The returned mask covers all keys and hides
    those before ``offset``, because transformers passes it back in as a mask of all keys.
    """
    if may_skip and there.all():
        return None
    if are_holed(there).any():
        return or_else()
    return handed(pad(there, (offset, 0)), bounds=edges_of(there))  # layers need not search for bounds


def _kinds(function: Callable) -> Iterator[Callable | str]:
    """Yield the functions that a mask function combines by "and", or the names of unknown functions."""
    name = getattr(function, "__qualname__", "")
    if name == JOINED:
        for part in _closed(function, "mask_functions"):
            yield from _kinds(part)
    elif function in (causal_mask_function, bidirectional_mask_function):
        yield function
    else:
        yield name


def meaning_of(function: Callable) -> str:
    """Classify a mask function as "full", "causal", "window" or "other", ignoring padding and documents."""
    if getattr(function, "__qualname__", "") == REMAPPED:
        return meaning_of(_closed(function, "mask_function"))
    if getattr(function, "__qualname__", "") == JOINED:
        meanings = {meaning_of(part) for part in _closed(function, "mask_functions")} - {"documents"}
        if meanings == {"causal", "window"}:
            return "window"
        return meanings.pop() if len(meanings) == 1 else "other"
    kinds = {
        WINDOW: "window",
        PACKED: "documents",
        causal_mask_function: "causal",
        bidirectional_mask_function: "full",
    }
    return next((kinds[kind] for kind in _kinds(function) if kind in kinds), "other")


def is_band(named: Mapping[str, Any]) -> bool:
    """True if transformers requests a causal mask, whose window, if it has one, reaches attention."""
    return _is_band(list(_kinds(named.get("mask_function", causal_mask_function))), named)


def _is_band(kinds: list, options: Mapping[str, Any]) -> bool:
    """True if a mask is causal, without a window or with a window that the model passes to attention."""
    rest = [kind for kind in kinds if kind is not causal_mask_function]
    if len(rest) == len(kinds) or any(kind != WINDOW for kind in rest):
        return False
    return not rest or _hands_window(type(options["config"]).__module__ if "config" in options else "")


def _hands_window(configuration: str) -> bool:
    """True if the source of a model passes ``sliding_window=``; ``configuration`` is its config's module."""
    model = sys.modules.get(configuration.replace("configuration_", "modeling_"))
    return any(
        "sliding_window=" in line for line in linecache.getlines(getattr(model, "__file__", None) or "")
    )


def _documents(function: Callable, options: dict) -> Tensor | None:
    """Return the document number of each token, from 1, for a packed causal mask; None for other masks."""
    if getattr(function, "__qualname__", "") != JOINED:
        return None
    parts = {getattr(part, "__qualname__", ""): part for part in _closed(function, "mask_functions")}
    if set(parts) != {PACKED, REMAPPED}:
        return None
    if not _is_band(list(_kinds(_closed(parts[REMAPPED], "mask_function"))), options):
        return None
    return _closed(parts[PACKED], "packed_sequence_mask").int() + 1


def _closed(function: Callable, name: str):
    """Return the value of a variable that a function closes over, by the variable's name."""
    return inspect.getclosurevars(function).nonlocals[name]
