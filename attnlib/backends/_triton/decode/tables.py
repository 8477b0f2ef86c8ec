"""Tile tables of the decode kernels, and the size of a schedule. Pure functions; imports no Triton."""

from typing import NamedTuple

from ....masks.function import GRAIN as GRAIN
from ..launching.config import LaunchConfig, fitting, in_blocks, power_of_two, widths

# The capacity of a schedule is the number of splits it aims for. At full capacity, splits begin at multiples
# of FINEST tokens. Each halving of the capacity doubles this step, up to GRANULARITY tokens.
GRANULARITY = 128
FINEST = 32
ENTRY = 8  # int32 values per split in a schedule
HALVINGS = 12  # a schedule is stored for 12 capacities, each half of the previous one
RESIDENT = 4  # schedules assume that an SM runs at most this many programs at once
LARGE = (80, 90, 100)  # architectures with more than 99 KB of shared memory
EDGE = 16  # if descriptors (TMA) load the full tiles, masked tiles have this many tokens
TILE = 64  # up to this many query rows, the tables for few rows apply
# The minimum and maximum tokens in a split of a long packed sequence, one with more query rows than a tile.
SMALLEST, LARGEST = 512, 4096
LONG_SPLITS = 16  # most splits per block of a long sequence; combining more costs more than it saves
TOGETHER = 16  # rows per program of the combine kernel, if long sequences are split
# The combine kernel aims for at least this many programs. Its time with 128 heads, one sequence of 8k tokens
# and 64 splits:
#   programs  1,024  512  256
#   us          6.8  4.8  3.7
JOINING = 256
# With more query tokens per sequence than this, on average, a call may fill the GPU without splits.
LONG = 16


class DecodeCase(NamedTuple):
    """The properties of a decode call that determine its tiles.

    Attributes:
        rows: query rows per sequence and KV head.
        head_dim, tail, value_dim: channels of a key, of its separate rotary plane (or 0), and of a value.
        itemsize: bytes of a stored value; 4 if the call computes in fp32.
        latent: the cache stores latents (MLA), not keys and values.
        one: every sequence has one query.
        page_size: tokens per page; 0 if one page holds a whole sequence.
        arch: compute capability, such as 90.
        aligned: descriptors (TMA) may load the cache.
        changed: a score function changes scores.
    """

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
        """Return the larger of a whole key's channels and the padded channels of a value."""
        return max(self.head_dim + self.tail, power_of_two(self.value_dim))


# Each table lists (widest head, config), tuned on an H200, 2026-11. This table serves up to TILE query rows;
# `decode` adapts block_m to their number.
FEW_ROWS = (
    (128, LaunchConfig(16, 64, 4, 4)),
    (256, LaunchConfig(16, 32, 4, 4)),
    (576, LaunchConfig(16, 16, 3, 4, resident=1)),
)
# Tiles for more than TILE query rows.
MANY_ROWS = (
    (128, LaunchConfig(128, 64, 3, 8, resident=1)),
    (256, LaunchConfig(64, 32, 3, 8, resident=1)),
    (576, LaunchConfig(64, 16, 2, 8, resident=1)),
)
# Tiles for few query rows over an int8 or fp8 cache.
EIGHT_BIT = (
    (128, LaunchConfig(16, 128, 3, 4)),
    (256, LaunchConfig(16, 64, 3, 4)),
    (576, LaunchConfig(16, 64, 3, 4)),  # 16 heads, 64 x 8k: 122 us; 16 x 32 takes 138 us
)
# Tiles for many query rows with a score function. The function needs registers: with a tile of 128 rows, 328
# bytes would spill (not timed).
MANY_ROWS_CHANGED = ((128, LaunchConfig(64, 64, 3, 8)), *MANY_ROWS[1:])
# Batch-invariant calls: the same tile for any number of query rows.
BATCH_INVARIANT = (
    (128, LaunchConfig(64, 64, 3, 4)),
    (256, LaunchConfig(64, 32, 3, 8)),
    (576, LaunchConfig(16, 32, 2, 4, resident=1)),
)
# Tiles for fp32 computation, for any number of query rows.
FP32 = (
    (128, LaunchConfig(16, 32, 2, 4)),
    (256, LaunchConfig(16, 16, 2, 4)),
    (576, LaunchConfig(16, 16, 1, 8, resident=1)),
)
# Tiles for latent caches (MLA) on GPUs with 200 KB of shared memory. The tile of 64 rows needs sm_90.
LATENT_ROWS_16 = LaunchConfig(16, 64, 3, 8, resident=1)
LATENT_ROWS_64 = LaunchConfig(64, 64, 2, 8, tma=True, resident=1)
# Tiles for tokens of latents that lists select. Every token has an address of its own, which takes registers:
# LATENT_ROWS_64 would spill 968 bytes, 64 x 32 spills 120, and EIGHT_BIT would spill 440 (sm_90, triton 3.6).
# For 64 sequences with 2,048 of 32k tokens and 128 heads, it takes 244 us, 2 or 4 stages 282 or 285, and
# tiles of 64 x 16 take 398 (H100, 2026-11-28).
SELECTED_ROWS_64 = LaunchConfig(64, 32, 3, 8, resident=1)
SELECTED_INT8_FP8 = LaunchConfig(16, 32, 4, 4)
# The dedicated Hopper kernel for selected tokens of latents gathers them row by row, without TMA.
HOPPER_SELECTED = LaunchConfig(64, 64, 2, 4, resident=1)
FARTHEST = 2**24  # largest stride of query heads in elements: int32 offsets must reach across 64 heads
ENTRIES = 128  # entries of a list for each warp that lists its visible blocks (not timed)
LEAST_SELECTED = 64  # keys of a split of a list (not timed)
# The dedicated Hopper kernels for latents of 512 + 64 channels. ROWS_16 uses 16 query rows as the columns of
# a matrix product, ROWS_64 uses 64 as its rows. Microseconds, 32 query heads, 64 sequences of 8k tokens:
#   tile                            bf16  fp8  int8
#   64 rows                          168  183   188   (8-bit latents are converted to 16 bits)
#   two blocks of 16 rows            183  156   182
HOPPER_ROWS_16 = LaunchConfig(16, 64, 2, 4, tma=True, resident=1)
HOPPER_ROWS_64 = LaunchConfig(64, 64, 3, 4, tma=True, resident=1)
HOPPER_INT8_FP8 = LaunchConfig(16, 64, 4, 4, tma=True, resident=1)
MAX_ROWS_INT8_FP8 = 32  # up to this many query rows, HOPPER_INT8_FP8 runs, in one or two blocks

# The dedicated Hopper kernels for keys and values of 128 channels. All warps share 16 query rows, or each
# half of the warps has its own 16. Microseconds, sequences x tokens, pages of 16 tokens:
#                           ours  cuDNN  generic
#   16 x 8k                129.4  124.0
#   128 x 1k               128.5  126.2
#   64 x 8k                  487    480
#   1 x 128k               129.6  126.7
#   1 x 1k                   7.4             6.5
#   64 x 8k, MQA, 32 rows   70.7   82.8
#   64 x 8k, int8            255             282
#   64 x 8k, fp8             255             277
#   16 x 1k, 8 bits         14.3            15.2
# Two or three slots (stages) are faster than more: two keep the memory busy. Microseconds:
#   slots               2      3     4     6
#   16 x 8k         126.8  127.6
#   64 x 8k, int8     255    258
#   64 x 8k, MQA     72.4   70.8  73.0  76.6
HOPPER_PAGES = LaunchConfig(16, 16, 2, 8, tma=True, resident=1)
HOPPER_PAGES_ROWS_32 = LaunchConfig(32, 16, 3, 4, tma=True, resident=1)
# The dedicated kernels for keys and values need a cache of at least this capacity, in tokens times KV heads.
# A cache of this capacity takes 64 MB in 16 bits, more than the L2 cache.
LEAST_CACHED = 1 << 17


def hopper(case: DecodeCase, cached: int) -> LaunchConfig | None:
    """Return the tiles of the dedicated Hopper kernels; None if the generic kernel runs.

    They serve latents of 512 + 64 channels, and keys and values of 128 channels. ``cached`` is the capacity
    of the cache, in tokens times KV heads.

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
    """Return how many KV heads a decode program handles: one, or in the Hopper GQA kernel up to one per warp.

    >>> [together(heads, HOPPER_PAGES) for heads in (1, 6, 32)], together(8, None)
    ([1, 2, 8], 1)
    """
    return 1 if config is None else min(config.warps, kv_heads & -kv_heads)


def decode(case: DecodeCase) -> LaunchConfig:
    """Return the tiles of the generic decode kernel.

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
        config = config._replace(stages=1)  # Triton 3.6 cannot compile more loads in flight
    return _with_less(config, case)


def pairs(case: DecodeCase, config: LaunchConfig) -> bool:
    """True if 8-bit values are read in pairs, as 16-bit words.

    With more than 16 query rows, a tile leaves too few registers for this. A matrix product needs at least 16
    channels, and pairs halve their number, so heads need at least 32.
    """
    channels = [n for n in widths_of(case.head_dim, case.tail, case.value_dim)[:2] if n]
    return case.itemsize == 1 and case.aligned and config.block_m == 16 and min(channels) >= 32


def fixed(case: DecodeCase) -> LaunchConfig:
    """Return the tiles of a batch-invariant call, which do not depend on the number of queries."""
    return _with_less(fitting(FP32 if case.itemsize > 2 else BATCH_INVARIANT, case.widest), case)


def selected(case: DecodeCase, *, block_size: int) -> LaunchConfig:
    """Return the tiles of the kernel over keys that lists select in blocks of ``block_size`` keys.

    >>> case = DecodeCase(128, 512, 64, 512, 2, True, True, 64, 90, True)
    >>> [selected(case._replace(rows=rows), block_size=1).block_n for rows in (16, 128)]
    [64, 32]
    """
    config, wide = decode(case), case.widest > 256
    if config == LATENT_ROWS_64._replace(tma=config.tma):
        config = SELECTED_ROWS_64
    elif wide and case.itemsize == 1 and (case.rows <= 16 or case.arch not in (90, 100)):
        config = _with_less(SELECTED_INT8_FP8, case)  # 64 x 16 would spill 5 KB (sm_80, triton 3.6)
    return in_blocks(config._replace(tma=False), block_size)


def selected_latents(case: DecodeCase) -> LaunchConfig | None:
    """Return the tiles of the Hopper kernel for selected tokens of latents; None if the generic one runs.

    >>> case = DecodeCase(128, 512, 64, 512, 2, True, True, 16, 90, True)
    >>> found = (selected_latents(case._replace(rows=rows)) for rows in (64, 96, 128))
    >>> [None if config is None else config.block_m for config in found]
    [64, None, 64]
    """
    fits = case.arch == 90 and case.aligned and case.latent and case.rows % HOPPER_SELECTED.block_m == 0
    channels = case.head_dim, case.tail, case.value_dim
    return HOPPER_SELECTED if fits and channels == (512, 64, 512) and case.itemsize <= 2 else None


def listing(slots: int) -> LaunchConfig:
    """Return the size and warps of a program that lists the visible blocks of one list of ``slots`` entries.

    A program of a decoding step waits for its loads and atomics, so each thread should have few entries.

    >>> [listing(slots).warps for slots in (16, 600, 2048, 5000)]
    [4, 8, 16, 16]
    """
    size = power_of_two(slots)
    return LaunchConfig(size, 0, 1, min(16, max(4, size // ENTRIES)))


def list_splits(config: LaunchConfig, keys: int, programs: int, processors: int) -> int:
    """Return the number of splits of each list: enough to fill the GPU, or as many as have enough keys.

    A list selects up to ``keys`` keys. Without splits, there would be ``programs`` programs.

    >>> [list_splits(SELECTED_ROWS_64, 2048, 2 * queries, 132) for queries in (1, 8, 32, 64)]
    [32, 8, 2, 1]
    """
    tiles, missing = max(1, -(-keys // config.block_n)), config.resident * processors // max(1, programs)
    tiles_each = -(-tiles // max(1, min(missing, keys // LEAST_SELECTED)))
    return -(-tiles // tiles_each)


def may_use_tf32(case: DecodeCase) -> bool:
    """True if fp32 products may use tf32, which stores key tiles twice in shared memory."""
    return case.widest <= 256 or case.arch in LARGE


def _with_less(config: LaunchConfig, case: DecodeCase) -> LaunchConfig:
    """Return a smaller config if the GPU has little shared memory, otherwise the same config."""
    if case.arch in LARGE:
        return config
    block_m = config.block_m if case.widest <= 256 else min(32, config.block_m)
    return config._replace(block_m=block_m, stages=max(1, config.stages - 1))


def rows(tokens: int, batch: int, group: int) -> int:
    """Return the number of query rows per packed sequence for which tiles are chosen.

    All sequences together have ``tokens`` queries. The result is the mean per sequence, but at
    least the rows of the longest possible sequence if they fit in a tile, and otherwise at least a full tile.
    With fewer rows, a second block might have to read all keys again.

    >>> rows(64, 64, 4), rows(72, 64, 4), rows(319, 64, 7), rows(1000, 10, 4)
    (4, 36, 63, 400)
    """
    mean, most = -(-tokens // max(1, batch)), tokens - batch + 1
    return group * max(mean, min(most, TILE // group))


def halvings(config: LaunchConfig, programs: int, kv_heads: int, *, whole: bool = False) -> int:
    """Return how many times to halve the capacity of a schedule (the number of splits it aims for).

    Each split runs ``programs`` programs, for all KV heads together. With ``whole``, splits consist of whole
    tiles.

    >>> halvings(FEW_ROWS[0][1], 8, 8), halvings(HOPPER_PAGES, 1, 8), halvings(HOPPER_PAGES, 1, 1)
    (2, 0, 2)
    """
    most = config.resident * min(kv_heads, RESIDENT)
    least = (config.block_n // FINEST).bit_length() - 1 if whole else 0
    return min(HALVINGS - 1, max(least, (-(-programs * RESIDENT // most) - 1).bit_length()))


def long_splits(config: LaunchConfig, blocks: int, processors: int) -> int:
    """Return the most splits per block of long sequences: enough to fill the GPU three times.

    >>> [long_splits(LaunchConfig(64, 64, 3, 4), blocks, 132) for blocks in (8, 48, 72, 500)]
    [16, 16, 11, 1]
    """
    return max(1, min(LONG_SPLITS, 3 * config.resident * processors // blocks))


def capacity(processors: int, kv_heads: int) -> int:
    """Return how many splits of all sequences together fill a GPU with this many multiprocessors.

    With fewer than 4 KV heads, more splits are needed to fill the GPU.
    """
    return max(1, RESIDENT * processors // min(kv_heads, RESIDENT))


def joined(splits: int, width: int, rows: int) -> tuple[int, int, int]:
    """Return the rows, splits and channels that a program of the combine kernel handles at once.

    The kernel combines ``rows`` rows of ``width`` channels in all. ``splits`` is the number of splits per
    sequence if all sequences have the same length.

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
    """Return the largest number of splits in a schedule with this capacity for ``batch`` sequences."""
    return max(capacity, batch + (capacity + 1) // 2)


def widths_of(head_dim: int, tail: int, value_dim: int) -> tuple[int, int, int]:
    """Return the padded channels of the block for a key, of a second block for its rest, and of a value.

    In a latent cache, the rest of a key is its rotary part, with ``tail`` channels.
    """
    if tail:
        return power_of_two(head_dim), power_of_two(tail), power_of_two(value_dim)
    return widths(head_dim, value_dim)
