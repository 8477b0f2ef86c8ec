"""Which kernels a call without a cache runs on: Hopper's own where there are some for it, the plain ones elsewhere."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import hopper_tables, plans
from .hopper_tables import HopperConfig
from .launch import Block, Launch, current_stream, remembered
from .plans import DenseShapes, Key
from .schedule import processors
from .tables import LaunchConfig

KNOWN = ("3.6", "3.7")  # the versions of Triton whose Gluon these kernels have been tested with
QUERIES = 64  # of a consumer


class Forward(NamedTuple):
    """The launch of a forward. Where it is ``drawn``, programs draw their tiles from a counter."""

    launch: Launch
    variant: str
    drawn: bool = False

    def counter(self, device: torch.device) -> Tensor | None:
        """The counter for a launch on the current stream."""
        if not self.drawn:
            return None
        if torch.cuda.is_current_stream_capturing():  # a graph may be replayed on any stream
            return torch.zeros(1, dtype=torch.int32, device=device)
        return _counter_of(device, current_stream(device.index))


@remembered
def _counter_of(device: torch.device, stream: int) -> Tensor:
    """A counter that kernels leave at 0: those of one stream run one after another."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@remembered
def forward(key: Key) -> Forward:
    """The launch of a forward, which makes out and lse."""
    x, a = DenseShapes(key), key.layouts
    if key.hopper and a.dropout_p == 0 and x.out.is_in_lines and is_gluon_known():
        config = hopper_tables.forward(x.case, keys=x.length)
        if config is not None:
            return _hopper_forward(x, config, drawn=not x.are_alike, processors=processors(key.device))
    return Forward(plans.forward(x), "plain")


def _hopper_forward(x: DenseShapes, config: HopperConfig, *, drawn: bool, processors: int) -> Forward:
    from .kernels.hopper.forward import forward

    # Heads whose blocks are all of one length may run one after another: none waits for the longest.
    block_m, (pairs, wave) = QUERIES * config.consumers, x.waves(x.h, 0 if x.are_alike else hopper_tables.L2)
    tiles = pairs * x.blocks(x.s, block_m)
    main, tail, value = (x.arguments[name] for name in ("D_MAIN", "D_TAIL", "E_MAIN"))
    blocks = {
        f"{name}_desc": Block(name, rows, width, gluon=True)
        for name, rows, width in (
            ("q", QUERIES, main),
            ("k", config.block_n, main),
            ("v", config.block_n, value),
            ("out", QUERIES, value),
        )
    }
    if tail:
        blocks |= {"q_tail_desc": Block("q", QUERIES, tail, gluon=True)}
        blocks |= {"k_tail_desc": Block("k", config.block_n, tail, gluon=True)}
    arguments = x.arguments | config.constants | {"heads_per_wave": wave, "tiles": tiles}
    launch = Launch(forward, min(processors, tiles), arguments, LaunchConfig(block_m, config.block_n, 1, 4), blocks)
    return Forward(launch, "Hopper", drawn)


@remembered
def is_gluon_known() -> bool:
    """Whether Triton is of a version whose Gluon these kernels know."""
    import triton

    return triton.__version__.startswith(tuple(f"{version}." for version in KNOWN))
