"""Launches that classify the tiles of a mask function as hidden, partial or full, and list those to visit."""

from math import prod
from typing import NamedTuple

from ....internal.checks import INT32
from ....masks.function import TreeTensors
from ..launching.config import LaunchConfig
from ..launching.launch import Launch
from ..launching.tiles import classify
from . import tables
from .shapes import DenseShapes


class Lists(NamedTuple):
    """The launch that lists the tiles to visit, and the layout of the buffer ``lists`` that it fills.

    ``numbers`` is the size of the buffer in int32 values. ``arguments`` has its strides, for kernels.
    """

    launch: Launch
    numbers: int
    arguments: dict[str, int]


def states(x: DenseShapes) -> Launch:
    """Return the launch that classifies tiles, or bounds those of a tree; it writes a tensor ``x.states``."""
    if x.tree is not None:
        return _bounds(x, x.tree)
    kernel, programs, config, more = classify(x.states, tables.GRAIN, tables.GRAIN)
    return x.launch(kernel, programs, config, _counts(x, *x.states[:2]) | more)


def _bounds(x: DenseShapes, tree: TreeTensors) -> Launch:
    from ..kernels.tree_tiles import EACH, bound_tiles

    sequences, *_ = x.states
    more = _counts(x, sequences, 1) | {"stride_state_b": prod(x.states[1:]), "reach": tree.reach}
    more |= {"ENDS": tree.ends, "DEPTHS": tree.positions}
    blocks = x.blocks(x.t, EACH.value * tables.GRAIN)
    return x.launch(bound_tiles, blocks if x.packed else sequences * blocks, LaunchConfig(0, 0, 1, 4), more)


def lists(x: DenseShapes, tiles: LaunchConfig, *, by_keys: bool, group: int | None = None) -> Lists:
    """Return the launch that lists the tiles to visit per block of queries, or of keys if ``by_keys``.

    A list of a block of keys covers ``group`` query heads; None stands for all that share the keys.
    """
    from ..kernels.mask_tiles import HEADER, MOST, list_tiles

    group = 1 if not by_keys else x.h // x.g if group is None else group
    if group * MOST.value > INT32 + 1:
        raise NotImplementedError(
            f"triton: expected at most {INT32 // MOST.value + 1} heads per KV head, got {group}"
        )
    (of_sequence, sequences), (of_head, heads) = (
        (0 if n == 1 else prod(x.states[at + 1 :]), n) for at, n in enumerate(x.states[:2])
    )
    sequences = x.batch if x.bounded and not x.packed else sequences
    planes = heads // group if heads > 1 else 1
    own, other = (x.t, x.s) if by_keys else (x.s, x.t)
    own_block, other_block = (tiles.block_n, tiles.block_m) if by_keys else (tiles.block_m, tiles.block_n)
    blocks, room = x.blocks(own, own_block), -(-other // other_block) * group
    of_plane = blocks * (HEADER.value + room)
    found = {
        "room": room, "stride_list_b": planes * of_plane if sequences > 1 else 0,
        "stride_list_h": of_plane if planes > 1 else 0,
    }  # fmt: skip
    more = _counts(x, sequences, planes) | found
    more |= {
        "stride_state_b": of_sequence,
        "stride_state_h": of_head,
        "BY_KEYS": by_keys,
        "GROUP": group,
        "TREE": x.tree is not None,
        "reach": None if x.tree is None else x.tree.reach,
    }
    config = LaunchConfig(tiles.block_m, tiles.block_n, 1, 4)
    launch = x.launch(list_tiles, sequences * planes * blocks, config, more)
    return Lists(launch, sequences * planes * of_plane, found)


def _counts(x: DenseShapes, sequences: int, planes: int) -> dict[str, int]:
    """Return launch arguments by name: the counts of sequences, heads and tile columns, and the tile size."""
    batch = x.batch if x.packed else sequences
    return {"batch": batch, "planes": planes, "columns": x.states[3], "GRAIN": tables.GRAIN}
