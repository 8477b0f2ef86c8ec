"""The launch tables: every entry fits the chip that it is for."""

import pytest

from attnlib.kernels import launch
from attnlib.kernels.launch import Problem

SHARED = {90: 227, 100: 227, 80: 163, 86: 99, 89: 99, 120: 99}  # KiB that one program may take, by sm


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize(("d", "e"), [(1, 1), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("keys", [1, 100_000])
def test_tiles_fit_into_shared_memory(arch, d, e, causal, plain, keys):
    config = launch.forward(Problem(d, e, 2, causal, plain, arch), keys=keys)
    loaded = config.block_m * d + config.stages * config.block_n * (d + e)
    assert 2 * loaded <= SHARED[arch] << 10
    assert {config.block_m, config.block_n} <= {16, 32, 64, 128}


@pytest.mark.parametrize("d", [1, 7, 16, 17, 40, 64, 80, 96, 111, 128, 160, 192, 256, 576])
def test_a_head_is_two_blocks_that_hold_it_and_waste_little(d):
    main, tail = launch.head_split(d)
    assert d <= main + tail <= max(16, 2 * d)
    assert main.bit_count() == 1
    assert tail == 0 or (tail.bit_count() == 1 and tail >= 16)
    assert tail < main


def test_a_section_holds_whole_groups():
    problem = Problem(128, 128, 2, True, True, 90)
    assert launch.section(problem, keys=8192, pairs=64, group=1) == 6  # of 4 MiB each
    assert launch.section(problem, keys=8192, pairs=64, group=4) == 24
    assert launch.section(problem, keys=1 << 20, pairs=64, group=4) == 1
    assert launch.section(problem, keys=16, pairs=64, group=4) == 64
