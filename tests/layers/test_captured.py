"""Masks and scores by function in layers: their own tensors, a call's mask, and every way a layer attends."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    MultiHeadLatentAttention,
    Rope,
    attention,
    mask_mod,
    score_mod,
    sliding,
)
from attnlib.layers import latent_forms


def relative(score, b, h, i, j, bias, gain):
    return score * gain[0] + bias[h, (i - j).clamp(0, 8)]


def same_document(b, h, i, j, document):
    return document[b, i] == document[b, j]


def scored(heads=4):
    return score_mod(relative, nn.Parameter(torch.randn(heads, 9)), torch.tensor([1.5]))


def documents(b=2, t=40):
    return mask_mod(same_document, torch.randint(0, 3, (b, t)).sort().values.int())


def grouped(**options):
    return GroupedQueryAttention(32, 4, num_kv_heads=2, rope=Rope(8), score=scored(), **options)


def latent(**options):
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    return MultiHeadLatentAttention(32, 4, q_lora_rank=None, rope=Rope(4), score=scored(), **sizes, **options)


LAYERS = {"grouped": grouped, "latent": latent, "expanded": lambda **x: latent(form="expanded", **x)}
LAYERS["absorbed"] = lambda **x: latent(form="absorbed", **x)
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def test_what_a_score_reads_is_the_layers_own():
    layer = grouped(mask=CAUSAL)
    assert "score.bias" in dict(layer.named_parameters())
    assert "score.gain" in dict(layer.named_buffers())
    assert "score.bias" in layer.state_dict()
    layer(torch.randn(2, 9, 32)).sum().backward()
    assert layer.score.bias.grad.any()
    layer.double()
    assert layer(torch.randn(2, 9, 32).double()).dtype == torch.float64
    layer.reset_parameters()


def test_a_layer_attends_by_its_functions():
    layer, x, mask = grouped(mask=CAUSAL), torch.randn(2, 40, 32), documents()
    seen = []
    layer.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    layer(x, mask=mask)
    angles = layer.rope.angles(torch.arange(40))
    q, (k, v) = layer.query(x, angles), layer.key_value(x)
    from attnlib import rotate

    expected = attention(q, rotate(k, angles), v, mask=CAUSAL & mask, score=layer.score(), scale=layer.scale)
    torch.testing.assert_close(seen[0], expected.flatten(-2))


@layers
@pytest.mark.parametrize("page_size", [4, None])
@torch.no_grad()
def test_decoding_sees_what_training_sees(make, page_size, monkeypatch):
    monkeypatch.setattr(latent_forms, "CHUNK", 8)
    layer, x, mask = (
        make(mask=CAUSAL & documents()),
        torch.randn(2, 40, 32),
        mask_mod(lambda b, h, i, j: (i - j) % 5 != h),
    )
    options = {"page_size": page_size, "pages": 30} if page_size else {"max_length": 40}
    made = KVCache.paged if page_size else KVCache.contiguous
    cache = made([layer.kv_layout], max_sequences=2, **options)
    first, second = cache.admit(2)
    whole = layer(x, mask=mask)
    done = 0
    for count in (21, 1, 17, 1):
        part = slice(done, done := done + count)
        with cache.step(count) as (kv,):
            torch.testing.assert_close(layer(x[:, part], kv=kv, mask=mask), whole[:, part])
    cache.truncate(first, 10)
    cache.truncate(second, 30)
    with cache.step({first: 30, second: 1}) as (kv,):  # a prompt among single tokens
        packed = torch.cat((x[0, 10:40], x[1, 30:31]))
        expected = torch.cat((whole[0, 10:40], whole[1, 30:31]))
        torch.testing.assert_close(layer(packed, kv=kv, mask=mask), expected)


@layers
def test_packed_sequences_are_each_alone(make):
    layer, cu = make(mask=CAUSAL), torch.tensor([0, 13, 13, 40], dtype=torch.int32)
    x, mask = torch.randn(40, 32), mask_mod(lambda b, h, i, j: (b == 2) | (j % 3 != 0))
    out = layer(x, cu_seqlens=cu, mask=mask)
    for n, (start, stop) in enumerate(((0, 13), (13, 13), (13, 40))):
        alone = layer(x[None, start:stop], mask=mask_mod(lambda b, h, i, j, n=n: (n == 2) | (j % 3 != 0)))
        torch.testing.assert_close(out[start:stop], alone[0])


def test_a_window_within_a_function_is_kept():
    assert grouped(mask=sliding(7) & documents()).kv_layout.window == 7
    assert grouped(mask=documents()).kv_layout.window is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": documents}, "mask: expected a Mask"),
        ({"mask": CAUSAL, "score": relative}, "score: expected what score_mod"),
    ],
)
def test_what_is_no_function_is_refused(options, message):
    with pytest.raises(TypeError, match=message):
        GroupedQueryAttention(32, 4, **options)
    with pytest.raises(TypeError, match="mask: expected a Mask such as CAUSAL, FULL"):
        grouped(mask=FULL)(torch.randn(1, 3, 32), mask="causal")


def test_a_layer_with_functions_is_exported_copied_and_made_without_memory():
    layer, x = grouped(mask=CAUSAL & documents()), torch.randn(2, 40, 32)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))
    other = deepcopy(layer)
    other.score.bias.data.zero_()
    assert not torch.equal(other(x), layer(x))
    with torch.device("meta"):
        other = grouped(mask=CAUSAL)
    other.to_empty(device="cpu").load_state_dict(layer.state_dict())
    other.score.gain.fill_(1.5)
    other.mask = layer.mask
    other.mask_tensors = layer.mask_tensors
    torch.testing.assert_close(other(x), layer(x))
