"""The launch that tells apart the tiles that a mask by function hides, cuts or shows whole."""

from math import prod

from ....masks.function import GRAIN
from .config import LaunchConfig
from .launch import Launch


def classify(shape: tuple[int, ...], queries: int, arguments: dict) -> Launch:
    """The launch that makes states of this shape, of tiles of so many queries."""
    from ..kernels.mask_tiles import EACH, classify_tiles

    *rows, columns = shape
    programs = prod(rows) * -(-columns // EACH.value)
    return Launch(classify_tiles, programs, arguments, LaunchConfig(queries, GRAIN, 1, 8))
