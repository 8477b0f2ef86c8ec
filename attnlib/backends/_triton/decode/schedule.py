"""The decode schedule: how sequences are split across a GPU, computed and updated on the device."""

import torch
from torch import Tensor

from ..launching import layouts
from ..launching.config import LaunchConfig, power_of_two
from ..launching.launch import Launch, cached_plan
from . import tables as decode_tables


def new_schedule(
    heads: int, rows: int, device: torch.device, *, limit: int = 0, split_size: int = 0
) -> Tensor:
    """Allocate a schedule ``[heads, halvings, slots, 8]`` for up to ``rows`` sequences.

    A schedule lists the splits of all sequences, one split per slot. It has such a list for each of several
    target numbers of splits (``halvings``): every target is half the previous one. All KV heads share one
    memory. With a fixed ``split_size``, there is only one list, with a slot for every split of sequences of
    up to ``limit`` tokens.
    """
    capacity = decode_tables.capacity(layouts.processors(device), heads)
    halvings, slots = decode_tables.HALVINGS, decode_tables.slots(rows, capacity)
    if split_size:
        halvings, slots = 1, rows * -(-limit // split_size)
    return torch.empty(halvings, slots, decode_tables.ENTRY, dtype=torch.int32, device=device).expand(
        heads, -1, -1, -1
    )


def update_schedule(
    schedule: Tensor, starts: Tensor, lengths: Tensor, *, limit: int, reach: int | None, split_size: int = 0
) -> None:
    """Split the sequences of a cache for decoding, and write the splits to ``schedule``.

    ``starts`` and ``lengths`` have one entry per sequence; lengths above ``limit`` tokens count as ``limit``.
    If ``reach`` is set, only the last ``reach`` tokens of a sequence are split.
    """
    plan = _plan(
        schedule.device, schedule.shape, len(lengths), limit, limit if reach is None else reach, split_size
    )
    plan.on({"starts": starts, "lengths": lengths, "schedule": schedule})


@cached_plan
def _plan(
    device: torch.device, shape: torch.Size, batch: int, limit: int, reach: int, split_size: int
) -> Launch:
    from ..kernels.split_kv import schedule

    (heads, halvings, slots, _), lanes = shape, power_of_two(batch)
    capacity = slots if split_size else decode_tables.capacity(layouts.processors(device), heads)
    arguments = {
        "batch": batch, "slots": slots, "capacity": capacity, "limit": limit, "reach": reach,
        "ROWS": lanes, "SPLITS": max(1, 128 // lanes), "GRANULARITY": split_size or decode_tables.GRANULARITY,
        "FINEST": split_size or decode_tables.FINEST,
        "SMALLEST": decode_tables.SMALLEST, "LARGEST": decode_tables.LARGEST,
    }  # fmt: skip
    return Launch(schedule, halvings, arguments, LaunchConfig(0, 0, 1, 4))
