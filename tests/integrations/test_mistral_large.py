"""Mistral Large 4: layers that read the latents of earlier ones, without rope, and with learnt factors."""

import copy

import pytest
import torch
from families import CACHE, RECENT, SIZES, small
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4TextIndexer

from attnlib import KVCache, KVLayout
from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers.mistral_large import LearntRope, LearntTemperature
from attnlib.integrations.transformers.selecting import ReplacedSelectingAttention
from attnlib.rope.rope import Angles
from tests.integrations.test_transformers import agree, both, tokens

FAMILY = "mistral_large4_text"
TOP, SOURCES = RECENT[FAMILY]["index_topk"], RECENT[FAMILY]["kv_source_layers"]


def text_of(model) -> nn.Module:
    return model.model.language_model


def layers_of(model) -> list[nn.Module]:
    """Layers from the config, with the weights of a model of transformers."""
    config = text_of(model).config
    return [
        hf.from_config(config, index, weights=layer.self_attn.state_dict()).eval()
        for index, layer in enumerate(text_of(model).layers)
    ]


def inputs_of(model, layers, x: Tensor) -> tuple[Tensor, Angles]:
    """Positions of x, and the angles of a model."""
    positions = torch.arange(x.shape[1])[None]
    return positions, layers[0].rope.learnt_angles(positions, text_of(model).rotary_emb.alpha)


def alone(layers, x: Tensor, angles: Angles, positions: Tensor) -> list[Tensor]:
    """The outputs of layers for the same input, with the keys and choices of the layers that they read."""
    outs, latents, chosen = [], {}, None
    for index, (layer, source) in enumerate(zip(layers, SOURCES, strict=True)):
        given = {"angles": None if layer.rope is None else angles, "positions": positions}
        if layer.own_keys:
            latents[index] = layer.latent(x, given["angles"])
        chosen = layer.choose(x, **given) if layer.select else chosen
        outs.append(layer(x, keys=latents[source], selected=chosen, **given))
    return outs


@pytest.fixture(scope="module")
def eager():
    torch.manual_seed(0)
    model = small(FAMILY).eval()
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def test_layers_by_themselves(eager):
    layers, seen = layers_of(eager), []
    x = torch.randn(2, 19, 32)
    positions, angles = inputs_of(eager, layers, x)
    added = torch.zeros(1, 1, 19, 19).masked_fill(torch.ones(19, 19).triu(1).bool(), torch.finfo(x.dtype).min)
    shared, lists = {}, None
    for layer in text_of(eager).layers:
        given = {"attention_mask": added, "shared_kv_states": shared, "position_ids": positions}
        embeddings = text_of(eager).rotary_emb(x, positions)
        out, _, lists = layer.self_attn(x, embeddings, prev_topk_indices=lists, **given)
        seen.append(out)
    for mine, theirs in zip(alone(layers, x, angles, positions), seen, strict=True):
        agree(mine, theirs)
    assert [layer.own_keys for layer in layers] == [True, True, False, False]
    assert [layer.select is not None for layer in layers] == [True, True, False, True]
    assert [layer.qk_rope_head_dim for layer in layers] == [8, 0, 8, 0]
    with pytest.raises(ValueError, match="angles: expected those of the model, which holds learnt factors"):
        layers[0](x)


@pytest.mark.parametrize("page_size", [4, None], ids=["paged", "contiguous"])
@torch.no_grad()
def test_layers_over_a_cache_of_attnlib(eager, page_size):
    layers, x = layers_of(eager), torch.randn(2, 19, 32)
    positions, angles = inputs_of(eager, layers, x)
    expected = alone(layers, x, angles, positions)
    storing = [n for n, layer in enumerate(layers) if layer.own_keys or layer.select]
    layouts = [layers[n].kv_layout for n in storing]
    assert storing == [0, 1, 3]
    assert layouts[2] == KVLayout.index_only(16)
    sizes = {"max_sequences": 2, "max_length": 24}
    if page_size is None:
        cache = KVCache.contiguous(layouts, **sizes)
    else:
        cache = KVCache.paged(layouts, pages=12, page_size=page_size, **sizes)
    cache.admit(2)
    outs, at = [], 0
    for n in (3, 9, 1, 1, 5):
        now, chosen, rows = [], None, slice(at, at + n)
        turned = Angles(angles.cos[:, rows].contiguous(), angles.sin[:, rows].contiguous(), True)
        with cache.step(n) as kv:
            for index, (layer, source) in enumerate(zip(layers, SOURCES, strict=True)):
                given = {"kv": kv[storing.index(index)]} if index in storing else {}
                given |= {"angles": None if layer.rope is None else turned, "positions": positions[:, rows]}
                chosen = layer.choose(x[:, rows], **given) if layer.select else chosen
                given |= {} if layer.own_keys else {"keys": kv[source].view()}
                now.append(layer(x[:, rows], selected=chosen, **given))
        outs.append(torch.stack(now))
        at += n
    agree(torch.cat(outs, 2), torch.stack(expected))


@torch.no_grad()
def test_each_branch_chooses_what_theirs_does(monkeypatch):
    eager, ours = both(FAMILY, "layers")
    theirs, mine = [], []
    for module in eager.modules():
        if isinstance(module, MistralLarge4TextIndexer):
            module.register_forward_hook(lambda _, args, out: theirs.append(out))
    choose = ReplacedSelectingAttention._lists

    def kept_lists(*args):
        lists = choose(*args)
        mine.append(lists[:, :, 0])
        return lists

    monkeypatch.setattr(ReplacedSelectingAttention, "_lists", kept_lists)
    ids = tokens(eager)
    agree(ours(ids).logits, eager(ids).logits)
    assert len(mine) == len(theirs) == 3
    for a, b in zip(mine, theirs, strict=True):  # earlier queries see fewer keys than a list has entries
        assert torch.equal(*(x[:, TOP:].long().sort(-1).values for x in (a, b)))


@torch.no_grad()
def test_pages_hold_latents_index_keys_or_both():
    _, ours = both(FAMILY, "layers")
    cache = hf.PagedCache(ours, pages=8, page_size=4, max_sequences=2)
    found = [(layout.dim, layout.rope_dim, layout.index_dim) for layout in cache.kv.layouts]
    assert found == [(16, 8, 16), (16, 0, 16), (0, 0, 16)]


@pytest.mark.parametrize("way", ["absorbed", "layers"])
@torch.no_grad()
def test_rows_of_pages_are_reordered_and_cropped(way):
    eager, ours = both(FAMILY, "layers" if way == "layers" else "attention")
    ours = ours if way == "layers" else hf.absorb(ours)
    ids = tokens(eager, 3, 20)
    cache = hf.PagedCache(ours, pages=96, page_size=4, max_sequences=8)
    ours(ids[:, :15], **{CACHE: cache})
    rows = torch.tensor([2, 0, 0])
    cache.reorder_cache(rows)
    cache.crop(-4)
    theirs, ids = DynamicCache(config=eager.config), ids[rows]
    ids[:, 11:] = tokens(eager, 3, 9)
    eager(ids[:, :11], **{CACHE: theirs})
    for begin, end in ((11, 12), (12, 17), (17, 18)):
        part = ids[:, begin:end]
        agree(ours(part, **{CACHE: cache}).logits, eager(part, **{CACHE: theirs}).logits)


@torch.no_grad()
def test_a_saved_model_has_their_names(tmp_path):
    eager, ours = both(FAMILY, "layers")
    ours.save_pretrained(tmp_path)
    again = type(eager).from_pretrained(tmp_path, attn_implementation="eager")
    assert again.state_dict().keys() == eager.state_dict().keys() == ours.state_dict().keys()
    for name, x in eager.state_dict().items():
        assert torch.equal(again.state_dict()[name], x), name


def test_parameters_are_reset_to_factors_of_1():
    made = LearntTemperature(4)
    nn.init.normal_(made.scale)
    made.reset_parameters()
    q = torch.randn(2, 3, 4, 8)
    assert torch.equal(made.scaled(q, torch.arange(3)), q)


@torch.no_grad()
def test_losses_of_branches_leave_the_rope_alone(eager):
    with torch.enable_grad():
        layer, alpha = layers_of(eager)[0], torch.zeros(4, requires_grad=True)
        assert isinstance(layer.rope, LearntRope)
        x, positions = torch.randn(2, 19, 32), torch.arange(19)
        given = {"angles": layer.rope.learnt_angles(positions, alpha), "positions": positions}
        layer.index_loss(x, **given).backward()
        assert alpha.grad is None
        layer(x, **given).sum().backward()
        assert alpha.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": ["shared"] + ["full"] * 3}, "indexer_types: expected 'full' or"),
        ({"kv_source_layers": [0, 1, 0, 0]}, r"kv_source_layers: expected \[\] for layer 3, .* got 0"),
        (
            {"kv_source_layers": [0, 1, 1, 0], "no_rope_layers": [1] * 4},
            r"kv_source_layers: expected \[1\] for layer 3, the last one .* got 0",
        ),
        ({"index_block": 4}, "config: index_block=4 is unknown for mistral_large4_text"),
    ],
)
def test_other_configs_are_refused(fields, message):
    config = CONFIG_MAPPING[FAMILY](**SIZES | RECENT[FAMILY] | fields)
    with pytest.raises(NotImplementedError, match=message):
        hf.from_config(config, 3, device="meta")


@torch.no_grad()
def test_a_rope_that_needs_the_length():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    torch.manual_seed(0)
    eager = small(FAMILY, rope_parameters=rope, max_position_embeddings=16).eval()
    ours = hf.replace(copy.deepcopy(eager))
    eager.set_attn_implementation("eager")
    for count in (5, 24):
        ids = torch.arange(3, 3 + count)[None]
        agree(ours(ids).logits, eager(ids).logits)
