"""Tile tables of the generic kernels for calls without a cache. Pure functions; imports no Triton."""

from typing import NamedTuple

from ....masks.function import GRAIN as GRAIN
from ..launching.config import LaunchConfig, fitting, power_of_two, widths

# The keys and values of heads that run together may take this many bytes, about half of an H200's L2 cache.
L2 = 24 << 20
WIDEST = 576  # most channels of a key: the latent and rotary channels of MLA
WIDEST_VALUE = 512  # most channels of a value; tiles pad values to a power of two
WIDE = 256  # heads with more channels have tables of their own, and no backward in fp32
SHORT = 2048  # up to this many keys, smaller tiles are faster
FEW_KEYS = 512  # up to this many keys, making descriptors costs more CPU time than they save on the GPU
ROOMY = (90, 100)  # GPUs (sm) whose programs have up to 227 KB of shared memory
FARTHEST = 2**24  # largest row stride in elements: int32 offsets must reach across a tile of 128 rows


class DenseCase(NamedTuple):
    """The properties of a call that determine its tiles.

    Attributes:
        head_dim, value_dim: channels of a key and of a value.
        itemsize: bytes of a value.
        causal: queries see no later keys.
        plain: no softcap, ALiBi slopes or dropout.
        arch: compute capability, such as 90.
        aligned: rows start at multiples of 16 bytes, as descriptors (TMA) need.
        by_function: the call has a mask function or a score function.
        changed: the call has a score function.
        exponentials: how many exponentials (or similar functions) the score function computes per pair of a
            query and a key.
        gathers: how many tensors the functions read per pair.
    """

    head_dim: int
    value_dim: int
    itemsize: int
    causal: bool
    plain: bool
    arch: int
    aligned: bool
    by_function: bool = False
    changed: bool = False
    exponentials: int = 0
    gathers: int = 0


# Each table lists (widest head, config). Comments give milliseconds for the cases of bench/cases.py with 8k
# tokens in bf16, on a warm H200, 2026-11: first for the entry, then for other tiles (queries x keys).
#   head         entry  others
#   64            1.38  TMA 1.45; 64 x 64, 4 warps, 168 registers 1.47
#   128           1.16  without TMA 1.29; 64 x 64, 4 warps 1.21
#   192, v 128    1.38  TMA 1.42
#   256           1.19  without TMA 1.39
FORWARD_CAUSAL = (
    (64, LaunchConfig(128, 64, 3, 8, registers=128)),
    (128, LaunchConfig(128, 128, 3, 8, tma=True)),
    (192, LaunchConfig(128, 64, 3, 8)),
    (256, LaunchConfig(128, 64, 2, 8, tma=True)),
)
# Milliseconds, full 8k:
#   head  entry  others
#   64     2.64  TMA 2.75; 64 x 64, 4 warps 2.80; 128 x 128 3.14
#   128    2.24  without TMA 2.40; 128 x 64 2.37; 2 stages, 4 warps, TMA 2.36
FORWARD_FULL = ((64, LaunchConfig(128, 64, 3, 8)), *FORWARD_CAUSAL[1:])
# Milliseconds at d = 128, 1k tokens: entry 0.22; 64 x 64 with 2 stages and TMA 0.23; 128 x 128 with TMA 0.24.
FORWARD_SHORT = (FORWARD_CAUSAL[0], (128, LaunchConfig(64, 64, 3, 4)), *FORWARD_CAUSAL[2:])
# Score options and unaligned tensors need more registers, so they use these small tiles. So do GPUs with only
# 99 KB of shared memory (sm_86, sm_89, sm_120).
FORWARD_SMALL = (
    (64, LaunchConfig(64, 64, 3, 4, registers=168)),
    (128, LaunchConfig(64, 64, 2, 4)),
    (256, LaunchConfig(64, 32, 2, 4)),
    (512, LaunchConfig(64, 16, 2, 8)),
    (WIDEST, LaunchConfig(32, 16, 2, 8)),
)
FORWARD_FP32 = (
    (64, LaunchConfig(64, 64, 2, 8)),  # 4k: 3.0 ms; 32 x 32 with 1 stage and 4 warps 3.3 ms
    # These tiles are not timed. Each thread holds whole rows of its operands, so larger tiles would spill
    # kilobytes of registers.
    (128, LaunchConfig(32, 32, 1, 8)),
    (WIDEST, LaunchConfig(16, 16, 1, 8)),
)

# The backward pass over blocks of keys, which writes dk and dv. Milliseconds at 8k; other tiles were tried:
#   head  tile                              full  causal
#   64    entry                             4.24    2.49
#         64 x 64, 3 stages, TMA            4.85    2.30
#   128   entry                             3.88    2.02
#         64 x 128, 3 stages, 8 warps, TMA  4.06    2.03
#   192   entry                                     2.58
#         64 x 128, 8 warps                         3.24
#   256   entry                                     3.54
#         without TMA                               4.03
#         32 x 64, TMA                              4.69
BACKWARD_KEYS = (
    (64, LaunchConfig(128, 64, 2, 4, tma=True)),
    (128, LaunchConfig(64, 64, 2, 4, tma=True)),
    (192, LaunchConfig(32, 64, 3, 4, tma=True)),
    (256, LaunchConfig(64, 64, 2, 8, tma=True)),
)
# The backward pass over blocks of queries, which writes dq. Milliseconds at 8k; other tiles were tried:
#   head  tile                              full  causal
#   64    entry                             3.19    1.58
#         128 x 64, 8 warps                 3.67    1.89
#   128   entry                             2.71    1.37
#         TMA                               3.01    1.50
#         64 x 64, 2 stages, 4 warps, TMA   3.02    1.60
#   192   entry                                     1.78
#         TMA                                       1.96
#         2 stages                                  2.19
#   256   entry                                     1.76
#         128 x 64, 1 stage, TMA                    2.14
#         64 x 64                                   3.18
BACKWARD_QUERIES = (
    (64, LaunchConfig(64, 64, 3, 4, tma=True)),
    (128, LaunchConfig(128, 64, 3, 8)),
    (192, LaunchConfig(128, 64, 3, 8)),
    (256, LaunchConfig(128, 32, 3, 8, tma=True)),
)
BACKWARD_KEYS_SMALL = (
    (64, LaunchConfig(64, 64, 2, 4)),
    (128, LaunchConfig(32, 64, 1, 4)),
    (256, LaunchConfig(32, 32, 1, 4)),
    (512, LaunchConfig(16, 32, 2, 8)),
    (WIDEST, LaunchConfig(16, 16, 2, 8)),
)
BACKWARD_QUERIES_SMALL = (
    *BACKWARD_KEYS_SMALL[:3],
    (512, LaunchConfig(32, 16, 2, 8)),
    (WIDEST, LaunchConfig(16, 16, 2, 8)),
)
BACKWARD_FP32 = (
    (64, LaunchConfig(32, 32, 1, 4)),
    (128, LaunchConfig(32, 32, 1, 8)),
    (WIDEST, LaunchConfig(16, 16, 1, 8)),  # above 256, only for Triton's interpreter
)

# Forward tiles with mask or score functions; heads wider than 128 use small tiles. Milliseconds, causal 8k:
#   head  tile                      ALiBi function  window 1,024  documents
#   64    entry                               0.76          0.24       0.27
#         64 x 64, 168 registers              0.79          0.25       0.23
#   128   entry                               1.36          0.43       0.40
#         3 stages                            1.21          0.45       0.43
#         64 x 64                             1.39          0.43       0.39
FORWARD_FUNCTIONS = (
    (64, LaunchConfig(128, 64, 3, 8, tma=True)),
    (128, LaunchConfig(128, 128, 2, 8, tma=True)),
)
# Tiles for the backward pass over blocks of keys, with mask or score functions. Milliseconds, causal 8k:
#   head  tile                      ALiBi function  window 1,024  documents
#   64    entry                               1.19          0.37       0.33
#         128 x 64, 2 stages                  1.42          0.37       0.37
#   128   entry                               1.85          0.57       0.55
#         64 x 128, 8 warps                   2.09          0.71       0.63
BACKWARD_KEYS_FUNCTIONS = (
    (64, LaunchConfig(64, 64, 3, 4, tma=True)),
    (128, LaunchConfig(64, 64, 2, 4, tma=True)),
)
# Tiles for the backward pass over blocks of queries, with mask or score functions. Milliseconds, causal 8k:
#   head  tile                      ALiBi function  window 1,024  documents
#   64    entry                               1.22          0.24       0.25
#         TMA                                 1.18          0.24       0.28
#   128   entry                               2.24          0.40       0.35
#         128 x 64, 3 stages, 8 warps         1.76          0.54       0.45
BACKWARD_QUERIES_FUNCTIONS = (
    (64, LaunchConfig(64, 64, 3, 4)),
    (128, LaunchConfig(64, 64, 2, 4, tma=True)),
)

# Heads of more than 256 channels, on GPUs with 227 KB of shared memory. A program owns 64 rows, whose fp32
# sums of 512 channels take half of the registers of 8 warps. The sums of dk and dv together would take all of
# them, so dv has a pass of its own, which computes the scores once more. With n products of matrices per
# tile in a pass:
#   dv (2), dk (3), dq (3)                                       8 products, 64 rows
#   dk and dv together (4), dq (3)                               7 products, 32 rows
#   halves of the channels of dk and dv together (2 x 3), dq (3) 9 products, 64 rows
# Products of 64 rows run on wgmma, and those of 32 rows only on mma. These tiles are not timed; they are the
# largest that fit, and their loops without a mask spill next to nothing (d = 512, bf16, triton 3.7.1).
FORWARD_WIDE = ((WIDEST, LaunchConfig(64, 32, 2, 8, tma=True)),)
BACKWARD_VALUES_WIDE = ((WIDEST, LaunchConfig(32, 64, 2, 8, tma=True)),)
BACKWARD_KEYS_WIDE = ((WIDEST, LaunchConfig(16, 64, 2, 8, tma=True)),)
BACKWARD_QUERIES_WIDE = ((WIDEST, LaunchConfig(64, 16, 2, 8, tma=True)),)


# The largest scores of queries: q stays, and keys pass by. Two programs fit on an SM of a Hopper GPU, so that
# one multiplies while the other finds maxima. Time relative to the forward (16 heads, causal, 8k, H200), by
# tiles, stages and warps (OOM: too little shared memory):
#         128 x 128, 2, 8  128 x 128, 3, 8  128 x 64, 4, 8  64 x 128, 3, 4  64 x 64, 2, 4  128 x 256, 2, 8
#   d64              0.66             0.62            0.48            0.62           0.59             0.63
#   d128             0.52             0.60            0.55            0.56           0.59             0.67
#   d256             0.63              OOM            0.56            0.61           0.68              OOM
MAXIMA = (
    (64, LaunchConfig(128, 64, 4, 8, tma=True)),
    (128, LaunchConfig(128, 128, 2, 8, tma=True)),
    (256, LaunchConfig(128, 64, 4, 8, tma=True)),
)
MAXIMA_WIDE = ((WIDEST, LaunchConfig(64, 32, 2, 8, tma=True)),)
# The mass of keys: k stays, and queries pass by; else as above.
#         64 x 128, 4, 4  64 x 128, 2, 4  32 x 128, 2, 4  64 x 128, 2, 8  64 x 64, 2, 4  128 x 128, 2, 8
#   d64             0.90            0.84            0.97            0.99           1.05             1.33
#   d128            0.74            0.90            0.85            0.85           0.89             1.16
#   d256            0.75            0.82            0.78            0.83           0.81             0.82
MASS = (
    (64, LaunchConfig(64, 128, 2, 4, tma=True)),
    (256, LaunchConfig(64, 128, 4, 4, tma=True)),
)
MASS_WIDE = ((WIDEST, LaunchConfig(32, 64, 2, 8, tma=True)),)
STATISTICS_SMALL = (
    (128, LaunchConfig(64, 64, 2, 4)),
    (256, LaunchConfig(64, 32, 2, 4)),
    (WIDEST, LaunchConfig(32, 32, 2, 8)),
)
STATISTICS_FP32 = (
    (64, LaunchConfig(32, 32, 1, 4)),
    (128, LaunchConfig(32, 32, 1, 8)),
    (WIDEST, LaunchConfig(16, 16, 1, 8)),
)
# Some rows and all keys, or some keys of each query: small tiles, whose rows are gathered.
ROW_WEIGHTS = (
    (128, LaunchConfig(64, 64, 1, 4)),
    (256, LaunchConfig(32, 64, 1, 4)),
    (WIDEST, LaunchConfig(32, 64, 1, 8)),  # 32 x 32 spills 504 bytes (sm_90, triton 3.7.1)
)
MEAN_WEIGHTS = (
    (128, LaunchConfig(64, 64, 1, 4)),
    (256, LaunchConfig(32, 32, 1, 4)),
    (WIDEST, LaunchConfig(32, 32, 1, 8)),
)


def maxima(case: DenseCase, *, keys: int) -> LaunchConfig:
    """Return the tiles of the kernel that finds the largest scores."""
    return _first_that_fits(case, keys, MAXIMA, MAXIMA_WIDE, STATISTICS_SMALL, STATISTICS_FP32)


def mass(case: DenseCase, *, keys: int) -> LaunchConfig:
    """Return the tiles of the kernel that sums the probabilities of keys."""
    return _first_that_fits(case, keys, MASS, MASS_WIDE, STATISTICS_SMALL, STATISTICS_FP32)


def row_weights(case: DenseCase) -> LaunchConfig:
    """Return the tiles of the kernel that computes the probabilities of some rows."""
    return fitting(STATISTICS_FP32 if case.itemsize > 2 else ROW_WEIGHTS, widest_of(case))


def mean_weights(case: DenseCase, *, group: int) -> LaunchConfig:
    """Return the tiles of the kernel that averages the probabilities of some keys over heads.

    Its rows are the ``group`` query heads that share a key.
    """
    config = fitting(STATISTICS_FP32 if case.itemsize > 2 else MEAN_WEIGHTS, widest_of(case))
    return config._replace(block_m=min(config.block_m, power_of_two(group)))


def forward(case: DenseCase, *, keys: int) -> LaunchConfig:
    """Return the tiles of the generic forward kernel.

    >>> case = DenseCase(96, 96, itemsize=2, causal=True, plain=True, arch=90, aligned=True)
    >>> forward(case, keys=8192)
    LaunchConfig(block_m=128, block_n=128, stages=3, warps=8, tma=True, registers=None, resident=2)
    """
    long = FORWARD_CAUSAL if case.causal else FORWARD_FULL
    long = FORWARD_FUNCTIONS if case.by_function else FORWARD_SHORT if keys <= SHORT else long
    return _first_that_fits(case, keys, long, FORWARD_WIDE, FORWARD_SMALL, FORWARD_FP32)


def backward_values(case: DenseCase, *, keys: int) -> LaunchConfig | None:
    """Return the tiles of the backward pass that writes dv, or None if the pass that writes dk does."""
    return _fitted(BACKWARD_VALUES_WIDE, case, keys) if _has_wide_tiles(case) else None


def backward_keys(case: DenseCase, *, keys: int) -> LaunchConfig:
    """Return the tiles of the backward pass over blocks of keys, which writes dk and dv."""
    large = BACKWARD_KEYS_FUNCTIONS if case.by_function else BACKWARD_KEYS
    return _first_that_fits(case, keys, large, BACKWARD_KEYS_WIDE, BACKWARD_KEYS_SMALL, BACKWARD_FP32)


def backward_queries(case: DenseCase, *, keys: int) -> LaunchConfig:
    """Return the tiles of the backward pass over blocks of queries, which writes dq."""
    large = BACKWARD_QUERIES_FUNCTIONS if case.by_function else BACKWARD_QUERIES
    return _first_that_fits(case, keys, large, BACKWARD_QUERIES_WIDE, BACKWARD_QUERIES_SMALL, BACKWARD_FP32)


def widest_of(case: DenseCase) -> int:
    """Return the larger width of a key or value. Keys count unpadded, since wide keys use two blocks.

    Wide heads count as the widest if they need more shared memory: for tensors read per pair, or because
    rows are not aligned.
    """
    widest = max(case.head_dim, widths(case.head_dim, case.value_dim)[2])
    return WIDEST if widest > WIDE and (case.gathers or not case.aligned) else widest


def _has_wide_tiles(case: DenseCase) -> bool:
    """True if the tables for wide heads apply: their tiles have room for one tensor read per pair.

    Without TMA, which needs aligned rows, they would spill in their loops.
    """
    fits = case.arch in ROOMY and case.itemsize == 2 and case.aligned and case.gathers < 2
    return fits and widest_of(case) > WIDE


def _first_that_fits(
    case: DenseCase, keys: int, large: tuple, wide: tuple, small: tuple, fp32: tuple
) -> LaunchConfig:
    widest = widest_of(case)
    # A tensor that is read for each query-key pair takes as many tiles of shared memory as there are stages.
    fits = case.plain and case.aligned and case.arch in ROOMY and not case.gathers and widest <= large[-1][0]
    large = wide if _has_wide_tiles(case) else large if fits else small
    return _fitted(fp32 if case.itemsize > 2 else large, case, keys)


def _fitted(table: tuple, case: DenseCase, keys: int) -> LaunchConfig:
    """Return the entry of a table for a case: with few stages for many tensors, and TMA where it pays."""
    config = fitting(table, widest_of(case))
    stages = 1 if case.gathers > 2 else config.stages
    return config._replace(stages=stages, tma=config.tma and keys > FEW_KEYS)


def heads_per_wave(case: DenseCase, *, keys: int, pairs: int, group: int, cache: int = L2) -> int:
    """Return how many (sequence, head) pairs run together (a wave), so their keys and values fit in L2.

    The keys and values of a wave take about ``cache`` bytes. Of the sizes near this limit, choose the one
    with the fullest last wave. In a small last wave, most of the GPU waits for the long rows of a few heads,
    which takes an eighth of the time at d = 256, 8k tokens and 16 heads.

    >>> case = DenseCase(256, 256, itemsize=2, causal=True, plain=True, arch=90, aligned=True)
    >>> [heads_per_wave(case, keys=8192, pairs=n, group=1) for n in (16, 18, 2)]
    [4, 3, 2]
    """
    kv_heads, fit = (
        -(-pairs // group),
        cache // max(1, keys * (case.head_dim + case.value_dim) * case.itemsize),
    )
    most = max(1, fit * 4 // 3)
    if kv_heads <= most:
        return pairs
    sizes = range(max(1, fit // 2), most + 1)
    return group * max(sizes, key=lambda n: (((kv_heads - 1) % n + 1) / n, n))
