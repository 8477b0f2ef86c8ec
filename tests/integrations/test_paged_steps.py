"""Steps of attnlib's paged cache that go wrong: they are undone, and a layer that caused it is named."""

import copy

import pytest
import torch
from families import CACHE
from torch import nn
from transformers import PreTrainedConfig

from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers.layouts import layouts_of
from tests.integrations.test_paged import OPTIONS, paged, pair_of
from tests.integrations.test_transformers import tokens


def counts(cache: hf.PagedCache) -> tuple:
    return (
        cache.get_seq_length(),
        [layer.get_seq_length() for layer in cache.layers],
        cache.length,
        len(cache.handles),
    )


@pytest.mark.parametrize("place", ["layers.0.mlp", "layers.1.mlp", "norm"])
@pytest.mark.parametrize("begun", [0, 5])
@torch.no_grad()
def test_an_undone_step_leaves_every_count(place, begun):
    """Also one that raised behind the last layer, and one with which everything began."""
    eager, ours = pair_of("llama")
    ids, cache = tokens(eager, 2, 9), paged(ours)
    if begun:
        ours(ids[:, :begun], **{CACHE: cache})
    before = counts(cache)

    def fail(*_):
        raise OSError("midway")

    hook = ours.model.get_submodule(place).register_forward_hook(fail)
    with pytest.raises(OSError, match="midway"):
        ours(ids[:, begun:], **{CACHE: cache})
    hook.remove()
    assert counts(cache) == before
    theirs = eager.generate(ids, **OPTIONS)
    assert torch.equal(ours.generate(ids, **{CACHE: cache}, **OPTIONS), theirs)


@pytest.mark.parametrize("change", ["key", "value", "both"])
@torch.no_grad()
def test_a_layer_that_changes_what_it_was_handed_is_named(change, monkeypatch):
    """As diffllama, which rearranges values, and jetmoe, which repeats both."""
    eager, ours = pair_of("llama", "attention")
    ids, cache = tokens(eager, 2, 9), paged(ours)
    ours(ids[:, :5], **{CACHE: cache})
    before, update = counts(cache), cache.layers[1].update

    def changed(key, value, *args, **kwargs):
        key, value = update(key, value, *args, **kwargs)
        return (key if change == "value" else key.clone()), (value if change == "key" else value.clone())

    monkeypatch.setattr(cache.layers[1], "update", changed)
    error, text = (RuntimeError, "layer 1: expected attention to the pages") if change == "both" else (
        NotImplementedError, f"layer 1, {change}: expected what hf.PagedCache returned, got another tensor",
    )  # fmt: skip
    with pytest.raises(error, match=text):
        ours(ids[:, 5:], **{CACHE: cache})
    assert counts(cache) == before


@torch.no_grad()
def test_a_layer_of_other_heads_than_its_config_says_is_named():
    """As mimo-v2-flash, whose layers with a window have more."""
    _, ours = pair_of("llama", "attention")
    ours.config.num_key_value_heads += 1
    cache = paged(ours)
    before = counts(cache)
    with pytest.raises(NotImplementedError, match=r"layer 0: expected 3 heads .* by the model's config, got"):
        ours(tokens(ours, 2, 9), **{CACHE: cache})
    assert counts(cache) == before


def test_a_config_that_is_made_of_others_is_refused():
    """As Blt's."""
    with pytest.raises(
        NotImplementedError, match="model: expected num_hidden_layers in its config, got a PreTrained"
    ):
        layouts_of(nn.Linear(2, 2), PreTrainedConfig(), None)


def test_reading_keys_past_attention_is_refused():
    """As mllama, which looks whether its cross-attention has any, and Whisper's ``generate``."""
    layer = paged(pair_of("llama", "attention")[1]).layers[1]
    for name in ("keys", "values"):
        with pytest.raises(
            NotImplementedError, match="layer 1: expected no direct access to cached keys or values"
        ):
            getattr(layer, name)


@torch.no_grad()
def test_a_part_of_the_model_may_be_called():
    """A step that raises there is undone too, and pages that nobody read are found; adapters call models
    so.
    """
    eager, ours = pair_of("llama", "attention")
    ids, cache = tokens(ours, 2, 9), paged(ours)
    ours.model(ids[:, :5], **{CACHE: cache})
    before = counts(cache)
    hook = ours.model.layers[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours.model(ids[:, 5:], **{CACHE: cache})
    hook.remove()
    assert counts(cache) == before
    found = ours.model(ids[:, 5:], **{CACHE: cache}).last_hidden_state
    torch.testing.assert_close(found, eager.model(ids).last_hidden_state[:, 5:])
    before = counts(cache)
    ours.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="layer 0: expected attention to the pages"):
        ours.model(ids[:, :1], **{CACHE: cache})
    assert counts(cache) == before


def test_gradients_are_refused():
    _, ours = pair_of("llama", "attention")
    with pytest.raises(NotImplementedError, match=r"hf\.PagedCache: expected no gradients"):
        ours(tokens(ours, 2, 9), **{CACHE: paged(ours)})


@torch.no_grad()
def test_a_compiled_model_stores_into_pages():
    eager, ours = pair_of("llama", "attention")
    ids, cache = tokens(ours, 2, 9), paged(ours)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager")
    found = [compiled(part, **{CACHE: cache}).logits for part in (ids[:, :5], ids[:, 5:])]
    torch.testing.assert_close(torch.cat(found, 1), eager(ids).logits)


@torch.no_grad()
def test_a_layer_that_stores_nothing_is_named():
    _, ours = pair_of("llama")
    ids, cache = tokens(ours, 2, 9), paged(ours)
    ours(ids[:, :5], **{CACHE: cache})
    before, ours.model.layers = counts(cache), ours.model.layers[:1]
    with pytest.raises(RuntimeError, match="layer 1: expected keys and values in every step"):
        ours(ids[:, 5:], **{CACHE: cache})
    assert counts(cache) == before


@torch.no_grad()
def test_copies_of_a_model_leave_the_cache_alone(tmp_path):
    _, ours = pair_of("llama")
    ids, cache = tokens(ours, 2, 9), paged(ours)
    torch.save(ours, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    ours(ids, **{CACHE: cache})
    for other in (copy.deepcopy(ours), loaded):
        other(ids)
    assert cache.length == 9
