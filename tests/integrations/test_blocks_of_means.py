"""Qwen 4's layers, which choose blocks of the keys that a query sees by the means of their keys."""

import copy

import pytest
import torch
from families import CACHE, QWEN4, RECENT, SIZES, lively, small
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, StaticCache

from attnlib import Indexer, Rope, packing
from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers.means import ReplacedMeansAttention
from tests.integrations.test_transformers import (
    GREEDY,
    agree,
    agree_in_generation,
    agree_in_gradients,
    tokens,
)

KIND = "qwen4_exp_text"
SIZE = QWEN4["indexer_compress_ratio"]
BUDGET = QWEN4["indexer_budget"]
ONE_LAYER = {"layer_types": ["indexed_attention"], "num_hidden_layers": 1, "ple_layer_ids": None}


def replaced(way="layers", **fields):
    """A text model on eager attention, and one with layers of attnlib, or with attention by attnlib."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[KIND](**SIZES | RECENT[KIND] | {"attention_bias": True} | fields)
    eager = lively(AutoModelForCausalLM.from_config(config).float()).eval()
    ours = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    hf.register()
    ours.set_attn_implementation("attnlib")
    return eager, hf.replace(ours) if way == "layers" else ours


def choosing(model: nn.Module) -> list[ReplacedMeansAttention]:
    return [x for x in model.modules() if isinstance(x, ReplacedMeansAttention)]


def paged(model, **options) -> hf.PagedCache:
    return hf.PagedCache(model, pages=96, page_size=4, max_sequences=8, **options)


@pytest.mark.parametrize("tokens_of_prompt", [1, BUDGET, BUDGET + SIZE - 1, BUDGET + SIZE, 40])
@torch.no_grad()
def test_prompts_shorter_and_longer_than_a_list(tokens_of_prompt):
    """Lists hold an incomplete block as well, so that one block more than they have makes the difference."""
    eager, ours = replaced()
    assert len(choosing(ours)) == 2
    ids = tokens(eager, 2, tokens_of_prompt)
    expected = eager(ids).logits
    agree(ours(ids).logits, expected)
    for module in choosing(ours):
        module.layer.indexer.q_proj.weight.neg_()
    is_same = torch.allclose(ours(ids).logits, expected, atol=1e-3)
    assert is_same == (tokens_of_prompt < BUDGET + SIZE)


@pytest.mark.parametrize("way", ["attention", "layers"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "pages"])
@torch.no_grad()
def test_generated_tokens(cache, way):
    """Of rows with padding on the left, which blocks do not count."""
    eager, ours = replaced(way)
    given = {CACHE: paged(ours)} if cache == "pages" else {"cache_implementation": cache}
    agree_in_generation(ours, eager, given)


@torch.no_grad()
def test_several_tokens_after_a_prompt():
    """The first steps are dense, and store index keys all the same."""
    eager, ours = replaced()
    ids, theirs = tokens(eager, 2, 30), DynamicCache(config=eager.config)
    caches = paged(ours), DynamicCache(config=ours.config), StaticCache(config=ours.config, max_cache_len=32)
    for begin, end in ((0, 3), (3, 5), (5, 20), (20, 21), (21, 30)):
        expected = eager(ids[:, begin:end], **{CACHE: theirs}).logits
        for cache in caches:
            agree(ours(ids[:, begin:end], **{CACHE: cache}).logits, expected)


@pytest.mark.parametrize("way", ["attention", "layers"])
@torch.no_grad()
def test_padding_holes_and_packed_sequences(way):
    eager, ours = replaced(way)
    ids, mask = tokens(eager, 3), torch.ones(3, 23, dtype=torch.long)
    for hidden in (slice(0, 5), slice(3, 7), slice(-9, None)):
        mask[1] = 1
        mask[1, hidden] = 0
        agree(*(model(ids, attention_mask=mask).logits for model in (ours, eager)), mask.bool())
    mask[0, :5], mask[2, 4:9] = 0, 0
    agree(*(model(ids, attention_mask=mask).logits for model in (ours, eager)), mask.bool())
    positions = torch.cat([torch.arange(n) for n in (3, 12, 8)]).expand(3, -1)
    agree(*(model(ids, position_ids=positions, use_cache=False).logits for model in (ours, eager)))


@torch.no_grad()
def test_a_mask_of_queries_and_keys():
    eager, ours = replaced()
    ids, shown = tokens(eager, 2), torch.rand(2, 1, 23, 23) < 0.8
    shown = (shown | torch.eye(23, dtype=torch.bool)).tril()
    added = torch.zeros(2, 1, 23, 23).masked_fill(~shown, torch.finfo(torch.float32).min)
    agree(*(model(ids, attention_mask=added).logits for model in (ours, eager)))
    with pytest.raises(NotImplementedError, match="attention_mask: expected one that hides keys or not"):
        ours(ids, attention_mask=added + 0.5)
    tree = packing.tree([ids[0].tolist(), [*ids[0, :5].tolist(), 7, 8, 9]])
    with pytest.raises(NotImplementedError, match="expected"):
        ours(**hf.tree_inputs(tree))


@torch.no_grad()
def test_positions_of_their_own():
    """Means of keys rotate at the position of their first key, whatever it is."""
    eager, ours = replaced()
    ids, positions = tokens(eager), torch.randint(0, 9, (4, 2, 23)).cumsum(-1)
    theirs, mine = (DynamicCache(config=model.config) for model in (eager, ours))
    for begin, end in ((0, 20), (20, 21), (21, 23)):
        at = {"position_ids": positions[..., begin:end]}
        expected = eager(ids[:, begin:end], **at, **{CACHE: theirs}).logits
        agree(ours(ids[:, begin:end], **at, **{CACHE: mine}).logits, expected)


def test_gradients():
    """Of the language loss, which index branches have none of."""
    eager, ours = replaced()
    agree_in_gradients(ours, eager)


@pytest.mark.parametrize("fields", [{}, {"indexer_n_heads": 1}], ids=str)
@torch.no_grad()
def test_state_dicts_keep_transformers_names(tmp_path, fields):
    """Also if index queries have as many rows as index keys: q_proj and the gate alternate by heads."""
    eager, ours = replaced(**fields)
    assert all(torch.equal(x, ours.state_dict()[name]) for name, x in eager.state_dict().items())
    ours.save_pretrained(tmp_path)
    again = type(eager).from_pretrained(tmp_path, attn_implementation="eager")
    ids = tokens(eager)
    torch.testing.assert_close(again(ids).logits, eager(ids).logits)


@torch.no_grad()
def test_the_description_is_the_configs():
    _, ours = replaced()
    branch = {"norms": "rms", "weighted": False, "pool": "mean", "norm_after_pool": True, "tail": True}
    expected = Indexer(16, 16, 3, rope=Rope(8), block_size=2, **branch)
    assert [module.layer.select for module in choosing(ours)] == [expected] * 2
    assert [layout.index_dim for layout in paged(ours).kv.layouts] == [16, 16]


@torch.no_grad()
def test_beams():
    """They reorder keys, index keys, positions and the states of recurrent layers."""
    eager, ours = replaced()
    ids, mask = tokens(eager, 2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    options = {"num_beams": 3, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    theirs = eager.generate(ids, **options)
    for given in ({}, {CACHE: hf.PagedCache(ours, pages=96, page_size=4, max_sequences=12)}):
        assert torch.equal(ours.generate(ids, **options, **given), theirs)


@torch.no_grad()
def test_pages_take_back_tokens_and_failed_steps():
    """Of a model without recurrent layers; the positions that the model keeps go back as well."""
    fields = {"layer_types": ["indexed_attention"] * 2, "num_hidden_layers": 2, "ple_layer_ids": None}
    eager, ours = replaced(**fields)
    ids, cache = tokens(eager, 2, 20), paged(ours)
    expected = eager(ids).logits
    ours(ids[:, :12], **{CACHE: cache})
    broken = ours.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours(ids[:, :3], **{CACHE: cache})
    broken.remove()
    cache.crop(-2)
    agree(ours(ids[:, 10:19], **{CACHE: cache}).logits, expected[:, 10:19])
    cache.batch_repeat_interleave(2)
    again = ours(ids[:, 19:].repeat_interleave(2, 0), **{CACHE: cache}).logits
    agree(again, expected[:, 19:].repeat_interleave(2, 0))
    cache.reset()
    agree(ours(ids, **{CACHE: cache}).logits, expected)


@torch.no_grad()
def test_a_static_cache_in_a_compiled_step():
    torch._dynamo.reset()  # of other models' steps, which count as recompiles
    eager, ours = replaced(**ONE_LAYER)
    ids, mask = tokens(eager, 3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :4], mask[1, 5] = 0, 0
    options = GREEDY | {"attention_mask": mask, "max_new_tokens": 6, "output_logits": False}
    theirs = eager.generate(ids, **options).sequences
    ours.forward = torch.compile(ours.forward, fullgraph=True, backend="eager")
    assert torch.equal(ours.generate(ids, **options, cache_implementation="static").sequences, theirs)


@pytest.mark.parametrize("way", ["attention", "layers"])
@torch.no_grad()
def test_compiled_steps_of_one_token(way):
    torch._dynamo.reset()
    eager, ours = replaced(way, **ONE_LAYER)
    ids, cache = tokens(eager, 2, 12), StaticCache(config=ours.config, max_cache_len=32)
    mask, expected = torch.ones(2, 12, dtype=torch.long), eager(ids).logits
    ours(ids[:, :9], attention_mask=mask[:, :9], **{CACHE: cache})
    step = torch.compile(ours.forward, backend="eager")
    for n in range(9, 12):
        given = {"attention_mask": mask[:, : n + 1], CACHE: cache}
        agree(step(ids[:, n : n + 1], **given).logits, expected[:, n : n + 1])


@torch.no_grad()
def test_a_layer_by_itself():
    """It counts tokens from the start, and refuses positions on several axes, which means do not have."""
    eager, _ = replaced()
    module, x = eager.model.layers[1].self_attn, torch.randn(2, 19, 32)
    layer = hf.from_config(eager.config, 1, weights=module.state_dict())
    positions = torch.arange(19).expand(3, 2, -1)
    hidden = torch.full((19, 19), torch.finfo(x.dtype).min).triu(1).expand(2, 1, -1, -1)
    agree(layer(x), module(x, eager.model.rotary_emb(x, positions), attention_mask=hidden)[0])
    assert layer.index_loss(x).isfinite()
    for given in ({"positions": positions}, {"angles": layer.rope.angles(positions)}):
        with pytest.raises(NotImplementedError, match="positions: expected neither positions nor angles"):
            layer(x, **given)
    with pytest.raises(NotImplementedError, match=r"layer_types: expected .* got 'linear_attention'"):
        hf.from_config(eager.config, 0)


@torch.no_grad()
def test_masks_of_rows_are_enough(monkeypatch):
    _, ours = replaced()
    ids, mask = tokens(ours, 2), torch.ones(2, 23, dtype=torch.long)
    forward, dims = ReplacedMeansAttention.forward, []

    def seen(self, *args, **given):
        dims.append(given["attention_mask"].dim())
        return forward(self, *args, **given)

    monkeypatch.setattr(ReplacedMeansAttention, "forward", seen)
    ours(ids)
    mask[0, :4] = 0
    ours(ids, attention_mask=mask)
    assert dims == [2] * 4


def test_copies_are_their_own():
    _, ours = replaced()
    again, ids = copy.deepcopy(ours), tokens(ours)
    with torch.no_grad():
        choosing(again)[0].layer.indexer.q_proj.weight.neg_()
        assert not torch.allclose(again(ids).logits, ours(ids).logits)


@torch.no_grad()
def test_a_text_model_beside_a_vision_encoder():
    torch.manual_seed(0)
    eager = small(KIND).eval()
    ours = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    hf.replace(ours)
    ids = tokens(eager, 2, 12)
    options = GREEDY | {"output_logits": False}
    theirs = eager.generate(ids, **options).sequences
    assert torch.equal(ours.generate(ids, **options, **{CACHE: paged(ours)}).sequences, theirs)
