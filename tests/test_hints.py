"""The warning for calls in another library's layout: where it comes, where it does not, and what it says."""

import warnings

import pytest
import torch

import attnlib.compat.flash_attn as flash_attn
from attnlib import CAUSAL, FULL, LayoutWarning, attention, attention_with_lse, mask_mod, sliding, varlen_attention
from attnlib.compat.sdpa import scaled_dot_product_attention

FEW = torch.randn(1, 8, 64, 4), torch.randn(1, 2, 64, 4)  # SDPA's layout: 8 and 2 heads of 64 tokens
MANY = torch.randn(1, 3, 300, 4)


@pytest.mark.parametrize("call", [attention, attention_with_lse])
@pytest.mark.parametrize("mask", [CAUSAL, sliding(3), CAUSAL & mask_mod(lambda b, h, i, j: i != j)])
def test_fewer_keys_than_queries_under_a_bounded_mask(call, mask):
    q, k = FEW
    with pytest.warns(LayoutWarning, match=r"q: expected \[b, s, h, d\], got \(1, 8, 64, 4\).*8 queries for 2 keys"):
        call(q, k, k, mask=mask)


def test_more_heads_than_models_have():
    with pytest.warns(LayoutWarning, match=r"which says 300 heads; .* give q.transpose\(1, 2\).*compat.sdpa"):
        attention(MANY, MANY, MANY, mask=FULL)


def test_it_names_the_line_that_calls():
    q, k = FEW
    with pytest.warns(LayoutWarning) as found:
        attention(q, k, k, mask=CAUSAL)
    assert found[0].filename == __file__


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
