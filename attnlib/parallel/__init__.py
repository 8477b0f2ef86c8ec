"""Attention over sequences that several ranks share, on torch.distributed: each rank has a part of the
tokens.
"""

from .context_parallel import ContextParallel
from .functions import context_attention, gather_attention, head_attention, ring_attention
from .sharding import shard, unshard

__all__ = [
    "ContextParallel",
    "context_attention",
    "gather_attention",
    "head_attention",
    "ring_attention",
    "shard",
    "unshard",
]
