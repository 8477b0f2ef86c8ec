"""Attention over sequences that several ranks share, on torch.distributed: each rank has a part of the tokens."""

from .context import gather_attention, head_attention
from .sharding import shard, unshard

__all__ = ["gather_attention", "head_attention", "shard", "unshard"]
