"""Masks, which say which keys a query sees: bands of indices, functions of indices, and ready-made ones of both.

``band.py`` holds what most calls need and kernels compute from four numbers. ``function.py`` joins a band with a
function of indices. ``ready_made.py`` is what people write with it, and where a new mask belongs.
"""

from .band import CAUSAL as CAUSAL
from .band import FULL as FULL
from .band import NOTHING as NOTHING
from .band import AnyMask as AnyMask
from .band import Mask as Mask
from .band import mask_mod as mask_mod
from .band import refuse_mask as refuse_mask
from .band import sliding as sliding
from .function import MaskFunction as MaskFunction
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
    "attention_sinks",
    "bidirectional_spans",
    "block_list",
    "chunked",
    "dilated",
    "documents",
    "documents_of",
    "global_tokens",
    "head_windows",
    "mask_tensor",
    "prefix_lm",
    "tree",
    "used",
]
