"""The reference backend: the definition, sequence by sequence and query by query."""

from torch import Tensor

from ..cache.layout import KVView
from ..spec import AttentionSpec, Terms


def unsupported(spec: AttentionSpec) -> list[str]:
    """Why this backend cannot run ``spec``."""
    raise NotImplementedError


def slow(spec: AttentionSpec) -> list[str]:
    """Why this backend would copy K or V, or wait for the device."""
    raise NotImplementedError


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Dense or packed attention and its LSE."""
    raise NotImplementedError


def cached_attention(q: Tensor, kv: KVView, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Attention over stored keys and its LSE."""
    raise NotImplementedError
