"""Attention masks: bands of visible keys, masks written as Python functions, and ready-made masks.

``band.py`` holds the masks that kernels compute from three integers. ``function.py`` combines a band with a
function of token indices, in which ``recognition.py`` finds bands. ``trees.py`` has the mask of a tree of
sequences, and ``selection.py`` that of lists of keys. Add new masks to ``ready_made.py``.
"""

from typing import TYPE_CHECKING

from ..internal.renamed import module_getattr
from .band import CAUSAL as CAUSAL
from .band import FULL as FULL
from .band import NOTHING as NOTHING
from .band import AnyMask as AnyMask
from .band import Mask as Mask
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
    seqused,
    tree,
)
from .recognition import mask_mod as mask_mod
from .selection import selected
from .trees import until

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
    "selected",
    "seqused",
    "tree",
    "until",
]

if not TYPE_CHECKING:
    __getattr__ = module_getattr(__name__, {"used": "seqused"})
