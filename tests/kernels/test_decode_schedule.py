"""The schedule: splits that follow each other without gaps, as many as there is room for, and none much
longer.
"""

from random import Random

import pytest
import torch
from kernel_helpers import DEVICE, INTERPRETED

from attnlib.backends._triton.decode import schedule as triton_schedule
from attnlib.backends._triton.decode import tables as decode_tables
from attnlib.backends._triton.decode.tables import ENTRY, FINEST, GRANULARITY, HALVINGS
from attnlib.backends._triton.launching import layouts
from attnlib.backends._triton.launching.launch import plan_cache

END = 2**31 - 1  # of a last part, whose sequence may grow


@pytest.fixture
def device(monkeypatch):
    """Call it for one of so many multiprocessors."""

    def of(processors: int) -> torch.device:
        monkeypatch.setattr(layouts, "processors", lambda device: processors)
        plan_cache.cache_clear()
        return torch.device(DEVICE)

    yield of
    plan_cache.cache_clear()


def scheduled(device, starts, lengths, *, heads=1, limit=2**20, reach=None, rows=0) -> list[list[list[int]]]:
    """Entries by level and slot, where there was garbage before."""
    schedule = triton_schedule.new_schedule(heads, max(rows, len(lengths)), device)
    schedule[0].fill_(123456789)
    tensors = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, lengths))
    triton_schedule.update_schedule(schedule, *tensors, limit=limit, reach=reach)
    assert schedule.shape[:2] == (heads, HALVINGS)
    assert schedule.shape[3] == ENTRY
    return schedule[0].tolist()


def bounds(start: int, length: int, limit: int, reach: int | None) -> tuple[int, int]:
    """What is to be shared out of a sequence."""
    length = max(0, min(length, limit))
    return min(max(start, 0 if reach is None else length - reach, 0), length), length


def least_size(grains: list[int], room: int, slots: int) -> int:
    """Grains of the longest part, if each sequence is cut into equal ones and all fit."""
    size = max(1, -(-sum(grains) // room))
    while sum(-(-n // size) for n in grains) > slots:
        size += 1
    return size


def check(entries: list[list[int]], ranges: list[tuple[int, int]], room: int, level: int) -> None:
    room, grain = max(1, room >> level), min(FINEST << level, GRANULARITY)
    slots = decode_tables.slots(len(ranges), room)
    grains = [max(1, -(-length // grain) - start // grain) for start, length in ranges]
    size, slot = least_size(grains, room, slots), 0
    for n, ((start, length), many) in enumerate(zip(ranges, grains, strict=True)):
        first, splits = entries[n][4:6]
        assert (first, splits) == (slot, -(-many // size))
        ends = [start]
        for number, (sequence, begin, end, of, *_) in enumerate(entries[first : first + splits]):
            assert (sequence, of) == (n, splits)
            assert begin == ends[-1]
            assert end % grain == 0 or number == splits - 1
            assert end > begin
            assert -(-min(end, length) // grain) - begin // grain <= size
            ends.append(end)
        assert ends[-1] == END
        assert all(end < length for end in ends[1:-1])
        slot += splits
    assert slot <= slots
    assert all(entry[0] == -1 for entry in entries[slot:])


def test_splits_tile_what_is_seen(device):
    """At every level, for any lengths, of which some are 0, and for more rows than there are sequences."""
    random, lengths = Random(0), (0, 1, GRANULARITY - 1, GRANULARITY, GRANULARITY + 1, 700, 5000, 131072)
    cases = [(1, 1), (1, 132), (3, 7), (17, 33), (64, 132), (150, 16)][: 4 if INTERPRETED else None]
    for batch, processors in cases:
        for heads, reach in ((1, None), (8, 300)):
            chosen = [random.choice(lengths) for _ in range(batch)]
            starts = [random.choice((0, 0, 5, length // 2, length)) for length in chosen]
            of = device(processors)
            entries = scheduled(
                of, starts, chosen, heads=heads, reach=reach, rows=batch + random.choice((0, 5))
            )
            room = decode_tables.capacity(processors, heads)
            ranges = [bounds(*pair, 2**20, reach) for pair in zip(starts, chosen, strict=True)]
            for level, row in enumerate(entries):
                check(row, ranges, room, level)
    entries = scheduled(device(33), [0] * 5, [1, 128000, 3, 0, 9])[0]
    splits = [entry[5] for entry in entries[:5]]
    assert splits == [1, splits[1], 1, 1, 1]
    assert splits[1] > 0.9 * decode_tables.capacity(33, 1)  # the long one gets what the others leave


def test_wrong_lengths_are_contained(device):
    """Fault 76: what is negative is empty, and what is beyond the limit ends there."""
    lengths = [-1, -(2**31), 2**31 - 1, 4097, 3]
    starts = [0, 2**31 - 1, 0, -5, 2**31 - 1]
    for limit, reach in ((4096, None), (4096, 100), (2**28, None)):
        entries = scheduled(device(33), starts, lengths, limit=limit, reach=reach)
        ranges = [bounds(*pair, limit, reach) for pair in zip(starts, lengths, strict=True)]
        room = decode_tables.capacity(33, 1)
        for level, row in enumerate(entries):
            check(row, ranges, room, level)
