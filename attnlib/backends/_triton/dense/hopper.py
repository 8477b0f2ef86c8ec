"""Which kernels run a call without a cache: Hopper's own where there are some for it, the plain ones
elsewhere.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ....tracing.derivative import derivative
from ....tracing.program import Program
from ...operators import Arguments
from ..launching import layouts
from ..launching.config import LaunchConfig
from ..launching.direct import streams
from ..launching.launch import Block, Launch, has_gluon, remembered
from ..launching.layouts import Key, Layout
from . import generic as passes
from . import hopper_tables, mask_tiles
from .generic import Backward
from .hopper_tables import BackwardConfig, ForwardConfig
from .shapes import BackwardShapes, DenseShapes

ROWS = 64  # queries or keys of a warpgroup


class Forward(NamedTuple):
    """The launches of a forward. Where it is ``dynamic``, tiles of the last are scheduled by a counter.

    The first of two writes values in another order, in the shape of ``transposed``, or so many numbers of
    ``lists``.
    """

    launches: tuple[Launch, ...]
    variant: str
    dynamic: bool = False
    transposed: tuple[int, ...] = ()
    lists: int = 0

    def counter(self, device: torch.device) -> Tensor | None:
        """The counter for a launch on the current stream.

        Launches on the default stream share one. Others may be captured, and what they allocate may be a
        graph's.
        """
        if not self.dynamic:
            return None
        return _counter_of(device) if streams().current_stream(device.index) == 0 else _zero(device)


def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


_counter_of = remembered(_zero)  # kernels leave it at 0


@remembered
def states(key: Key) -> tuple[Launch, tuple[int, ...]]:
    """The launch that tells apart the tiles of a mask by function, and the shape of what it makes."""
    x = DenseShapes(key)
    return mask_tiles.states(x), x.states


@remembered
def forward(key: Key) -> Forward:
    """The launches of a forward, which makes out and lse."""
    x, a = DenseShapes(key), key.layouts
    # Pieces of a call have not been tried.
    takes = a.dropout_p == 0 and a.origin is None and x.out.is_in_lines
    takes = takes and not (x.case.by_function and x.case.itemsize == 1)
    config = None
    if key.hopper and takes and has_gluon():
        config = hopper_tables.forward(x.case, keys=x.length, triton=triton_version())
    if config is not None:
        return _hopper_forward(x, config, dynamic=not x.are_alike, processors=layouts.processors(key.device))
    launches, lists = passes.forward(x)
    return Forward(launches, "plain", lists=lists)


@remembered
def triton_version() -> tuple[int, int]:
    """The minor version of Triton, by which tables choose where its compilers differ."""
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)


def _hopper_forward(x: DenseShapes, config: ForwardConfig, *, dynamic: bool, processors: int) -> Forward:
    from ..kernels.hopper.forward.kernel import forward
    from ..kernels.hopper.forward.kernel_fp8 import forward_fp8
    from ..kernels.hopper.forward.transpose_values import transpose_values

    block_m, block_n = ROWS * config.consumers, config.block_n
    # Heads whose blocks are all of one length may run one after another: none waits for the longest.
    pairs, wave = x.waves(x.h, 0 if x.are_alike else hopper_tables.L2)
    tiles = pairs * x.blocks(x.s, block_m)
    arguments = x.arguments | config.constants | {"heads_per_wave": wave, "tiles": tiles}
    blocks, launched = (
        _blocks(x, q=ROWS, k=block_n, v=block_n, out=ROWS),
        LaunchConfig(block_m, block_n, 1, 4),
    )
    kernel, before, transposed = forward, (), ()
    if x.case.itemsize == 1:
        (planes, _), key_blocks = x.waves(x.g), x.blocks(x.t, block_n)
        transposed = (planes // x.g, arguments["E"], x.g, key_blocks * block_n)
        # Eight warps: 25 us where four take 42 (d64), and 24 as with four elsewhere; a copy of the same bytes
        # takes 22.
        before = (Launch(transpose_values, planes * key_blocks, arguments, launched._replace(warps=8)),)
        kernel, blocks["v_desc"] = forward_fp8, Block("transposed", arguments["E_MAIN"], block_n, gluon=True)
    lists = 0
    if x.states is not None:
        found = mask_tiles.lists(x, launched, by_keys=False)
        before, arguments, lists, dynamic = (found.launch,), arguments | found.arguments, found.numbers, True
    launch = Launch(kernel, min(processors, tiles), arguments, launched, blocks)
    return Forward((*before, launch), "Hopper", dynamic, transposed, lists)


def _blocks(x: DenseShapes, **rows: int) -> dict[str, Block]:
    """By the kernel's parameters what is loaded at once of each tensor: so many rows, of the channels of a
    block.
    """
    main, tail, value = (x.arguments[name] for name in ("D_MAIN", "D_TAIL", "E_MAIN"))
    found = {}
    for name, n in rows.items():
        is_value = name.removeprefix("d") in ("v", "out")
        found[f"{name}_desc"] = Block(name, n, value if is_value else main, gluon=True)
        if tail and not is_value:
            found[f"{name}_tail_desc"] = Block(name, n, tail, gluon=True)
    return found


def in_order(key: Key) -> Key:
    """The key of a backward. Hopper's own adds to dq in any order, unless torch has been asked for a fixed
    one.
    """
    return key._replace(in_order=True) if torch.are_deterministic_algorithms_enabled() else key


@remembered
def backward(key: Key, dout: tuple, dlse: tuple | None) -> Backward:
    """The launches of a backward."""
    x, a = BackwardShapes(key, Layout(*dout), None if dlse is None else Layout(*dlse)), key.layouts
    takes = a.dropout_p == 0 and a.origin is None and not x.has_slopes and x.out.is_in_lines and key.hopper
    takes = takes and a.scale != 0 and has_gluon()  # by the scale it divides
    config = hopper_tables.backward(x.case, keys=x.length, in_order=key.in_order) if takes else None
    if config is None or (x.case.by_function and not _takes_functions(a, config, in_order=key.in_order)):
        return passes.backward(x)
    return _hopper_backward(x, config, in_order=key.in_order)


def _takes_functions(a: Arguments, config: BackwardConfig, *, in_order: bool) -> bool:
    """Whether Hopper's backward runs the functions of a call.

    In a fixed order, programs rely on bands. Atomics, by which what scores read learns, crash ptxas beside
    products; and there is no room for scores, where a derivative needs them.
    """
    if in_order or not config.dq_registers:
        return False
    return a.score_program is None or not (a.learns or derivative(Program(a.score_program)).needs_score)


def _hopper_backward(x: BackwardShapes, config: BackwardConfig, *, in_order: bool) -> Backward:
    from ..kernels.hopper.backward.kernel import backward
    from ..kernels.hopper.backward.results import finish_queries

    # As in a forward, and their queries and sums of dq are in the L2 cache too. In a fixed order few programs
    # of a head should run at once, since they begin one after the other: full 8k d128 one head 470 TFLOP/s,
    # two 489, four 513.
    pairs, wave = x.waves(x.g, 0 if x.are_alike and not in_order else hopper_tables.BACKWARD_L2)
    tiles, heads = x.blocks(x.s, config.block_m), x.rows * x.h
    sums = heads * tiles * config.block_m * (x.arguments["D_MAIN"] + x.arguments["D_TAIL"])
    arguments = x.arguments | config.constants | {"heads_per_wave": wave, "dq_tiles": tiles, "sums": sums}
    # After the program of the next keys, the shortest come first and none waits long: causal 8k d128 512
    # TFLOP/s, the other way 426. Where heads share keys programs are few, and the longest must not be the
    # last: GQA 4k 470 and 405.
    arguments["AFTER"] = (-1 if x.h > x.g else 1) if in_order else 0
    blocks = _blocks(x, q=config.block_m, k=ROWS, dout=config.block_m, v=ROWS, dk=ROWS, dv=ROWS)
    launched = LaunchConfig(config.block_m, 0, 1, 4)
    # In a fixed order, a counter from which programs draw their work, and whose turn it is at each tile of
    # sums.
    room, programs = sums + (1 + heads * tiles) * in_order, pairs * x.blocks(x.t, ROWS * config.tiles)
    before, lists = None, 0
    if x.states is not None:
        found = mask_tiles.lists(x, LaunchConfig(config.block_m, ROWS * config.tiles, 1, 4), by_keys=True)
        before, lists, arguments = found.launch, found.numbers, arguments | found.arguments
    # Of two kernels before it, one that starts early would wait for the last alone.
    keys = Launch(backward, programs, arguments, launched, blocks, early=before is None)
    queries = Launch(finish_queries, heads * tiles, arguments, launched, early=True)
    variant = "ordered Hopper" if in_order else "Hopper"
    return Backward(x.prepare(), keys, queries, variant, sums=room, before_keys=before, lists=lists)
