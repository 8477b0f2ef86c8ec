"""Ropes: laws of relative positions, frequencies, angles and compilation, and what is refused."""

import copy
import doctest
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_cases import FAR, LENGTH, SCALINGS, make, pairs, turn

import attnlib.rope.rope
from attnlib.rope.rope import (
    DynamicNTKScaling,
    LinearScaling,
    LongRoPEScaling,
    NTKScaling,
    Rope,
    YaRNScaling,
    rotate,
)

rules = st.sampled_from(sorted(SCALINGS))
seeds = st.integers(0, 2**16)


# Laws (P11)


@settings(max_examples=50, deadline=None)
@given(rules, st.booleans(), st.integers(0, 4095), st.integers(0, 4095), st.integers(-4096, 4096), seeds)
def test_scores_depend_on_relative_position_only(rule, interleaved, i, j, shift, seed):
    rope = make(rule, 16, interleaved)
    q, k = torch.randn(2, 1, 1, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    here = (turn(q, rope, [i]) * turn(k, rope, [j])).sum()
    there = (turn(q, rope, [i + shift]) * turn(k, rope, [j + shift])).sum()
    # Four fp32 phases, each wrong by at most half a unit in the last place of 8192, and four fp32 cos and
    # sin.
    bound = (4 * 8192 * 2**-24 + 4 * 2**-23) * q.norm() * k.norm()
    assert (here - there).abs() <= bound


@settings(max_examples=30, deadline=None)
@given(rules, st.booleans(), st.sampled_from((2, 6, 16, 64)), st.integers(-100, 200_000), seeds)
def test_norms_of_pairs_are_preserved_and_the_rest_is_untouched(rule, interleaved, width, position, seed):
    if width == 2 and rule in ("ntk", "dynamic"):
        width = 4
    x = torch.randn(1, 3, width + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    y = turn(x, make(rule, width, interleaved), [position])
    before, after = (pairs(a, width, interleaved).norm(dim=-1) for a in (x, y))
    assert ((after / before - 1).abs() <= 2**-22).all()
    assert torch.equal(x[..., width:], y[..., width:])


@settings(max_examples=30, deadline=None)
@given(rules, st.sampled_from((2, 8, 66)), st.integers(0, 100_000), seeds)
def test_interleaved_is_half_after_a_fixed_permutation(rule, half, position, seed):
    width = 2 * half
    x = torch.randn(2, 3, 2, width + 3, generator=torch.Generator().manual_seed(seed))
    positions = position + torch.arange(3)
    order = [
        *range(0, width, 2),
        *range(1, width, 2),
        *range(width, width + 3),
    ]  # half's channel c is interleaved's 2c
    expected = turn(x[..., order], make(rule, width), positions)
    assert torch.equal(turn(x, make(rule, width, True), positions)[..., order], expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_turns_counterclockwise_by_position_times_frequency(interleaved):
    """The definition, in Python floats, at a small position."""
    rope = Rope(4, 100.0, interleaved=interleaved)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    y = pairs(turn(x, rope, [3]), 4, interleaved)[0, 0]
    for (a, b), got, frequency in zip(pairs(x, 4, interleaved)[0, 0].tolist(), y, (1.0, 0.1), strict=True):
        expected = complex(a, b) * complex(math.cos(3 * frequency), math.sin(3 * frequency))
        assert abs(expected - complex(*got)) <= 2**-21 * abs(expected)


@pytest.mark.parametrize("theta", [10_000, 150_000.0, 500_000.0])
def test_plain_frequencies_are_rounded_correctly(theta):
    """Each of the three fp32 roundings, so that no device's fp32 power enters."""
    frequencies = Rope(128, theta).inverse_frequencies()
    for c, frequency in enumerate(frequencies.tolist()):
        exponent = torch.tensor(2 * c / 128, dtype=torch.float32).item()
        wavelength = torch.tensor(theta**exponent, dtype=torch.float32).item()
        assert frequency == torch.tensor(1 / wavelength, dtype=torch.float32).item()


@pytest.mark.parametrize("rule", sorted(SCALINGS))
def test_far_positions_never_wrap(rule):
    """Fault 53: there is no table to run past, in int32 or int64."""
    rope, length = make(rule, 32), LENGTH.get(rule)
    positions = torch.tensor([8191, 8192, 65_535, 65_536, 131_072, 2**20, 2**24, 2**31, 2**33 + 2**20])
    frequencies = rope.inverse_frequencies(length=length).double()
    phases = positions.double()[:, None] * frequencies
    angles = rope.angles(positions, length=length)
    bound = phases * 2**-24 + 2**-22
    assert ((angles.cos - phases.cos()).abs() <= bound).all()
    assert ((angles.sin - phases.sin()).abs() <= bound).all()
    assert (angles.cos.double() ** 2 + angles.sin.double() ** 2 - 1).abs().max() <= 2**-22
    narrow = rope.angles(positions[:7].int(), length=length)
    assert torch.equal(narrow.cos, angles.cos[:7])
    assert torch.equal(narrow.sin, angles.sin[:7])


@pytest.mark.parametrize("rule", sorted(SCALINGS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_angles_are_fp32_whatever_the_ambient_dtype(rule, dtype):
    # 96: a power of two would have exponents that bf16 holds exactly.
    rope, positions = make(rule, 96), torch.tensor([[0, 1], [4097, 100_000]], dtype=torch.int32)
    expected = rope.angles(positions, length=LENGTH.get(rule))
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            angles = rope.angles(positions, length=LENGTH.get(rule))
    finally:
        torch.set_default_dtype(default)
    assert angles.cos.shape == (2, 2, 48)
    assert angles.cos.dtype == angles.sin.dtype == torch.float32
    assert torch.equal(angles.cos, expected.cos)
    assert torch.equal(angles.sin, expected.sin)


@pytest.mark.parametrize("rule", sorted(SCALINGS))
def test_inference_mode_first_then_training(rule):
    """Fault 32: nothing computed under inference_mode survives it."""
    rope, x = make(rule, 8), torch.randn(2, 5, 3, 8)
    with torch.inference_mode():
        inferred = turn(x, rope, torch.arange(5))
    y = turn(x.requires_grad_(), rope, torch.arange(5))
    y.square().sum().backward()
    assert torch.equal(y, inferred)
    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rule", sorted(SCALINGS))
def test_compiles_to_one_graph(rule, interleaved):
    torch._dynamo.reset()
    rope, length = make(rule, 8, interleaved), LENGTH.get(rule)

    def call(x, positions):
        angles = rope.angles(positions, length=length)
        return rotate(x, angles), angles

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    x, positions = torch.randn(2, 5, 3, 10), torch.arange(5) + 4000
    (eager, _), (traced, angles) = call(x, positions), compiled(x, positions)
    assert torch.equal(eager, traced)
    # Angles cross the border of a graph both ways: layers share one computation per step.
    assert torch.equal(torch.compile(rotate, fullgraph=True, backend="eager")(x, angles), eager)


def test_a_growing_sequence_does_not_recompile():
    torch._dynamo.reset()
    graphs = 0

    def count(graph, _):
        nonlocal graphs
        graphs += 1
        return graph.forward

    rope = make("dynamic", 8)
    call = lambda x, positions, length: rotate(x, rope.angles(positions, length=length))  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend=count)
    for s in (5, 6, 7, 9, 12):
        x, positions = torch.randn(2, s, 3, 10), torch.arange(s) + 2000
        assert torch.equal(compiled(x, positions, 2000 + s), call(x, positions, 2000 + s))
    assert graphs <= 2


def test_ropes_are_plain_values():
    rope = make("llama3", 64)
    assert rope == make("llama3", 64)
    assert hash(rope) == hash(make("llama3", 64))
    assert rope != make("llama3", 64, True)
    assert copy.deepcopy(rope) == rope
    with pytest.raises(AttributeError):
        rope.dim = 32


def test_angles_follow_the_device_of_the_positions():
    positions = torch.empty(2, 3, dtype=torch.int32, device="meta")
    for rule in SCALINGS:
        angles = make(rule, 8).angles(positions, length=LENGTH.get(rule))
        assert angles.cos.device.type == angles.sin.device.type == "meta"
        assert rotate(torch.empty(2, 3, 4, 8, device="meta"), angles).shape == (2, 3, 4, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", sorted(SCALINGS))
def test_frequencies_are_the_same_on_a_gpu(rule):
    for dim in (64, 96, 128):
        rope, length, positions = make(rule, dim, theta=150_000.0), LENGTH.get(rule), torch.tensor(FAR)
        here = rope.inverse_frequencies(length=length)
        assert torch.equal(rope.inverse_frequencies(length=length, device="cuda").cpu(), here)
        # cosf and sinf are within 2 units in the last place on either device.
        expected, angles = (rope.angles(where, length=length) for where in (positions, positions.cuda()))
        assert (angles.cos.cpu() - expected.cos).abs().max() <= 4 * 2**-24
        assert (angles.sin.cpu() - expected.sin).abs().max() <= 4 * 2**-24


def test_examples_in_docstrings():
    result = doctest.testmod(attnlib.rope.rope, extraglobs={"attnlib": attnlib})
    assert result.attempted > 0
    assert result.failed == 0


# Refusals


@pytest.mark.parametrize("dim", [-2, 0, 1, 7, 63])
def test_an_odd_or_empty_width_is_refused(dim):
    """Fault 22."""
    with pytest.raises(ValueError, match=f"rope.dim: expected a positive even number of channels, got {dim}"):
        Rope(dim)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"dim": 64.0}, TypeError, "rope.dim: expected an int, got 64.0"),
        ({"dim": True}, TypeError, "rope.dim: expected an int"),
        ({"theta": 0.0}, ValueError, "rope.theta: expected a finite number above 0, got 0.0"),
        ({"theta": -1.0}, ValueError, "rope.theta"),
        ({"theta": math.inf}, ValueError, "rope.theta"),
        ({"theta": math.nan}, ValueError, "rope.theta"),
        ({"theta": "10000"}, TypeError, "rope.theta: expected a number, got '10000'"),
        ({"scaling": 2.0}, TypeError, "rope.scaling: expected LinearScaling, NTKScaling"),
        ({"scaling": {"rope_type": "linear"}}, TypeError, "rope.scaling"),
        ({"interleaved": 1}, TypeError, "rope.interleaved: expected a bool, got 1"),
        ({"dim": 2, "scaling": NTKScaling(2.0)}, ValueError, "at least 4 channels with an NTK scaling"),
        (
            {"dim": 2, "scaling": DynamicNTKScaling(2.0, 1024)},
            ValueError,
            "at least 4 channels with an NTK scaling",
        ),
        (
            {"theta": 1.0, "scaling": YaRNScaling(2.0, 1024)},
            ValueError,
            "rope.theta: expected more than 1 with YaRN",
        ),
        (
            {"scaling": LongRoPEScaling((1.0,), (2.0,), 2.0, 64)},
            ValueError,
            "rope.scaling: expected 32 factors, .* got 1",
        ),
    ],
)
def test_a_wrong_rope_is_refused(fields, error, message):
    with pytest.raises(error, match=message):
        Rope(**{"dim": 64, **fields})


@pytest.mark.parametrize(
    ("rope", "positions", "length", "error", "message"),
    [
        (
            Rope(8),
            torch.arange(3.0),
            None,
            TypeError,
            r"positions: expected an integer tensor, got torch.float32",
        ),
        (Rope(8), torch.ones(3, dtype=torch.bool), None, TypeError, "got torch.bool"),
        (Rope(8), torch.ones(3, dtype=torch.complex64), None, TypeError, "got torch.complex64"),
        (Rope(8), [0, 1], None, TypeError, "positions: expected an integer tensor, got list"),
        (
            Rope(8),
            torch.arange(3),
            3,
            ValueError,
            "length: only DynamicNTKScaling and LongRoPEScaling depend on it",
        ),
        (Rope(8, scaling=LinearScaling(2.0)), torch.arange(3), 3, ValueError, "leave length out"),
        (
            make("dynamic", 8),
            torch.arange(3),
            None,
            ValueError,
            r"compute rope.angles\(positions, length=n\)",
        ),
        (make("dynamic", 8), torch.arange(3), 3.0, TypeError, "length: expected an int, got 3.0"),
        (make("dynamic", 8), torch.arange(3), torch.tensor(3), TypeError, "length: expected an int"),
        (make("dynamic", 8), torch.arange(3), True, TypeError, "length: expected an int"),
    ],
)
def test_wrong_positions_or_length_are_refused(rope, positions, length, error, message):
    with pytest.raises(error, match=message):
        rope.angles(positions, length=length)
