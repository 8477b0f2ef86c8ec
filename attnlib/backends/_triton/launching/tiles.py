"""The launch that classifies each tile of a mask function as hidden, partial or full."""

from collections.abc import Callable
from math import prod

from .config import LaunchConfig


def classify(shape: tuple[int, ...], queries: int, keys: int) -> tuple[Callable, int, LaunchConfig]:
    """Return the kernel, program count and config that classify tiles of ``queries`` x ``keys``.

    ``shape`` is the shape of the result, which has one number for each tile.
    """
    from ..kernels.mask_tiles import EACH, classify_tiles

    *rows, columns = shape
    return classify_tiles, prod(rows) * -(-columns // EACH.value), LaunchConfig(queries, keys, 1, 8)
