"""Attention layers that share one attention core, for training and for decoding with the same weights.

To read the code, start with ``masks/band.py`` (which keys a query sees) and ``functional.py`` (the attention
functions). Continue with ``kv.py`` (how a cache stores tokens) and ``layers/gqa.py`` (a layer that uses all
three). ``docs/tour.md`` follows a tensor through the library.
"""

import torch

from . import masks as masks
from . import packing as packing
from . import scaling as scaling
from . import scores as scores
from .cache.kv_cache import KVCache, LayerCache
from .cache.pages import CacheFullError, Handle
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
from .integrations import load
from .kv import KVLayout, KVView
from .layers import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    shared_angles,
)
from .masks.band import CAUSAL, FULL, Mask, mask_mod, sliding
from .masks.function import MaskFunction
from .merge import merge_states
from .rope.rope import Angles, Rope, rotate
from .rope.scaling import NTK, DynamicNTK, Llama3, LongRoPE, Proportional, Temperature, YaRN
from .scores import ScoreFunction, score_mod
from .tracing.trace import FIRST_QUERY, TraceError

__version__ = "0.1.0"

# Operators whose outputs selective activation checkpointing should save: their size is linear in the number
# of tokens, while recomputing them takes quadratic time.
SAVE_OPS = tuple(
    getattr(torch.ops.attnlib, f"{name}_forward").default for name in ("torch", "triton", "triton_plain")
)

__all__ = [
    "CAUSAL",
    "FIRST_QUERY",
    "FLOP_FORMULAS",
    "FULL",
    "NTK",
    "SAVE_OPS",
    "Angles",
    "CacheFullError",
    "DynamicNTK",
    "Explanation",
    "Fp8Inputs",
    "GroupedQueryAttention",
    "Handle",
    "KVCache",
    "KVLayout",
    "KVView",
    "LayerCache",
    "LayoutWarning",
    "Llama3",
    "LongRoPE",
    "Mask",
    "MaskFunction",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiQueryAttention",
    "Proportional",
    "Rope",
    "ScoreFunction",
    "SlowPathWarning",
    "Temperature",
    "TraceError",
    "YaRN",
    "attention",
    "attention_with_lse",
    "cached_attention",
    "cached_attention_with_lse",
    "explain",
    "load",
    "mask_mod",
    "merge_states",
    "quantize_fp8",
    "rotate",
    "score_mod",
    "shared_angles",
    "sliding",
    "varlen_attention",
    "varlen_attention_with_lse",
]
