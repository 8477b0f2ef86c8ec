"""Families whose layers choose their keys: DeepSeek-V3.2, GLM-5, whose layers share choices, and Mistral
Large 4, whose layers share latents, too.
"""

import copy

import pytest
import torch
from families import CACHE, INDEXED, RECENT, SIZES, small
from torch import nn
from transformers import CONFIG_MAPPING, DynamicCache, StaticCache

from attnlib import packing
from attnlib.indexing import IndexBranch
from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers.attention import attention_forward
from attnlib.integrations.transformers.selecting import ReplacedSelectingAttention, visible_of
from tests.integrations.test_transformers import (
    GREEDY,
    agree,
    agree_in_generation,
    agree_in_gradients,
    both,
    tokens,
)

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "mistral_large4_text")
TOP = INDEXED["index_topk"]


def replaced(family: str):
    """A model on eager attention, and one with layers of attnlib."""
    return both(family, "layers")


def of_way(family: str, way: str):
    """A model on eager attention, and one that absorbs, or has layers of attnlib."""
    if way == "layers":
        return replaced(family)
    eager, ours = both(family)
    return eager, hf.absorb(ours)


def branches_of(model) -> list[IndexBranch]:
    return [module for module in model.modules() if isinstance(module, IndexBranch)]


def paged(model) -> hf.PagedCache:
    return hf.PagedCache(model, pages=96, page_size=4, max_sequences=8)


@pytest.mark.parametrize("tokens_of_prompt", [1, TOP - 1, TOP, TOP + 1, 40])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_prompts_shorter_and_longer_than_a_list(family, tokens_of_prompt):
    eager, ours = replaced(family)
    ids = tokens(eager, 2, tokens_of_prompt)
    expected = eager(ids).logits
    agree(ours(ids).logits, expected)
    for branch in branches_of(ours):  # dense attention would compute something else
        branch.q_proj.weight.neg_()
    is_same = torch.allclose(ours(ids).logits, expected, atol=1e-3)
    assert is_same == (tokens_of_prompt <= TOP)


@pytest.mark.parametrize("way", ["absorbed", "layers"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "pages"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_generated_tokens(family, cache, way):
    """Of rows with padding on the left, some of which see fewer keys than a list has entries."""
    eager, ours = of_way(family, way)
    given = {CACHE: paged(ours)} if cache == "pages" else {"cache_implementation": cache}
    agree_in_generation(ours, eager, given)


@pytest.mark.parametrize("way", ["absorbed", "layers"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_several_tokens_after_a_prompt(family, way):
    """The first steps are dense, and store index keys all the same."""
    eager, ours = of_way(family, way)
    ids, caches = tokens(eager, 2, 30), (paged(ours), DynamicCache(config=ours.config))
    theirs = DynamicCache(config=eager.config)
    for begin, end in ((0, 3), (3, 5), (5, 20), (20, 21), (21, 30)):
        expected = eager(ids[:, begin:end], **{CACHE: theirs}).logits
        for cache in caches:
            agree(ours(ids[:, begin:end], **{CACHE: cache}).logits, expected)


@pytest.mark.parametrize("way", ["attention", "layers"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_holes_and_packed_sequences(family, way):
    eager, ours = both(family, way)
    ids, mask = tokens(eager, 3), torch.ones(3, 23, dtype=torch.long)
    mask[0, 3:7], mask[1, 9], mask[2, -9:] = 0, 0, 0
    agree(*(model(ids, attention_mask=mask).logits for model in (ours, eager)), mask.bool())
    positions = torch.cat([torch.arange(n) for n in (3, 12, 8)]).expand(3, -1)
    agree(*(model(ids, position_ids=positions, use_cache=False).logits for model in (ours, eager)))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family):
    eager, ours = replaced(family)
    agree_in_gradients(ours, eager)


@torch.no_grad()
def test_pages_hold_index_keys_of_layers_that_choose():
    _, ours = replaced("glm_moe_dsa")
    assert [layout.index_dim for layout in paged(ours).kv.layouts] == [16, 0, 16]


@torch.no_grad()
def test_a_shared_choice_of_layers_alone():
    torch.manual_seed(0)
    config = small("glm_moe_dsa").config
    first, second = (hf.from_config(config, index) for index in (0, 1))
    x = torch.randn(2, 9, 32)
    assert second.select is None
    assert first.choose(x).indices.shape == (2, 9, 1, TOP)
    assert not torch.allclose(second(x, selected=first.choose(x)), second(x))


@torch.no_grad()
def test_state_dicts_keep_transformers_names(tmp_path):
    eager, ours = replaced("deepseek_v32")
    ours.save_pretrained(tmp_path)
    again = type(eager).from_pretrained(tmp_path, attn_implementation="eager")
    ids = tokens(eager)
    torch.testing.assert_close(again(ids).logits, eager(ids).logits)


@pytest.mark.parametrize("way", ["absorbed", "layers"])
@torch.no_grad()
def test_terms_beside_up_projections_are_kept_or_refused(way):
    eager, ours = of_way("deepseek_v32", way)
    for model in (eager, ours):
        for layer in model.model.layers:
            owner = getattr(layer.self_attn, "layer", layer.self_attn)
            owner.kv_b_proj.register_forward_hook(lambda module, given, out: out * 1.5)
    ids = tokens(eager)
    agree(ours(ids).logits, eager(ids).logits)
    cache = paged(ours)
    ours(ids, **{CACHE: cache})
    with pytest.raises(NotImplementedError, match="kv_b_proj: expected a plain nn"):
        ours(ids[:, :1], **{CACHE: cache})


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "glm_moe_dsa",
            {"indexer_types": ["shared", "full", "full"]},
            "indexer_types: expected 'full' or",
        ),
        (
            "deepseek_v32",
            {"layer_types": ["full_attention"] * 2},
            "layer_types: expected indexed attention",
        ),
        ("deepseek_v32", {"index_block": 4}, "config: index_block=4 is unknown for deepseek_v32"),
    ],
)
def test_other_configs_are_refused(family, fields, message):
    config = CONFIG_MAPPING[family](**SIZES | RECENT[family] | fields)
    with pytest.raises(NotImplementedError, match=message):
        hf.from_config(config, device="meta")


@torch.no_grad()
def test_other_masks_are_refused():
    _, ours = replaced("deepseek_v32")
    ids = tokens(ours, 1, 9)
    shown = torch.ones(1, 1, 9, 9).tril()
    added = torch.zeros(1, 1, 9, 9).masked_fill(shown == 0, torch.finfo(torch.float32).min)
    agree(ours(ids, attention_mask=added).logits, ours(ids).logits)
    with pytest.raises(NotImplementedError, match="attention_mask: expected one that hides keys or not"):
        ours(ids, attention_mask=added + 0.5 * shown)
    tree = packing.tree([ids[0].tolist(), [*ids[0, :5].tolist(), 7, 8, 9]])
    with pytest.raises(NotImplementedError, match="attention_mask: expected"):
        ours(**hf.tree_inputs(tree))


def test_keys_that_masks_show():
    holed = torch.tensor([[True, False, True, True]])
    causal = torch.ones(2, 4, dtype=torch.bool).tril(2)
    assert torch.equal(visible_of(holed, 2), (causal & holed)[None])
    assert torch.equal(visible_of(holed, 1), holed[:, None])
    numbers = torch.tensor([[1, 1, 2, 2]], dtype=torch.int32)
    expected = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]], dtype=torch.bool)
    assert torch.equal(visible_of(numbers, 4), expected)


@pytest.mark.parametrize(
    "indices", [torch.ones(1, 3, 2), torch.ones(3, 2).int(), torch.ones(1, 4, 2).int()], ids=str
)
def test_indices_that_are_no_lists_are_refused(indices):
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=r"indices: expected int32 lists of keys \[b, s, n\]"):
        attention_forward(nn.Module(), q, q, q, None, indices=indices)
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    lists = torch.zeros(1, 3, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q: expected None with lists of chosen"):
        attention_forward(nn.Module(), q, q, q, None, indices=lists, cu_seq_lens_q=offsets)


@pytest.mark.parametrize("way", ["attention", "layers"])
@torch.no_grad()
def test_offsets_are_refused(way):
    """With a cache, transformers makes no mask of them, so that the index branch would not know them."""
    eager, ours = both("deepseek_v32", way)
    ids, positions = tokens(eager, 1), torch.cat([torch.arange(n) for n in (3, 12, 8)])[None]
    offsets = torch.tensor([0, 3, 15, 23], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 12, "max_length_k": 12}
    for use_cache in (False, True):
        with pytest.raises(NotImplementedError, match="cu_seq_lens_q: expected None with lists of chosen"):
            ours(ids, position_ids=positions, use_cache=use_cache, **packed)


def test_copies_are_their_own():
    _, ours = replaced("deepseek_v32")
    again, ids = copy.deepcopy(ours), tokens(ours)
    with torch.no_grad():
        again.model.layers[0].self_attn.layer.indexer.q_proj.weight.neg_()
        assert not torch.allclose(again(ids).logits, ours(ids).logits)


@torch.no_grad()
def test_replaced_layers_need_no_mask_of_queries_and_keys(monkeypatch):
    """A model with the same config that has its own layers still gets the mask that its indexer reads."""
    eager, ours = replaced("deepseek_v32")
    own = type(eager)(ours.config).eval()
    own.load_state_dict(eager.state_dict())
    ids, mask = tokens(eager, 2), torch.ones(2, 23, dtype=torch.long)
    for padding in (0, 4, 18):
        mask[0, :padding] = 0
        expected = eager(ids, attention_mask=mask).logits
        agree(own(ids, attention_mask=mask).logits, expected, mask.bool())
        agree(ours(ids, attention_mask=mask).logits, expected, mask.bool())
    forward, dims = ReplacedSelectingAttention.forward, []

    def seen(self, **given):
        dims.append(given["attention_mask"].dim())
        return forward(self, **given)

    monkeypatch.setattr(ReplacedSelectingAttention, "forward", seen)
    ours(ids, attention_mask=mask)
    ours(ids)
    assert dims == [2] * 4


@pytest.mark.parametrize("way", ["absorbed", "layers"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_static_cache_in_a_compiled_step(family, way):
    torch._dynamo.reset()  # of other models' steps, which count as recompiles
    eager, ours = of_way(family, way)
    ids, mask = tokens(eager, 3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :4], mask[1, 5] = 0, 0
    options = GREEDY | {"attention_mask": mask, "max_new_tokens": 6, "output_logits": False}
    theirs = eager.generate(ids, **options).sequences
    ours.forward = torch.compile(ours.forward, fullgraph=True, backend="eager")
    assert torch.equal(ours.generate(ids, **options, cache_implementation="static").sequences, theirs)


@pytest.mark.parametrize("way", ["attnlib", "absorbed", "layers"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_steps_over_a_static_cache_without_a_mask(family, way):
    """The cache counts its tokens in a tensor, which grows before the indexer reads the mask."""
    eager, ours = both(family) if way == "attnlib" else of_way(family, way)
    ids, cache = tokens(eager, 2, 12), StaticCache(config=ours.config, max_cache_len=32)
    expected = eager(ids).logits
    for begin, end in ((0, 9), (9, 10), (10, 12)):
        agree(ours(ids[:, begin:end], **{CACHE: cache}).logits, expected[:, begin:end])


@pytest.mark.parametrize("way", ["attnlib", "absorbed", "layers"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_compiled_step_of_one_token(family, way):
    torch._dynamo.reset()
    eager, ours = both(family) if way == "attnlib" else of_way(family, way)
    ids, cache = tokens(eager, 2, 10), StaticCache(config=ours.config, max_cache_len=32)
    mask, expected = torch.ones(2, 10, dtype=torch.long), eager(ids).logits
    ours(ids[:, :9], attention_mask=mask[:, :9], **{CACHE: cache})
    step = torch.compile(ours.forward, backend="eager")
    agree(step(ids[:, 9:], attention_mask=mask, **{CACHE: cache}).logits, expected[:, 9:])


def test_masks_of_several_heads_are_refused():
    with pytest.raises(NotImplementedError, match=r"attention_mask: expected one mask for all heads"):
        visible_of(torch.zeros(2, 4, 3, 3), 3)
