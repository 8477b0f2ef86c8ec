"""What transformers asks of a mask, as the least that attention needs to know of it.

A mask is None where the model's own flags say all; a bool ``[b, t]`` that tells which keys are there; numbers
of documents, int32 ``[b, t]``, of packed sequences, with 0 for what is of none; or, where nothing else says
it, a bool ``[b, 1, s, t]``. transformers may hand any of these back in as a padding mask: it then means the
same again. Masks are made once for all layers, and read from the device for holes, as transformers reads them
itself; but for a model that is compiled, which gets its own masks, and of one query the bool ``[b, t]``.
"""

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
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

# What transformers' mask functions close over, by which their parts are told apart.
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
    """The mask of a step of ``q_length`` queries from index ``q_offset`` on, over keys from ``kv_offset`` on.

    What transformers calls; ``options`` are the rest of what it hands over.
    """
    attention_mask = None if attention_mask is None else read(attention_mask)[1]
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    if torch.compiler.is_compiling() or (attention_mask is not None and is_tracing(attention_mask)):
        traced = sdpa_mask(*sizes, **options)
        return traced[:, 0, 0] if q_length == 1 and traced is not None else traced
    skips = options.get("allow_is_causal_skip", True)

    def definition() -> Tensor:
        kept = {name: options[name] for name in ("use_vmap", "device") if name in options}
        return sdpa_mask(*sizes, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kept)

    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    padding = None if padding is None else padding[:, kv_offset : kv_offset + kv_length].bool()
    kinds, visible = (
        list(_kinds(mask_function)),
        int(q_offset) + q_length - kv_offset,
    )  # keys up to the last query
    if kinds == [bidirectional_mask_function] and options.get("allow_is_bidirectional_skip"):
        return None if padding is None else _least(padding, kv_offset, may_skip=True, or_else=definition)
    fits = 0 < visible <= kv_length and (visible == kv_length or kv_offset == 0)
    if q_length == 1 and not (skips and fits and kinds == [causal_mask_function]):  # one row says all
        row = definition()[:, 0, 0]
        return _least(row, kv_offset, may_skip=skips, or_else=lambda: row[:, None, None])
    if skips and fits and _is_band(kinds, options):
        if padding is None and visible < kv_length:  # the rest of a static cache lies behind
            padding = torch.ones(batch_size, visible, dtype=torch.bool, device=options.get("device"))
        if padding is None:
            return None
        return _least(padding[:, :visible], kv_offset, may_skip=visible == kv_length, or_else=definition)
    numbers = _documents(mask_function, options) if padding is None else None
    return definition() if numbers is None else handed(numbers)


def _least(there: Tensor, offset: int, *, may_skip: bool, or_else: Callable[[], Tensor]) -> Tensor | None:
    """None for a mask of keys from ``offset`` on that hides nothing, or what stands for one with holes.

    Else the mask of all keys, of which those before are hidden: as such it would be read when it is handed
    back in.
    """
    if may_skip and there.all():
        return None
    if are_holed(there).any():
        return or_else()
    return handed(pad(there, (offset, 0)), bounds=edges_of(there))  # which every layer would find again


def _kinds(function: Callable) -> Iterator[Callable | str]:
    """The parts that a mask function joins by and: known functions, or the names of others."""
    name = getattr(function, "__qualname__", "")
    if name == JOINED:
        for part in _closed(function, "mask_functions"):
            yield from _kinds(part)
    elif function in (causal_mask_function, bidirectional_mask_function):
        yield function
    else:
        yield name


def meaning_of(function: Callable) -> str:
    """Classify a mask function, apart from padding and documents: "full", "causal", "window" or "other"."""
    if getattr(function, "__qualname__", "") == REMAPPED:
        return meaning_of(_closed(function, "mask_function"))
    if getattr(function, "__qualname__", "") == JOINED:
        said = {meaning_of(part) for part in _closed(function, "mask_functions")} - {"documents"}
        return "window" if said == {"causal", "window"} else said.pop() if len(said) == 1 else "other"
    kinds = {
        WINDOW: "window",
        PACKED: "documents",
        causal_mask_function: "causal",
        bidirectional_mask_function: "full",
    }
    return next((kinds[kind] for kind in _kinds(function) if kind in kinds), "other")


def _is_band(kinds: list, options: dict) -> bool:
    """Whether these parts are causal, with a window at most that the model hands to attention too."""
    rest = [kind for kind in kinds if kind is not causal_mask_function]
    if len(rest) == len(kinds) or any(kind != WINDOW for kind in rest):
        return False
    return not rest or _hands_window(type(options["config"]).__module__ if "config" in options else "")


def _hands_window(configuration: str) -> bool:
    """Whether the model beside this module of configurations says ``sliding_window=`` where it calls
    attention.
    """
    model = sys.modules.get(configuration.replace("configuration_", "modeling_"))
    return any(
        "sliding_window=" in line for line in linecache.getlines(getattr(model, "__file__", None) or "")
    )


def _documents(function: Callable, options: dict) -> Tensor | None:
    """The documents that a mask function tells apart, from 1, where each is causal with a window at most."""
    if getattr(function, "__qualname__", "") != JOINED:
        return None
    parts = {getattr(part, "__qualname__", ""): part for part in _closed(function, "mask_functions")}
    if set(parts) != {PACKED, REMAPPED}:
        return None
    if not _is_band(list(_kinds(_closed(parts[REMAPPED], "mask_function"))), options):
        return None
    return _closed(parts[PACKED], "packed_sequence_mask").int() + 1


def _closed(function: Callable, name: str):
    """What a function closes over by this name."""
    return inspect.getclosurevars(function).nonlocals[name]
