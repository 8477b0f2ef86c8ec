"""How the decode kernels are launched: pure tables and rules, and the size of a schedule. Imports no
triton.
"""

from typing import NamedTuple

from ....masks.function import GRAIN as GRAIN
from ..launching.config import LaunchConfig, fitting, power_of_two, widths

GRANULARITY = 128  # tokens, of which splits of a sequence are multiples
FINEST = 32  # those of the most splits; of half of them, multiples of twice as many
ENTRY = 8  # int32 that a schedule holds for each split
HALVINGS = 12  # of the capacity, for each of which there is a schedule
RESIDENT = 4  # programs that an SM runs at once at most, which schedules count with
LARGE = (80, 90, 100)  # chips with more than 99 KB of shared memory
EDGE = 16  # tokens of the tiles around those that descriptors load
TILE = 64  # rows of queries in a tile of few
# Tokens of the splits of long packed sequences, which have more rows than a tile.
SMALLEST, LARGEST = 512, 4096
LONG_SPLITS = 16  # of each of their blocks at most: more take longer to join than they spare
TOGETHER = 16  # rows that a program joins where there are such splits
JOINING = (
    256  # programs that join at least: 128 heads, 1 x 8k, 64 splits: 1,024 take 6.8 us, 512 4.8 and 256 3.7
)
LONG = 16  # query tokens of a sequence, on the mean, from which there may be enough programs without splits


class DecodeCase(NamedTuple):
    """What decides the tiles of a call: ``rows`` of queries for each sequence and KV head, the bytes of a
    stored value (4 if what is computed with is fp32), whether every sequence has ``one`` query, the tokens of
    a page (0 where a page holds all), and whether a function changes scores."""

    rows: int
    head_dim: int
    tail: int
    value_dim: int
    itemsize: int
    latent: bool
    one: bool
    page_size: int
    arch: int
    aligned: bool
    changed: bool = False

    @property
    def widest(self) -> int:
        """Channels of a whole key, or of the block that holds a value."""
        return max(self.head_dim + self.tail, power_of_two(self.value_dim))


# By the widest head that fits, on an H200, 2026-11. Up to TILE rows of queries, with as many as there are:
FEW_ROWS = (
    (128, LaunchConfig(16, 64, 4, 4)),
    (256, LaunchConfig(16, 32, 4, 4)),
    (576, LaunchConfig(16, 16, 3, 4, resident=1)),
)
# More rows.
MANY_ROWS = (
    (128, LaunchConfig(128, 64, 3, 8, resident=1)),
    (256, LaunchConfig(64, 32, 3, 8, resident=1)),
    (576, LaunchConfig(64, 16, 2, 8, resident=1)),
)
# Few rows over int8 and fp8.
EIGHT_BIT = (
    (128, LaunchConfig(16, 128, 3, 4)),
    (256, LaunchConfig(16, 64, 3, 4)),
    (576, LaunchConfig(16, 64, 3, 4)),  # 16 heads, 64 x 8k: 122; 16 x 32 138
)
# More rows, whose scores a function changes, which takes registers: of 128 rows it spills 328 bytes (none was
# timed).
MANY_ROWS_CHANGED = ((128, LaunchConfig(64, 64, 3, 8)), *MANY_ROWS[1:])
# Batch-invariant calls, whatever the rows.
BATCH_INVARIANT = (
    (128, LaunchConfig(64, 64, 3, 4)),
    (256, LaunchConfig(64, 32, 3, 8)),
    (576, LaunchConfig(16, 32, 2, 4, resident=1)),
)
# Any rows, if what is computed with is fp32.
FP32 = (
    (128, LaunchConfig(16, 32, 2, 4)),
    (256, LaunchConfig(16, 16, 2, 4)),
    (576, LaunchConfig(16, 16, 1, 8, resident=1)),
)
# Latent storage on chips with 200 KB of shared memory; many rows on sm_90 only.
LATENT_ROWS_16 = LaunchConfig(16, 64, 3, 8, resident=1)
LATENT_ROWS_64 = LaunchConfig(64, 64, 2, 8, tma=True, resident=1)
# Latents of 512 + 64 in Hopper's own kernels: rows as columns of products, or as their 64 rows.
HOPPER_ROWS_16 = LaunchConfig(16, 64, 2, 4, tma=True, resident=1)
# 32 heads, 64 x 8k: 168; in two blocks of 16 rows, 183
HOPPER_ROWS_64 = LaunchConfig(64, 64, 3, 4, tma=True, resident=1)
# Of stored bytes; 32 heads, 64 x 8k: 156 in fp8 and 182 in int8; as 64 rows, of bytes made 16 bits, 183 and
# 188.
HOPPER_INT8_FP8 = LaunchConfig(16, 64, 4, 4, tma=True, resident=1)
MAX_ROWS_INT8_FP8 = 32  # rows, in two blocks

# 128 channels in kernels of their own: 16 rows for all warps, or for each half of them. us, pages of 16, own
# / cuDNN: 16 x 8k 129.4 / 124.0, 128 x 1k 128.5 / 126.2, 64 x 8k 487 / 480, 1 x 128k 129.6 / 126.7; of 32
# rows, MQA 64 x 8k 70.7 / 82.8. In bytes 64 x 8k, own / plain: int8 255 / 282, fp8 255 / 277; 16 x 1k 14.3 /
# 15.2. 1 x 1k 7.4 / 6.5. Fewer loads in flight are faster. By slots: 16 x 8k 126.8 with two, 127.6 with
# three; int8 255, 258; MQA 72.4 with two, 70.8 with three, 73.0 with four, 76.6 with six.
HOPPER_PAGES = LaunchConfig(16, 16, 2, 8, tma=True, resident=1)
HOPPER_PAGES_ROWS_32 = LaunchConfig(32, 16, 3, 4, tma=True, resident=1)
# Tokens times KV heads that a cache must have room for: 64 MB, which is more than the L2 cache holds.
LEAST_CACHED = 1 << 17


def hopper(case: DecodeCase, cached: int) -> LaunchConfig | None:
    """Tiles of Hopper's own kernels over latents of 512 + 64, or keys and values of 128; None where a plain
    one runs.

    >>> case = DecodeCase(128, 512, 64, 512, 2, True, True, 64, 90, True)
    >>> hopper(case, 1).block_m, hopper(case._replace(rows=16), 1).block_m
    (64, 16)
    >>> hopper(case._replace(page_size=16), 1) is None
    True
    >>> [hopper(case._replace(rows=rows, itemsize=1), 1).block_m for rows in (16, 32, 64)]
    [16, 16, 64]
    >>> case = DecodeCase(4, 128, 0, 128, 2, False, True, 16, 90, True)
    >>> wide = case._replace(rows=17)
    >>> hopper(case, LEAST_CACHED).block_m, hopper(wide, LEAST_CACHED).block_m, hopper(case, 1024)
    (16, 32, None)
    >>> [hopper(case._replace(rows=rows, itemsize=1), LEAST_CACHED) is None for rows in (16, 17)]
    [False, True]
    """
    is_byte = case.itemsize == 1
    if case.latent:
        small, large, channels = (
            HOPPER_INT8_FP8 if is_byte else HOPPER_ROWS_16,
            HOPPER_ROWS_64,
            (512, 64, 512),
        )
        max_small, is_there = MAX_ROWS_INT8_FP8 if is_byte else small.block_m, case.itemsize <= 2
    else:
        small, channels = HOPPER_PAGES, (128, 0, 128)
        max_small, large = small.block_m, small if is_byte else HOPPER_PAGES_ROWS_32
        is_there = case.itemsize <= 2 and cached >= LEAST_CACHED and case.rows <= large.block_m
    is_there = is_there and case.arch == 90 and case.aligned and case.page_size % large.block_n == 0
    if not is_there or (case.head_dim, case.tail, case.value_dim) != channels:
        return None
    return small if case.rows <= max_small else large


def together(kv_heads: int, config: LaunchConfig | None) -> int:
    """KV heads that a program reads: all that lie side by side, one a warp, in Hopper's own kernel over
    pages.

    >>> [together(heads, HOPPER_PAGES) for heads in (1, 6, 32)], together(8, None)
    ([1, 2, 8], 1)
    """
    return 1 if config is None else min(config.warps, kv_heads & -kv_heads)


def decode(case: DecodeCase) -> LaunchConfig:
    """Tiles of the decode kernel.

    >>> decode(DecodeCase(4, 128, 0, 128, 2, False, True, 64, 90, True))
    LaunchConfig(block_m=16, block_n=64, stages=4, warps=4, tma=False, registers=None, resident=2)
    """
    widest = case.widest
    if case.latent and widest > 256 and case.itemsize == 2 and case.arch in (90, 100):
        if case.rows <= LATENT_ROWS_16.block_m:
            return LATENT_ROWS_16
        tma = case.page_size % LATENT_ROWS_64.block_n == 0 and case.aligned
        if case.arch == 90 and (tma or case.one) and not case.changed:
            return LATENT_ROWS_64._replace(tma=tma)
    small, max_rows = (EIGHT_BIT, 16 if widest > 256 else TILE) if case.itemsize == 1 else (FEW_ROWS, TILE)
    many = MANY_ROWS_CHANGED if case.changed else MANY_ROWS
    table = FP32 if case.itemsize > 2 else many if case.rows > max_rows else small
    config = fitting(table, widest)
    if table is small:
        block_m = min(TILE, power_of_two(case.rows))
        config = config._replace(
            block_m=block_m, stages=config.stages if block_m == 16 else min(3, config.stages)
        )
    elif widest > 256 and case.itemsize == 1 and case.arch == 100:
        config = config._replace(stages=1)  # loads in flight are more than triton 3.6 can compile
    return _with_less(config, case)


def pairs(case: DecodeCase, config: LaunchConfig) -> bool:
    """Whether stored bytes are read in pairs, which takes more registers than many rows leave.

    A product takes 16 channels at least, so that as many pairs are 32.
    """
    channels = [n for n in widths_of(case.head_dim, case.tail, case.value_dim)[:2] if n]
    return case.itemsize == 1 and case.aligned and config.block_m == 16 and min(channels) >= 32


def fixed(case: DecodeCase) -> LaunchConfig:
    """Tiles that a batch-invariant call has whatever its queries are."""
    return _with_less(fitting(FP32 if case.itemsize > 2 else BATCH_INVARIANT, case.widest), case)


def may_use_tf32(case: DecodeCase) -> bool:
    """Whether products of fp32 may be those of tf32, for which tiles of keys lie in shared memory twice."""
    return case.widest <= 256 or case.arch in LARGE


def _with_less(config: LaunchConfig, case: DecodeCase) -> LaunchConfig:
    """The same on chips with less shared memory."""
    if case.arch in LARGE:
        return config
    block_m = config.block_m if case.widest <= 256 else min(32, config.block_m)
    return config._replace(block_m=block_m, stages=max(1, config.stages - 1))


def rows(tokens: int, batch: int, group: int) -> int:
    """The rows of a packed sequence that tiles are chosen for, of ``tokens`` queries of all sequences.

    Those of the mean; or up to a tile all that one sequence may have, since each block of more rows reads all
    keys.

    >>> rows(64, 64, 4), rows(72, 64, 4), rows(319, 64, 7), rows(1000, 10, 4)
    (4, 36, 63, 400)
    """
    mean, most = -(-tokens // max(1, batch)), tokens - batch + 1
    return group * max(mean, min(most, TILE // group))


def halvings(config: LaunchConfig, programs: int, kv_heads: int, *, whole: bool = False) -> int:
    """How often the capacity is halved for so many programs to each split of all KV heads; ``whole``: of
    whole tiles.

    >>> halvings(FEW_ROWS[0][1], 8, 8), halvings(HOPPER_PAGES, 1, 8), halvings(HOPPER_PAGES, 1, 1)
    (2, 0, 2)
    """
    most = config.resident * min(kv_heads, RESIDENT)
    least = (config.block_n // FINEST).bit_length() - 1 if whole else 0
    return min(HALVINGS - 1, max(least, (-(-programs * RESIDENT // most) - 1).bit_length()))


def long_splits(config: LaunchConfig, blocks: int, processors: int) -> int:
    """Splits of each of so many blocks of long sequences at most, by which they fill a GPU three times.

    >>> [long_splits(LaunchConfig(64, 64, 3, 4), blocks, 132) for blocks in (8, 48, 72, 500)]
    [16, 16, 11, 1]
    """
    return max(1, min(LONG_SPLITS, 3 * config.resident * processors // blocks))


def capacity(processors: int, kv_heads: int) -> int:
    """Splits, of all sequences, that fill a GPU of so many multiprocessors if a program has 4 KV heads at
    least.
    """
    return max(1, RESIDENT * processors // min(kv_heads, RESIDENT))


def joined(splits: int, width: int, rows: int) -> tuple[int, int, int]:
    """Rows, splits and channels that a program joins at once, of ``rows`` in all: of as many splits as
    sequences have if all are alike.

    >>> joined(2, 512, 4096), joined(4, 128, 512), joined(22, 512, 384)
    ((4, 2, 512), (8, 4, 128), (2, 16, 256))
    >>> joined(66, 512, 128), joined(132, 512, 16)
    ((4, 64, 64), (1, 128, 32))
    """
    at_once = min(128, max(2, 1 << splits.bit_length() >> 1))
    channels = min(width, 4096 // at_once)
    many = 1 << (rows * (width // channels) // JOINING).bit_length() >> 1
    return max(min(8, 4096 // (at_once * channels)), min(4, many)), at_once, channels


def slots(batch: int, capacity: int) -> int:
    """Splits that a schedule has at most, for as many sequences and a capacity."""
    return max(capacity, batch + (capacity + 1) // 2)


def widths_of(head_dim: int, tail: int, value_dim: int) -> tuple[int, int, int]:
    """Channels of the blocks that hold a key, the rest of a key (latent storage has its own plane for it), a
    value.
    """
    if tail:
        return power_of_two(head_dim), power_of_two(tail), power_of_two(value_dim)
    return widths(head_dim, value_dim)
