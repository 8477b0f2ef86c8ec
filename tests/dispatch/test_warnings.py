"""The warning for calls in another library's layout: where it comes, where it does not, and what it says."""

import warnings

import pytest
import torch

import attnlib.compat.flash_attn as flash_attn
from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    LayoutWarning,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    Rope,
    attention,
    attention_with_lse,
    mask_mod,
    sliding,
    varlen_attention,
)
from attnlib.compat.sdpa import scaled_dot_product_attention
from attnlib.convert import gqa_to_mla

FEW = torch.randn(1, 8, 64, 4), torch.randn(1, 2, 64, 4)  # SDPA's layout: 8 and 2 heads of 64 tokens
MANY = torch.randn(1, 3, 300, 4)


@pytest.mark.parametrize("call", [attention, attention_with_lse])
@pytest.mark.parametrize("mask", [CAUSAL, sliding(3), CAUSAL & mask_mod(lambda b, h, i, j: i != j)])
def test_fewer_keys_than_queries_under_a_bounded_mask(call, mask):
    q, k = FEW
    with pytest.warns(
        LayoutWarning, match=r"q: expected \[b, s, h, d\], got \(1, 8, 64, 4\).*8 queries for 2 keys"
    ):
        call(q, k, k, mask=mask)


def test_more_heads_than_models_have():
    with pytest.warns(LayoutWarning, match=r"which says 300 heads; .* pass q.transpose\(1, 2\).*compat.sdpa"):
        attention(MANY, MANY, MANY, mask=FULL)


@pytest.mark.parametrize("call", [attention, attention_with_lse])
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(3)])
@pytest.mark.parametrize("shape", [(2, 8, 128, 4), (1, 4, 8, 4), (3, 12, 256, 4)])
def test_as_many_heads_and_keys_as_heads_and_queries(call, mask, shape):
    """SDPA's layout without groups: 8 heads of 128 tokens look like 128 heads of 8 tokens."""
    q = torch.randn(shape)
    with pytest.warns(
        LayoutWarning, match=f"which says {shape[2]} heads and {shape[1]} tokens; .*q.transpose"
    ):
        call(q, q, q, mask=mask)


def test_it_names_the_line_that_calls():
    q, k = FEW
    with pytest.warns(LayoutWarning) as found:
        attention(q, k, k, mask=CAUSAL)
    assert found[0].filename == __file__


def test_it_comes_once_a_call_site_whatever_the_shapes():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default", LayoutWarning)
        for tokens in (64, 65, 66):
            q = torch.randn(1, 8, tokens, 4)
            attention(q, q, q, mask=FULL)
        attention(q, q, q, mask=FULL)
    assert len(found) == 2


@pytest.mark.parametrize("action", ["always", "error"])
def test_filters_are_obeyed(action):
    q, told = torch.randn(1, 8, 64, 4), 0
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action, LayoutWarning)
        for _ in range(3):
            try:
                attention(q, q, q, mask=FULL)
            except LayoutWarning:
                told += 1
    assert len(found) + told == 3


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", LayoutWarning)
        yield


@pytest.mark.usefixtures("silent")
def test_what_is_meant_is_silent():
    q, k = FEW
    attention(q, k, k, mask=FULL)  # each query sees all
    attention(k, q, q, mask=CAUSAL)
    x = torch.randn(3, 8, 4)
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    varlen_attention(x, x[:1], x[:1], cu_seqlens_q=offsets, cu_seqlens_k=offsets.clamp(max=1), mask=CAUSAL)


# [s, h, g] of public models, whose keys are their queries' own: prompts, and steps of a few drafted tokens.
USUAL = {
    "Llama 3 8B": (128, 32, 8), "Llama 3 70B, 8 tokens": (8, 64, 8), "Llama 2 7B": (128, 32, 32),
    "Qwen 3 0.6B, 5 tokens": (5, 16, 8), "Mistral 7B, 4 tokens": (4, 32, 8),
    "Gemma 3 4B, 6 tokens": (6, 8, 4), "gpt-oss, 16 tokens": (16, 64, 8), "Falcon 7B, 4 tokens": (4, 71, 1),
    "StarCoder, 9 tokens": (9, 48, 1), "GPT-2": (64, 12, 12), "GPT-2, 7 tokens": (7, 12, 12),
    "BERT": (512, 16, 16), "ViT-B/16": (197, 12, 12), "CLIP's text": (77, 8, 8), "Whisper": (1500, 20, 20),
    "DeepSeek-V3, expanded": (128, 128, 128), "a decoded token": (1, 32, 32),
    "three drafted tokens": (3, 32, 32), "OPT 125M, 16 tokens": (16, 12, 12), "T5 small": (32, 8, 8),
}  # fmt: skip


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("shape", USUAL)
@pytest.mark.parametrize("mask", [CAUSAL, FULL])
def test_usual_shapes_are_silent(shape, mask):
    s, h, g = USUAL[shape]
    q, k = torch.randn(1, s, h, 2), torch.randn(1, s, g, 2)
    attention(q, k, k, mask=mask)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("s", range(1, 10))
def test_grouped_calls_are_silent(s):
    q, k = torch.randn(1, s, 64, 2), torch.randn(1, s, 32, 2)
    attention(q, k, k, mask=CAUSAL)
    attention(q, k[:, :, :1], k[:, :, :1], mask=CAUSAL)


@pytest.mark.usefixtures("silent")
def test_callers_within_the_package_are_silent():
    """They know their layouts: a model of transformers gives the attention function a prompt of 4 tokens."""
    q = torch.randn(1, 4, 12, 2)
    known = {"__name__": "attnlib.planted", "attention": attention, "q": q, "mask": FULL}
    exec("attention(q, q, q, mask=mask)", known)
    layer = MultiHeadAttention(24, 12, mask=CAUSAL)
    layer(torch.randn(1, 4, 24))


@pytest.mark.usefixtures("silent")
def test_other_libraries_layouts_are_silent():
    q, k = FEW
    scaled_dot_product_attention(MANY, MANY, MANY)
    scaled_dot_product_attention(k, k[:, :, :9], k[:, :, :9], is_causal=True)
    flash_attn.flash_attn_func(q, k, k, causal=True)


def test_a_nested_tensor_is_left_to_the_checks():
    q = torch.nested.nested_tensor([torch.randn(3, 2, 8)], layout=torch.jagged)
    with pytest.raises(TypeError, match="q: expected a"):
        attention(q, q, q, mask=CAUSAL)


@pytest.mark.usefixtures("silent")
def test_compiled_calls_are_silent():
    q, k = FEW
    torch.compile(attention, fullgraph=True, backend="eager")(q, k, k, mask=CAUSAL)


LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}


def test_a_rope_of_halves_is_not_deepseeks():
    with pytest.warns(
        LayoutWarning, match=r"rope: expected Rope\(4, interleaved=True\) as DeepSeek's"
    ) as found:
        MultiHeadLatentAttention(16, 2, mask=CAUSAL, rope=Rope(4), **LATENT)
    assert found[0].filename == __file__


def test_it_comes_once_for_all_layers_of_a_model():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default", LayoutWarning)
        [MultiHeadLatentAttention(16, 2, mask=CAUSAL, rope=Rope(4), **LATENT) for _ in range(3)]
    assert len(found) == 1


@pytest.mark.usefixtures("silent")
def test_the_rope_of_deepseek_and_of_converted_layers_is_silent():
    """Conversion keeps the pairs that a layer had, whatever they are."""
    MultiHeadLatentAttention(16, 2, mask=CAUSAL, rope=Rope(4, interleaved=True), **LATENT)
    layer = gqa_to_mla(GroupedQueryAttention(16, 2, mask=CAUSAL, rope=Rope(8)))
    assert not layer.rope.interleaved
