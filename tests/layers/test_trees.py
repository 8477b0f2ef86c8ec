"""Layers on trees have the outputs of unshared copies, and the sums of their gradients."""

import pytest
import torch
from tree_layers import HIDDEN, LAYERS, MADE, douts, grouped, latent, make, of_copies, tokens, trained

from attnlib import CAUSAL, KVCache, QueryTemperature, Rope, explain, masks, shared_angles, sliding
from attnlib.packing import tree

TREE = masks.until(MADE.ends, MADE.positions)
WITHOUT = masks.until(MADE.ends)
X = tokens()


def assert_close(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_a_tree_learns_what_it_learns_on_copies(name):
    layer = make(name)
    expected = of_copies(layer)
    out, dx, *dw = trained(layer, X[None], douts()[None], {"mask": TREE})
    assert_close([out[0], dx[0], *dw], expected)


@pytest.mark.parametrize("form", ["[t]", "[b, t]"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_packed_trees_learns_what_it_learns_on_copies(name, form):
    """Two packed trees, the first of which is the other's beginning; rows behind them may be NaN."""
    layer, first = make(name), tree([MADE.tokens[rows].tolist() for rows in MADE.rows[:4]])
    sizes = len(first.tokens), len(MADE.tokens)
    expected = [of_copies(layer, x) for x in (first, MADE)]
    cu = torch.tensor([0, sizes[0], sum(sizes)], dtype=torch.int32)
    ends, positions = torch.zeros(2, sizes[1], dtype=torch.int32), torch.zeros(2, sizes[1]).int()
    for n, made in enumerate((first, MADE)):
        ends[n, : sizes[n]], positions[n, : sizes[n]] = made.ends, made.positions.int()
    if form == "[t]":
        ends, positions = (torch.cat((x[0, : sizes[0]], x[1], x.new_zeros(2))) for x in (ends, positions))
    padding = torch.zeros(2, HIDDEN, dtype=torch.float64)
    x = torch.cat((tokens(first), X, padding))
    dout = torch.cat((douts(first), douts(), padding))
    options = {"mask": masks.until(ends, positions), "cu_seqlens": cu}
    out, dx, *dw = trained(layer, x, dout, options)
    pairs = [torch.cat(y) for y in list(zip(*expected, strict=True))[:2]]
    sums = [x + y for x, y in list(zip(*expected, strict=True))[2:]]
    assert_close([out[: sum(sizes)], dx[: sum(sizes)], *dw], [*pairs, *sums])


@pytest.mark.parametrize("make_layer", [grouped, latent])
def test_a_tree_may_belong_to_the_layer(make_layer):
    torch.manual_seed(0)
    own = make_layer(mask=TREE & sliding(4)).double()
    other = make_layer(mask=sliding(4)).double()
    other.load_state_dict(own.state_dict(), strict=False)
    expected = other(X[None], mask=TREE)
    torch.testing.assert_close(own(X[None]), expected)
    torch.testing.assert_close(own(X[None], angles=shared_angles([own], X[None])[0]), expected)
    every = shared_angles([other, own, own], X[None])
    assert every[1] is every[2]
    assert not torch.equal(every[0].cos, every[1].cos.expand_as(every[0].cos))


def test_given_positions_are_the_ones_of_rope():
    layer = grouped().double()
    expected = layer(X[None], mask=TREE)
    for mask in (TREE, WITHOUT):
        torch.testing.assert_close(layer(X[None], mask=mask, positions=MADE.positions), expected)
        angles = layer.rope.angles(MADE.positions)
        torch.testing.assert_close(layer(X[None], mask=mask, angles=angles), expected)
    moved = layer(X[None], mask=TREE, positions=torch.arange(len(X)))
    assert not torch.allclose(moved, expected)


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"rope": Rope(8)}, "the layer's rope"),
        ({"rope": None, "temperature": QueryTemperature(0.5, 2)}, "the layer's temperature"),
    ],
)
def test_positions_are_needed(options, counts):
    layer = grouped(**options).double()
    with pytest.raises(
        ValueError, match=f"^positions: expected .* {counts} counts .*or pass positions= to the layer"
    ):
        layer(X[None], mask=WITHOUT)
    layer(X[None], mask=WITHOUT, positions=MADE.positions)
    grouped(rope=None).double()(X[None], mask=WITHOUT)


@pytest.mark.parametrize("make_layer", [grouped, latent])
def test_a_cache_step_on_a_tree_is_refused(make_layer):
    layer = make_layer().double()
    cache = KVCache.paged([layer.kv_layout], pages=8, page_size=16, max_sequences=2)
    cache.admit(1)
    refusal = r"^mask: expected no tree of masks.until\(\) over a cache; cache.fork"
    with torch.no_grad(), pytest.raises(NotImplementedError, match=refusal), cache.step(len(X)) as (kv,):
        layer(X[None], kv=kv, mask=TREE)


def test_dropout_on_a_tree_is_refused():
    layer = grouped(dropout_p=0.1).double()
    with pytest.raises(NotImplementedError, match=r"^dropout_p: expected 0 with a tree"):
        layer(X[None], mask=TREE)
    layer.eval()(X[None], mask=TREE)


@pytest.mark.parametrize("ends", [MADE.ends, MADE.ends[None].expand(2, -1)])
def test_trees_of_other_inputs_are_refused(ends):
    layer = grouped().double()
    x = torch.cat((X, X))[None]
    with pytest.raises(ValueError, match=r"^mask: expected a tensor \[.*as the call has them, got"):
        layer(x, mask=masks.until(ends, ends))


def test_a_layer_on_a_tree_is_explained_and_compiled():
    layer = grouped().double()
    assert "mask       CAUSAL" in str(explain(layer, X[None], mask=TREE))
    compiled = torch.compile(
        lambda x, ends, positions: layer(x, mask=masks.until(ends, positions) & sliding(3)),
        fullgraph=True,
        backend="eager",
    )
    expected = layer(X[None], mask=TREE & sliding(3))
    torch.testing.assert_close(compiled(X[None], MADE.ends, MADE.positions), expected)
    assert not torch.allclose(expected, layer(X[None], mask=CAUSAL))
