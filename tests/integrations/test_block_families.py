"""A family whose layers choose blocks of keys for each KV head: the text model of MiniMax-M3."""

import copy
from types import SimpleNamespace

import pytest
import torch
from families import BLOCKED, CACHE, SIZES, YARN, lively
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, StaticCache

from attnlib import CAUSAL, GroupedQueryAttention, attention, masks, packing
from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers.attention import attention_forward
from attnlib.integrations.transformers.selecting import ReplacedSelectingGroupedAttention
from tests.integrations.test_selecting_families import paged
from tests.integrations.test_transformers import GREEDY, WAYS, agree, agree_in_gradients, tokens

hf.register()

FAMILY = "minimax_m3_vl_text"
SIZE, TOP = BLOCKED["index_block_size"], BLOCKED["index_topk_blocks"]
KINDS = ("minimax_m3_sparse", "full_attention", "minimax_m3_sparse")
FIELDS = SIZES | BLOCKED | {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]}


def config_with(**fields):
    return CONFIG_MAPPING[FAMILY](**FIELDS | {"layer_types": list(KINDS)} | fields)


def of_way(way: str, **fields):
    """A model on eager attention, and one that calls attnlib's attention, or has layers of attnlib."""
    torch.manual_seed(0)
    eager = lively(AutoModelForCausalLM.from_config(config_with(**fields)).float()).eval()
    ours = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("attnlib")
    return eager, hf.replace(ours) if way == "layers" else ours


@pytest.mark.parametrize("tokens_of_prompt", [1, SIZE, TOP * SIZE, TOP * SIZE + 1, 42])
@torch.no_grad()
def test_prompts_shorter_and_longer_than_a_list(tokens_of_prompt):
    eager, ours = of_way("layers")
    ids = tokens(eager, 2, tokens_of_prompt)
    expected = eager(ids).logits
    agree(ours(ids).logits, expected)
    for layer in ours.model.layers:  # dense attention would compute something else
        if layer.self_attn.layer.indexer is not None:
            layer.self_attn.layer.indexer.q_proj.weight.neg_()
    is_same = torch.allclose(ours(ids).logits, expected, atol=1e-3)
    assert is_same == (tokens_of_prompt <= TOP * SIZE)


@pytest.mark.parametrize(
    "fields",
    [
        {"index_local_blocks": 2},
        {"index_local_blocks": 0},
        {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
        {"num_key_value_heads": 4, "index_n_heads": 4, "index_head_dim": 24},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_other_branches(way, fields):
    eager, ours = of_way(way, **fields)
    ids = tokens(eager, 2, 42)
    agree(ours(ids).logits, eager(ids).logits)


@torch.no_grad()
def test_chosen_blocks_are_equal(monkeypatch):
    """In a prompt, and in steps after it."""
    eager, ours = of_way("layers")
    mine, theirs, choice = [], [], ReplacedSelectingGroupedAttention._choice
    for layer in eager.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(lambda *given: theirs.append(given[-1]))

    def kept(self, *given):
        mine.append(choice(self, *given))
        return mine[-1]

    monkeypatch.setattr(ReplacedSelectingGroupedAttention, "_choice", kept)
    ids = tokens(eager, 2, 42)
    for model in (eager, ours):
        cache = DynamicCache(config=model.config)
        for part in ids.split([30, 1, 11], 1):
            model(part, **{CACHE: cache})
    assert len(mine) == len(theirs) == 6
    for ours_of_step, lists in zip(mine, theirs, strict=True):
        assert torch.equal(ours_of_step.sort(-1).values, lists.transpose(1, 2).int().sort(-1).values)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", ["dynamic", "static", "pages"])
@torch.no_grad()
def test_generated_tokens(cache, way):
    eager, ours = of_way(way)
    ids = tokens(eager, 3, 10)
    given = {CACHE: paged(ours)} if cache == "pages" else {"cache_implementation": cache}
    theirs, mine = eager.generate(ids, **GREEDY), ours.generate(ids, **GREEDY, **given)
    assert torch.equal(mine.sequences, theirs.sequences)
    agree(torch.stack(mine.logits), torch.stack(theirs.logits))


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_several_tokens_after_a_prompt(way):
    """The first steps are dense, and store index keys all the same."""
    eager, ours = of_way(way)
    ids = tokens(eager, 2, 40)
    caches = paged(ours), DynamicCache(config=ours.config), StaticCache(config=ours.config, max_cache_len=48)
    theirs = DynamicCache(config=eager.config)
    for begin, end in ((0, 3), (3, 5), (5, 25), (25, 26), (26, 40)):
        expected = eager(ids[:, begin:end], **{CACHE: theirs}).logits
        for cache in caches:
            agree(ours(ids[:, begin:end], **{CACHE: cache}).logits, expected)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_beams_and_an_assistant(way):
    eager, ours = of_way(way)
    assistant, ids = copy.deepcopy(ours), tokens(eager, 1, 15)
    for x in assistant.parameters():
        x.add_(0.02 * torch.randn_like(x))
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": 60}
    for added in ({"num_beams": 3}, {"assistant_model": assistant}):
        for given in ({}, {CACHE: paged(ours)}):
            theirs = eager.generate(ids, **options, **added)
            assert torch.equal(ours.generate(ids, **options, **added, **given), theirs)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_padding_on_the_right(way):
    """With positions of the tokens, in which padding has none."""
    eager, ours = of_way(way)
    ids, mask = tokens(eager, 3, 42), torch.ones(3, 42, dtype=torch.long)
    mask[0, -5:], mask[1, -31:] = 0, 0
    for positions in (None, mask.cumsum(1) - 1):
        given = {"attention_mask": mask, "position_ids": positions}
        agree(ours(ids, **given).logits, eager(ids, **given).logits, mask.bool())


def padded_left(mask):
    mask[0, :5] = 0


def holed(mask):
    mask[1, 7] = 0


@pytest.mark.parametrize("change", [padded_left, holed])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_other_padding_is_refused_unless_there_is_one_block(way, change):
    eager, ours = of_way(way, index_block_size=16)
    mask = torch.ones(2, 17, dtype=torch.long)
    change(mask)
    ids, shown = tokens(eager, 2, 17), mask[:, :16]
    positions = (shown.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": shown, "position_ids": positions}
    agree(ours(ids[:, :16], **given).logits, eager(ids[:, :16], **given).logits, shown.bool())
    with pytest.raises(NotImplementedError, match="attention_mask: expected padding on the right only"):
        ours(ids, attention_mask=mask)
    cache = paged(ours)
    ours(ids[:, :16], attention_mask=shown, **{CACHE: cache})
    with pytest.raises(NotImplementedError, match="attention_mask: expected padding on the right only"):
        ours(ids[:, 16:], attention_mask=mask, **{CACHE: cache})
    assert cache.length == 16


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_packed_sequences_and_trees_are_refused(way):
    _, ours = of_way(way)
    ids, positions = tokens(ours, 1), torch.cat([torch.arange(n) for n in (3, 12, 8)])[None]
    with pytest.raises(NotImplementedError, match="attention_mask: expected padding on the right only"):
        ours(ids, position_ids=positions, use_cache=False)
    tree = packing.tree([ids[0].tolist(), [*ids[0, :5].tolist(), 7, 8, 9]])
    with pytest.raises(NotImplementedError, match="attention_mask: expected padding on the right only"):
        ours(**hf.tree_inputs(tree))


@torch.no_grad()
def test_other_positions_are_refused():
    eager, ours = of_way("layers")
    ids = tokens(eager, 1)
    for positions in (torch.arange(23) + 1, torch.arange(23) // 2):
        with pytest.raises(NotImplementedError, match="position_ids: expected 0, 1, 2"):
            ours(ids, position_ids=positions[None])
    with pytest.raises(NotImplementedError, match="position_ids: expected 0, 1, 2"):
        ours(ids[:, 12:], position_ids=torch.arange(11)[None], **{CACHE: filled(ours, ids[:, :12])})


def filled(model, ids) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache})
    return cache


@pytest.mark.parametrize("way", WAYS)
def test_gradients(way):
    eager, ours = of_way(way, num_hidden_layers=2, layer_types=[KINDS[0]] * 2, mlp_layer_types=["dense"] * 2)
    agree_in_gradients(ours, eager)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_static_cache_in_a_compiled_step(way):
    torch._dynamo.reset()  # of other models' steps, which count as recompiles
    eager, ours = of_way(way)
    ids, options = tokens(eager, 3, 12), GREEDY | {"max_new_tokens": 6, "output_logits": False}
    theirs = eager.generate(ids, **options).sequences
    ours.forward = torch.compile(ours.forward, fullgraph=True, backend="eager")
    assert torch.equal(ours.generate(ids, **options, cache_implementation="static").sequences, theirs)


@torch.no_grad()
def test_a_layer_alone_chooses_the_same_blocks():
    eager, _ = of_way("attention")
    x, compared = torch.randn(2, 42, 32), 0
    embeddings = eager.model.rotary_emb(x, torch.arange(42)[None])
    for index, kind in enumerate(KINDS):
        module = eager.model.layers[index].self_attn
        layer = hf.from_config(eager.config, index, weights=module.state_dict())
        assert type(layer) is GroupedQueryAttention
        assert (layer.indexer is not None) == (kind == "minimax_m3_sparse")
        mask = torch.zeros(1, 1, 42, 42).masked_fill(torch.ones(42, 42).tril() == 0, -torch.inf)
        agree(layer(x), module(x, embeddings, mask)[0])
        compared += 1
    assert compared == 3


@torch.no_grad()
def test_pages_hold_index_keys_of_layers_that_choose():
    _, ours = of_way("layers")
    assert [layout.index_dim for layout in paged(ours).kv.layouts] == [16, 0, 16]


@torch.no_grad()
def test_state_dicts_keep_transformers_names(tmp_path):
    eager, ours = of_way("layers")
    assert ours.state_dict().keys() == eager.state_dict().keys()
    ours.save_pretrained(tmp_path)
    again, ids = type(eager).from_pretrained(tmp_path, attn_implementation="eager"), tokens(eager)
    torch.testing.assert_close(again(ids).logits, eager(ids).logits)


@torch.no_grad()
def test_weights_of_chosen_blocks():
    eager, ours = of_way("attention")
    ids = tokens(eager)
    for mine, theirs in zip(*(m(ids, output_attentions=True).attentions for m in (ours, eager)), strict=True):
        agree(mine, theirs)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"index_n_heads": 4}, ValueError, "select: expected num_kv_heads=2 heads, got per='group' with 4"),
        ({"index_local_blocks": 4}, ValueError, r"indexer.top: expected at least local \+ first = 4 entries"),
        ({"layer_types": ["indexed_attention"] * 3}, NotImplementedError, "full attention or minimax m3 spa"),
        ({"index_block_size": 1}, ValueError, "indexer.block_size: expected at least 2 keys with pool='max'"),
        ({"index_gate": 4}, NotImplementedError, "config: index_gate=4 is unknown for minimax_m3_vl_text"),
    ],
)
def test_other_configs_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        hf.from_config(config_with(**fields), device="meta")


@torch.no_grad()
def test_shards_of_heads_are_refused():
    _, ours = of_way("layers")
    module, q = ours.model.layers[0].self_attn, torch.randn(1, 2, 19, 16)
    lists = torch.zeros(1, 19, 2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"select: expected all 4 query heads with a list for .* got 2"):
        module._attend(q, q, q, None, {"lists": lists})


# Lists of blocks, as a model's own layer passes them


def layer_with(size) -> nn.Module:
    module = nn.Module()
    module.indexer, module.is_causal = SimpleNamespace(block_size=size), True
    return module


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lists", [1, 2, 4])
def test_lists_for_all_heads_for_kv_heads_and_for_heads(lists, dtype):
    q, (k, v) = torch.randn(2, 4, 19, 16), torch.randn(2, 2, 2, 19, 16)
    blocks = torch.stack([torch.randperm(5)[:3] for _ in range(2 * lists * 19)]).view(2, lists, 19, 3)
    blocks = torch.where(torch.rand(blocks.shape) < 0.2, -1, blocks).to(dtype)
    out, _ = attention_forward(layer_with(4), q, k, v, None, block_indices=blocks)
    mask = CAUSAL & masks.selected(blocks.transpose(1, 2).int(), 4)
    agree(out, attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=mask))


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((1, 2, 3), torch.int32, 4),
        ((1, 3, 3, 2), torch.int32, 4),
        ((1, 2, 4, 2), torch.int32, 4),
        ((2, 2, 3, 2), torch.int32, 4),
        ((1, 2, 3, 2), torch.float32, 4),
        ((1, 2, 3, 2), torch.int32, None),
    ],
)
def test_block_indices_that_are_no_lists_are_refused(shape, dtype, size):
    q, lists = torch.randn(1, 4, 3, 8), torch.zeros(shape, dtype=dtype)
    with pytest.raises(
        NotImplementedError, match=r"block_indices: expected integer lists of blocks \[b, 1 or heads, s, n\]"
    ):
        attention_forward(layer_with(size), q, q[:, :2], q[:, :2], None, block_indices=lists)
    offsets, lists = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(1, 2, 3, 2, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q: expected None with lists of chosen"):
        attention_forward(
            layer_with(4), q, q[:, :2], q[:, :2], None, block_indices=lists, cu_seq_lens_q=offsets
        )
