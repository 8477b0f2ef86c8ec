"""A layer decides once whether to choose, and refuses what its index branch cannot choose among."""

from dataclasses import replace

import pytest
import torch
from layer_helpers import Stack, cache_for, close, feed, grouped, latent, tokens
from selecting_cases import INDEXERS, LATENT, T, choosing, most, steps

from attnlib import CAUSAL, FULL, Rope, sliding
from attnlib.indexing import choose
from attnlib.layers import choices
from attnlib.scaling import DynamicNTKScaling


@pytest.mark.parametrize("name", INDEXERS)
def test_a_captured_step_decides_by_the_capacity_of_its_cache(name, monkeypatch):
    """A replay may find longer sequences than the capture did."""
    layer = choosing(name)
    monkeypatch.setattr(choices, "is_recorded", lambda _: True)
    for length, is_dense in ((most(layer), True), (48, False)):
        cache = cache_for(Stack(layer), 2, length=length)
        cache.admit(2)
        x = tokens(2, min(T, length))
        out, found = steps(layer, x, cache, [4, *[1] * (x.shape[1] - 4)])
        assert all((chosen.indices is None) == is_dense for chosen in found)
        close(out, layer(x))


GROUP = INDEXERS["minimax"]
REFUSALS = {
    "no indexer": (lambda: grouped(select=3), TypeError, "select: expected an Indexer or None, got int"),
    "no latent": (lambda: latent(select=INDEXERS["deepseek"]), ValueError, "q_lora_rank=None"),
    "a latent of a grouped layer": (
        lambda: grouped(select=INDEXERS["deepseek"]), ValueError, "select.source: .* a grouped layer",
    ),
    "heads": (lambda: grouped(1, select=GROUP), ValueError, "num_kv_heads=1 heads, got per='group' with 2"),
    "lists of a latent layer": (
        lambda: latent(**LATENT, select=GROUP), ValueError, "per='all' in a latent layer",
    ),
    "a window": (lambda: grouped(mask=sliding(3), select=INDEXERS["of x"]), ValueError, "mask: .*CAUSAL"),
    "a mask": (lambda: choosing("of x")(tokens(1, T), mask=sliding(3)), NotImplementedError, "mask: .*None"),
    "no mask": (lambda: choosing("of x")(tokens(1, T), mask=3), TypeError, "mask"),
    "holes": (
        lambda: choosing("of x")(tokens(1, 4), attention_mask=torch.tensor([[True, False, True, True]])),
        NotImplementedError, "pad them on one side",
    ),
    "no branch": (lambda: grouped().choose(tokens(1, 4)), ValueError, "select: .*index branch"),
    "no loss": (lambda: grouped().index_loss(tokens(1, 4)), ValueError, "select: .*index branch"),
    "another type": (lambda: grouped()(tokens(1, 4), selected=[1]), TypeError, "selected: .*choose"),
    "int64": (
        lambda: grouped()(tokens(1, 4), selected=torch.zeros(1, 4, 1, 1).long()), TypeError, "int32",
    ),
    "alibi": (
        lambda: grouped(rope=False, alibi=True, select=INDEXERS["mistral"]).index_loss(tokens(1, 4)),
        NotImplementedError, "alibi_slopes",
    ),
    "other blocks": (
        lambda: choosing("of x").index_loss(tokens(1, T), selected=choosing("minimax").choose(tokens(1, T))),
        ValueError, "selected: expected .*block_size=1",
    ),
    "only angles": (
        lambda: grouped(select=INDEXERS["of x"])(tokens(1, T), angles=Rope(8).angles(torch.arange(T))),
        ValueError, "positions: the index branch needs them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused_by_name(name):
    call, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_masks_that_hide_nothing_more_are_taken(mask):
    layer, x = choosing("of x"), tokens(2, T)
    close(layer(x, mask=mask), layer(x))


def test_a_rope_of_the_length_rotates_index_keys_by_the_length_of_x():
    """A cache is refused, as such a rope would rotate stored keys anew."""
    rope = Rope(4, scaling=DynamicNTKScaling(2.0, 8))
    layer, x = grouped(select=replace(INDEXERS["of x"], rope=rope)), tokens(2, T)
    index = layer.indexer(x, angles=rope.angles(torch.arange(T), length=T))
    lists = choose(index.queries, index.keys, index.weights, layer.select)
    assert torch.equal(layer.choose(x).indices, lists)
    cache = cache_for(Stack(layer))
    cache.admit(2)
    with pytest.raises(ValueError, match="DynamicNTKScaling rotates stored keys anew"), torch.no_grad():
        steps(layer, x, cache, (T,))


def test_other_keys_are_refused():
    layer, x = choosing("of x"), tokens(2, 4)
    with pytest.raises(NotImplementedError, match="context: expected keys of the tokens of x"):
        grouped(rope=False, select=INDEXERS["mistral"])(x, context=tokens(2, 9))
    cache = cache_for(Stack(layer))
    cache.admit(2)
    with torch.no_grad(), cache.step(4) as kv:
        layer(x, kv=kv[0])
        with pytest.raises(NotImplementedError, match="keys: expected keys of the tokens of x"):
            layer(x, keys=kv[0].view())


def test_packed_steps_are_not_captured(monkeypatch):
    layer = choosing("of x")
    cache = cache_for(Stack(layer))
    handles = cache.admit(2)
    monkeypatch.setattr(choices, "is_recorded", lambda _: True)
    with pytest.raises(NotImplementedError, match="dense steps in compiled code and CUDA graphs"):
        feed(Stack(layer), cache, dict(zip(handles, tokens(2, 5), strict=True)))


def test_ranks_do_not_share_lists_of_kv_heads():
    with pytest.raises(ValueError, match="per='all' for tensor parallelism"):
        choosing("minimax").parallel_plan(None)


def test_context_parallelism_is_refused():
    layer = choosing("of x")
    layer.context_parallel = object()
    with pytest.raises(NotImplementedError, match="context_parallel: expected None"):
        layer.index_loss(tokens(1, 4))
