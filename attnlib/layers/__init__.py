"""Attention layers: they project, normalize and rotate, and call the functional core for attention."""

from .gqa import GroupedQueryAttention as GroupedQueryAttention
from .gqa import MultiHeadAttention as MultiHeadAttention
from .gqa import MultiQueryAttention as MultiQueryAttention
from .mla import MultiHeadLatentAttention as MultiHeadLatentAttention
from .sharing import shared_angles as shared_angles
