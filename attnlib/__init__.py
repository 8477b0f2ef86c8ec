"""Attention layers for PyTorch: MHA, GQA, MQA and MLA, which train and decode with the same weights.

Build a layer, and call it on ``x`` ``[batch, tokens, width]``. There is no default mask.

>>> import torch
>>> from attnlib import CAUSAL, GroupedQueryAttention, KVCache, Rope
>>> layer = GroupedQueryAttention(512, 8, num_kv_heads=2, mask=CAUSAL, rope=Rope(64))
>>> x = torch.randn(1, 10, 512)
>>> layer(x).shape
torch.Size([1, 10, 512])

Decode with the same layer over a paged cache, as many tokens in each step as you like:

>>> cache = KVCache.paged([layer.kv_layout], pages=8, page_size=16, max_sequences=1)
>>> (sequence,) = cache.admit()
>>> with torch.no_grad():
...     for tokens in x.split([9, 1], dim=1):
...         with cache.step(tokens.shape[1]) as (kv,):
...             y = layer(tokens, kv=kv)
...     torch.testing.assert_close(y, layer(x)[:, -1:])

Where to look next:

- layers: MultiHeadAttention, GroupedQueryAttention, MultiQueryAttention, MultiHeadLatentAttention
- functions: attention, varlen_attention, cached_attention, and explain, which says what a call runs on
- looking at attention: attention_weights, attention_maxima
- masks and scores: CAUSAL, FULL, sliding, mask_mod, score_mod, and the modules masks and scores
- caches: KVCache, KVLayout; checkpoints: load_pretrained, and the modules convert and integrations
- planning: sizes; several GPUs: parallel; drop-in replacements of SDPA and flash-attn: compat

``python -m attnlib --help`` lists the commands, and ``docs/quickstart.md`` goes on from here.
"""

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from . import masks as masks
from . import packing as packing
from . import scaling as scaling
from . import scores as scores
from .cache.kv_cache import KVCache, LayerCache
from .cache.pages import CacheFullError, SequenceHandle
from .dispatch.select import FLOP_FORMULAS, Explanation, SlowPathWarning
from .dispatch.warnings import LayoutWarning
from .fp8 import Fp8Inputs, quantize_fp8
from .functional import (
    attention,
    attention_with_lse,
    cached_attention,
    cached_attention_with_lse,
    explain,
    varlen_attention,
    varlen_attention_with_lse,
)
from .gate import Gate
from .indexing import Indexer
from .integrations import load_pretrained
from .internal.renamed import module_getattr
from .kv import KVLayout, KVView
from .layers import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    shared_angles,
)
from .masks.band import CAUSAL, FULL, Mask, sliding
from .masks.function import MaskFunction
from .masks.recognition import mask_mod
from .merge import merge_states
from .rope.axes import Axes
from .rope.mrope import mrope_positions
from .rope.rope import Angles, Rope, rotate
from .rope.scaling import QueryTemperature
from .scores import ScoreFunction, score_mod
from .tracing.trace import QUERY_OFFSET, TraceError
from .weights import attention_maxima, attention_weights

__version__ = "0.1.0"

# Operators whose outputs selective activation checkpointing should save: their size is linear in the number
# of tokens, while recomputing them takes quadratic time.
CHECKPOINT_SAVE_OPS = tuple(
    getattr(torch.ops.attnlib, f"{name}_forward").default for name in ("torch", "triton", "triton_generic")
)

# Modules that are imported when they are first used
_SUBMODULES = ("compat", "convert", "integrations", "parallel", "qk_clip", "sizes")
_RENAMED = MappingProxyType(
    {
        "FIRST_QUERY": "QUERY_OFFSET",
        "Handle": "SequenceHandle",
        "SAVE_OPS": "CHECKPOINT_SAVE_OPS",
        "Temperature": "QueryTemperature",
        "load": "load_pretrained",
    }
    | {name: f"scaling.{new}" for name, new in scaling.RENAMED.items()}
)

__all__ = [
    "CAUSAL",
    "CHECKPOINT_SAVE_OPS",
    "FLOP_FORMULAS",
    "FULL",
    "QUERY_OFFSET",
    "Angles",
    "Axes",
    "CacheFullError",
    "Explanation",
    "Fp8Inputs",
    "Gate",
    "GroupedQueryAttention",
    "Indexer",
    "KVCache",
    "KVLayout",
    "KVView",
    "LayerCache",
    "LayoutWarning",
    "Mask",
    "MaskFunction",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiQueryAttention",
    "QueryTemperature",
    "Rope",
    "ScoreFunction",
    "SequenceHandle",
    "SlowPathWarning",
    "TraceError",
    "attention",
    "attention_maxima",
    "attention_weights",
    "attention_with_lse",
    "cached_attention",
    "cached_attention_with_lse",
    "explain",
    "load_pretrained",
    "mask_mod",
    "merge_states",
    "mrope_positions",
    "quantize_fp8",
    "rotate",
    "score_mod",
    "shared_angles",
    "sliding",
    "varlen_attention",
    "varlen_attention_with_lse",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = module_getattr(__name__, _RENAMED, _SUBMODULES)


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, "masks", "packing", "scaling", "scores"])
