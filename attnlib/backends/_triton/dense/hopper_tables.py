"""Choose the dedicated Hopper kernels and their configurations. Pure tables; imports no Triton."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..launching.config import fitting, widths
from .tables import FEW_KEYS, DenseCase


def _constants(config: NamedTuple) -> dict[str, int]:
    """Return the constexpr arguments of a kernel, by name."""
    return {name.upper(): value for name, value in config._asdict().items()}


class ForwardConfig(NamedTuple):
    """The configuration of the Hopper forward.

    Attributes:
        block_n: keys per block.
        consumers: consumer warpgroups, with 64 queries each.
        q_slots, k_slots, v_slots: slots of the ring buffers.
        q_in_registers: read queries from shared memory once, not for every block.
        out_in_q: a tile of the output reuses the shared memory of its queries.
        registers, producer_registers: registers per thread, of consumers and of the producer.
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
    """The configuration of the Hopper backward.

    Attributes:
        block_m: queries per tile.
        tiles: tiles of 64 keys per program. With one, the consumers compute dk and dv; with two, each
            consumer computes both gradients of its tile.
        slots: slots of the ring buffer of queries.
        by_rows: compute a tile of dq in halves of its queries, not of its channels.
        registers, producer_registers: registers per thread, of the two consumers and of the producer.
        dq_registers: registers per thread of a third warpgroup, which computes dq; 0 if the consumers do.
    """

    block_m: int
    tiles: int
    slots: int
    by_rows: bool
    registers: int = 240
    producer_registers: int = 24
    dq_registers: int = 0

    constants = property(_constants)


# Tables are indexed by the first Triton version they are for; a version uses the newest table not above it.
#
# From Triton 3.9 on, ptxas 13.4 builds for Hopper. If queries are in registers it keeps them twice, and
# accesses the stack 8 to 36 times per loop trip (28 to 32 times with three consumers). It does not spill if
# queries stay in shared memory and two consumers have 240 registers each. It also recomputes more descriptors
# in every trip; products hide most of that. Instructions per trip:
#                       3.9  3.6
#   forward, d128       362  327
#   backward, 192/128   570  526
#   MLA decode          512  422
# Microseconds, causal 8k, 16 heads, versions alternating on an H100, 2026-11:
#                             3.9    3.6
#   forward, d128             425    422
#   backward, d128          1,299  1,312
#   forward, 192/128          506    505
#   backward, 192/128       1,895  1,880
#   MLA decode                150    147
#   MLA decode, 4 tokens      470    436
# The forward of d64, 32 heads, is slower under 3.9 with every configuration tried (us):
#                                     causal   full
#   3.6, three consumers (its entry)     556  1,031
#   3.6, two consumers                   614  1,152
#   3.9, two consumers (its entry)       612  1,174
#   3.9, three consumers                 665  1,194
#   3.9, queries in registers            631  1,187
#   3.9, blocks of 64 keys               677  1,378
NEWEST = (3, 9)
# Tables list (widest head, config), for bf16. Comments give TFLOP/s of the causal and the full 8k cases of
# bench/cases.py on an H200, 2026-11.
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
# Mask and score functions need more registers than three consumers leave, so d64 runs with two.
FORWARD_FUNCTIONS = MappingProxyType(
    {
        (3, 6): ((64, ForwardConfig(128, 2, 2, 3, 2, True, False, 240, 24)), *FORWARD[3, 6][1:]),
        NEWEST: FORWARD[NEWEST],
    }
)
# With a mask function, partial tiles of 128 keys spill registers and read more hidden keys than tiles of 64.
# Forward in us, causal 8k, 16 heads, H100, 2026-11; under Triton 3.9 the same tiles win:
#                     keys  12 documents  window 1,024  prefix 1,000
#   d128               128           202           201           505
#                       64           154           183           528
#   192/128            128           198           223           604
#                       64           172           217           626
#   d64, 32 heads      128           151           151           369
#                       64           138           153           425
#   d256                64           214           306           931
#                       32           237           337         1,059
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
# fp8. TFLOP/s of whole calls; d64 is no faster than bf16:
#                                fp8  bf16
#   d128, full, 8k        936 to 991   777  (982 with one more slot of values)
#   d256, causal, 8k  1,036 to 1,085   723  (857 with blocks of 64 keys)
#   d64                          515
FORWARD_FP8 = (
    (64, ForwardConfig(128, 2, 1, 3, 2, True, False, 240, 24)),
    (192, ForwardConfig(128, 2, 1, 4, 3, False, False, 240, 24)),
    (256, ForwardConfig(128, 2, 1, 2, 2, False, False, 240, 24)),
)
# Heads run together as long as their keys and values take about this many bytes. TFLOP/s by the number of
# heads that run together:
#                       1    4   16   32
#   full, d128, 8k    693  627       586
#   full, MLA         742  653       608
#   causal, d128, 8k  626  617       574
#   causal, GQA, 4k   571  575       544
#   causal, 1k        419       428
L2 = 10 << 20
# dq is added from registers: causal 8k, d128 runs at 559 TFLOP/s and d64 at 475; through shared memory, at
# 488 and 433. Up to d128 a third warpgroup computes dq. TFLOP/s, including `prepare`:
#                    third warpgroup  two consumers
#   d128, full, 8k               597            559
#   d128, causal, 8k             577            541
#   GQA, 4k                      535            509
#   1k                           331            316
#   d64, full                    516            480
#   d64, causal                  478            445
# Other trials: d64 with tiles of 64 queries, full 486; d128 with a third slot, full 543, causal 521 (576 with
# two).
BACKWARD = (
    (64, BackwardConfig(128, 2, 2, True, registers=216, dq_registers=64)),
    (128, BackwardConfig(64, 2, 2, False, registers=216, dq_registers=64)),
    (192, BackwardConfig(64, 2, 2, False)),  # causal 8k: 515 TFLOP/s; 401 with one tile of keys
    (256, BackwardConfig(64, 1, 2, False)),
)
# The L2 limit of heads that run together in the backward, where queries, output gradients and sums of dq take
# two or three times as many bytes again. TFLOP/s; causal 8k does not differ between 8 and 24 MB. The full
# cases time only the kernel, in an earlier version:
#                one head  8 MB  16 MB  24 MB
#   causal, 1k              325    321    297
#   full, d64         486                 442
#   full, d128        546                 531
BACKWARD_L2 = 16 << 20
NARROWEST = 64  # channels of the narrowest block these kernels support


def forward(case: DenseCase, *, keys: int, triton: tuple[int, int]) -> ForwardConfig | None:
    """Return the configuration of the Hopper forward; None if the generic kernel runs.

    ``triton`` is Triton's version, (major, minor). An unknown version uses the entries of the newest known
    version below it.

    >>> case = DenseCase(128, 128, 2, causal=True, plain=True, arch=90, aligned=True)
    >>> forward(case, keys=8192, triton=(3, 6)).block_n, forward(case, keys=100, triton=(3, 6))
    (128, None)
    >>> [forward(case, keys=8192, triton=version).q_in_registers for version in ((3, 8), (3, 9), (3, 10))]
    [True, False, False]
    """
    main, _, value = widths(case.head_dim, case.value_dim)
    # The generic kernel is faster for some score functions, but not if a function loads a value per query-key
    # pair. Milliseconds, causal 8k unless noted:
    #                           generic  Hopper
    #   tanh, d64                  1.54    2.54
    #   tanh, d128                 2.70    2.99
    #   ALiBi function, d128       1.37    0.98
    #   ALiBi function, d64, 32k   5.94    7.34
    #   loads per pair             5.57    0.90
    if case.changed and not case.gathers and (case.exponentials or main <= 64):
        return None
    of_functions = FORWARD_FUNCTIONS if case.changed else FORWARD_MASKS
    tables = of_functions if case.by_function else FORWARD
    table = FORWARD_FP8 if case.itemsize == 1 else for_version(tables, triton)
    config = _fitting(table, case, keys) if case.itemsize < 4 else None
    return None if config is not None and config.out_in_q and value != main else config


def backward(case: DenseCase, *, keys: int, in_order: bool = False) -> BackwardConfig | None:
    """Return the configuration of the Hopper backward; None if the two generic passes run.

    With ``in_order``, programs add to dq in a fixed order. Heads that need two blocks then use the generic
    passes, which are faster: MLA, causal 8k, 429 TFLOP/s, where an earlier ordered Hopper kernel had 365.
    """
    main, tail, value = widths(case.head_dim, case.value_dim)
    runs = value == main and case.itemsize == 2 and not (tail and in_order)
    config = _fitting(BACKWARD, case, keys) if runs else None
    # A softcap needs registers that two tiles of keys do not leave: at least 70 words would spill per step.
    return None if config is not None and config.tiles > 1 and not case.plain else config


def for_version(tables: Mapping[tuple[int, int], tuple], triton: tuple[int, int]) -> tuple:
    """Return the newest table that is not above this version of Triton, or else the oldest table."""
    return tables[max((version for version in tables if version <= triton), default=min(tables))]


def _fitting(table: tuple[tuple, ...], case: DenseCase, keys: int) -> ForwardConfig | BackwardConfig | None:
    main, tail, value = widths(case.head_dim, case.value_dim)
    widest, (limit, _) = max(main + tail, value), table[-1]
    runs = case.arch == 90 and case.aligned and main >= NARROWEST and widest <= limit
    return fitting(table, widest) if runs and keys > FEW_KEYS else None
