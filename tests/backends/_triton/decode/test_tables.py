"""The tables of the decode kernels: every entry fits the chip that it is for, and the size of a schedule."""

from itertools import product

import pytest

from attnlib.backends._triton.decode import tables as decode_tables
from attnlib.backends._triton.decode.tables import DecodeCase
from attnlib.backends._triton.launching.config import power_of_two

SHARED = {90: 227, 100: 227, 80: 163, 86: 99, 89: 99, 120: 99}  # KiB that one program may take, by sm
HEADS = [(16, 0, 16), (59, 0, 24), (80, 0, 80), (128, 0, 128), (192, 0, 128), (256, 0, 256), (576, 0, 512)]
LATENT = [(64, 16), (128, 0), (300, 20), (512, 64), (512, 0)]


def problems(arch: int):
    sizes = [(d, tail, e, False) for d, tail, e in HEADS] + [(d, tail, d, True) for d, tail in LATENT]
    for (d, tail, e, latent), itemsize, rows in product(sizes, (1, 2, 4), (1, 8, 16, 17, 64, 65, 128, 4096)):
        choices = product((True, False), (0, 1, 16, 64, 256), (True, False), (False, True))
        for one, page, aligned, changed in choices:
            yield DecodeCase(rows, d, tail, e, itemsize, latent, one, page, arch, aligned, changed)


@pytest.mark.parametrize("arch", SHARED)
def test_tiles_fit_into_shared_memory(arch):
    for case in problems(arch):
        config = decode_tables.decode(case)
        *keys, values = decode_tables.widths_of(case.head_dim, case.tail, case.value_dim)
        stored = sum(keys) + (0 if case.latent else values)
        loaded = max(1, config.stages - 1) * config.block_n * stored * case.itemsize
        assert loaded <= SHARED[arch] << 10, (case, config)


@pytest.mark.parametrize("arch", SHARED)
def test_tiles_are_what_kernels_take(arch):
    for case in problems(arch):
        config = decode_tables.decode(case)
        assert {config.block_m, config.block_n} <= {16, 32, 64, 128}
        assert config.warps in (4, 8)
        assert 1 <= config.resident <= decode_tables.RESIDENT
        wide = max(case.head_dim + case.tail, case.value_dim) > 256  # whose tiles are of 16 rows, or of 64
        assert config.block_m < 2 * power_of_two(case.rows) or (
            wide and 16 < case.rows <= 64 >= config.block_m
        )
        if config.tma:
            assert arch in (90, 100)
            assert case.aligned
            assert case.latent
            assert case.itemsize == 2
            assert case.page_size % config.block_n == 0
            assert config.block_n % decode_tables.EDGE == 0


@pytest.mark.parametrize("group", [1, 3, 4, 7, 64, 128])
def test_rows_of_packed_sequences(group):
    """Those of the mean at least; and no more than a tile of few, unless the mean has more."""
    for batch, tokens in product((1, 2, 9, 64), (0, 1, 9, 64, 65, 1000)):
        found, mean = decode_tables.rows(tokens, batch, group), group * -(-tokens // batch)
        assert mean <= found <= max(mean, decode_tables.TILE)
        assert found >= min(decode_tables.TILE - group + 1, group * (tokens - batch + 1))


@pytest.mark.parametrize(
    ("d", "tail", "e"), [x for x in HEADS if not x[1]] + [(d, tail, d) for d, tail in LATENT]
)
def test_blocks_hold_a_key_and_a_value(d, tail, e):
    """A key in one plane is in two blocks where that saves channels; a latent and its rotary key have a block
    each.
    """
    main, rest, value = decode_tables.widths_of(d, tail, e)
    assert {n.bit_count() for n in (main, rest, value)} <= {0, 1}
    assert value >= e
    if tail:
        assert main == value >= d
        assert rest >= tail
    else:
        assert main + rest >= d
        assert rest < main


@pytest.mark.parametrize("resident", [1, 2, 4])
def test_programs_of_a_split_leave_room_for_fewer_splits(resident):
    """What a schedule has room for at a level runs at once, and is more than half of what could."""
    config = decode_tables.LaunchConfig(16, 64, 2, 4, resident=resident)
    for processors, blocks, heads in product((33, 132), (1, 2, 3, 8, 9), (1, 2, 8)):
        level = decode_tables.halvings(config, blocks * heads, heads)
        room = decode_tables.capacity(processors, heads) >> level
        assert room * blocks * heads <= resident * processors
        assert 2 * (room + 1) * blocks * heads > resident * processors - heads
    assert decode_tables.halvings(config, 100_000, 1) == decode_tables.HALVINGS - 1


@pytest.mark.parametrize("batch", [0, 1, 2, 17, 1000])
@pytest.mark.parametrize("room", [1, 2, 33, 264])
def test_a_schedule_has_a_slot_for_each_sequence_and_each_place(batch, room):
    slots = decode_tables.slots(batch, room)
    assert slots >= room
    assert slots >= batch + room // 2
    for level in range(decode_tables.HALVINGS):
        assert decode_tables.slots(batch, max(1, room >> level)) <= slots
        assert decode_tables.slots(max(0, batch - 1), room) <= slots


def test_more_heads_than_places_still_leave_one():
    assert decode_tables.capacity(1, 1000) == 1
