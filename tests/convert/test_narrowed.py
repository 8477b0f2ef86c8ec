"""Ropes of fewer channels: every pair turns as its like of the wider rope, or they are refused."""

import math
from contextlib import nullcontext, suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib import Axes, Rope
from attnlib.convert.latent.narrowed import narrowed
from attnlib.rope.rope import yarn_ramp
from attnlib.rope.scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    ProportionalScaling,
    YaRNScaling,
)

PLAIN = [None, LinearScaling(4.0), Llama3Scaling(8.0, 1.0, 4.0, 64)]
SOURCES = {  # theta and what is said of YaRN, of published models and of the default numbers
    "qwen2": (1e6, YaRNScaling(4.0, 32768)),
    "llama2": (1e4, YaRNScaling(16.0, 4096)),
    "not rounded": (150_000.0, YaRNScaling(32.0, 4096, truncate=False)),
    "other turns": (1e4, YaRNScaling(40.0, 4096, beta_fast=16.0, beta_slow=2.0)),
    "one step": (1e4, YaRNScaling(40.0, 4096, beta_fast=8.0, beta_slow=8.0)),
    "from the first pair": (1e4, YaRNScaling(8.0, 128)),
}


def every(rope, dim):
    """What the pairs of the wider rope turn by that are kept."""
    return rope.inverse_frequencies()[:: rope.dim // dim]


@pytest.mark.parametrize("scaling", PLAIN)
@pytest.mark.parametrize(("width", "dim"), [(128, 128), (128, 64), (128, 32), (96, 32), (8, 2)])
def test_every_fth_pair_is_the_same_to_the_bit(width, dim, scaling):
    old = Rope(width, theta=500_000.0, scaling=scaling)
    new = narrowed(old, dim)
    assert new == Rope(dim, theta=500_000.0, scaling=scaling, interleaved=True)
    assert torch.equal(new.inverse_frequencies(), every(old, dim))


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("dim", [128, 64, 32, 16, 8])
def test_yarns_of_published_models_can_be_said(name, dim):
    theta, yarn = SOURCES[name]
    old = Rope(128, theta=theta, scaling=yarn)
    new = narrowed(old, dim)
    torch.testing.assert_close(new.inverse_frequencies(), every(old, dim), rtol=1e-6, atol=0.0)
    if dim == 128:
        assert torch.equal(new.inverse_frequencies(), every(old, dim))
    assert new.amplitude == 1.0
    assert new.latent_scale == pytest.approx((0.1 * math.log(yarn.factor) + 1) ** 2)


@given(
    st.integers(2, 40),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.floats(1.5, 1e7),
    st.floats(1.0, 64.0),
    st.integers(1, 2**20),
    st.floats(0.1, 40.0),
    st.floats(1.0, 60.0),
    st.booleans(),
)
def test_any_yarn_turns_alike_or_is_refused(pairs, f, theta, factor, original, slow, more, truncate):
    yarn = YaRNScaling(factor, original, beta_fast=slow * more, beta_slow=slow, truncate=truncate)
    old = Rope(2 * pairs * f, theta=theta, scaling=yarn)
    low, high = yarn_ramp(old, yarn)
    can_be_said = f == 1 or low <= high <= f * (2 * pairs - 1)
    with nullcontext() if can_be_said else suppress(NotImplementedError):
        found = narrowed(old, 2 * pairs).inverse_frequencies()
        # Rounding ``pair - low`` to fp32 moves the ramp; this bounds what that does to a frequency.
        steep = 2**-23 * old.dim / 2 * (factor - 1) / max(high - low, 1e-3)
        torch.testing.assert_close(found, every(old, 2 * pairs), rtol=1e-6 + steep, atol=0.0)


def test_ends_on_kept_pairs_are_told_as_all_loaders_round_them():
    """vLLM and llama.cpp always round, and llama.cpp passes over other numbers than YaRN's own."""
    old = Rope(128, theta=1200.0, scaling=YaRNScaling(4.0, 256, mscale=1.0, mscale_all_dim=1.0))
    low, high = yarn_ramp(old, old.scaling)
    assert low % 2 == high % 2 == 0 < low
    new = narrowed(old, 64)
    assert new.scaling == old.scaling
    assert yarn_ramp(new, new.scaling) == (low / 2, high / 2)
    assert not narrowed(Rope(128, theta=1e6, scaling=YaRNScaling(4.0, 32768)), 64).scaling.truncate  # 23 / 2


def test_the_attention_factor_is_said_of_all_channels():
    yarn = YaRNScaling(4.0, 4096, attention_factor=3.0)
    assert narrowed(Rope(64, scaling=yarn), 64).scaling == YaRNScaling(
        4.0, 4096, mscale=1.0, mscale_all_dim=1.0
    )


@pytest.mark.parametrize(
    "scaling",
    [
        NTKScaling(4.0),
        DynamicNTKScaling(4.0, 16),
        LongRoPEScaling((1.0,) * 4, (2.0,) * 4, 4.0, 16),
        ProportionalScaling(0.5),
    ],
)
def test_scalings_that_deepseek_cannot_say_are_refused_by_name(scaling):
    with pytest.raises(NotImplementedError, match=rf"rope: .* got {type(scaling).__name__}; .* --to attnlib"):
        narrowed(Rope(8, scaling=scaling), 4)


@pytest.mark.parametrize("dim", [0, 3, 6, 16])
def test_widths_that_do_not_divide_are_refused(dim):
    with pytest.raises(
        ValueError, match=f"rope_dim: expected an even divisor of 8, the rotated channels, got {dim}"
    ):
        narrowed(Rope(8), dim)


def test_a_ramp_that_ends_behind_all_pairs_is_refused():
    old = Rope(8, theta=2.0, scaling=YaRNScaling(4.0, 1024, beta_fast=500.0))
    with pytest.raises(NotImplementedError, match="rope_dim: expected 8, because YaRN's ramp ends beyond"):
        narrowed(old, 4)


def test_several_axes_are_refused():
    with pytest.raises(NotImplementedError, match=r"rope: expected one axis, .*got Axes.*; use gqa_to_mla"):
        narrowed(Rope(8, axes=Axes((2, 1, 1), "blocks")), 4)
