"""What ranks send each other of keys and values."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Expand = Callable[..., tuple[Tensor, Tensor]]


class Source(NamedTuple):
    """What keys and values are made of, where that is less to send than they are.

    ``tensors`` are of this rank's tokens, ``[b, tokens here, ...]`` or packed ``[tokens here, ...]``. ``expand`` makes
    k and v of those of any tokens, with these ``weights``.
    """

    tensors: tuple[Tensor, ...]
    expand: Expand
    weights: tuple[Tensor, ...] = ()


def source_of(k: Tensor, v: Tensor) -> Source:
    """Keys and values as they are."""
    return Source((k, v), _as_they_are)


def _as_they_are(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k, v
