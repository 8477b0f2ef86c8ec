"""The launch options of a kernel (tiles, stages and warps), and the split of head dimensions into blocks."""

from typing import NamedTuple

ALIKE = 64  # 16-bit tiles with at least this many channels all have the same layout


class LaunchConfig(NamedTuple):
    """The launch options of a kernel.

    Attributes:
        block_m, block_n: the numbers of queries and keys in a tile.
        stages: the number of loads in flight.
        warps: the number of warps in a program.
        tma: load tiles through descriptors (TMA). This saves the registers for addresses, but needs sm_90,
            and addresses and strides that are multiples of 16 bytes.
        registers: the limit per thread; with fewer registers, more programs fit on an SM.
        resident: how many programs are assumed to run on an SM at once when decode work is split.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int
    tma: bool = False
    registers: int | None = None
    resident: int = 2


def fitting(table: tuple[tuple, ...], n: int):
    """Return the first entry in a table of (limit, entry) pairs whose limit is at least ``n``."""
    return next(entry for limit, entry in table if n <= limit)


def in_blocks(config: LaunchConfig, block_size: int) -> LaunchConfig:
    """Return tiles for keys that lists select in blocks of ``block_size`` keys.

    A tile lies in one block if it can do so with at least 32 keys. Otherwise it has as many keys as other
    tiles, and each has its own block.
    """
    even = block_size & -block_size  # the largest power of two that divides it
    return config._replace(block_n=min(config.block_n, even)) if even >= 32 else config


def power_of_two(n: int) -> int:
    """Return the smallest power of two that holds ``n``, but at least 16, which matrix products require."""
    return max(16, 1 << (n - 1).bit_length())


def head_split(d: int) -> tuple[int, int]:
    """Split ``d`` channels into a power-of-two block and a second, padded block for the rest (0 if none).

    >>> head_split(192), head_split(160), head_split(96), head_split(59), head_split(8)
    ((128, 64), (128, 64), (128, 0), (64, 0), (16, 0))
    """
    above = power_of_two(d)
    main, tail = above // 2, max(ALIKE, power_of_two(d - above // 2))
    return (main, tail) if main + tail < above else (above, 0)


def widths(d: int, e: int) -> tuple[int, int, int]:
    """Return the widths of three blocks of channels: two for a key (:func:`head_split`), one for a value.

    All blocks are equally wide or have at least 64 channels, so their tiles have the same layout. Tiles that
    are not pipelined share an address. If their layouts differed, ptxas might omit the base of a descriptor
    (tests/compiled/sass.py).

    >>> widths(128, 128), widths(192, 128), widths(59, 29), widths(128, 16), widths(16, 32), widths(40, 64)
    ((128, 0, 128), (128, 64, 128), (64, 0, 64), (128, 0, 64), (32, 0, 32), (64, 0, 64))
    """
    (main, tail), value = head_split(d), power_of_two(e)
    return max(main, min(value, ALIKE)), tail, max(value, min(main, ALIKE))
