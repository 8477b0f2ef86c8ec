"""Masks, which say which keys a query sees: bands of indices, functions of indices, and ready-made ones of both.

``band.py`` holds what most calls need and kernels compute from four numbers. ``function.py`` joins a band with a
function of indices. ``ready_made.py`` is what people write with it, and where a new mask belongs.
"""

from .band import CAUSAL, FULL, NOTHING, AnyMask, Mask, mask_mod, refuse_mask, sliding
from .function import MaskFunction
from .ready_made import (
    attention_sinks,
    bidirectional_spans,
    block_list,
    chunked,
    dilated,
    documents,
    documents_of,
    global_tokens,
    head_windows,
    mask_tensor,
    prefix_lm,
    tree,
    used,
)

__all__ = [
    "CAUSAL",
    "FULL",
    "NOTHING",
    "AnyMask",
    "Mask",
    "MaskFunction",
    "attention_sinks",
    "bidirectional_spans",
    "block_list",
    "chunked",
    "dilated",
    "documents",
    "documents_of",
    "global_tokens",
    "head_windows",
    "mask_mod",
    "mask_tensor",
    "prefix_lm",
    "refuse_mask",
    "sliding",
    "tree",
    "used",
]
