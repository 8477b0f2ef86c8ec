"""How kernels are launched: pure tables and rules that give a printable LaunchConfig. Imports no triton."""

from typing import NamedTuple

L2 = 24 << 20  # bytes of keys and values that a section of heads may hold: about half of an H200's L2 cache
WIDEST = 576  # MLA's latent and rotary channels
WIDEST_BACKWARD = 256
SHORT = 2048  # tokens, up to which smaller tiles pay
FARTHEST = 2**24  # elements between rows, which int32 offsets within a tile of 128 rows can hold


class Problem(NamedTuple):
    """What decides the tiles of a call. ``plain`` scores have no softcap, no slopes and no dropout."""

    head_dim: int
    value_dim: int
    itemsize: int
    causal: bool
    plain: bool
    arch: int


class LaunchConfig(NamedTuple):
    """Queries and keys of a tile, loads in flight, and warps of a program."""

    block_m: int
    block_n: int
    stages: int
    warps: int


# By the widest head that fits. bf16 on an H200, 2026-11: the forward's TFLOP/s over those of cuDNN in the same run.
FORWARD_FULL = (
    (64, LaunchConfig(64, 64, 3, 4)),  # 8k: 0.91, 128 x 64 0.89
    (128, LaunchConfig(128, 64, 3, 8)),  # 8k: 0.70, 128 x 128 0.70, 64 x 64 with 4 warps 0.67
    (192, LaunchConfig(128, 64, 3, 8)),
    (256, LaunchConfig(128, 64, 2, 8)),
    (WIDEST, LaunchConfig(64, 32, 2, 8)),
)
FORWARD_CAUSAL = (
    (64, LaunchConfig(128, 64, 3, 4)),  # 8k: 0.88, 64 x 64 0.86
    (128, LaunchConfig(128, 128, 3, 8)),  # 8k: 0.84, 32k: 0.89; 128 x 64 0.80, 0.80; 64 x 64 with 4 warps 0.82, 0.77
    (192, LaunchConfig(128, 64, 3, 8)),  # values of 128, 8k: 0.89, 128 x 128 0.83
    (256, LaunchConfig(128, 64, 2, 8)),  # 8k: 0.76, 128 x 32 0.67
    (WIDEST, LaunchConfig(64, 32, 2, 8)),
)
# 1k tokens: 0.72 at d = 128, where 128 x 64 has 0.62.
FORWARD_SHORT = ((128, LaunchConfig(64, 64, 3, 4)), *FORWARD_CAUSAL[2:])
# For scores that take more registers, and for chips with 99 KB of shared memory (sm_86, sm_89, sm_120).
FORWARD_SMALL = (
    (64, LaunchConfig(64, 64, 3, 4)),
    (128, LaunchConfig(64, 64, 2, 4)),
    (256, LaunchConfig(64, 32, 2, 4)),
    (WIDEST, LaunchConfig(16, 16, 2, 4)),
)
FORWARD_FP32 = (
    (128, LaunchConfig(64, 32, 1, 4)),
    (256, LaunchConfig(32, 16, 1, 4)),
    (WIDEST, LaunchConfig(16, 16, 1, 4)),
)


# Of the backward: queries, keys, stages, warps; over cuDNN's, 8k, both passes together.
BACKWARD_KEYS = (
    (64, LaunchConfig(128, 64, 2, 4)),  # 0.80, causal 0.83; 64 x 64 with 3 stages 0.74, 0.80
    (128, LaunchConfig(64, 64, 2, 4)),  # 0.79, causal 0.75; 64 x 128 with 8 warps 0.63, 0.67
    (192, LaunchConfig(64, 128, 2, 8)),  # causal 0.74; 64 x 64 0.49
    (256, LaunchConfig(64, 64, 2, 8)),
)
BACKWARD_QUERIES = (
    (64, LaunchConfig(64, 64, 3, 4)),
    (128, LaunchConfig(128, 64, 3, 8)),  # 0.79; 64 x 64 with 4 warps 0.73
    (192, LaunchConfig(128, 64, 2, 8)),
    (256, LaunchConfig(64, 64, 2, 8)),
)
BACKWARD_SMALL = (
    (64, LaunchConfig(64, 64, 2, 4)),
    (128, LaunchConfig(32, 64, 1, 4)),
    (256, LaunchConfig(32, 32, 1, 4)),
)
BACKWARD_FP32 = ((128, LaunchConfig(32, 32, 1, 4)), (256, LaunchConfig(16, 16, 1, 4)))


def backward_keys(problem: Problem) -> LaunchConfig:
    """Tiles of the pass that owns keys."""
    return _backward(problem, BACKWARD_KEYS)


def backward_queries(problem: Problem) -> LaunchConfig:
    """Tiles of the pass that owns queries."""
    return _backward(problem, BACKWARD_QUERIES)


def _backward(problem: Problem, table: tuple[tuple[int, LaunchConfig], ...]) -> LaunchConfig:
    if problem.itemsize > 2:
        table = BACKWARD_FP32
    elif not problem.plain or problem.arch not in (90, 100):
        table = BACKWARD_SMALL
    widest = max(problem.head_dim, problem.value_dim)
    return next(config for limit, config in table if widest <= limit)


def forward(problem: Problem, *, keys: int) -> LaunchConfig:
    """Tiles of the forward kernel.

    >>> forward(Problem(head_dim=96, value_dim=96, itemsize=2, causal=True, plain=True, arch=90), keys=8192)
    LaunchConfig(block_m=128, block_n=128, stages=3, warps=8)
    """
    table = FORWARD_CAUSAL if problem.causal else FORWARD_FULL
    if problem.itemsize > 2:
        table = FORWARD_FP32
    elif not problem.plain or problem.arch not in (90, 100):
        table = FORWARD_SMALL
    elif keys <= SHORT:
        table = FORWARD_SHORT
    widest = max(problem.head_dim, problem.value_dim)
    return next(config for limit, config in table if widest <= limit)


def head_split(d: int) -> tuple[int, int]:
    """A head dimension as a power of two and a second block that holds the rest, 0 or at least 16.

    >>> head_split(192), head_split(80), head_split(59), head_split(128), head_split(8)
    ((128, 64), (64, 16), (64, 0), (128, 0), (16, 0))
    """
    above = max(16, 1 << (d - 1).bit_length())
    main, rest = above // 2, d - above // 2
    tail = max(16, 1 << (rest - 1).bit_length()) if rest > 0 else 0
    return (main, tail) if d > 16 and main + tail < above else (above, 0)


def section(problem: Problem, *, keys: int, pairs: int, group: int) -> int:
    """How many (sequence, head) pairs run together, so that their keys and values stay in the L2 cache."""
    size = max(1, keys * (problem.head_dim + problem.value_dim) * problem.itemsize)
    return max(1, min(pairs, L2 // size * group))
