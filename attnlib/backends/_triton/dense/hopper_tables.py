"""Tables that choose the dedicated Hopper kernels and their configurations. Imports no Triton."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..launching.config import LaunchConfig, fitting, widths
from .tables import FEW_KEYS, DenseCase


def _constants(config: NamedTuple) -> dict[str, int]:
    """Return the fields of a configuration as constexpr arguments of a kernel, by name."""
    return {name.upper(): value for name, value in config._asdict().items()}


class ForwardConfig(NamedTuple):
    """The configuration of the Hopper forward.

    Attributes:
        block_n: the number of keys per block.
        consumers: the number of consumer warpgroups, with 64 queries each.
        q_slots, k_slots, v_slots: how many tiles of queries, keys and values the ring buffers hold.
        q_in_registers: read queries from shared memory once, not again for every block of keys.
        out_in_q: a tile of the output reuses the shared memory of its queries.
        registers, producer_registers: registers per thread of the consumers, and of the producer.
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
        block_m: the number of queries per tile.
        tiles: the number of tiles of 64 keys per program. With one, one consumer computes dk, the
            other dv; with two, each consumer computes both gradients of its own tile.
        slots: how many tiles of queries the ring buffer holds.
        by_rows: split a tile of dq into halves by its queries, not by its channels.
        registers, producer_registers: registers per thread of the two consumers, and of the producer.
        dq_registers: registers per thread of a third warpgroup that computes dq; 0 if the consumers do that.
    """

    block_m: int
    tiles: int
    slots: int
    by_rows: bool
    registers: int = 240
    producer_registers: int = 24
    dq_registers: int = 0

    constants = property(_constants)


# The key of a table is the first version of Triton that uses it; later versions use it up to the next key.
#
# From Triton 3.9 on, ptxas 13.4 compiles for Hopper. If queries are in registers, it stores them twice, and
# accesses the stack 8 to 36 times per iteration of the loop (28 to 32 times with three consumers). It does
# not spill if queries stay in shared memory and two consumers have 240 registers per thread. It also computes
# more descriptors anew in every iteration, but matrix products hide most of that. Instructions per iteration:
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
# Each table lists (widest head, config), for bf16. Comments give TFLOP/s for the cases of bench/cases.py with
# 8k tokens on an H200, 2026-11; of two numbers, the first is causal and the second full.
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
# With three consumers, too few registers are left for softcap, slopes, and mask and score functions, so d64
# uses two.
FORWARD_FUNCTIONS = MappingProxyType(
    {
        (3, 6): ((64, ForwardConfig(128, 2, 2, 3, 2, True, False, 240, 24)), *FORWARD[3, 6][1:]),
        NEWEST: FORWARD[NEWEST],
    }
)
# With a mask function, partial tiles of 128 keys spill registers, and read more hidden keys than tiles of 64.
# Time of the forward in us, causal, 8k tokens, 16 heads, H100, 2026-11 (under Triton 3.9 the same tiles win):
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
# Tables for fp8. TFLOP/s of whole calls, 8k (H200, Triton 3.6, 2026-11-28, variants of commit 9632b7f6; d256
# in another run):
#                            fp8  bf16
#   d64, full                671   615  two consumers 524, three with scores at once 702
#   d64, causal              567   561  two consumers 504, three with scores at once 531
#   d128, full               977   795  932 if consumers do not take turns
#   d128, causal             931   770  956 with 4 + 3 slots, which leave no barrier to take turns
#   d256, causal  1,036 to 1,085   723  857 with blocks of 64 keys
# Three consumers of d64 have too few registers for softcap and slopes, and from Triton 3.8 on.
_FP8_TWO_CONSUMERS = (
    (64, ForwardConfig(128, 2, 1, 3, 2, True, False, 240, 24)),
    (192, ForwardConfig(128, 2, 1, 3, 3, False, False, 240, 24)),
    (256, ForwardConfig(128, 2, 1, 2, 2, False, False, 240, 24)),
)
_FP8_THREE_CONSUMERS = (
    (64, ForwardConfig(128, 3, 1, 3, 2, False, False, 160, 32)),
    *_FP8_TWO_CONSUMERS[1:],
)
FORWARD_FP8 = MappingProxyType({(3, 6): _FP8_THREE_CONSUMERS, (3, 8): _FP8_TWO_CONSUMERS})
FORWARD_FP8_OPTIONS = MappingProxyType({(3, 6): _FP8_TWO_CONSUMERS})
# Heads of 257 to 512 channels have a forward of their own, whose programs compute 64 queries.
FORWARD_WIDE = ForwardConfig(32, 1, 1, 2, 2, False, True, 168, 24)
# The keys and values of heads that run together may take about this many bytes. TFLOP/s by the number of
# heads that run together:
#                       1    4   16   32
#   full, d128, 8k    693  627       586
#   full, MLA         742  653       608
#   causal, d128, 8k  626  617       574
#   causal, GQA, 4k   571  575       544
#   causal, 1k        419       428
L2 = 10 << 20
# dq is added to memory from registers. TFLOP/s, causal 8k:
#           from registers  through shared memory
#   d64                475                    433
#   d128               559                    488
# Up to d128, a third warpgroup computes dq. TFLOP/s, including `prepare`:
#                    third warpgroup  two consumers
#   d128, full, 8k               597            559
#   d128, causal, 8k             577            541
#   GQA, 4k                      535            509
#   1k                           331            316
#   d64, full                    516            480
#   d64, causal                  478            445
# Other trials, in TFLOP/s: d64 with tiles of 64 queries, full 486; d128 with a third slot, full 543, causal
# 521 (576 with two slots).
BACKWARD = (
    (64, BackwardConfig(128, 2, 2, True, registers=216, dq_registers=64)),
    (128, BackwardConfig(64, 2, 2, False, registers=216, dq_registers=64)),
    (192, BackwardConfig(64, 2, 2, False)),  # causal 8k: 515 TFLOP/s; 401 with one tile of keys
    (256, BackwardConfig(64, 1, 2, False)),
)
# In the backward, the keys and values of heads that run together may take about this many bytes. The queries,
# output gradients and sums of dq of these heads take two or three times as many in addition. TFLOP/s by limit
# (causal 8k does not differ between 8 and 24 MB; the full cases time only the kernel, in an earlier version):
#                one head  8 MB  16 MB  24 MB
#   causal, 1k              325    321    297
#   full, d64         486                 442
#   full, d128        546                 531
BACKWARD_L2 = 16 << 20
HALF = 256  # channels of a wide head that one warpgroup holds
# Selected tokens of latents: heads of a query, and tokens. Registers do not hold 128 heads. For 4,096
# queries of 128 heads that select 2,048 of 32k tokens, the kernel does 608 TFLOP/s (H100, 2026-11-28).
LATENTS = LaunchConfig(64, 64, 1, 4)
NARROWEST = 64  # these kernels support blocks of at least this many channels


def forward(case: DenseCase, *, keys: int, triton: tuple[int, int]) -> ForwardConfig | None:
    """Return the configuration of the Hopper forward; None if the generic kernel runs.

    ``triton`` is the version of Triton as (major, minor). For an unknown version, the entries of the newest
    known version below it are used.

    >>> case = DenseCase(128, 128, 2, causal=True, plain=True, arch=90, aligned=True)
    >>> forward(case, keys=8192, triton=(3, 6)).block_n, forward(case, keys=100, triton=(3, 6))
    (128, None)
    >>> [forward(case, keys=8192, triton=version).q_in_registers for version in ((3, 8), (3, 9), (3, 10))]
    [True, False, False]
    """
    if takes_wide(case, keys):
        return FORWARD_WIDE
    main, _, value = widths(case.head_dim, case.value_dim)
    # For some score functions the generic kernel is faster, unless a function loads a value for each pair of
    # a query and a key. Milliseconds, causal 8k unless noted:
    #                           generic  Hopper
    #   tanh, d64                  1.54    2.54
    #   tanh, d128                 2.70    2.99
    #   ALiBi function, d128       1.37    0.98
    #   ALiBi function, d64, 32k   5.94    7.34
    #   loads per pair             5.57    0.90
    if case.changed and not case.gathers and (case.exponentials or main <= 64):
        return None
    of_scores = FORWARD if case.plain and not case.changed else FORWARD_FUNCTIONS
    tables = FORWARD_MASKS if case.by_function and not case.changed else of_scores
    if case.itemsize == 1:
        tables = FORWARD_FP8 if case.plain else FORWARD_FP8_OPTIONS
    table = for_version(tables, triton)
    config = _fitting(table, case, keys) if case.itemsize < 4 else None
    return None if config is not None and config.out_in_q and value != main else config


def backward(case: DenseCase, *, keys: int, in_order: bool = False) -> BackwardConfig | None:
    """Return the configuration of the Hopper backward; None if the two generic passes run.

    With ``in_order``, programs add to dq in a fixed order. Heads that need two blocks, such as those of MLA,
    then use the generic passes, which are faster: 429 TFLOP/s for causal 8k, compared with 365 of an earlier
    ordered Hopper kernel.
    """
    main, tail, value = widths(case.head_dim, case.value_dim)
    runs = value == main and case.itemsize == 2 and not (tail and in_order)
    config = _fitting(BACKWARD, case, keys) if runs else None
    # If two consumers compute the gradients of two tiles of keys and dq, too few registers are left for a
    # softcap: at least 70 words would spill per step.
    crowded = config is not None and config.tiles > 1 and not config.dq_registers
    return None if crowded and not case.plain else config


def takes_wide(case: DenseCase, keys: int) -> bool:
    """True if the Hopper kernels for heads of 257 to 512 channels take a call; they have no functions."""
    narrow, wide = sorted((case.head_dim, case.value_dim))
    fits = narrow > HALF and wide <= 2 * HALF and case.itemsize == 2 and not case.by_function
    return fits and case.arch == 90 and case.aligned and keys > FEW_KEYS


def takes_latents(case: DenseCase, *, heads: int) -> bool:
    """True if the Hopper kernel for selected tokens takes latents of 512 + 64 channels and these heads."""
    fits = (case.head_dim, case.value_dim, case.itemsize) == (576, 512, 2) and heads % LATENTS.block_m == 0
    return fits and case.arch == 90 and case.aligned


def for_version(tables: Mapping[tuple[int, int], tuple], triton: tuple[int, int]) -> tuple:
    """Return the table for a Triton version: the newest of its age or older, else the oldest table."""
    return tables[max((version for version in tables if version <= triton), default=min(tables))]


def _fitting(table: tuple[tuple, ...], case: DenseCase, keys: int) -> ForwardConfig | BackwardConfig | None:
    main, tail, value = widths(case.head_dim, case.value_dim)
    widest, (limit, _) = max(main + tail, value), table[-1]
    runs = case.arch == 90 and case.aligned and main >= NARROWEST and widest <= limit
    return fitting(table, widest) if runs and keys > FEW_KEYS else None
