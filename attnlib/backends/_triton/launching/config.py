"""LaunchConfig, a printable record of tiles, stages and warps; and how a head is split into power-of-two
blocks.
"""

from typing import NamedTuple

ALIKE = 64  # channels of 16 bits, from which tiles of any width have the same layout


class LaunchConfig(NamedTuple):
    """Queries and keys of a tile, loads in flight, warps; whether descriptors load, a bound on registers, and
    how many such programs an SM runs at once, which decode kernels count with.

    Descriptors (TMA) spare the registers that addresses take; they need sm_90, and addresses and strides of
    16 bytes. A thread with fewer registers leaves room for more programs beside it.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int
    tma: bool = False
    registers: int | None = None
    resident: int = 2


def fitting(table: tuple[tuple, ...], n: int):
    """The first entry of a table whose limit holds ``n``."""
    return next(entry for limit, entry in table if n <= limit)


def power_of_two(n: int) -> int:
    """The least that holds ``n``, and that a product takes: at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def head_split(d: int) -> tuple[int, int]:
    """A head dimension as a power of two and a second block that holds the rest, 0 or at least 64.

    >>> head_split(192), head_split(160), head_split(96), head_split(59), head_split(8)
    ((128, 64), (128, 64), (128, 0), (64, 0), (16, 0))
    """
    above = power_of_two(d)
    main, tail = above // 2, max(ALIKE, power_of_two(d - above // 2))
    return (main, tail) if main + tail < above else (above, 0)


def widths(d: int, e: int) -> tuple[int, int, int]:
    """Channels of the blocks that hold a key, the rest of a key, and a value: equal, or at least 64 each.

    Tiles that are not pipelined share an address; where they then differ in layout, ptxas may leave a
    descriptor without its base (tests/compiled/sass.py).

    >>> widths(128, 128), widths(192, 128), widths(59, 29), widths(128, 16), widths(16, 32), widths(40, 64)
    ((128, 0, 128), (128, 64, 128), (64, 0, 64), (128, 0, 64), (32, 0, 32), (64, 0, 64))
    """
    (main, tail), value = head_split(d), power_of_two(e)
    return max(main, min(value, ALIKE)), tail, max(value, min(main, ALIKE))
