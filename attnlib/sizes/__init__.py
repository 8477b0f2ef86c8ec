"""Compute what attention costs by plain arithmetic: the bytes it stores, its FLOPs, and the bytes it reads.

``cache.py`` counts the bytes of a cache, ``attention.py`` the parameters and FLOPs of a layer, and
``exchange.py`` the traffic between ranks in training. ``models.py`` derives variants of a model with other
kinds of attention, ``catalogue.py`` lists public models and chips, ``report.py`` computes the rows of a
report, and ``text.py`` writes them as tables.
"""

from .attention import GroupedShape, LatentShape, decode_bytes, decode_flops, prefill_flops
from .cache import cache_bytes, largest_batch, longest_context
from .catalogue import CHIPS, MODELS, Chip, chip, model
from .exchange import Exchange, exchange_bytes
from .models import Model, variants
from .report import Row, Setting, rows
from .text import table

__all__ = [
    "CHIPS",
    "MODELS",
    "Chip",
    "Exchange",
    "GroupedShape",
    "LatentShape",
    "Model",
    "Row",
    "Setting",
    "cache_bytes",
    "chip",
    "decode_bytes",
    "decode_flops",
    "exchange_bytes",
    "largest_batch",
    "longest_context",
    "model",
    "prefill_flops",
    "rows",
    "table",
    "variants",
]
