"""The launch that classifies each tile of a mask function as hidden, partial or full."""

from collections.abc import Callable
from math import prod

from .config import LaunchConfig


def classify(
    shape: tuple[int, ...], queries: int, keys: int, most: int | None = None
) -> tuple[Callable, int, LaunchConfig, dict[str, int]]:
    """Return the kernel, program count, config and an argument that classify tiles of ``queries`` x ``keys``.

    ``shape`` is the shape of the result, which has one number for each tile. ``most`` bounds the number of
    programs approximately, since most columns of a cache may be empty.
    """
    from ..kernels.mask_tiles import EACH, classify_tiles

    *rows, columns = shape
    chunks = -(-columns // EACH.value)
    if most is not None:
        chunks = min(chunks, max(1, -(-most // max(1, prod(rows)))))
    config = LaunchConfig(queries, keys, 1, min(8, max(2, 2 * queries)))
    return classify_tiles, prod(rows) * chunks, config, {"chunks": chunks}
