"""Which calls run on Hopper's own kernels, and how those are launched: pure tables and rules. Imports no
triton.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..launching.config import fitting, widths
from .tables import FEW_KEYS, DenseCase


def _constants(config: NamedTuple) -> dict[str, int]:
    """What a kernel is compiled for, by its parameters."""
    return {name.upper(): value for name, value in config._asdict().items()}


class ForwardConfig(NamedTuple):
    """Keys of a block, consumers of 64 queries each, slots of the rings, and registers of a thread.

    ``q_in_registers``: queries are read from shared memory once, not for every block. ``out_in_q``: a tile of
    out takes the room of its queries.
    """

    block_n: int
    consumers: int
    q_slots: int
    k_slots: int
    v_slots: int
    q_in_registers: bool
    out_in_q: bool
    registers: int
    producer_registers: int

    constants = property(_constants)


class BackwardConfig(NamedTuple):
    """Queries of a tile and keys of a program, slots of the ring of queries, and registers of a thread.

    Of 64 keys, one tile, one of two warpgroups makes dk and the other dv; of two tiles each makes both
    gradients. ``by_rows``: a tile of dq is multiplied in halves of its queries, not of its channels.
    ``dq_registers``: registers of a third warpgroup, which multiplies dq; 0: the two do.
    """

    block_m: int
    tiles: int
    slots: int
    by_rows: bool
    registers: int = 240
    producer_registers: int = 24
    dq_registers: int = 0

    constants = property(_constants)


# Tables by the first minor version of Triton that they are for: a version uses the newest one that is not
# above it. ptxas 13.4, which builds for Hopper from 3.9 on, keeps queries in registers twice, and so reads
# and writes the stack 8 to 36 times in each trip; with three consumers 28 to 32 times. It does not where
# queries stay in shared memory and two consumers have 240 registers each. It also makes more descriptors anew
# in every trip (instructions of a trip, 3.9 and 3.6: d128 362 and 327, backward of 192/128 570 and 526, MLA
# decode 512 and 422), most of which products hide. Microseconds, causal 8k, 16 heads, 3.9 and 3.6 in turns on
# an H100, 2026-11: d128 425 and 422, backward 1,299 and 1,312; 192/128 506 and 505, backward 1,895 and 1,880;
# MLA decode 150 and 147, of four tokens 470 and 436. d64, 32 heads, 612 and 556, full 1,174 and 1,031: two
# consumers take 614 and 1,152 under 3.6 too; three 665 and 1,194 under 3.9, with queries in registers 631 and
# 1,187, blocks of 64 keys 677 and 1,378.
NEWEST = (3, 9)
# By the widest head that fits; bf16 on an H200, 2026-11. TFLOP/s of the causal and the full 8k cases of
# bench/cases.py.
FORWARD = MappingProxyType(
    {
        (3, 6): (
            (64, ForwardConfig(128, 3, 2, 2, 2, False, False, 160, 32)),  # 539, 585; 3 slots 540, 583
            (128, ForwardConfig(128, 2, 1, 3, 2, True, False, 240, 24)),  # 705, 745
            (192, ForwardConfig(128, 2, 1, 2, 2, True, True, 240, 24)),  # 740
            (256, ForwardConfig(64, 2, 1, 3, 2, False, True, 240, 24)),  # 713
        ),
        NEWEST: (
            (64, ForwardConfig(128, 2, 2, 3, 2, False, False, 240, 24)),
            (128, ForwardConfig(128, 2, 1, 3, 2, False, False, 240, 24)),
            (192, ForwardConfig(128, 2, 1, 2, 2, False, True, 240, 24)),
            (256, ForwardConfig(64, 2, 1, 3, 2, False, True, 240, 24)),
        ),
    }
)
# Functions of indices take registers that three consumers do not have.
FORWARD_FUNCTIONS = MappingProxyType(
    {
        (3, 6): ((64, ForwardConfig(128, 2, 2, 3, 2, True, False, 240, 24)), *FORWARD[3, 6][1:]),
        NEWEST: FORWARD[NEWEST],
    }
)
# Tiles that a mask cuts spill with 128 keys, and more of what they read is hidden. Microseconds of the
# forward with 128 and with 64 keys, causal 8k, 16 heads, H100, 2026-11, in 12 documents, a window of 1,024
# and after a prefix of 1,000: d128 202, 201, 505 and 154, 183, 528; 192/128 198, 223, 604 and 172, 217, 626;
# d64, 32 heads, 151, 151, 369 and 138, 153, 425; d256 with 64 and 32 keys 214, 306, 931 and 237, 337, 1,059.
# Under 3.9 the same are faster.
FORWARD_MASKS = MappingProxyType(
    {
        version: (
            table[0],
            (128, ForwardConfig(64, 2, 2, 4, 4, version < NEWEST, False, 240, 24)),
            (192, ForwardConfig(64, 2, 1, 4, 4, version < NEWEST, True, 240, 24)),
            *table[3:],
        )
        for version, table in FORWARD_FUNCTIONS.items()
    }
)
# Of 8 bits, whole calls; d128 full 8k 936 to 991 TFLOP/s where bf16 had 777 (a slot of values more: 982),
# d256 causal 8k 1,036 to 1,085 and 723 (64 keys 857). 64 channels are no faster than bf16: 515.
FORWARD_FP8 = (
    (64, ForwardConfig(128, 2, 1, 3, 2, True, False, 240, 24)),
    (192, ForwardConfig(128, 2, 1, 4, 3, False, False, 240, 24)),
    (256, ForwardConfig(128, 2, 1, 2, 2, False, False, 240, 24)),
)
# Bytes of keys and values of the heads that run together. Full, d128 8k: one head 693 TFLOP/s, four 627, 32
# 586; MLA 742, 653, 608. Causal, d128 8k: one 626, four 617, 32 574; GQA 4k 571, 575, 544; 1k one 419, 16
# 428.
L2 = 10 << 20
# Adding dq from registers, not through shared memory: causal 8k d128 559 and 488 TFLOP/s, d64 475 and 433. By
# a third warpgroup, with prepare and all: d128 full 8k 597, by the two 559; causal 577, 541; GQA 4k 535, 509;
# 1k 331, 316; d64 full 516, 480, causal 478, 445. 64 queries a tile at d64: full 486. A third slot: d128 full
# 543, causal 521 for 576.
BACKWARD = (
    (64, BackwardConfig(128, 2, 2, True, registers=216, dq_registers=64)),
    (128, BackwardConfig(64, 2, 2, False, registers=216, dq_registers=64)),
    (192, BackwardConfig(64, 2, 2, False)),  # causal 8k 515; one tile of keys 401
    (256, BackwardConfig(64, 1, 2, False)),
)
# Bytes of keys and values of the heads that run together. Their queries, the gradient of their output and
# their sums of dq take two or three times as many. Causal 1k: 8 MB 325 TFLOP/s, 16 MB 321, 24 MB 297; causal
# 8k alike from 8 to 24. Full, the kernel alone, an earlier form: one head d64 486, d128 546; 24 MB 442, 531.
BACKWARD_L2 = 16 << 20
NARROWEST = 64  # channels of a block that these kernels have layouts for


def forward(case: DenseCase, *, keys: int, triton: tuple[int, int]) -> ForwardConfig | None:
    """How the forward of a call is launched; None where the plain kernel runs it.

    ``triton``: the minor version of Triton, of which one that is not known has the entries of the newest
    below it.

    >>> case = DenseCase(128, 128, 2, causal=True, plain=True, arch=90, aligned=True)
    >>> forward(case, keys=8192, triton=(3, 6)).block_n, forward(case, keys=100, triton=(3, 6))
    (128, None)
    >>> [forward(case, keys=8192, triton=version).q_in_registers for version in ((3, 8), (3, 9), (3, 10))]
    [True, False, False]
    """
    main, _, value = widths(case.head_dim, case.value_dim)
    # Milliseconds of the plain kernel and of this one, causal 8k: tanh at d64 1.54 and 2.54, at d128 2.70 and
    # 2.99; ALiBi by function at d128 1.37 and 0.98, d64 32k 5.94 and 7.34. What is read at each pair decides:
    # 5.57 and 0.90.
    if case.changed and not case.gathers and (case.exponentials or main <= 64):
        return None
    of_functions = FORWARD_FUNCTIONS if case.changed else FORWARD_MASKS
    tables = of_functions if case.by_function else FORWARD
    table = FORWARD_FP8 if case.itemsize == 1 else for_version(tables, triton)
    config = _fitting(table, case, keys) if case.itemsize < 4 else None
    return None if config is not None and config.out_in_q and value != main else config


def backward(case: DenseCase, *, keys: int, in_order: bool = False) -> BackwardConfig | None:
    """How the backward of a call is launched; None where the two plain passes run it.

    ``in_order``: programs add to dq in a fixed order. Heads in two blocks then take the two passes: MLA,
    causal 8k, 429 TFLOP/s, in order 365 in an earlier form.
    """
    main, tail, value = widths(case.head_dim, case.value_dim)
    runs = value == main and case.itemsize == 2 and not (tail and in_order)
    config = _fitting(BACKWARD, case, keys) if runs else None
    # A cap takes registers that two tiles of keys do not leave: 70 and more words would be spilled in every
    # step.
    return None if config is not None and config.tiles > 1 and not case.plain else config


def for_version(tables: Mapping[tuple[int, int], tuple], triton: tuple[int, int]) -> tuple:
    """The newest table that is not above a version of Triton; the oldest for one below them all."""
    return tables[max((version for version in tables if version <= triton), default=min(tables))]


def _fitting(table: tuple[tuple, ...], case: DenseCase, keys: int) -> ForwardConfig | BackwardConfig | None:
    main, tail, value = widths(case.head_dim, case.value_dim)
    widest, (limit, _) = max(main + tail, value), table[-1]
    runs = case.arch == 90 and case.aligned and main >= NARROWEST and widest <= limit
    return fitting(table, widest) if runs and keys > FEW_KEYS else None
