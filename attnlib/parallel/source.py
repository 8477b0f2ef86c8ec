"""Sources of keys and values: the tensors that ranks send each other, and how to expand them into k and v."""

from collections.abc import Callable

from torch import Tensor

from ..layers.context_parallel import KeyValueSource as KeyValueSource

Expand = Callable[..., tuple[Tensor, Tensor]]


def source_of(k: Tensor, v: Tensor) -> KeyValueSource:
    """Return the source of plain keys and values: ranks send each other k and v, and expand nothing."""
    return KeyValueSource((k, v), lambda k, v: (k, v))
