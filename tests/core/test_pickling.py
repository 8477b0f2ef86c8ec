"""Masks, scores and layers with functions of indices, copied and pickled: by program and tensors, not the
function.
"""

import copy
import io
import pickle

import pytest
import torch
import torch.multiprocessing as mp
from function_cases import MASK_NAMES, functions, narrow, tensors

from attnlib import (
    CAUSAL,
    FULL,
    QUERY_OFFSET,
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    Rope,
    attention_with_lse,
    mask_mod,
    masks,
    score_mod,
)


def saved(x):
    """Through a file of torch.save."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # modules and masks are no weights


WAYS = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy, "torch.save": saved}


def attend(mask, score):
    torch.manual_seed(1)
    leaves = narrow(*tensors())
    out, lse = attention_with_lse(*leaves, mask=mask, score=score)
    return out, lse, *torch.autograd.grad(out.sin().sum(), leaves)


def assert_same_bits(ours, theirs):
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask_name", MASK_NAMES)
def test_masks_and_scores(mask_name, way):
    known, scores = functions()
    mask = known[mask_name]
    for score in (None, *(score for score, _ in scores.values())):
        again = [WAYS[way](x) for x in (mask, score)]
        assert_same_bits(attend(*again), attend(mask, score))
        assert mask.program == again[0].program
        assert {*map(id, again[0].tensors)}.isdisjoint(map(id, mask.tensors))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_known_of_a_mask_stays_known(way):
    """Its tiles, its sections and what a cache keeps; not that tiles were those of other numbers."""
    of = masks.documents(torch.zeros(2, 60, dtype=torch.int32)).block_mask(2, 4, 37, 60)
    again = WAYS[way](of)
    assert torch.equal(again.tiles, of.tiles)
    attend(again, None)
    again.tensors[0].add_(1)
    with pytest.raises(ValueError, match="has changed since block_mask"):
        attend(again, None)
    of.tensors[0].add_(1)
    with pytest.raises(ValueError, match="has changed since block_mask"):
        attend(WAYS[way](of), None)
    packed = WAYS[way](masks.documents_of(torch.tensor([0, 9, 20]), 30))
    assert packed.sections.tolist() == [0, 9, 20, 30]
    sinks = masks.attention_sinks(2, 9)
    assert WAYS[way](sinks).kept == sinks.kept
    assert WAYS[way](QUERY_OFFSET) is QUERY_OFFSET


def layers():
    torch.manual_seed(0)
    mask = CAUSAL & mask_mod(
        lambda b, h, i, j, d: d[b, i] == d[b, j], torch.randint(0, 3, (2, 12)).sort().values
    )
    bias = torch.nn.Parameter(torch.randn(4, 17))
    score = score_mod(lambda s, b, h, i, j, bias: s + bias[h, (i - j).clamp(-8, 8) + 8], bias)
    sizes = {
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "q_lora_rank": None,
    }
    return {
        "grouped": GroupedQueryAttention(24, 4, num_kv_heads=2, mask=mask, score=score, rope=Rope(4)),
        "latent": MultiHeadLatentAttention(24, num_heads=4, mask=mask, score=score, rope=Rope(4), **sizes),
        "a band": GroupedQueryAttention(24, 4, mask=FULL, score=score),
    }


def run(layer):
    x = torch.linspace(-1, 1, 2 * 12 * 24).sin().view(2, 12, 24)
    out = layer(x)
    return out, *torch.autograd.grad(out.sin().sum(), list(layer.parameters()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", layers())
def test_layers(name, way):
    layer = layers()[name]
    again = WAYS[way](layer)
    assert_same_bits(run(again), run(layer))
    assert [*again.state_dict()] == [*layer.state_dict()]
    assert "score.bias" in dict(again.named_parameters())  # by the name that the function has for it
    with torch.no_grad():
        again.score.bias.zero_()
    assert not torch.equal(run(again)[0], run(layer)[0])  # nothing is shared


def _run_there(layer, results):
    results.put([x.detach().numpy() for x in run(layer)])


def test_a_layer_goes_to_another_process():
    """A process that never saw its functions."""
    layer = layers()["grouped"]
    context = mp.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_run_there, args=(layer, results))
    process.start()
    found = results.get(timeout=120)
    process.join()
    assert_same_bits(map(torch.from_numpy, found), [x.detach() for x in run(layer)])
