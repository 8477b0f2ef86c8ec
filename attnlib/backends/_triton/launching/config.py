"""LaunchConfig, a printable record of tiles, stages and warps, and the split of heads into blocks."""

from typing import NamedTuple

ALIKE = 64  # from this many 16-bit channels on, tiles of every width have the same layout


class LaunchConfig(NamedTuple):
    """The launch options of a kernel.

    Attributes:
        block_m, block_n: queries and keys in a tile.
        stages: loads in flight.
        warps: warps in a program.
        tma: load through descriptors (TMA). They save the registers that addresses take, but need sm_90 and
            addresses and strides that are multiples of 16 bytes.
        registers: limit per thread; with fewer registers, more programs fit on an SM.
        resident: programs that run on an SM at once, as decode kernels assume when they split work.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int
    tma: bool = False
    registers: int | None = None
    resident: int = 2


def fitting(table: tuple[tuple, ...], n: int):
    """Return the first entry of a table whose limit is at least ``n``."""
    return next(entry for limit, entry in table if n <= limit)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that holds ``n``, but at least 16, which matrix products require."""
    return max(16, 1 << (n - 1).bit_length())


def head_split(d: int) -> tuple[int, int]:
    """Split a head dimension into a power of two and a second block for the rest, 0 or at least 64.

    >>> head_split(192), head_split(160), head_split(96), head_split(59), head_split(8)
    ((128, 64), (128, 64), (128, 0), (64, 0), (16, 0))
    """
    above = power_of_two(d)
    main, tail = above // 2, max(ALIKE, power_of_two(d - above // 2))
    return (main, tail) if main + tail < above else (above, 0)


def widths(d: int, e: int) -> tuple[int, int, int]:
    """Return the channels of the blocks for a key, the rest of a key, and a value.

    The blocks are equally wide, or have at least 64 channels each. Tiles that are not pipelined share an
    address; if their layouts differ, ptxas may omit the base of a descriptor (tests/compiled/sass.py).

    >>> widths(128, 128), widths(192, 128), widths(59, 29), widths(128, 16), widths(16, 32), widths(40, 64)
    ((128, 0, 128), (128, 64, 128), (64, 0, 64), (128, 0, 64), (32, 0, 32), (64, 0, 64))
    """
    (main, tail), value = head_split(d), power_of_two(e)
    return max(main, min(value, ALIKE)), tail, max(value, min(main, ALIKE))
