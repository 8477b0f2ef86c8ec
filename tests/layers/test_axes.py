"""Layers whose ropes have several axes: dense, packed, decoded, compiled and sharded, and what is refused."""

import pytest
import torch
from layer_helpers import (
    BOTH,
    Stack,
    cache_for,
    close,
    feed_dense,
    grouped,
    latent,
    tokens,
)

from attnlib import Angles, Axes, QueryTemperature, Rope, mrope_positions, shared_angles
from attnlib.scaling import DynamicNTKScaling, YaRNScaling

GQA, MLA = Axes((2, 1, 1), "interleaved"), Axes((1, 1), "blocks")
TYPES = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]])
GRIDS = torch.tensor([[1, 2, 3], [1, 2, 2]])


def made(kind: str, axes: Axes | None = None, **options):
    """A layer whose rope has axes; a latent layer has two of them."""
    scaling = options.pop("scaling", None)
    if kind == "gqa":
        layer = grouped(**options)
        layer.rope = Rope(8, scaling=scaling, axes=axes or GQA)
        return layer
    layer = latent(kind.removeprefix("mla-"), **options)
    layer.rope = Rope(4, scaling=scaling, interleaved=True, axes=axes or MLA)
    return layer


def image_positions(layer):
    """Positions of two sequences with an image each, on the axes of the layer's rope."""
    positions, following = mrope_positions(TYPES, GRIDS)
    return positions[-len(layer.rope.axes.sections) :], following


@pytest.mark.parametrize("kind", BOTH)
def test_text_is_at_equal_positions_on_all_axes(kind):
    """Positions may be left out: the same bits as of a rope without axes."""
    layer, x = made(kind), tokens(2, 11)
    n, counted = len(layer.rope.axes.sections), torch.arange(11)
    cu = torch.tensor([0, 4, 11], dtype=torch.int32)
    packed = torch.cat((torch.arange(4), torch.arange(7)))
    out = layer(x), layer(x[0], cu_seqlens=cu)
    for shape in ((n, 2, 11), (n, 1, 11), (n, 11)):
        assert torch.equal(layer(x, positions=counted.expand(shape)), out[0])
    assert torch.equal(layer(x[0], cu_seqlens=cu, positions=packed.expand(n, 11)), out[1])
    layer.rope = Rope(layer.rope.dim, interleaved=layer.rope.interleaved)
    assert torch.equal(layer(x), out[0])
    assert torch.equal(layer(x[0], cu_seqlens=cu), out[1])


@pytest.mark.parametrize("kind", BOTH)
def test_the_positions_of_every_axis_matter(kind):
    layer, x = made(kind), tokens(2, 11)
    positions, _ = image_positions(layer)
    out = layer(x, positions=positions)
    for axis in range(len(positions)):
        moved = positions.clone()
        moved[axis, :, 6:] += 1
        assert (layer(x, positions=moved) - out).abs().max() > 1e-4


@pytest.mark.parametrize("kind", BOTH)
def test_rows_and_packed_sequences_have_positions_of_their_own(kind):
    layer, x = made(kind), tokens(2, 11)
    positions, _ = image_positions(layer)
    out = layer(x, positions=positions)
    for row in range(2):
        close(layer(x[row : row + 1], positions=positions[:, row]), out[row : row + 1])
    cu = torch.tensor([0, 11, 22], dtype=torch.int32)
    close(layer(x.flatten(0, 1), cu_seqlens=cu, positions=positions.flatten(1)), out.flatten(0, 1))
    assert torch.equal(layer(x, angles=layer.rope.angles(positions)), out)


@pytest.mark.parametrize("page_size", [4, None])
@pytest.mark.parametrize("store", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", BOTH)
def test_a_sequence_with_an_image_is_decoded_step_by_step(kind, store, page_size):
    """Positions go on where mrope_positions says; the outputs are those of one call."""
    model, x = Stack(made(kind), made(kind)), tokens(2, 14)
    prompt, following = image_positions(model.layers[0])
    n = len(prompt)
    new = (following[:, None] + torch.arange(3)).expand(n, 2, 3)
    positions = torch.cat((prompt, new), 2)
    cache, out = cache_for(model, page_size, store=store), []
    cache.admit(2)
    for part, where in zip(x.split((11, 1, 1, 1), 1), positions.split((11, 1, 1, 1), 2), strict=True):
        with torch.no_grad(), cache.step(part.shape[1]) as layers:
            out.append(model(part, layers, positions=where))
    found, wanted = torch.cat(out, 1), model(x, positions=positions)
    if store is None:
        close(found, wanted)
    else:
        assert (found - wanted).abs().max() <= 0.05 * wanted.abs().max()
        assert (found - model(x)).abs().max() > (found - wanted).abs().max()


@pytest.mark.parametrize("kind", BOTH)
def test_a_packed_step_takes_packed_positions(kind):
    """Sequences of different lengths, each at positions [axes, t] of its own; the same when compiled."""
    torch._dynamo.reset()
    model, x = Stack(made(kind)), tokens(2, 11)
    positions, _ = image_positions(model.layers[0])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    wanted = model(x, positions=positions)
    for run in (model, compiled):
        cache = cache_for(model)
        first, second = cache.admit(2)
        for bounds in (((0, 9), (0, 4)), ((9, 11), (4, 5))):
            parts = [(row, slice(*bound)) for row, bound in enumerate(bounds)]
            counts = {first: bounds[0][1] - bounds[0][0], second: bounds[1][1] - bounds[1][0]}
            rows = torch.cat([x[part] for part in parts])
            where = torch.cat([positions[(slice(None), *part)] for part in parts], 1)
            with torch.no_grad(), cache.step(counts) as layers:
                found = run(rows, layers, positions=where)
            close(found, torch.cat([wanted[part] for part in parts]))


@pytest.mark.parametrize("kind", BOTH)
def test_left_padding_takes_positions_as_given(kind):
    layer, x = made(kind), tokens(2, 11)
    shown = torch.ones(2, 11, dtype=torch.bool)
    shown[0, :3] = False
    types = TYPES.roll(3, 1) * shown
    positions, _ = mrope_positions(types, GRIDS, attention_mask=shown)
    positions = positions[-len(layer.rope.axes.sections) :]
    out = layer(x, positions=positions, attention_mask=shown)
    close(out[:1, 3:], layer(x[:1, 3:], positions=positions[:, :1, 3:]))


@pytest.mark.parametrize("kind", BOTH)
def test_gradients_are_those_of_the_angles(kind):
    layer, x = made(kind), tokens(2, 11).requires_grad_()
    positions, _ = image_positions(layer)
    found = []
    for given in ({"positions": positions}, {"angles": layer.rope.angles(positions)}):
        layer.zero_grad()
        x.grad = None
        layer(x, **given).square().sum().backward()
        found.append([x.grad, *(p.grad.clone() for p in layer.parameters())])
    for ours, wanted in zip(*found, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("kind", BOTH)
def test_a_temperature_reads_the_first_axis(kind):
    layer, x = made(kind, temperature=QueryTemperature(0.5, 4)), tokens(2, 11)
    positions, _ = image_positions(layer)
    out = layer(x, positions=positions)
    angles = layer.rope.angles(positions)
    layer.rope = Rope(layer.rope.dim, interleaved=layer.rope.interleaved)
    assert torch.equal(layer(x, angles=angles, positions=positions[0]), out)
    text = layer(x)
    layer.rope = made(kind).rope
    assert torch.equal(layer(x), text)


def test_layers_share_the_angles_of_several_axes():
    layers, x = [made("gqa"), made("gqa"), made("gqa", Axes((2, 1, 1), "blocks"))], tokens(2, 11)
    positions, _ = image_positions(layers[0])
    shared = shared_angles(layers, x, positions=positions)
    assert shared[0] is shared[1] is not shared[2]
    for layer, angles in zip(layers, shared, strict=True):
        assert isinstance(angles, Angles)
        assert torch.equal(layer(x, angles=angles), layer(x, positions=positions))
    model = Stack(*layers)
    cache = cache_for(model)
    cache.admit(2)
    with torch.no_grad(), cache.step(11) as kvs:
        assert torch.equal(shared_angles(layers, x, kv=kvs[0], positions=positions)[0].cos, shared[0].cos)
        with pytest.raises(ValueError, match=r"positions: expected \[axes=3, 2, 11\] in a cache step"):
            shared_angles(layers, x, kv=kvs[0])
        model(x, kvs, positions=positions)


def test_a_rope_that_needs_a_length_counts_text_itself():
    layer, x = made("gqa", scaling=DynamicNTKScaling(2.0, 4)), tokens(2, 11)
    out = layer(x)
    layer.rope = Rope(8, scaling=layer.rope.scaling)
    assert torch.equal(layer(x), out)


@pytest.mark.parametrize("kind", BOTH)
def test_compiles_to_one_graph(kind):
    torch._dynamo.reset()
    layer, x = made(kind, dtype=torch.float32), tokens(2, 11).float()
    positions, _ = image_positions(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, positions=positions), layer(x, positions=positions))


def test_the_repr_shows_the_axes():
    rope = Rope(8, 1e6, YaRNScaling(4.0, 64), axes=GQA)
    layer = grouped()
    layer.rope = rope
    assert "rope=Rope(8, theta=1,000,000.0, axes=Axes(sections=(2, 1, 1), order='interleaved'))" in repr(
        layer
    )


# Refusals


@pytest.mark.parametrize("kind", BOTH)
def test_a_cached_step_needs_positions(kind):
    model, x = Stack(made(kind)), tokens(2, 5)
    cache = cache_for(model)
    cache.admit(2)
    n = len(model.layers[0].rope.axes.sections)
    message = rf"positions: expected \[axes={n}, 2, 5\] in a cache step, got None.*mrope_positions.*expand"
    with pytest.raises(ValueError, match=message):
        feed_dense(model, cache, x)
    with torch.no_grad(), cache.step(5) as (kv,):
        model.layers[0](x, kv=kv, positions=kv.positions.expand(n, *kv.positions.shape))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5,), r"expected \[axes=3, b=2, s=5\] or \[axes=3, s=5\].*got \(5,\); for text.*expand"),
        ((2, 5), r"got \(2, 5\); for text"),
        ((2, 2, 5), r"got \(2, 2, 5\); for text"),
        ((3, 4), r"got \(3, 4\)$"),
        ((3, 4, 5), r"got \(3, 4, 5\)$"),
        ((3, 1, 2, 5), r"got \(3, 1, 2, 5\)$"),
        ((), r"got \(\); for text"),
    ],
)
def test_positions_of_another_shape_are_refused(shape, message):
    with pytest.raises(ValueError, match=f"positions: .*{message}"):
        made("gqa")(tokens(2, 5), positions=torch.zeros(shape, dtype=torch.int64))
    cu = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"positions: expected \[axes=3, t=5\], .*got \(5,\)"):
        made("gqa")(tokens(5), cu_seqlens=cu, positions=torch.arange(5))


def test_documents_in_a_row_are_refused_by_the_first_axis():
    layer, x = made("gqa"), tokens(2, 5)
    restarts = torch.tensor([0, 1, 2, 0, 1])
    positions = torch.stack((restarts, torch.arange(5), torch.arange(5)))
    with pytest.raises(ValueError, match=r"positions: they begin again within a row.*with cu_seqlens=, or"):
        layer(x, positions=positions)
    layer(x, positions=positions.flip(0))  # columns begin again in each row of an image
