"""Context parallelism: attention over sequences that are sharded by token over ranks (torch.distributed)."""

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
