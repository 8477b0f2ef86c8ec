"""Tile tables of the generic kernels for keys that lists select. Pure functions; imports no Triton."""

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

from ..launching.config import LaunchConfig, fitting, in_blocks, power_of_two
from .tables import BACKWARD_FP32, BACKWARD_KEYS_SMALL, ROOMY, WIDEST, DenseCase, widest_of

# Keys that lists select for one query: the rows of a tile are the heads that share a list. A prototype with
# these tiles for 128 channels computed 136 TFLOP/s (64/4 heads, 16 blocks of 64 of 32k keys, H100, 2026-11).
SELECTED = (
    (128, LaunchConfig(64, 64, 2, 4)),
    (256, LaunchConfig(64, 32, 2, 4)),
    (WIDEST, LaunchConfig(64, 32, 2, 8)),  # 64 x 64 takes 345 KB of shared memory (sm_90, triton 3.6)
)
# Values that are the first channels of the keys take no shared memory of their own. For 4,096 queries of 128
# heads that select 2,048 of 32k latents, 64 x 32 takes 15.2 ms and this 11.4 (H100, 2026-11-28, with a slower
# list_blocks than today's).
SELECTED_LATENTS = LaunchConfig(64, 64, 2, 8)
SELECTED_SMALL = (
    (128, LaunchConfig(64, 64, 2, 4)),
    (256, LaunchConfig(32, 32, 2, 4)),
    (WIDEST, LaunchConfig(32, 16, 2, 8)),
)
SELECTED_FP32 = (
    (64, LaunchConfig(32, 32, 1, 4)),
    (128, LaunchConfig(32, 32, 1, 8)),
    (WIDEST, LaunchConfig(16, 16, 1, 8)),
)
UNION = 1024  # entries of lists of neighbouring queries that one program sorts (more are not timed)
# Their gradients. A program for queries keeps q and dout; one for keys keeps k, v and the sums of dk and dv.
# With 16 blocks of 64, 64/4 heads d128 and 32k queries, dk and dv take 6.9 ms with 64 x 64 and 2 stages, and
# 6.1 ms with 32 x 64 and 3 (H100, 2026-11-28). The tiles for 256 channels are not timed.
SELECTED_QUERIES = (
    (128, LaunchConfig(64, 64, 2, 4)),
    (256, LaunchConfig(64, 32, 2, 8)),
    (WIDEST, LaunchConfig(32, 32, 2, 8)),  # 64 x 16 takes 238 KB of shared memory (sm_100, triton 3.6)
)
SELECTED_KEYS = (
    (128, LaunchConfig(32, 64, 3, 4)),
    (256, LaunchConfig(64, 32, 2, 8)),
    (WIDEST, LaunchConfig(64, 16, 2, 8)),  # 64 x 32 takes 237 KB (sm_90, triton 3.9)
)
SELECTED_BACKWARD_SMALL = (*BACKWARD_KEYS_SMALL[:3], BACKWARD_KEYS_SMALL[-1])
PARTS = 1 << 30  # bytes of partial sums of dk and dv at a time


class EntryTiles(NamedTuple):
    """The tiles of a product over listed keys, and how many channels of a head it takes at a time."""

    tiles: LaunchConfig
    channels: int

    def arguments(self, more: dict) -> tuple[LaunchConfig, dict]:
        """Return the tiles and the arguments of a launch."""
        return self.tiles, more | {"CHANNELS": self.channels}


# The products of a backward over lists that many heads share: of keys with q and with the gradients of
# outputs, of the gradients of scores with keys, and of both matrices of weights with q and with the gradients
# of outputs. With 2,048 queries of 128 heads, 2,048 of 32k latents take 3.8, 3.3 and 5.0 ms (H100,
# 2026-11-28); 128 x 128 and 8 warps took 4.2, 256 channels 3.6, and stores by TMA 6.8. Tiles for little
# shared memory are not timed.
ENTRIES = MappingProxyType(
    {
        "weights": (EntryTiles(LaunchConfig(64, 128, 3, 4), 64), EntryTiles(LaunchConfig(64, 64, 2, 4), 32)),
        "queries": (EntryTiles(LaunchConfig(128, 64, 3, 4), 128), EntryTiles(LaunchConfig(64, 32, 2, 4), 64)),
        "parts": (EntryTiles(LaunchConfig(128, 128, 3, 8), 64), EntryTiles(LaunchConfig(128, 32, 2, 4), 64)),
    }
)
ENTRIES_FP32 = EntryTiles(LaunchConfig(16, 32, 1, 4), 16)
ITEM = 512  # lists with a block that a program adds up, or twice, four times, ... as many for fewer sums


def forward(
    case: DenseCase, *, rows: int, block_size: int, queries: int = 1, own_values: bool = True
) -> LaunchConfig:
    """Return the tiles of the forward over keys that lists select in blocks of ``block_size`` keys.

    Its rows are the query heads of ``queries`` neighbouring queries that share a list and a KV head.
    """
    if not own_values and case.arch == 90 and case.itemsize == 2 and widest_of(case) > 256:
        tiles = SELECTED_LATENTS._replace(block_m=min(64, power_of_two(rows * queries)))
        return in_blocks(tiles, block_size)
    return _of_lists(case, SELECTED, SELECTED_SMALL, SELECTED_FP32, rows * queries, block_size)


def neighbours(case: DenseCase, tiled: Callable = forward, *, rows: int, block_size: int, slots: int) -> int:
    """Return how many neighbouring queries share tiles, which ``tiled`` returns: of keys that some select.

    If neighbours choose alike, such tiles read keys once for all of them. Otherwise each query computes the
    scores of all, which takes no longer than reading keys. With 16 of 512 blocks of 64, 16 heads and d = 128,
    single queries take 10.1 ms; four together take 3.1 if they choose alike, and 9.2 at random (H100,
    2026-11-28). fp32 is bound by its products.
    """
    for queries in (4, 2):
        tiles = tiled(case, rows=rows, block_size=block_size, queries=queries)
        is_whole = block_size % tiles.block_n == 0 and rows * queries <= tiles.block_m
        if is_whole and case.itemsize == 2 and 0 < queries * slots <= UNION:
            return queries
    return 1


def queries_pass(case: DenseCase, *, rows: int, block_size: int, queries: int = 1) -> LaunchConfig:
    """Return the tiles of the pass over queries of a backward with lists; they divide blocks as above."""
    table = SELECTED_QUERIES, SELECTED_BACKWARD_SMALL, BACKWARD_FP32
    return _of_lists(case, *table, rows * queries, block_size)


def keys_pass(case: DenseCase, *, rows: int, keys: int) -> LaunchConfig:
    """Return the tiles of the pass over keys of a backward with lists.

    A program has up to ``rows`` rows, and one of the tiles of ``keys`` adjacent keys.
    """
    table = SELECTED_KEYS if case.arch in ROOMY else SELECTED_BACKWARD_SMALL
    config = fitting(BACKWARD_FP32 if case.itemsize > 2 else table, widest_of(case))
    block_m, block_n = (min(x, power_of_two(n)) for x, n in zip(config[:2], (rows, keys), strict=True))
    return config._replace(block_m=block_m, block_n=block_n)


def adds_by_entry(*, rows: int, block_size: int) -> bool:
    """True if each entry of a list has shares in dk and dv, False if many lists with the same block do.

    The first form reads the queries of a list once, but writes and reads shares of each selected key:
    ``rows`` FLOPs per byte of memory. The second form keeps a block of keys, and reads the queries of all
    lists that have it: ``2 * block_size`` FLOPs per byte of the L2 cache. The factor 8 is computed from this,
    not measured. In the first form, a program has all rows, of which only 128 fit.
    """
    return 8 * block_size <= rows <= 128


def by_entry(case: DenseCase, product: str, *, rows: int) -> EntryTiles:
    """Return the tiles of one of the products ``ENTRIES``, for ``rows`` heads that share a list."""
    of_chip = ENTRIES[product][0 if case.arch in ROOMY else 1] if case.itemsize == 2 else ENTRIES_FP32
    most, channels = power_of_two(rows), min(of_chip.channels, power_of_two(case.value_dim))
    block_m = most if product == "parts" else min(of_chip.tiles.block_m, most)
    return EntryTiles(of_chip.tiles._replace(block_m=block_m), channels)


def _of_lists(
    case: DenseCase, large: tuple, small: tuple, fp32: tuple, rows: int, block_size: int
) -> LaunchConfig:
    table = large if case.arch in ROOMY else small
    config = fitting(fp32 if case.itemsize > 2 else table, widest_of(case))
    return in_blocks(config._replace(block_m=min(config.block_m, power_of_two(rows))), block_size)
