"""Models of transformers on a GPU: bf16 against their own attention, and the same tokens from every cache."""

import copy

import pytest
import torch
from families import CACHE, DECODERS

from attnlib.integrations import transformers as hf
from tests.integrations.test_block_families import of_way
from tests.integrations.test_transformers import WAYS, both, tokens

pytestmark = pytest.mark.gpu
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}


def pair_of(family: str, way: str):
    eager, ours = (model.cuda() for model in both(family, way))
    return eager, hf.absorb(ours) if way == "attention" and hasattr(ours.config, "kv_lora_rank") else ours


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_half_precision_is_no_worse_than_theirs(family, way):
    """Against fp32 on the CPU."""
    eager, ours = pair_of(family, way)
    if any("experts" in name for name, _ in eager.named_parameters()):
        pytest.skip("a token that goes to another expert hides what attention loses")
    ids = tokens(eager, 6)
    exact = copy.deepcopy(eager).cpu()(ids).logits.double()
    theirs, mine = ((x.bfloat16()(ids.cuda()).logits.double().cpu() - exact).norm() for x in (eager, ours))
    assert mine <= 1.1 * theirs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [*DECODERS, "qwen4_exp_text"])
@torch.no_grad()
def test_every_cache_gives_the_same_tokens(family, way):
    """Of a batch that is padded on the left, in fp32."""
    eager, ours = pair_of(family, way)
    ids, mask = tokens(eager, 3, 12).cuda(), torch.ones(3, 12, dtype=torch.long, device="cuda")
    mask[0, :4], mask[1, :9] = 0, 0
    theirs = eager.generate(ids, attention_mask=mask, **OPTIONS)
    pages = hf.PagedCache(ours, pages=64, page_size=16, max_sequences=4)
    for cache in (
        {},
        {"cache_implementation": "static", "disable_compile": True},
        {CACHE: pages},
    ):
        assert torch.equal(ours.generate(ids, attention_mask=mask, **OPTIONS, **cache), theirs), list(cache)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_every_cache_gives_the_same_tokens_of_chosen_blocks(way):
    """In fp32; replaced layers read index keys in the pages."""
    eager, ours = (model.cuda() for model in of_way(way))
    ids = tokens(eager, 3, 30).cuda()
    theirs, pages = (
        eager.generate(ids, **OPTIONS),
        hf.PagedCache(ours, pages=64, page_size=16, max_sequences=4),
    )
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}, {CACHE: pages}):
        assert torch.equal(ours.generate(ids, **OPTIONS, **cache), theirs), list(cache)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_gradients(family):
    """Of a replaced model, in fp32."""
    eager, ours = pair_of(family, "layers")
    ids = tokens(eager).cuda()
    losses = [model(ids, labels=ids, use_cache=False).loss for model in (ours, eager)]
    grads = [
        torch.autograd.grad(x, m.get_input_embeddings().weight)
        for x, m in zip(losses, (ours, eager), strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-3)
