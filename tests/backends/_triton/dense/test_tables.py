"""The launch tables: every entry fits the chip that it is for."""

from functools import partial
from itertools import product

import pytest

from attnlib.backends._triton.dense import hopper_tables, tables
from attnlib.backends._triton.dense.tables import DenseCase
from attnlib.backends._triton.launching.config import LaunchConfig, head_split, power_of_two, widths

SHARED = {90: 227, 100: 227, 80: 163, 86: 99, 89: 99, 120: 99}  # KiB that one program may take, by sm


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize(
    ("d", "e"),
    [
        (1, 1),
        (64, 64),
        (96, 96),
        (128, 128),
        (160, 160),
        (192, 128),
        (256, 256),
        (300, 300),
        (384, 320),
        (512, 512),
        (576, 512),
    ],
)
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("gathers", [None, 0, 2, 3])  # of functions of indices, where there are any
def test_tiles_fit_into_shared_memory(arch, d, e, plain, gathers):
    width = sum(head_split(d)) + power_of_two(e)

    def buffers(config: LaunchConfig) -> int:
        """wgmma reads a tile while the next ones load; mma has it in registers by then."""
        return config.stages if arch in tables.ROOMY else max(1, config.stages - 1)

    for causal, aligned, keys in product((True, False), (True, False), (1, 100_000)):
        case = DenseCase(d, e, 2, causal, plain, arch, aligned, gathers is not None, gathers=gathers or 0)
        forward = tables.forward(case, keys=keys)
        loaded = [forward.block_m * sum(head_split(d)) + buffers(forward) * forward.block_n * width]
        configs = [forward]
        owner, queries = (f(case, keys=keys) for f in (tables.backward_keys, tables.backward_queries))
        loaded.append(owner.block_n * width + buffers(owner) * owner.block_m * width)
        loaded.append(queries.block_m * width + buffers(queries) * queries.block_n * width)
        configs += [owner, queries]
        if (values := tables.backward_values(case, keys=keys)) is not None:  # it does not read V
            loaded.append(values.block_n * sum(head_split(d)) + buffers(values) * values.block_m * width)
            configs.append(values)
        assert 2 * max(loaded) <= SHARED[arch] << 10
        assert {n for config in configs for n in config[:2]} <= {16, 32, 64, 128}
        assert aligned or not any(config.tma for config in configs)


@pytest.mark.parametrize("d", [1, 7, 16, 17, 40, 64, 80, 96, 111, 128, 160, 192, 256, 576])
def test_a_head_is_two_blocks_that_hold_it_and_waste_little(d):
    main, tail = head_split(d)
    assert d <= main + tail <= max(16, 2 * d)
    assert main.bit_count() == 1
    assert tail == 0 or (tail.bit_count() == 1 and tail >= 16)
    assert tail < main


@pytest.mark.parametrize("d", [1, 16, 17, 40, 59, 64, 80, 111, 128, 192])
@pytest.mark.parametrize("e", [1, 29, 32, 64, 100, 128])
def test_tiles_of_keys_and_values_have_one_layout(d, e):
    main, tail, value = widths(d, e)
    assert d <= main + tail
    assert e <= value
    assert main == value or min(main, value) >= 64
    assert tail == 0 or tail >= 64


def test_wide_heads_have_tiles_of_their_own():
    """Options do not change them, since smaller tiles run without wgmma."""
    passes = tables.forward, tables.backward_values, tables.backward_keys, tables.backward_queries
    wide = (
        tables.FORWARD_WIDE,
        tables.BACKWARD_VALUES_WIDE,
        tables.BACKWARD_KEYS_WIDE,
        tables.BACKWARD_QUERIES_WIDE,
    )
    case = DenseCase(512, 512, 2, True, True, 90, True)
    options = {"plain": False}, {"by_function": True}, {"by_function": True, "changed": True, "gathers": 1}
    for changes in ({}, {"arch": 100}, {"head_dim": 257, "value_dim": 257}, {"value_dim": 64}, *options):
        for function, ((_, config),) in zip(passes, wide, strict=True):
            assert function(case._replace(**changes), keys=8192) == config
            assert function(case._replace(**changes), keys=tables.FEW_KEYS) == config._replace(tma=False)
    for changes in ({"arch": 86}, {"arch": 80}, {"gathers": 2}, {"itemsize": 4}, {"aligned": False}):
        assert tables.backward_values(case._replace(**changes), keys=8192) is None
        assert not any(f(case._replace(**changes), keys=8192).tma for f in (passes[0], *passes[2:]))
    small = case._replace(arch=86)
    for f in (passes[0], *passes[2:]):  # what these take beside, or unaligned rows do, would not fit
        widest = f(small._replace(head_dim=576), keys=8192)
        assert f(small, keys=8192) != widest
        for changes in ({"gathers": 1, "by_function": True}, {"aligned": False}):
            assert f(small._replace(**changes), keys=8192) == widest
    narrow = case._replace(head_dim=256, value_dim=256)
    assert tables.backward_values(narrow, keys=8192) is None
    assert passes[0](narrow, keys=8192).block_m == 128


def test_functions_have_tiles_and_kernels_of_their_own():
    case = DenseCase(128, 128, 2, True, True, 90, True)
    hides, reads = case._replace(by_function=True), case._replace(by_function=True, changed=True, gathers=1)
    assert tables.forward(hides, keys=8192) in [config for _, config in tables.FORWARD_FUNCTIONS]
    assert not tables.forward(reads, keys=8192).tma
    assert tables.forward(reads._replace(gathers=3), keys=8192).stages == 1
    forward = partial(hopper_tables.forward, keys=8192, triton=hopper_tables.NEWEST)
    assert (forward(hides).block_n, forward(reads).block_n) == (64, 128)
    adds, caps = reads._replace(gathers=0), reads._replace(gathers=0, exponentials=1)
    assert forward(adds) is not None
    assert forward(adds._replace(head_dim=64, value_dim=64)) is None
    assert forward(caps) is None


@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize(
    "functions", [{}, {"by_function": True}, {"by_function": True, "changed": True, "gathers": 1}]
)
def test_a_version_of_triton_uses_the_newest_table_that_is_not_above_it(d, e, functions):
    case = DenseCase(d, e, 2, True, True, 90, True)._replace(**functions)
    of = {
        version: hopper_tables.forward(case, keys=8192, triton=version)
        for version in [(3, n) for n in range(12)]
    }
    for version, config in of.items():
        known = max((x for x in hopper_tables.FORWARD if x <= version), default=min(hopper_tables.FORWARD))
        assert config == of[known]
    assert of[3, 6] != of[3, 9] or d == 256
    assert of[3, 10] == of[3, 9]


def test_a_wave_holds_whole_groups():
    case = DenseCase(128, 128, 2, True, True, 90, True)
    assert (
        tables.heads_per_wave(case, keys=8192, pairs=64, group=1) == 8
    )  # of 4 MiB each: as many in every wave
    assert tables.heads_per_wave(case, keys=8192, pairs=64, group=4) == 32
    assert tables.heads_per_wave(case, keys=1 << 20, pairs=64, group=4) == 4
    assert tables.heads_per_wave(case, keys=16, pairs=64, group=4) == 64
