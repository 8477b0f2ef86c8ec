"""Grouped-query attention at its two ends: a KV head for every query head, and one for all."""

from .gqa import GroupedQueryAttention


class MultiHeadAttention(GroupedQueryAttention):
    """Grouped-query attention in which every query head has a KV head of its own (Vaswani et al., 2017)."""

    @staticmethod
    def _kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
        if num_kv_heads not in (None, num_heads):
            raise ValueError(
                f"num_kv_heads: expected num_heads={num_heads}, got {num_kv_heads}; use GroupedQueryAttention"
            )
        return num_heads


class MultiQueryAttention(GroupedQueryAttention):
    """Grouped-query attention with a single KV head (Shazeer, 2019, arXiv 1911.02150)."""

    @staticmethod
    def _kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
        if num_kv_heads not in (None, 1):
            raise ValueError(f"num_kv_heads: expected 1, got {num_kv_heads}; use GroupedQueryAttention")
        return 1
