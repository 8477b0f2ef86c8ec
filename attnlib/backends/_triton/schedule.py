"""How a GPU shares sequences out: the schedule of their parts, made and updated on the device."""

from functools import lru_cache

import torch
from torch import Tensor

from ...kv import KVLayout
from . import decode_tables
from .decode_tables import ENTRY, GRAIN, LEVELS
from .launch import Launch, on_device
from .tables import LaunchConfig, power_of_two

INTERPRETED = 2  # multiprocessors of what is no GPU


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETED


def new_schedule(layout: KVLayout, rows: int, device: torch.device, *, limit: int = 0, split_size: int = 0) -> Tensor:
    """Room for the schedule of up to ``rows`` sequences of this layout; as :func:`new_schedule_for`."""
    return new_schedule_for(rows, layout.heads, device, limit=limit, split_size=split_size)


def new_schedule_for(rows: int, heads: int, device: torch.device, *, limit: int = 0, split_size: int = 0) -> Tensor:
    """Room for a schedule of up to ``rows`` sequences, ``[heads, levels, slots, 8]``, which all KV heads share; or for
    parts of a ``split_size`` each, of at most ``limit`` tokens a sequence."""
    levels, slots = LEVELS, decode_tables.slots(rows, decode_tables.room(processors(device), heads))
    if split_size:
        levels, slots = 1, rows * -(-limit // split_size)
    return torch.empty(levels, slots, ENTRY, dtype=torch.int32, device=device).expand(heads, -1, -1, -1)


def update_schedule(
    schedule: Tensor, starts: Tensor, lengths: Tensor, *, limit: int, reach: int | None, split_size: int = 0
) -> None:
    """Cut sequences of these starts and lengths (at most ``limit``; the last ``reach`` tokens of them) into parts."""
    heads, levels, slots, _ = schedule.shape
    room = slots if split_size else decode_tables.room(processors(schedule.device), heads)
    reach = limit if reach is None else reach
    with on_device(schedule):
        plan = _schedule_plan(schedule.device, lengths.shape[0], slots, room, limit, reach, levels, split_size or GRAIN)
        plan(starts, lengths, schedule)


@lru_cache(maxsize=4096)
def _schedule_plan(
    device: torch.device, batch: int, slots: int, capacity: int, limit: int, reach: int, levels: int, granularity: int
) -> Launch:
    from .kernels.split_kv import schedule

    lanes = power_of_two(batch)
    arguments = {
        "batch": batch, "slots": slots, "capacity": capacity, "limit": limit, "reach": reach,
        "ROWS": lanes, "SPLITS": max(1, 128 // lanes), "GRANULARITY": granularity,
    }  # fmt: skip
    return Launch(schedule, levels, arguments, LaunchConfig(0, 0, 1, 4))
