"""Rules that scale a rope: those of transformers and DeepSeek, a config read, and what is refused."""

import itertools
import math

import pytest
import torch
from rope_cases import FAR, make

from attnlib.rope.rope import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    ProportionalScaling,
    Rope,
    YaRNScaling,
    rotate,
)
from attnlib.rope.scaling import scaling_of


def test_the_ntk_base_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    plain, ntk = (
        Rope(64, scaling=scaling).inverse_frequencies().double() for scaling in (None, NTKScaling(8.0))
    )
    assert plain[0] == ntk[0] == 1
    torch.testing.assert_close(
        plain[-1] / ntk[-1], torch.tensor(8.0, dtype=torch.float64), rtol=2**-20, atol=0
    )
    assert ((plain / ntk).diff() > 0).all()


def test_dynamic_ntk_is_plain_up_to_its_length_and_a_fixed_ntk_beyond():
    rope = Rope(64, scaling=DynamicNTKScaling(2.0, original_max_position=1024))
    for length in (1, 1023, 1024):
        assert torch.equal(rope.inverse_frequencies(length=length), Rope(64).inverse_frequencies())
    assert torch.equal(
        rope.inverse_frequencies(length=2048), Rope(64, scaling=NTKScaling(3.0)).inverse_frequencies()
    )
    assert not torch.equal(rope.inverse_frequencies(length=1025), Rope(64).inverse_frequencies())


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
    "linear": (LinearScaling(4.0), {"factor": 4.0}),
    "dynamic": (DynamicNTKScaling(4.0, ORIGINAL), {"factor": 4.0}),
    "llama3": (
        Llama3Scaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=ORIGINAL),
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "llama3, wide step": (
        Llama3Scaling(32.0, low_freq_factor=0.5, high_freq_factor=20.0, original_max_position=ORIGINAL),
        {
            "factor": 32.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 20.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "proportional": (ProportionalScaling(0.25), {"partial_rotary_factor": 0.25}),
    "proportional, slowed": (ProportionalScaling(0.5, 4.0), {"partial_rotary_factor": 0.5, "factor": 4.0}),
    **{
        f"yarn, {name}": (
            YaRNScaling(original_max_position=ORIGINAL, **fields),
            {**fields, "original_max_position_embeddings": ORIGINAL},
        )
        for name, fields in YARNS.items()
    },
}


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
    rope = Rope(8, scaling=LongRoPEScaling((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0), 4.0, 64))
    assert not rope.needs_length
    expected = Rope(8).inverse_frequencies() / torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(rope.inverse_frequencies(), expected)


def test_pairs_that_do_not_turn_pass_through():
    """They are the last of each half, unlike those of a rope of fewer channels."""
    x = torch.randn(1, 3, 2, 16)
    turned = rotate(x, Rope(16, scaling=ProportionalScaling(0.5)).angles(torch.arange(3)))
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


def test_amplitude_and_latent_scale_are_one_without_yarn():
    for rule in ("plain", "linear", "ntk", "dynamic", "llama3"):
        assert make(rule, 64).amplitude == make(rule, 64).latent_scale == 1.0


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: LinearScaling(0.5),
            ValueError,
            "LinearScaling.factor: expected a finite number of at least 1, got 0.5",
        ),
        (lambda: LinearScaling(math.nan), ValueError, "LinearScaling.factor"),
        (lambda: LinearScaling(None), TypeError, "LinearScaling.factor: expected a number, got None"),
        (lambda: LinearScaling(True), TypeError, "LinearScaling.factor"),
        (lambda: NTKScaling(0.0), ValueError, "NTKScaling.factor"),
        (lambda: DynamicNTKScaling(0.9, 1024), ValueError, "DynamicNTKScaling.factor"),
        (
            lambda: DynamicNTKScaling(2.0, 0),
            ValueError,
            "DynamicNTKScaling.original_max_position: expected at least 1, got 0",
        ),
        (
            lambda: DynamicNTKScaling(2.0, 1024.0),
            TypeError,
            "DynamicNTKScaling.original_max_position: expected an int",
        ),
        (lambda: Llama3Scaling(0.5, 1.0, 4.0, 8192), ValueError, "Llama3Scaling.factor"),
        (lambda: Llama3Scaling(8.0, 0.0, 4.0, 8192), ValueError, "Llama3Scaling.low_freq_factor"),
        (lambda: Llama3Scaling(8.0, 1.0, math.inf, 8192), ValueError, "Llama3Scaling.high_freq_factor"),
        (
            lambda: Llama3Scaling(8.0, 4.0, 4.0, 8192),
            ValueError,
            "expected more than low_freq_factor=4.0, got 4.0",
        ),
        (lambda: Llama3Scaling(8.0, 1.0, 4.0, -1), ValueError, "Llama3Scaling.original_max_position"),
        (lambda: YaRNScaling(0.5, 4096), ValueError, "YaRNScaling.factor"),
        (lambda: YaRNScaling(2.0, None), TypeError, "YaRNScaling.original_max_position"),
        (
            lambda: YaRNScaling(2.0, 4096, beta_fast=1.0, beta_slow=2.0),
            ValueError,
            "expected at least beta_slow=2.0, got 1.0",
        ),
        (lambda: YaRNScaling(2.0, 4096, beta_fast=math.inf), ValueError, "YaRNScaling.beta_fast"),
        (lambda: YaRNScaling(2.0, 4096, beta_slow=0.0), ValueError, "YaRNScaling.beta_slow"),
        (lambda: YaRNScaling(2.0, 4096, attention_factor=0.0), ValueError, "YaRNScaling.attention_factor"),
        (lambda: YaRNScaling(2.0, 4096, mscale=-1.0), ValueError, "YaRNScaling.mscale: "),
        (lambda: YaRNScaling(2.0, 4096, mscale_all_dim="1"), TypeError, "YaRNScaling.mscale_all_dim: "),
        (
            lambda: YaRNScaling(2.0, 4096, truncate=None),
            TypeError,
            "YaRNScaling.truncate: expected a bool, got None",
        ),
        (
            lambda: LongRoPEScaling([1.0], (1.0,), 2.0, 64),
            TypeError,
            "LongRoPEScaling.short_factor: expected a tuple",
        ),
        (
            lambda: LongRoPEScaling((1.0,), (1.0, 2.0), 2.0, 64),
            TypeError,
            "LongRoPEScaling.long_factor: expected a tuple",
        ),
        (
            lambda: LongRoPEScaling((1.0,), (0.0,), 2.0, 64),
            ValueError,
            "LongRoPEScaling.long_factor: expected a finite number",
        ),
        (lambda: LongRoPEScaling((1.0,), (1.0,), 0.5, 64), ValueError, "LongRoPEScaling.factor"),
        (
            lambda: LongRoPEScaling((1.0,), (1.0,), 2.0, 1),
            ValueError,
            "LongRoPEScaling.original_max_position: expected at least 2",
        ),
        (
            lambda: LongRoPEScaling((1.0,), (1.0,), 2.0, 64, 0.0),
            ValueError,
            "LongRoPEScaling.attention_factor",
        ),
        (
            lambda: ProportionalScaling(0.0),
            ValueError,
            "ProportionalScaling.share: expected a finite number above 0",
        ),
        (
            lambda: ProportionalScaling(1.5),
            ValueError,
            "ProportionalScaling.share: expected at most 1, got 1.5",
        ),
        (lambda: ProportionalScaling(0.5, 0.5), ValueError, "ProportionalScaling.factor"),
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
