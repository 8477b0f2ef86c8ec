"""Choose the kernels for a call without a cache: the dedicated Hopper kernels, or the generic ones."""

from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators import Arguments
from ..launching import layouts
from ..launching.config import LaunchConfig
from ..launching.direct import streams
from ..launching.launch import Block, Launch, cached_plan, has_gluon
from ..launching.layouts import Key, Layout
from . import generic as passes
from . import hopper_tables, mask_tiles, selected
from .generic import Backward
from .hopper_tables import BackwardConfig, ForwardConfig
from .selected_backward import SelectedBackward
from .selected_entries import EntriesBackward
from .shapes import BackwardShapes, DenseShapes

ROWS = 64  # queries or keys per warpgroup
# If all tiles take equally long, programs get them in a fixed order, or from a counter if there are this many
# keys. In a fixed order, programs wait for processors that a transfer between GPUs holds. Times with the
# counter, as multiples of those with the fixed order (H200, triton 3.6, 2026-11): full masks of 1k tokens
# 1.06, 8k 1.01, 32k 1.00; a ring of four GPUs over 128k tokens 0.87.
LONG = 16384
MOST_SOFTCAP = 1024.0
# The channel blocks of heads that are wider than 256.
HALVES = MappingProxyType(dict.fromkeys(("D_MAIN", "D_TAIL", "E_MAIN", "E_TAIL"), hopper_tables.HALF))


class Forward(NamedTuple):
    """The launches of a forward, and the buffers they need.

    Attributes:
        launches: the attention kernel; before it, there may be one that transposes values or lists tiles.
        variant: the name of the kernels, which ``explain`` prints.
        dynamic: True if programs get their tiles from a counter, not in a fixed order.
        transposed: the shape of the buffer for transposed fp8 values, or empty.
        lists: the size of the tile lists of a mask function, in int32 values.
    """

    launches: tuple[Launch, ...]
    variant: str
    dynamic: bool = False
    transposed: tuple[int, ...] = ()
    lists: int = 0

    def counter(self, device: torch.device) -> Tensor | None:
        """Return the tile counter for a launch on the current stream; None if tiles have a fixed order.

        All launches on the default stream share one counter. On other streams every launch gets a new one,
        because a CUDA graph may capture these streams and own the memory that is allocated on them.
        """
        if not self.dynamic:
            return None
        return _counter_of(device) if streams().current_stream(device.index) == 0 else _zero(device)


def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


_counter_of = cached_plan(_zero)  # can be shared, since every kernel resets it to 0


@cached_plan
def states(key: Key) -> tuple[Launch, tuple[int, ...]]:
    """Return the launch that classifies the tiles of a mask function, and the shape of its output."""
    x = DenseShapes(key)
    return mask_tiles.states(x), x.states


@cached_plan
def forward(key: Key) -> Forward:
    """Return the launches of a forward, which write out and lse."""
    x, a = DenseShapes(key), key.layouts
    # A chunk of a larger call has an origin. The Hopper kernels are not tested on such chunks.
    takes = a.dropout_p == 0 and a.origin is None and x.out.is_in_lines
    takes = takes and not (x.case.by_function and x.case.itemsize == 1) and _is_precise(a)
    takes, config = takes and key.hopper and has_gluon(), None
    if takes and selected.takes_latents(x, a):
        launches, lists = selected.forward_of_latents(x, *x.selected)
        return Forward(launches, "Hopper", lists=lists)
    if takes and a.selected is None:
        config = hopper_tables.forward(x.case, keys=x.length, triton=triton_version())
    if config is not None:
        dynamic = not x.are_alike or x.length >= LONG
        return _hopper_forward(x, config, dynamic=dynamic, processors=layouts.processors(key.device))
    launches, lists = passes.forward(x)
    return Forward(launches, "plain", lists=lists)


@cached_plan
def triton_version() -> tuple[int, int]:
    """Return Triton's version as (major, minor); tile tables depend on its compiler."""
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)


def _hopper_forward(x: DenseShapes, config: ForwardConfig, *, dynamic: bool, processors: int) -> Forward:
    from ..kernels.hopper.forward.kernel import forward
    from ..kernels.hopper.forward.kernel_fp8 import forward_fp8
    from ..kernels.hopper.forward.transpose_values import transpose_values

    block_m, block_n = ROWS * config.consumers, config.block_n
    # If all blocks of queries see the same number of keys, programs take equally long. Heads then run one
    # after another, since no program waits for a longer one.
    pairs, wave = x.waves(x.h, 0 if x.are_alike else hopper_tables.L2)
    tiles = pairs * x.blocks(x.s, block_m)
    more = config.constants | {"heads_per_wave": wave, "tiles": tiles}
    is_wide = x.value > hopper_tables.HALF
    more |= HALVES if is_wide else {"E_TAIL": 0}
    blocks, launched = (
        (_halves if is_wide else _blocks)(x, q=ROWS, k=block_n, v=block_n, out=ROWS),
        LaunchConfig(block_m, block_n, 1, 4),
    )
    kernel, before, transposed = forward, (), ()
    if x.case.itemsize == 1:
        (planes, _), key_blocks = x.waves(x.g), x.blocks(x.t, block_n)
        transposed = (planes // x.g, x.case.value_dim, x.g, key_blocks * block_n)
        # Time to transpose the values: eight warps are faster for d64. To only copy them takes 22 us.
        #   us           4 warps  8 warps
        #   d64               42       25
        #   other heads       24       24
        before = (x.launch(transpose_values, planes * key_blocks, launched._replace(warps=8), more),)
        kernel, blocks["v_desc"] = forward_fp8, Block("transposed", x.value, block_n, gluon=True)
    lists = 0
    if x.states is not None:
        found = mask_tiles.lists(x, launched, by_keys=False)
        before, more, lists, dynamic = (found.launch,), more | found.arguments, found.numbers, True
    launch = x.launch(kernel, min(processors, tiles), launched, more, blocks)
    return Forward((*before, launch), "Hopper", dynamic, transposed, lists)


def _blocks(x: DenseShapes, **rows: int) -> dict[str, Block]:
    """Return, for each kernel parameter that is a TMA descriptor, the block that it loads or stores.

    ``rows`` has the number of rows in a block of each tensor.
    """
    found = {}
    for name, n in rows.items():
        is_value = name.removeprefix("d") in ("v", "out")
        found[f"{name}_desc"] = Block(name, n, x.value if is_value else x.main, gluon=True)
        if x.tail and not is_value:
            found[f"{name}_tail_desc"] = Block(name, n, x.tail, gluon=True)
    return found


def _halves(x: DenseShapes, **rows: int) -> dict[str, Block]:
    """Return what :func:`_blocks` does for a wide head, whose channels are loaded in two halves."""
    found = {f"{name}_desc": Block(name, n, hopper_tables.HALF, gluon=True) for name, n in rows.items()}
    return found | {f"{name}_tail_desc": found[f"{name}_desc"] for name in ("q", "k")}


def in_order(key: Key) -> Key:
    """Return the cache key of a backward, marked ``in_order`` if torch must be deterministic.

    Without this mark, the programs of the Hopper backward add to dq in any order.
    """
    return key._replace(in_order=True) if torch.are_deterministic_algorithms_enabled() else key


@cached_plan
def backward(key: Key, dout: tuple, dlse: tuple | None) -> Backward | EntriesBackward | SelectedBackward:
    """Return the launches of a backward."""
    x, a = BackwardShapes(key, Layout(*dout), None if dlse is None else Layout(*dlse)), key.layouts
    if a.selected is not None:
        return passes.backward(x)
    takes = a.dropout_p == 0 and a.origin is None and not x.learns_slopes and x.out.is_in_lines and key.hopper
    takes = takes and a.scale != 0 and has_gluon() and _is_precise(a)  # the backward divides by the scale
    if takes and a.alibi_slopes is None and hopper_tables.takes_wide(x.case, x.length):
        return _wide_backward(x)
    config = hopper_tables.backward(x.case, keys=x.length, in_order=key.in_order) if takes else None
    if config is None or (x.case.by_function and not _takes_functions(a, config, in_order=key.in_order)):
        return passes.backward(x)
    return _hopper_backward(x, config, in_order=key.in_order)


def _is_precise(a: Arguments) -> bool:
    """True if the tanh of the Hopper kernels is precise enough for a call.

    Its absolute error of 3e-7 is multiplied by the softcap.
    """
    return a.softcap is None or a.softcap <= MOST_SOFTCAP


def _takes_functions(a: Arguments, config: BackwardConfig, *, in_order: bool) -> bool:
    """True if the Hopper backward supports the mask and score functions of a call.

    A fixed order of additions relies on the band of a mask, so it excludes mask functions. If a tensor that a
    score function reads needs a gradient, the kernel would need atomics, which crash ptxas next to wgmma.
    """
    if not config.dq_registers or (in_order and a.mask_program is not None):
        return False
    return a.score_program is None or not a.learns


class WidePass(NamedTuple):
    """A pass of the backward for wide heads: its resident rows, its streamed rows, and its ring slots.

    upto_512.py explains the fields.
    """

    scored: str
    other: str | None
    first: str
    second: str
    slots: int
    left_slots: int
    right_slots: int


WIDE_PASSES = MappingProxyType(
    {
        "dv": WidePass("k", None, "q", "dout", 2, 2, 2),
        "dk": WidePass("k", "v", "dout", "q", 1, 2, 1),
        "dq": WidePass("q", "dout", "v", "k", 1, 2, 1),
    }
)


def _wide_backward(x: BackwardShapes) -> Backward:
    """Return the launches of a backward for heads of 257 to 512 channels: a pass for each gradient."""
    return Backward(
        x.prepare(), _wide_pass(x, "dk"), _wide_pass(x, "dq"), "Hopper", values=_wide_pass(x, "dv")
    )


def _wide_pass(x: BackwardShapes, of: str) -> Launch:
    from ..kernels.hopper.backward.upto_512 import backward_upto_512

    length, heads = (x.s, x.h) if of == "dq" else (x.t, x.g)
    pairs, wave = x.waves(heads, hopper_tables.BACKWARD_L2)
    a, streamed = WIDE_PASSES[of], LaunchConfig(32, 0, 1, 4)
    rows = {"scored": ROWS, "other": ROWS, "first": streamed.block_m, "second": streamed.block_m}
    blocks = {
        f"{place}_desc": Block(name, n, hopper_tables.HALF, gluon=True)
        for place, n in rows.items()
        if (name := getattr(a, place)) is not None
    }
    blocks["grad_desc"] = Block(of, ROWS, hopper_tables.HALF, gluon=True)
    more = {"OF": of, "heads_per_wave": wave, "REGISTERS": 240, "PRODUCER_REGISTERS": 24}
    more |= {"SLOTS": a.slots, "LEFT_SLOTS": a.left_slots, "RIGHT_SLOTS": a.right_slots}
    return x.launch(backward_upto_512, pairs * x.blocks(length, ROWS), streamed, more, blocks)


def _hopper_backward(x: BackwardShapes, config: BackwardConfig, *, in_order: bool) -> Backward:
    from ..kernels.hopper.backward.kernel import backward
    from ..kernels.hopper.backward.results import finish_queries

    # As in the forward, several heads run together, but the L2 cache must also hold queries and the sums of
    # dq. If programs add to dq in a fixed order, those of a head start one after another, so more heads
    # should run together. TFLOP/s by the number of heads that run together (full mask, 8k, d128):
    #   heads      1    2    4
    #   TFLOP/s  470  489  513
    pairs, wave = x.waves(x.g, 0 if x.are_alike and not in_order else hopper_tables.BACKWARD_L2)
    tiles, heads = x.blocks(x.s, config.block_m), x.rows * x.h
    sums = heads * tiles * config.block_m * (x.main + x.tail)
    more = config.constants | {"heads_per_wave": wave, "dq_tiles": tiles, "sums": sums}
    # To add to dq in a fixed order, a program waits for the program of the next keys (AFTER = 1) or of the
    # previous keys (-1). With 1, the shortest programs start first, and none waits long. With GQA there are
    # few programs, so the longest ones must not start last. TFLOP/s, by AFTER:
    #                     1   -1
    #   causal 8k d128  512  426
    #   GQA 4k          405  470
    more["AFTER"] = (-1 if x.h > x.g else 1) if in_order else 0
    blocks = _blocks(x, q=config.block_m, k=ROWS, dout=config.block_m, v=ROWS, dk=ROWS, dv=ROWS)
    launched = LaunchConfig(config.block_m, 0, 1, 4)
    # For a fixed order, the buffer of sums also has room for a work counter and, for each tile of sums, the
    # number of the program that may add to the tile next.
    room, programs = sums + (1 + heads * tiles) * in_order, pairs * x.blocks(x.t, ROWS * config.tiles)
    before, lists = None, 0
    if x.states is not None:
        found = mask_tiles.lists(x, LaunchConfig(config.block_m, ROWS * config.tiles, 1, 4), by_keys=True)
        before, lists, more = found.launch, found.numbers, more | found.arguments
    # A kernel that starts early waits only for the launch directly before it. If it depends on two launches,
    # it must not start early.
    keys = x.launch(backward, programs, launched, more, blocks, early=before is None)
    queries = x.launch(finish_queries, heads * tiles, launched, more, early=True)
    variant = "ordered Hopper" if in_order else "Hopper"
    return Backward(x.prepare(), keys, queries, variant, sums=room, before_keys=before, lists=lists)
