"""The launch that classifies tiles of a mask function as hidden, partial or full."""

from math import prod

from .config import LaunchConfig
from .launch import Launch


def classify(shape: tuple[int, ...], queries: int, arguments: dict) -> Launch:
    """Return the launch that classifies tiles of ``queries`` rows into states of this shape."""
    from ..kernels.mask_tiles import EACH, classify_tiles

    *rows, columns = shape
    programs = prod(rows) * -(-columns // EACH.value)
    return Launch(classify_tiles, programs, arguments, LaunchConfig(queries, arguments["GRAIN"], 1, 8))
