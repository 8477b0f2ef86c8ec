"""Calibration is the second moment of a layer's inputs, and of nothing else, whatever way the text is cut."""

import pytest
import torch
from convert_helpers import HIDDEN, close, grouped, heads_of, tokens
from hypothesis import given
from hypothesis import strategies as st

from attnlib.convert import Calibration, calibrate


@given(st.lists(st.integers(0, 40), max_size=3))
def test_it_is_the_mean_of_outer_products(cuts):
    x = tokens(40)
    batches = torch.tensor_split(x, sorted(cuts))
    calibration = Calibration.of(batches)
    y = torch.cat((x, torch.ones(40, 1, dtype=x.dtype)), -1)
    assert calibration.tokens == 40
    close(calibration.moment, torch.einsum("tm,tn->mn", y, y) / 40)
    assert torch.equal(calibration.moment, Calibration.of(batches).moment)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_fp64_whatever_the_inputs(dtype):
    x = (tokens(40) + 100).to(dtype)
    assert torch.equal(Calibration.of([x]).moment, Calibration.of([x.double()]).moment)


def test_energy_is_the_mean_square_of_activations():
    layer, x = grouped(bias=True), tokens(40)
    squares = layer.k_proj(x).unflatten(-1, (4, -1)).square().sum(-1).mean(0)
    close(Calibration.of([x]).energy(heads_of(layer).k), squares)
    pairs = heads_of(layer).pairs(heads_of(layer).k)
    close(Calibration.of([x]).energy(pairs), squares)


def test_blocks_are_observed_one_after_another():
    layers = [grouped(seed=seed) for seed in range(3)]
    texts, loaded = [tokens(2, 5), tokens(1, 7, seed=2)], []

    def blocks():
        for n, layer in enumerate(layers):
            loaded.append(n)
            yield (lambda x, layer=layer: x + layer(2 * x)), layer

    x = texts
    for n, calibration in enumerate(calibrate(blocks(), texts)):
        assert loaded == list(range(n + 1))  # the next block is not asked for before it is needed
        close(calibration.moment, Calibration.of([2 * part for part in x]).moment)
        assert calibration.tokens == 17
        x = [part + layers[n](2 * part) for part in x]
        layers[n].k_proj.weight.data.zero_()  # what is done with a block comes too late for the text
        x = [part.detach() for part in x]
    assert n == 2
    assert not any(layer._forward_pre_hooks for layer in layers)


def test_batches_bring_arguments_for_every_block():
    """Sequences that are packed, with their bounds, are those sequences one by one."""
    layers, texts = [grouped(seed=seed) for seed in range(2)], [tokens(1, 5), tokens(1, 8, seed=2)]
    packed = torch.cat(texts, 1)[0], {"cu_seqlens": torch.tensor([0, 5, 13], dtype=torch.int32)}
    own = [*calibrate(((layer, layer) for layer in layers), [packed, texts[0]])]
    for found, wanted in zip(
        own, calibrate(((layer, layer) for layer in layers), [*texts, texts[0]]), strict=True
    ):
        assert found.tokens == wanted.tokens == 18
        close(found.moment, wanted.moment)
    joined = [*calibrate(((layer, layer) for layer in layers), [packed[0][None], texts[0]])]
    assert not joined[1].moment.allclose(own[1].moment)


def test_a_block_that_fails_leaves_no_hook():
    layer = grouped()
    with pytest.raises(RuntimeError, match="block"):
        next(calibrate([(raising, layer)], [tokens(1, 4)]))
    assert not layer._forward_pre_hooks


def raising(x):
    raise RuntimeError("block")


@given(st.integers(1, 30_000), st.lists(st.integers(0, 30_000), max_size=3))
def test_a_sample_is_some_of_the_text_however_it_is_cut(count, cuts):
    x = torch.arange(count, dtype=torch.float32)[:, None]
    calibration = Calibration.of(torch.tensor_split(x, sorted(min(cut, count) for cut in cuts)))
    sample = calibration.sample
    assert torch.equal(sample, Calibration.of([x]).sample)
    assert sample.dtype == torch.float32
    assert (sample.diff(dim=0) > 0).all()
    assert torch.equal(sample, x) if count <= 4096 else 1800 < len(sample) <= 4096  # 7 standard deviations


@pytest.mark.parametrize("length", [32, 127, 512, 610, 1000])
def test_a_sample_has_first_tokens_in_their_share(length):
    """Of a text in pieces of this length, up to four standard deviations."""
    x = torch.arange(100_000)[:, None]
    sample = Calibration.of([x.float()]).sample.long()
    wanted = len(sample) / length
    assert abs((sample % length == 0).sum() - wanted) < 4 * wanted**0.5


def test_what_is_measured_on():
    x = tokens(40)
    y = Calibration.of([x.float()]).inputs()
    assert torch.equal(y, torch.cat((x.float().double(), torch.ones(40, 1, dtype=torch.float64)), -1))
    assert Calibration.white(HIDDEN).inputs() is None
    assert Calibration(40, Calibration.of([x]).moment).inputs() is None


def test_bad_calibrations_are_refused():
    x = tokens(4)
    with pytest.raises(ValueError, match="at least one token"):
        Calibration.of([])
    with pytest.raises(ValueError, match="at least one token"):
        next(calibrate([(lambda x: x, grouped())], [x]))
    with pytest.raises(ValueError, match="expected width 20 like the first one, got 19"):
        Calibration.of([x, x[:, 1:]])
    with pytest.raises(ValueError, match="NaN or infinite"):
        Calibration.of([x, x * torch.nan])
    with pytest.raises(TypeError, match=r"moment: expected an fp64 tensor .* got torch.float32"):
        Calibration(1, torch.eye(3))
    with pytest.raises(ValueError, match=r"moment: expected a square .* got \(3, 4\)"):
        Calibration(1, torch.eye(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"sample: expected \[n, 2\], like moment, got \(4, 3\)"):
        Calibration(1, torch.eye(3, dtype=torch.float64), torch.ones(4, 3))
    assert Calibration.white(HIDDEN).tokens == 0
