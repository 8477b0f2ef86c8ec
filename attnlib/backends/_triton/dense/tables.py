"""How kernels are launched: pure tables and rules that give a printable LaunchConfig. Imports no triton."""

from typing import NamedTuple

from ....masks.function import GRAIN as GRAIN
from ..launching.config import LaunchConfig, fitting, widths

# Bytes of keys and values that a heads_per_wave of heads may hold: about half of an H200's L2 cache.
L2 = 24 << 20
WIDEST = 576  # MLA's latent and rotary channels
WIDEST_VALUE = 512  # of which a tile holds a power of two
WIDEST_BACKWARD = 256
SHORT = 2048  # tokens, up to which smaller tiles pay
FEW_KEYS = 512  # tokens, up to which descriptors take the CPU longer than they spare the GPU
FARTHEST = 2**24  # elements between rows, which int32 offsets within a tile of 128 rows can hold


class DenseCase(NamedTuple):
    """What decides the tiles of a call. ``plain`` scores have no options and no dropout; ``aligned`` rows
    begin at multiples of 16 bytes. Masks or scores are ``by_function``; scores are ``changed`` by one, with
    so many ``exponentials``; at each pair, functions read ``gathers`` tensors."""

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


# By the widest head that fits; bf16 on an H200, 2026-11. Milliseconds of the cases of bench/cases.py at 8k,
# warm, by tiles of queries x keys; "T" loads by descriptors.
FORWARD_CAUSAL = (
    # 1.38, T 1.45; 64 x 64 with 4 warps and 168 registers 1.47.
    (64, LaunchConfig(128, 64, 3, 8, registers=128)),
    (128, LaunchConfig(128, 128, 3, 8, tma=True)),  # 1.16; without T 1.29, 64 x 64 with 4 warps 1.21
    (192, LaunchConfig(128, 64, 3, 8)),  # values of 128: 1.38, T 1.42
    (256, LaunchConfig(128, 64, 2, 8, tma=True)),  # 1.19; without T 1.39
    (WIDEST, LaunchConfig(64, 32, 2, 8)),
)
# Of 64: 2.64, T 2.75; 64 x 64 with 4 warps 2.80, 128 x 128 3.14. Of 128: 2.24; without T 2.40, 128 x 64 2.37,
# 2 stages and 4 warps T 2.36.
FORWARD_FULL = ((64, LaunchConfig(128, 64, 3, 8)), *FORWARD_CAUSAL[1:])
# 1k tokens at d = 128: 0.22; 64 x 64 with 2 stages T 0.23, 128 x 128 T 0.24.
FORWARD_SHORT = (FORWARD_CAUSAL[0], (128, LaunchConfig(64, 64, 3, 4)), *FORWARD_CAUSAL[2:])
# For scores and addresses that take more registers, and for chips with 99 KB of shared memory (sm_86, sm_89,
# sm_120).
FORWARD_SMALL = (
    (64, LaunchConfig(64, 64, 3, 4, registers=168)),
    (128, LaunchConfig(64, 64, 2, 4)),
    (256, LaunchConfig(64, 32, 2, 4)),
    (WIDEST, LaunchConfig(16, 16, 2, 4)),
)
FORWARD_FP32 = (
    (64, LaunchConfig(64, 64, 2, 8)),  # 4k: 3.0; 32 x 32 with 1 stage and 4 warps 3.3
    # Not timed: the largest that do not spill by the kilobyte, since a thread holds whole rows of its
    # operands.
    (128, LaunchConfig(32, 32, 1, 8)),
    (WIDEST, LaunchConfig(16, 16, 1, 8)),
)

# The backward's passes; causal but for the first number.
BACKWARD_KEYS = (
    (64, LaunchConfig(128, 64, 2, 4, tma=True)),  # full 4.24, 2.49; 64 x 64 with 3 stages T 4.85, 2.30
    # Full 3.88, 2.02; 64 x 128 with 3 stages, 8 warps T 4.06, 2.03.
    (128, LaunchConfig(64, 64, 2, 4, tma=True)),
    (192, LaunchConfig(32, 64, 3, 4, tma=True)),  # 2.58; 64 x 128 with 8 warps 3.24
    (256, LaunchConfig(64, 64, 2, 8, tma=True)),  # 3.54; without T 4.03, 32 x 64 T 4.69
)
BACKWARD_QUERIES = (
    (64, LaunchConfig(64, 64, 3, 4, tma=True)),  # full 3.19, 1.58; 128 x 64 with 8 warps 3.67, 1.89
    # Full 2.71, 1.37; T 3.01, 1.50; 64 x 64 with 2 stages, 4 warps T 3.02, 1.60.
    (128, LaunchConfig(128, 64, 3, 8)),
    (192, LaunchConfig(128, 64, 3, 8)),  # 1.78; T 1.96, 2 stages 2.19
    (256, LaunchConfig(128, 32, 3, 8, tma=True)),  # 1.76; 128 x 64 with 1 stage T 2.14, 64 x 64 3.18
)
BACKWARD_SMALL = (
    (64, LaunchConfig(64, 64, 2, 4)),
    (128, LaunchConfig(32, 64, 1, 4)),
    (256, LaunchConfig(32, 32, 1, 4)),
)
BACKWARD_FP32 = (
    (64, LaunchConfig(32, 32, 1, 4)),
    (128, LaunchConfig(32, 32, 1, 8)),
    (256, LaunchConfig(16, 16, 1, 8)),
)

# Where functions of indices hide or change scores; wider heads take small tiles. Milliseconds at d = 128,
# causal 8k (ALiBi by function; a window of 1024; documents): forward 1.36, 0.43, 0.40, of the large tables' 3
# stages 1.21, 0.45, 0.43, 64 x 64 1.39, 0.43, 0.39.
FORWARD_FUNCTIONS = (
    # 0.76, 0.24, 0.27; 64 x 64 with 168 registers 0.79, 0.25, 0.23.
    (64, LaunchConfig(128, 64, 3, 8, tma=True)),
    (128, LaunchConfig(128, 128, 2, 8, tma=True)),
)
BACKWARD_KEYS_FUNCTIONS = (
    (64, LaunchConfig(64, 64, 3, 4, tma=True)),  # 1.19, 0.37, 0.33; 128 x 64 with 2 stages 1.42, 0.37, 0.37
    (128, LaunchConfig(64, 64, 2, 4, tma=True)),  # 1.85, 0.57, 0.55; 64 x 128 with 8 warps 2.09, 0.71, 0.63
)
BACKWARD_QUERIES_FUNCTIONS = (
    (64, LaunchConfig(64, 64, 3, 4)),  # 1.22, 0.24, 0.25; T 1.18, 0.24, 0.28
    # 2.24, 0.40, 0.35; 128 x 64 with 3 stages, 8 warps 1.76, 0.54, 0.45.
    (128, LaunchConfig(64, 64, 2, 4, tma=True)),
)


def forward(case: DenseCase, *, keys: int) -> LaunchConfig:
    """Tiles of the forward kernel.

    >>> case = DenseCase(96, 96, itemsize=2, causal=True, plain=True, arch=90, aligned=True)
    >>> forward(case, keys=8192)
    LaunchConfig(block_m=128, block_n=128, stages=3, warps=8, tma=True, registers=None, resident=2)
    """
    long = FORWARD_CAUSAL if case.causal else FORWARD_FULL
    long = FORWARD_FUNCTIONS if case.by_function else FORWARD_SHORT if keys <= SHORT else long
    return _first_that_fits(case, keys, long, FORWARD_SMALL, FORWARD_FP32)


def backward_keys(case: DenseCase, *, keys: int) -> LaunchConfig:
    """Tiles of the pass that owns keys."""
    large = BACKWARD_KEYS_FUNCTIONS if case.by_function else BACKWARD_KEYS
    return _first_that_fits(case, keys, large, BACKWARD_SMALL, BACKWARD_FP32)


def backward_queries(case: DenseCase, *, keys: int) -> LaunchConfig:
    """Tiles of the pass that owns queries."""
    large = BACKWARD_QUERIES_FUNCTIONS if case.by_function else BACKWARD_QUERIES
    return _first_that_fits(case, keys, large, BACKWARD_SMALL, BACKWARD_FP32)


def _first_that_fits(case: DenseCase, keys: int, large: tuple, small: tuple, fp32: tuple) -> LaunchConfig:
    _, _, value = widths(case.head_dim, case.value_dim)
    widest = max(case.head_dim, value)  # values are padded, heads split
    # What is read at each pair takes a tile of shared memory a stage, as keys do.
    fits = (
        case.plain and case.aligned and case.arch in (90, 100) and not case.gathers and widest <= large[-1][0]
    )
    config = fitting(fp32 if case.itemsize > 2 else large if fits else small, widest)
    stages = 1 if case.gathers > 2 else config.stages
    return config._replace(stages=stages, tma=config.tma and keys > FEW_KEYS)


def heads_per_wave(case: DenseCase, *, keys: int, pairs: int, group: int, cache: int = L2) -> int:
    """How many (sequence, head) pairs run together: their keys and values stay in ``cache`` bytes of the L2
    cache.

    Of the sizes that fit about as well, that which leaves the last wave fullest: a small one ends with the
    long rows of few heads, while most of the GPU waits (an eighth of the time at d = 256, 8k, 16 heads).

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
