"""The torch backend: fused CPU attention where it is exact, else tile by tile; no T x T tensor, no copy of K or V."""

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
    """Dense or packed attention and its LSE, with gradients."""
    raise NotImplementedError


def cached_attention(q: Tensor, kv: KVView, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Attention over stored keys and its LSE, gathering at most 512 tokens at a time."""
    raise NotImplementedError
