"""Hopper's decode kernels over pages of grouped heads: the calls that reach them, and their accuracy."""

from dataclasses import replace

import pytest
import torch
from decode_helpers import Sizes, assert_right, kernel, store
from helpers import assert_same_bits
from kernel_helpers import INTERPRETED

from attnlib import CAUSAL, FULL, KVLayout, Mask, sliding
from attnlib.backends._triton.decode import tables as decode_tables
from attnlib.backends._triton.launching.launch import plan_cache

LENGTHS = (1024, 5, 327, 513, 70, 2000)
STARTS = (100, 0, 65, 512, 0, 1990)

if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU: Gluon has no interpreter", allow_module_level=True)


@pytest.fixture
def of_any_size(monkeypatch):
    """Caches with little room are for the plain kernel otherwise."""
    monkeypatch.setattr(decode_tables, "LEAST_CACHED", 1)
    plan_cache.cache_clear()
    yield
    plan_cache.cache_clear()


@pytest.mark.parametrize(
    ("kv_heads", "group", "tokens"),
    [(8, 4, 1), (1, 16, 1), (1, 32, 1), (2, 5, 3), (4, 8, 4), (6, 1, 20), (16, 1, 2)],
)
def test_any_kv_heads_and_rows_over_pages(of_any_size, kv_heads, group, tokens):
    layout = KVLayout.grouped(kv_heads, 128, dtype=torch.bfloat16)
    call = store(layout, Sizes((1024, 41, 327, 513, 70, 2000))).call(tokens, kv_heads * group)
    assert kernel(call).startswith("decode_gqa")
    assert_right(call)


@pytest.mark.parametrize("options", [(), ("softcap",), ("alibi_slopes", "sinks"), ("scale",)], ids=str)
@pytest.mark.parametrize(
    "mask", [CAUSAL, FULL, sliding(33), Mask(None, 0, 9), Mask(7, 3), Mask(None, -2)], ids=str
)
def test_any_mask_and_option_over_pages(of_any_size, mask, options):
    assert_right(
        store(KVLayout.grouped(4, 128, dtype=torch.bfloat16), Sizes(LENGTHS, STARTS)).call(
            2, 16, mask, options
        )
    )


@pytest.mark.parametrize("page_size", [32, 48, 256, None])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_any_page_and_dtype_over_pages(of_any_size, kv_heads, page_size):
    call = store(
        KVLayout.grouped(kv_heads, 128, dtype=torch.float16), Sizes(LENGTHS, STARTS, page_size)
    ).call(1, 8)
    assert kernel(call).startswith("decode_gqa")
    assert_right(call)


@pytest.mark.parametrize(
    "counts", [(1, 1, 1, 1, 1, 1), (1, 4, 0, 1, 1, 0), (0, 5, 0, 1, 0, 0), (2, 1, 3, 1, 2, 1)], ids=str
)
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_packed_sequences_over_pages(of_any_size, kv_heads, counts):
    """Five tokens are more rows than fit a program."""
    layout = KVLayout.grouped(kv_heads, 128, dtype=torch.bfloat16)
    call = store(layout, Sizes((1024, 41, 327, 513, 70, 2000))).call(counts, 4 * kv_heads)
    assert kernel(call).startswith("decode_gqa")
    assert_right(call)


def test_what_no_tile_of_pages_fits_is_for_the_plain_kernel(of_any_size):
    layout = KVLayout.grouped(2, 128, dtype=torch.bfloat16)
    assert kernel(store(layout, Sizes(LENGTHS, page_size=24)).call(1, 8)).startswith("decode ")
    assert kernel(store(layout, Sizes(LENGTHS, order="heads")).call(1, 8)).startswith("decode ")
    assert kernel(store(layout, Sizes(LENGTHS)).call(9, 8)).startswith("decode ")
    assert kernel(store(replace(layout, storage_dtype=torch.int8), Sizes(LENGTHS)).call(1, 8)).startswith(
        "decode "
    )
    assert kernel(store(replace(layout, dim=64, value_dim=64), Sizes(LENGTHS)).call(1, 8)).startswith(
        "decode "
    )


@pytest.mark.parametrize(
    "mask", [CAUSAL, FULL, sliding(33), Mask(None, 0, 9), Mask(7, 3), Mask(None, -2)], ids=str
)
@pytest.mark.parametrize(
    ("counts", "options"), [(1, ()), (3, ("softcap",)), (2, ("alibi_slopes", "sinks"))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_stored_bytes_over_pages(of_any_size, dtype, counts, options, mask):
    layout = KVLayout.grouped(8, 128, dtype=torch.bfloat16, storage_dtype=dtype)
    call = store(layout, Sizes((1024, 0, 327, 513, 70, 2000), (*STARTS[:1], 0, *STARTS[2:]))).call(
        counts, 32, mask, options
    )
    assert kernel(call) == "decode_gqa 16"
    assert_right(call)


@pytest.mark.parametrize("counts", [1, (1, 4, 0, 1, 0, 0), (0, 5, 0, 1, 0, 0)], ids=str)
@pytest.mark.parametrize("page_size", [16, 48, 256, None])
@pytest.mark.parametrize(("kv_heads", "dtype"), [(8, torch.int8), (16, torch.float8_e4m3fn)], ids=str)
def test_stored_bytes_over_any_page(of_any_size, kv_heads, dtype, page_size, counts):
    layout = KVLayout.grouped(kv_heads, 128, dtype=torch.float16, storage_dtype=dtype)
    call = store(layout, Sizes(LENGTHS, STARTS, page_size)).call(counts, 4 * kv_heads)
    assert kernel(call) == "decode_gqa 16"
    assert_right(call)


def test_a_small_cache_is_for_the_plain_kernel():
    layout = KVLayout.grouped(8, 128, dtype=torch.bfloat16)
    assert kernel(store(layout, Sizes((1000,))).call(1, 32)).startswith("decode ")


@pytest.mark.parametrize(("kv_heads", "stored"), [(1, None), (8, None), (8, torch.int8)], ids=str)
def test_a_thousand_repeats_over_pages_are_the_same_bits(of_any_size, kv_heads, stored):
    layout = KVLayout.grouped(kv_heads, 128, dtype=torch.bfloat16, storage_dtype=stored)
    call = store(layout, Sizes((4000,) * 20)).call(1, 32).scheduled()
    first = call.solve()
    for _ in range(1000):
        assert_same_bits(*zip(call.solve(), first, strict=True))
