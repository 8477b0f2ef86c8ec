"""Launches that find which tiles a mask by function hides, cuts or shows whole, and list those to visit."""

from math import prod
from typing import NamedTuple

from ..launching.config import LaunchConfig
from ..launching.launch import Launch
from ..launching.tiles import classify
from . import tables
from .shapes import DenseShapes


class Lists(NamedTuple):
    """The launch that makes ``lists``, so many numbers of int32, and what kernels need to find their lines in
    it.
    """

    launch: Launch
    numbers: int
    arguments: dict[str, int]


def states(x: DenseShapes) -> Launch:
    """The launch that makes ``states``, int8 ``x.states``."""
    return classify(x.states, tables.GRAIN, x.arguments | _counts(x, *x.states[:2]))


def lists(x: DenseShapes, tiles: LaunchConfig, *, by_keys: bool) -> Lists:
    """How tiles are listed for each block of queries; ``by_keys``, for each block of keys."""
    from ..kernels.mask_tiles import HEADER, list_tiles

    group = x.h // x.g if by_keys else 1
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
    arguments = x.arguments | _counts(x, sequences, planes) | found
    arguments |= {
        "stride_state_b": of_sequence,
        "stride_state_h": of_head,
        "BY_KEYS": by_keys,
        "GROUP": group,
    }
    config = LaunchConfig(tiles.block_m, tiles.block_n, 1, 4)
    launch = Launch(list_tiles, sequences * planes * blocks, arguments, config)
    return Lists(launch, sequences * planes * of_plane, found)


def _counts(x: DenseShapes, sequences: int, planes: int) -> dict[str, int]:
    """The sequences and heads that differ; of what is packed, each sequence does."""
    batch = x.batch if x.packed else sequences
    return {"batch": batch, "planes": planes, "columns": x.states[3], "GRAIN": tables.GRAIN}
