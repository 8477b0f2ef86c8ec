"""Replaced layers whose index keys a kernel reads in the pages of a cache; torch stands in for the kernel."""

import pytest
import torch
from families import CACHE
from transformers import DynamicCache

from attnlib.indexing import scores
from tests.integrations import test_block_families as blocks
from tests.integrations.test_selecting_families import paged, replaced
from tests.integrations.test_transformers import agree, tokens


class Kernel:
    """What the kernel of index scores computes, and how often it has read pages."""

    read = 0

    def __call__(self, q, keys, weights, ends, starts, table, k_scale, scale, relu, by_head, pool, tokens):
        assert k_scale is None
        assert pool == 1
        if table is not None:
            self.read += 1
            keys = keys[table.long()].flatten(1, 2)[:, :tokens]
        products = torch.einsum("bshd,btd->bsht", q, keys) * scale
        products = products.relu() if relu else products
        products = products if weights is None else products * weights[..., None]
        found = products if by_head else products.sum(2, keepdim=True)
        hidden = torch.arange(tokens) >= ends[..., None]
        hidden = hidden if starts is None else hidden | (torch.arange(tokens) < starts[:, None, None])
        return found.masked_fill(hidden[:, :, None], -torch.inf)


@pytest.fixture
def kernel(monkeypatch):
    found = Kernel()
    monkeypatch.setattr(scores, "kernel", lambda *_: found)
    monkeypatch.setattr(scores, "pooled", lambda *_: 1)
    return found


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", blocks.FAMILY])
@torch.no_grad()
def test_index_keys_are_read_in_place(family, kernel):
    """By steps after a prompt, in layers that choose; a dense step reads none."""
    eager, ours = blocks.of_way("layers") if family == blocks.FAMILY else replaced(family)
    layers = sum(layer.self_attn.layer.select is not None for layer in ours.model.layers)
    ids, cache, theirs = tokens(eager, 2, 30), paged(ours), DynamicCache(config=eager.config)
    reads = []
    for begin, end in ((0, 3), (3, 5), (5, 20), (20, 21), (21, 30)):
        expected = eager(ids[:, begin:end], **{CACHE: theirs}).logits
        agree(ours(ids[:, begin:end], **{CACHE: cache}).logits, expected)
        reads.append(kernel.read)
    assert reads == [0, 0, layers, 2 * layers, 3 * layers]


@pytest.mark.parametrize("is_holed", [False, True])
@torch.no_grad()
def test_padding_is_not_chosen_in_place(is_holed, kernel):
    eager, ours = replaced("deepseek_v32")
    ids, mask = tokens(eager, 2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, 4 if is_holed else 0 : 7] = 0
    cache, theirs = paged(ours), DynamicCache(config=eager.config)
    for begin, end in ((0, 20), (20, 21), (21, 30)):
        given = {"attention_mask": mask[:, :end]}
        expected = eager(ids[:, begin:end], **given, **{CACHE: theirs}).logits
        agree(ours(ids[:, begin:end], **given, **{CACHE: cache}).logits, expected, mask[:, begin:end].bool())
    assert kernel.read == 4
