"""Families whose last layers read the keys of earlier ones: Gemma 3n and Gemma 4."""

import copy

import pytest
import torch
from families import CACHE, small
from transformers import DynamicCache

from attnlib import Rope
from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers.handed import handed
from attnlib.integrations.transformers.replacing import ReplacedAttention
from attnlib.sizes import GroupedShape, Model, cache_bytes
from tests.integrations.test_transformers import WAYS, agree, both, tokens

FAMILIES = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")


def attention_of(model) -> list:
    return [layer.self_attn for layer in model.model.layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_by_themselves(family):
    """A layer of transformers, with the layer whose keys it reads, against ours; and their gradients."""
    torch.manual_seed(0)
    model = small(family).eval()
    model.set_attn_implementation("eager")
    x, at = torch.randn(2, 11, 32), torch.arange(11)[None]
    for index, module in enumerate(attention_of(model)):
        source, theirs = attention_of(model)[index % 2], {}
        kind = model.config.layer_types[index]
        window = module.sliding_window or 11
        hidden = (at > at.T) | (at.T - at >= window)
        added = torch.zeros(1, 1, 11, 11).masked_fill(hidden, torch.finfo(torch.float32).min)
        angles = model.model.rotary_emb(x, at, kind)
        for layer in dict.fromkeys((source, module)):
            expected, _ = layer(x, position_embeddings=angles, attention_mask=added, shared_kv_states=theirs)
        ours, owner = (
            hf.from_config(model.config, i, weights=part.state_dict())
            for i, part in ((index, module), (index % 2, source))
        )
        assert ours.own_keys == (index < 2)
        got = ours(x, keys=owner.key_value(x, owner.rope.angles(at[0])))
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
        grads = [
            torch.autograd.grad((out * expected.detach()).sum(), part.k_proj.weight)[0]
            for out, part in ((got, owner), (expected, source))
        ]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_what_gemma_4_has_by_layer():
    """Widths, KV heads, ropes, and values of keys in full attention only."""
    config = small("gemma4_text").config
    windowed, full, *readers = (hf.from_config(config, i, device="meta") for i in range(4))
    assert (windowed.head_dim, windowed.num_kv_heads, windowed.values) == (16, 2, None)
    assert (full.head_dim, full.num_kv_heads, full.values) == (32, 1, "keys")
    assert windowed.rope == Rope(16, 10_000.0)
    assert full.rope.dim == 32
    assert full.rope.inverse_frequencies().count_nonzero() == 4
    assert all(reader.k_proj is reader.k_norm is reader.v_norm is None for reader in readers)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_readers_compute_only_the_tokens_whose_logits_are_kept(family, way):
    """In a prompt that is longer than the window, and in later turns; with caches of either kind."""
    eager, ours = both(family, way)
    ids = tokens(eager, 2, 30)
    for given in ({}, {"attention_mask": torch.ones(2, 30, dtype=torch.long)}):
        if given:
            given["attention_mask"][0, :4] = 0
        expected = eager(ids, **given).logits
        for kept in (1, 2):
            agree(ours(ids, logits_to_keep=kept, **given).logits, expected[:, -kept:])
            paged = hf.PagedCache(ours, pages=96, page_size=4, max_sequences=2)
            for cache in (paged, DynamicCache(config=ours.config)):
                for begin, end in ((0, 13), (13, 22), (22, 23), (23, 30)):
                    part = {name: x[:, :end] for name, x in given.items()}
                    got = ours(ids[:, begin:end], **{CACHE: cache}, logits_to_keep=kept, **part).logits
                    agree(got, expected[:, max(begin, end - kept) : end])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_only_owners_store_tokens(family):
    """As many bytes as transformers stores, of which attnlib.sizes knows."""
    eager, ours = both(family, "layers")
    ids, config = tokens(eager, 1, 5), eager.config
    caches = DynamicCache(config=config), hf.PagedCache(ours, pages=96, page_size=1, max_sequences=1)
    for model, cache in zip((eager, ours), caches, strict=True):
        model(ids, **{CACHE: cache})
    stored = [x for layer in caches[0].layers if layer.keys is not None for x in (layer.keys, layer.values)]
    assert len(stored) == 4
    layers = [hf.from_config(config, i, device="meta") for i in range(4)]
    shapes = (
        GroupedShape(
            hidden_size=32,
            num_heads=4,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            window=layer.mask.kept[0],
            bias=True,
            output_bias=True,
            qk_norm=True,
            own_keys=layer.own_keys,
            values=layer.values,
        )
        for layer in layers
    )
    model = Model(family, tuple(shapes))
    layouts = model.layouts(dtype=torch.float32)
    assert layouts == [*caches[1].kv.layouts]
    assert cache_bytes(layouts, [5], page_size=1) == sum(x.nbytes for x in stored) == caches[1].kv.used_bytes
    assert model.parameters == sum(x.numel() for part in attention_of(eager) for x in part.parameters())


def test_a_reader_alone_is_refused():
    _, ours = both("gemma4_text", "layers")
    reader = attention_of(ours)[3]
    assert isinstance(reader, ReplacedAttention)
    with pytest.raises(ValueError, match="shared_kv_states: layer 3 reads the keys of an earlier 'full_att"):
        reader(torch.randn(1, 3, 32), position_embeddings=reader.layer.rope.angles(torch.arange(3)))


def test_a_mask_that_keeps_all_queries_stays_small():
    mask = handed(torch.ones(2, 5, dtype=torch.bool))
    assert mask[:, :, slice(0, None), :] is mask
    assert mask[:, 1:].shape == (2, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: expected 'vision', got 'all'"),
        (
            {"per_layer_config": {i: {"attention_sinks": 1} for i in range(4)}},
            "attention_sinks=1 is unknown for gemma4_text",
        ),
        ({"per_layer_config": {1: {"skip": ["self_attn"]}}}, r"skip: expected \(\), got \['self_attn'\]"),
    ],
)
def test_what_is_not_known_is_refused(fields, message):
    config = copy.deepcopy(small("gemma4_text").config)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(NotImplementedError, match=message):
        hf.from_config(config, 1)
