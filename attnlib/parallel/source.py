"""Sources of keys and values: the tensors that ranks send, and their expansion to keys and values."""

from collections.abc import Callable

from torch import Tensor

from ..layers.context_parallel import KeyValueSource as KeyValueSource

Expand = Callable[..., tuple[Tensor, Tensor]]


def source_of(k: Tensor, v: Tensor) -> KeyValueSource:
    """Return a source that sends keys and values as they are."""
    return KeyValueSource((k, v), lambda k, v: (k, v))
