"""Laws of rotary embeddings, then parity with Hugging Face transformers, then what is refused."""

import copy
import doctest
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnlib.rope.rope
from attnlib.rope.rope import (
    NTK,
    Angles,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Rope,
    YaRN,
    rotate,
)
from attnlib.rope.scaling import scaling_of

SCALINGS = {
    "plain": None,
    "linear": Linear(4.0),
    "ntk": NTK(4.0),
    "dynamic": DynamicNTK(2.0, original_max_position=1024),
    "llama3": Llama3(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
    "yarn": YaRN(40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=0.707),
    "proportional": Proportional(0.5),
}
LENGTH = {"dynamic": 5000}  # the rule that needs one
FAR = (0, 1, 4096, 100_000)  # position 0 alone cannot see an error

rules = st.sampled_from(sorted(SCALINGS))
seeds = st.integers(0, 2**16)


def make(rule: str, dim: int, interleaved: bool = False, theta: float = 10_000.0):
    return Rope(dim, theta, SCALINGS[rule], interleaved)


def turn(x, rope, positions):
    """x rotated at integer positions, whatever the rule."""
    length = 5000 if rope.needs_length else None
    return rotate(x, rope.angles(torch.as_tensor(positions), length=length))


def pairs(x, width, interleaved):
    """The rotated channels of x as [..., width / 2, 2]."""
    x = x[..., :width]
    return x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)


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


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_by_i_then_j_is_turning_by_their_sum(interleaved):
    rope = Rope(16, interleaved=interleaved)
    x = torch.randn(5, 2, 16, dtype=torch.float64)
    i, j = torch.tensor([[0, 1, 7, 300, 4000], [0, -1, 9, -300, 95]])
    error = (turn(turn(x, rope, i), rope, j) - turn(x, rope, i + j)).abs()
    assert (error <= (3 * 4095 * 2**-24 + 3 * 2**-23) * x.norm(dim=-1, keepdim=True)).all()
    assert not torch.equal(turn(x, rope, i), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_token_is_rotated_by_its_own_angles(interleaved):
    """Absent and size-1 batch dimensions broadcast; no row sees another."""
    rope = Rope(8, interleaved=interleaved)
    x = torch.randn(3, 5, 2, 10)
    own = torch.randint(0, 1000, (3, 5))
    y = turn(x, rope, own)
    for b, s in itertools.product(range(3), range(5)):
        assert torch.equal(y[b, s], turn(x[b, s], rope, own[b, s]))
    shared = own[0]
    repeated = turn(x, rope, shared.expand(3, 5))
    assert torch.equal(repeated, turn(x, rope, shared))
    assert torch.equal(repeated, turn(x, rope, shared[None]))
    assert torch.equal(y.flatten(0, 1), turn(x.flatten(0, 1), rope, own.flatten()))
    assert turn(x[:, :0], rope, own[:, :0]).shape == (3, 0, 2, 10)


@pytest.mark.parametrize("theta", [10_000, 150_000.0, 500_000.0])
def test_plain_frequencies_are_rounded_correctly(theta):
    """Each of the three fp32 roundings, so that no device's fp32 power enters."""
    frequencies = Rope(128, theta).inverse_frequencies()
    for c, frequency in enumerate(frequencies.tolist()):
        exponent = torch.tensor(2 * c / 128, dtype=torch.float32).item()
        wavelength = torch.tensor(theta**exponent, dtype=torch.float32).item()
        assert frequency == torch.tensor(1 / wavelength, dtype=torch.float32).item()


def test_the_ntk_base_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    plain, ntk = (Rope(64, scaling=scaling).inverse_frequencies().double() for scaling in (None, NTK(8.0)))
    assert plain[0] == ntk[0] == 1
    torch.testing.assert_close(
        plain[-1] / ntk[-1], torch.tensor(8.0, dtype=torch.float64), rtol=2**-20, atol=0
    )
    assert ((plain / ntk).diff() > 0).all()


def test_dynamic_ntk_is_plain_up_to_its_length_and_a_fixed_ntk_beyond():
    rope = Rope(64, scaling=DynamicNTK(2.0, original_max_position=1024))
    for length in (1, 1023, 1024):
        assert torch.equal(rope.inverse_frequencies(length=length), Rope(64).inverse_frequencies())
    assert torch.equal(
        rope.inverse_frequencies(length=2048), Rope(64, scaling=NTK(3.0)).inverse_frequencies()
    )
    assert not torch.equal(rope.inverse_frequencies(length=1025), Rope(64).inverse_frequencies())


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


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rotation_is_rounded_once(dtype, interleaved):
    """fp16 and bf16 are computed in fp32, fp64 in fp64: off by the result's rounding and three units."""
    angles = Rope(64, interleaved=interleaved).angles(torch.arange(65))
    x = torch.randn(65, 3, 80).to(dtype)
    first, second = pairs(x.double(), 64, interleaved).unbind(-1)
    cos, sin = angles.cos.double()[:, None], angles.sin.double()[:, None]
    y = rotate(x, angles)
    assert y.dtype == dtype
    unit = 2**-52 if dtype == torch.float64 else 2**-23
    info = torch.finfo(dtype)
    for got, exact in zip(
        pairs(y.double(), 64, interleaved).unbind(-1),
        (first * cos - second * sin, second * cos + first * sin),
        strict=True,
    ):
        bound = (
            info.eps / 2 * exact.abs()
            + 3 * unit * (first.abs() + second.abs())
            + info.eps * info.smallest_normal
        )
        assert ((got - exact).abs() <= bound).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved):
    """Also of the unrotated channels; and the gradient is the rotation backwards."""
    rope = Rope(6, interleaved=interleaved)
    positions = torch.tensor([0, 3, 100])
    angles = rope.angles(positions)
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, angles), x)
    upstream = torch.randn(2, 3, 2, 8, dtype=torch.float64)
    (grad,) = torch.autograd.grad(rotate(x, angles), x, upstream)
    assert torch.equal(grad, turn(upstream, rope, -positions))


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


def test_convention_names_the_pairing_and_the_rotated_width():
    assert Rope(64).angles(torch.arange(3)).convention == "half:64"
    assert Rope(6, interleaved=True).angles(torch.arange(3)).convention == "interleaved:6"


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
    result = doctest.testmod(attnlib.rope.rope)
    assert result.attempted > 0
    assert result.failed == 0


# Parity with transformers

ORIGINAL = 1024
YARNS = {
    "mscales equal": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "mscales equal, not 1": {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    "mscales different": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "mscales different, growing": {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.3},
    "mscale alone": {"factor": 40.0, "mscale": 0.707},
    "mscale_all_dim alone": {"factor": 40.0, "mscale_all_dim": 0.707},
    "mscale 0": {"factor": 40.0, "mscale": 0.0, "mscale_all_dim": 1.0},
    "mscale_all_dim 0": {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.0},
    "no mscale": {"factor": 40.0},
    "factor 1": {"factor": 1.0},
    "factor 1, mscales different": {"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "factor 1, mscales equal": {"factor": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    "attention factor": {"factor": 4.0, "attention_factor": 0.9, "mscale": 1.0, "mscale_all_dim": 0.707},
    "betas": {"factor": 8.0, "beta_fast": 20.0, "beta_slow": 3.0},
    "equal betas": {"factor": 8.0, "beta_fast": 4.0, "beta_slow": 4.0},
    "not truncated": {"factor": 32.0, "truncate": False},
    "equal betas, not truncated": {"factor": 8.0, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "a ramp past the last pair": {"factor": 8.0, "beta_slow": 0.001},
    "all channels slow": {"factor": 8.0, "beta_fast": 4000.0, "beta_slow": 1000.0},
}
PARITY = {
    "default": (None, {}),
    "linear": (Linear(4.0), {"factor": 4.0}),
    "dynamic": (DynamicNTK(4.0, ORIGINAL), {"factor": 4.0}),
    "llama3": (
        Llama3(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=ORIGINAL),
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "llama3, wide step": (
        Llama3(32.0, low_freq_factor=0.5, high_freq_factor=20.0, original_max_position=ORIGINAL),
        {
            "factor": 32.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 20.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "proportional": (Proportional(0.25), {"partial_rotary_factor": 0.25}),
    "proportional, slowed": (Proportional(0.5, 4.0), {"partial_rotary_factor": 0.5, "factor": 4.0}),
    **{
        f"yarn, {name}": (
            YaRN(original_max_position=ORIGINAL, **fields),
            {**fields, "original_max_position_embeddings": ORIGINAL},
        )
        for name, fields in YARNS.items()
    },
}


@pytest.fixture(scope="module")
def hf():
    """The functions of transformers that are compared with, imported once (it takes seconds)."""
    pytest.importorskip("transformers", minversion="5")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.llama import modeling_llama
    from transformers.models.llama.configuration_llama import LlamaConfig

    return SimpleNamespace(
        init=ROPE_INIT_FUNCTIONS,
        llama=modeling_llama,
        deepseek=modeling_deepseek_v3,
        LlamaConfig=LlamaConfig,
        DeepseekV3Config=DeepseekV3Config,
    )


def llama_config(hf, case, dim, theta):
    kind = case.split(",")[0]
    longest = ORIGINAL if kind in ("default", "dynamic") else int(ORIGINAL * PARITY[case][1].get("factor", 1))
    return hf.LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **PARITY[case][1]},
    )


def ulps(a, b):
    """The distance of two positive fp32 tensors in units in the last place."""
    return (a.view(torch.int32).long() - b.view(torch.int32).long()).abs()


@pytest.mark.parametrize("dim", [16, 64, 96, 128])
@pytest.mark.parametrize("case", PARITY)
def test_inverse_frequencies_are_those_of_transformers(hf, case, dim):
    scaling, _ = PARITY[case]
    kind = case.split(",")[0]
    for theta, length in itertools.product((10_000.0, 150_000.0, 500_000.0), (1, ORIGINAL, 1500, 100_001)):
        config = llama_config(hf, case, dim, theta)
        if kind == "default":
            expected, factor = hf.llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            expected, factor = hf.init[kind](config, device=torch.device("cpu"), seq_len=length)
        rope = Rope(dim, theta, scaling)
        got = rope.inverse_frequencies(length=length if kind == "dynamic" else None)
        assert got.dtype == torch.float32
        # The power differs by at most one unit (ours is rounded correctly); reciprocals pass it on, and
        # Llama's step, where the weight depends on the frequency too, doubles it.
        assert ulps(got, expected).max() <= (4 if kind == "llama3" else 2)
        assert rope.amplitude == factor


@pytest.mark.parametrize("case", PARITY)
def test_cos_and_sin_are_those_of_transformers_at_far_positions(hf, case):
    """Fault 102. Frequencies 4 units apart give phases that far apart, plus a rounding each."""
    scaling, _ = PARITY[case]
    rope = Rope(64, 500_000.0, scaling)
    module = hf.llama.LlamaRotaryEmbedding(llama_config(hf, case, 64, 500_000.0))
    positions = torch.tensor([FAR])
    cos, sin = module(torch.empty(0), positions)  # the tensor only gives the dtype
    length = FAR[-1] + 1 if case == "dynamic" else None
    angles = rope.angles(positions, length=length)
    # transformers computes the dynamic base in fp32 tensors: seven roundings more, two of them after a power.
    units = 16 if case == "dynamic" else 4
    phases = positions.double()[..., None] * rope.inverse_frequencies(length=length).double()
    bound = (phases * (units + 1) * 2**-23 + 2**-22) * rope.amplitude
    for got, expected in ((angles.cos, cos), (angles.sin, sin)):
        assert ((got.double() * rope.amplitude - expected[..., :32]).abs() <= bound).all()
        assert ((got.double() * rope.amplitude - expected[..., 32:]).abs() <= bound).all()


@pytest.mark.parametrize("case", PARITY)
def test_rules_are_read_from_a_config(hf, case):
    config = llama_config(hf, case, 64, 10_000.0)
    assert scaling_of(config.rope_parameters, max_position=config.max_position_embeddings) == PARITY[case][0]


@pytest.mark.parametrize("given", [{}, {"attention_factor": 1.3}, {"factor": 6.0}])
@pytest.mark.parametrize("dim", [16, 96])
def test_longrope_is_that_of_transformers(hf, dim, given):
    short, long = ([1.0 + x * n / dim for n in range(dim // 2)] for x in (0.5, 40.0))
    fields = {
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": ORIGINAL,
        **given,
    }
    config = hf.LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=4 * ORIGINAL,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0, **fields},
    )
    rope = Rope(dim, scaling=scaling_of(config.rope_parameters, max_position=4 * ORIGINAL))
    module = hf.llama.LlamaRotaryEmbedding(config)
    for longest in (ORIGINAL - 1, ORIGINAL, 3 * ORIGINAL):
        expected, factor = hf.init["longrope"](config, device=torch.device("cpu"), seq_len=longest + 1)
        assert ulps(rope.inverse_frequencies(length=longest + 1), expected).max() <= 2
        assert rope.amplitude == factor
        positions = torch.tensor([[0, 5, longest]])
        angles, (cos, _) = rope.angles(positions, length=longest + 1), module(torch.empty(0), positions)
        torch.testing.assert_close(angles.cos * factor, cos[..., : dim // 2], rtol=0, atol=longest * 2**-21)


def test_longrope_with_one_list_needs_no_length():
    rope = Rope(8, scaling=LongRoPE((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0), 4.0, 64))
    assert not rope.needs_length
    expected = Rope(8).inverse_frequencies() / torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(rope.inverse_frequencies(), expected)


def test_pairs_that_do_not_turn_pass_through():
    """They are the last of each half, unlike those of a rope of fewer channels."""
    x = torch.randn(1, 3, 2, 16)
    turned = rotate(x, Rope(16, scaling=Proportional(0.5)).angles(torch.arange(3)))
    same = (turned == x).all(1).all(0).all(0)
    assert same.tolist() == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4


@pytest.mark.parametrize("case", YARNS)
def test_yarn_scores_are_those_of_deepseek_v3(hf, case):
    """Fault 102 end to end: angles, amplitude and latent_scale together give DeepSeek's scaled scores."""
    scaling, parameters = PARITY[f"yarn, {case}"]
    config = hf.DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=32,
        qk_nope_head_dim=16,
        v_head_dim=8,
        max_position_embeddings=int(ORIGINAL * scaling.factor),
        rope_parameters={"rope_type": "yarn", "rope_theta": 10_000.0, **parameters},
    )
    rope = Rope(32, 10_000.0, scaling, interleaved=True)
    positions = torch.tensor([FAR])
    q, k = torch.randn(2, 1, 4, 2, 32)
    cos, sin = hf.deepseek.DeepseekV3RotaryEmbedding(config)(q, positions)
    hf_q, hf_k = hf.deepseek.apply_rotary_pos_emb_interleave(q, k, cos, sin, unsqueeze_dim=2)
    scale = hf.deepseek.DeepseekV3Attention(config, layer_idx=0).scaling
    expected = torch.einsum("bshd,bthd->bhst", hf_q.double(), hf_k.double()) * scale

    angles = rope.angles(positions)
    ours = torch.einsum("bshd,bthd->bhst", rotate(q, angles).double(), rotate(k, angles).double())
    ours = ours * rope.amplitude**2 * 48**-0.5 * rope.latent_scale
    phases = positions.double()[..., None] * rope.inverse_frequencies().double()
    drift = phases.amax(-1) * 3 * 2**-23 + 16 * 2**-23
    sizes = torch.einsum("bsh,bth->bhst", q.double().norm(dim=-1), k.double().norm(dim=-1))
    bound = (drift[:, None, :, None] + drift[:, None, None, :]) * sizes * rope.amplitude**2 * scale
    assert ((ours - expected).abs() <= bound).all()
    assert math.isclose(rope.latent_scale, scale / 48**-0.5, rel_tol=1e-12)


def full(angles):
    """cos and sin as transformers wants them, each angle twice."""
    return torch.cat((angles.cos, angles.cos), -1), torch.cat((angles.sin, angles.sin), -1)


@pytest.mark.parametrize("batched", [False, True])
def test_half_rotation_is_that_of_transformers(hf, batched):
    positions = torch.randint(0, 100_000, (2, 5)) if batched else torch.randint(0, 100_000, (1, 5))
    angles = Rope(64).angles(positions)
    q, k = torch.randn(2, 5, 4, 64), torch.randn(2, 5, 2, 64)
    expected_q, expected_k = hf.llama.apply_rotary_pos_emb(q, k, *full(angles), unsqueeze_dim=2)
    assert torch.equal(rotate(q, angles), expected_q)
    assert torch.equal(rotate(k, angles), expected_k)


def test_interleaved_rotation_is_that_of_deepseek_v3(hf):
    """Its result is in the half layout; ours stays interleaved. The two pairings also disagree, as they
    must.
    """
    angles = Rope(64, interleaved=True).angles(torch.randint(1, 100_000, (2, 5)))
    q, k = torch.randn(2, 5, 4, 64), torch.randn(2, 5, 1, 64)
    expected = hf.deepseek.apply_rotary_pos_emb_interleave(q, k, *full(angles), unsqueeze_dim=2)
    for x, halves in zip((q, k), expected, strict=True):
        y = rotate(x, angles)
        assert torch.equal(torch.cat((y[..., 0::2], y[..., 1::2]), -1), halves)
        assert not torch.equal(y, rotate(x, Angles(angles.cos, angles.sin, interleaved=False)))


def test_amplitude_and_latent_scale_are_one_without_yarn():
    for rule in ("plain", "linear", "ntk", "dynamic", "llama3"):
        assert make(rule, 64).amplitude == make(rule, 64).latent_scale == 1.0


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
        ({"scaling": 2.0}, TypeError, "rope.scaling: expected Linear, NTK"),
        ({"scaling": {"rope_type": "linear"}}, TypeError, "rope.scaling"),
        ({"interleaved": 1}, TypeError, "rope.interleaved: expected a bool, got 1"),
        ({"dim": 2, "scaling": NTK(2.0)}, ValueError, "at least 4 channels with an NTK scaling"),
        ({"dim": 2, "scaling": DynamicNTK(2.0, 1024)}, ValueError, "at least 4 channels with an NTK scaling"),
        (
            {"theta": 1.0, "scaling": YaRN(2.0, 1024)},
            ValueError,
            "rope.theta: expected more than 1 with YaRN",
        ),
        (
            {"scaling": LongRoPE((1.0,), (2.0,), 2.0, 64)},
            ValueError,
            "rope.scaling: expected 32 factors, .* got 1",
        ),
    ],
)
def test_a_wrong_rope_is_refused(fields, error, message):
    with pytest.raises(error, match=message):
        Rope(**{"dim": 64, **fields})


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Linear(0.5), ValueError, "Linear.factor: expected a finite number of at least 1, got 0.5"),
        (lambda: Linear(math.nan), ValueError, "Linear.factor"),
        (lambda: Linear(None), TypeError, "Linear.factor: expected a number, got None"),
        (lambda: Linear(True), TypeError, "Linear.factor"),
        (lambda: NTK(0.0), ValueError, "NTK.factor"),
        (lambda: DynamicNTK(0.9, 1024), ValueError, "DynamicNTK.factor"),
        (
            lambda: DynamicNTK(2.0, 0),
            ValueError,
            "DynamicNTK.original_max_position: expected at least 1, got 0",
        ),
        (lambda: DynamicNTK(2.0, 1024.0), TypeError, "DynamicNTK.original_max_position: expected an int"),
        (lambda: Llama3(0.5, 1.0, 4.0, 8192), ValueError, "Llama3.factor"),
        (lambda: Llama3(8.0, 0.0, 4.0, 8192), ValueError, "Llama3.low_freq_factor"),
        (lambda: Llama3(8.0, 1.0, math.inf, 8192), ValueError, "Llama3.high_freq_factor"),
        (lambda: Llama3(8.0, 4.0, 4.0, 8192), ValueError, "expected more than low_freq_factor=4.0, got 4.0"),
        (lambda: Llama3(8.0, 1.0, 4.0, -1), ValueError, "Llama3.original_max_position"),
        (lambda: YaRN(0.5, 4096), ValueError, "YaRN.factor"),
        (lambda: YaRN(2.0, None), TypeError, "YaRN.original_max_position"),
        (
            lambda: YaRN(2.0, 4096, beta_fast=1.0, beta_slow=2.0),
            ValueError,
            "expected at least beta_slow=2.0, got 1.0",
        ),
        (lambda: YaRN(2.0, 4096, beta_fast=math.inf), ValueError, "YaRN.beta_fast"),
        (lambda: YaRN(2.0, 4096, beta_slow=0.0), ValueError, "YaRN.beta_slow"),
        (lambda: YaRN(2.0, 4096, attention_factor=0.0), ValueError, "YaRN.attention_factor"),
        (lambda: YaRN(2.0, 4096, mscale=-1.0), ValueError, "YaRN.mscale: "),
        (lambda: YaRN(2.0, 4096, mscale_all_dim="1"), TypeError, "YaRN.mscale_all_dim: "),
        (lambda: YaRN(2.0, 4096, truncate=None), TypeError, "YaRN.truncate: expected a bool, got None"),
        (lambda: LongRoPE([1.0], (1.0,), 2.0, 64), TypeError, "LongRoPE.short_factor: expected a tuple"),
        (lambda: LongRoPE((1.0,), (1.0, 2.0), 2.0, 64), TypeError, "LongRoPE.long_factor: expected a tuple"),
        (
            lambda: LongRoPE((1.0,), (0.0,), 2.0, 64),
            ValueError,
            "LongRoPE.long_factor: expected a finite number",
        ),
        (lambda: LongRoPE((1.0,), (1.0,), 0.5, 64), ValueError, "LongRoPE.factor"),
        (
            lambda: LongRoPE((1.0,), (1.0,), 2.0, 1),
            ValueError,
            "LongRoPE.original_max_position: expected at least 2",
        ),
        (lambda: LongRoPE((1.0,), (1.0,), 2.0, 64, 0.0), ValueError, "LongRoPE.attention_factor"),
        (lambda: Proportional(0.0), ValueError, "Proportional.share: expected a finite number above 0"),
        (lambda: Proportional(1.5), ValueError, "Proportional.share: expected at most 1, got 1.5"),
        (lambda: Proportional(0.5, 0.5), ValueError, "Proportional.factor"),
        (
            lambda: scaling_of({"rope_type": "spiral"}, max_position=8),
            ValueError,
            "rope_type: expected one of default",
        ),
        (
            lambda: scaling_of({"rope_type": "yarn", "factor": 2.0}, max_position=None),
            KeyError,
            "max_position_embed",
        ),
    ],
)
def test_a_wrong_scaling_is_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()


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
        (Rope(8), torch.arange(3), 3, ValueError, "length: only DynamicNTK and LongRoPE depend on it"),
        (Rope(8, scaling=Linear(2.0)), torch.arange(3), 3, ValueError, "leave length out"),
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


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotating_more_channels_than_the_head_has_is_refused(interleaved):
    """Fault 22."""
    angles = Rope(64, interleaved=interleaved).angles(torch.arange(5))
    with pytest.raises(
        ValueError, match=r"d >= 64.*got \(2, 5, 3, 63\); make Rope\(dim=...\) at most the head dim"
    ):
        rotate(torch.randn(2, 5, 3, 63), angles)


@pytest.mark.parametrize(
    ("x", "positions"),
    [
        ((2, 5, 3, 8), (4,)),
        ((2, 5, 3, 8), (1,)),  # one position for a whole sequence
        ((2, 5, 3, 8), ()),
        ((2, 5, 3, 8), (2, 1)),
        ((2, 5, 3, 8), (3, 5)),
        ((1, 5, 3, 8), (2, 5)),  # would repeat x
        ((2, 5, 3, 8), (1, 2, 5)),
        ((2, 5, 3, 8), (5, 3)),  # rotated over heads
        ((5, 3, 8), (1, 5)),
        ((3, 8), (5,)),
    ],
)
def test_angles_of_other_tokens_are_refused(x, positions):
    angles = Rope(8).angles(torch.zeros(positions, dtype=torch.int64))
    with pytest.raises(ValueError, match="angles: expected cos") as refusal:
        rotate(torch.randn(x), angles)
    assert f"for x {x}, got {(*positions, 4)}; compute them from" in str(refusal.value)


def test_other_wrong_operands_are_refused():
    angles = Rope(8).angles(torch.arange(5))
    with pytest.raises(TypeError, match=r"x: expected fp16, bf16, fp32 or fp64, got torch\.int64"):
        rotate(torch.zeros(5, 2, 8, dtype=torch.int64), angles)
    with pytest.raises(TypeError, match=r"angles: expected fp32 cos and sin, got torch\.bfloat16"):
        Angles(angles.cos.bfloat16(), angles.sin.bfloat16(), False)
    with pytest.raises(
        ValueError, match=r"expected cos and sin of one shape \[..., p / 2\], got \(5, 4\) and \(4, 4\)"
    ):
        Angles(angles.cos, angles.sin[:4], False)
