"""Hopper's decode kernels over latents: which calls reach them, the accuracy rule, and bits that repeat."""

from dataclasses import replace

import pytest
import torch
from decode_helpers import Sizes, assert_right, kernel, store
from function_cases import by_definition, relative, same_document, tree
from helpers import assert_close, assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED

from attnlib import (
    CAUSAL,
    FULL,
    QUERY_OFFSET,
    KVLayout,
    Mask,
    cached_attention_with_lse,
    mask_mod,
    score_mod,
    sliding,
)

LATENT = KVLayout.latent(512, 64, dtype=torch.bfloat16)
LENGTHS = (1024, 5, 327, 513, 70, 2000)
STARTS = (100, 0, 65, 512, 0, 1990)

if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU: Gluon has no interpreter", allow_module_level=True)


@pytest.mark.parametrize("counts", [1, 3, (1, 40, 0, 1, 5, 2)], ids=str)
@pytest.mark.parametrize("heads", [5, 16, 32, 48, 64, 128])
def test_any_heads_and_tokens(heads, counts):
    call = store(LATENT, Sizes((1024, 41, 327, 513, 70, 2000), page_size=64)).call(counts, heads)
    rows = heads * (counts if isinstance(counts, int) else max(1, -(-sum(counts) // 6)))
    assert kernel(call) == f"decode_mla {16 if rows <= 16 else 64}" or not isinstance(counts, int)
    assert_right(call)


@pytest.mark.parametrize("options", [(), ("softcap",), ("alibi_slopes", "sinks"), ("scale",)], ids=str)
@pytest.mark.parametrize(
    "mask", [CAUSAL, FULL, sliding(33), Mask(None, 0, 9), Mask(7, 3), Mask(None, -2)], ids=str
)
@pytest.mark.parametrize("heads", [16, 128])
def test_any_mask_and_option(heads, mask, options):
    assert_right(store(LATENT, Sizes(LENGTHS, STARTS, page_size=128)).call(2, heads, mask, options))


@pytest.mark.parametrize("page_size", [64, 256, None])
@pytest.mark.parametrize("heads", [16, 128])
def test_any_page_and_dtype(heads, page_size):
    call = store(replace(LATENT, dtype=torch.float16), Sizes(LENGTHS, STARTS, page_size)).call(1, heads)
    assert kernel(call).startswith("decode_")
    assert_right(call)


@pytest.mark.parametrize("counts", [1, 2, (1, 1, 3, 0, 1, 2)], ids=str)
@pytest.mark.parametrize("options", [(), ("softcap",), ("alibi_slopes", "sinks")], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_stored_bytes(dtype, options, counts):
    stored = store(replace(LATENT, storage_dtype=dtype), Sizes(LENGTHS, page_size=64))
    for heads, rows in ((4, 16), (16, 16), (64, 64)):
        call = stored.call(counts, heads, CAUSAL, options)
        assert kernel(call) == f"decode_mla {rows}" or not isinstance(counts, int)
        assert_right(call)


@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(33), Mask(None, 0, 9), Mask(7, 3)], ids=str)
@pytest.mark.parametrize("counts", [1, 3, (1, 40, 0, 1, 5, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_stored_bytes_under_any_mask(dtype, counts, mask):
    """Sequences without tokens among them; what no token stores is NaN."""
    for page_size, columns in ((128, None), (2048, 1)):  # the second is contiguous
        sizes = Sizes((1024, 0, 327, 513, 70, 2000), (*STARTS[:1], 0, *STARTS[2:]), page_size)
        stored = store(replace(LATENT, storage_dtype=dtype, dtype=torch.float16), sizes)
        for heads in (16, 64):
            call = stored.call(counts, heads, mask)
            call = call.over(table=call.stored.view.table[:, :columns])
            assert kernel(call).startswith("decode_")
            assert_right(call)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scales_between_16_bytes_are_for_the_plain_kernel(dtype):
    """Where a descriptor cannot load: a contiguous cache has an odd number of tokens here."""
    call = store(replace(LATENT, storage_dtype=dtype), Sizes(LENGTHS, page_size=None)).call(1, 16)
    assert kernel(call).startswith("decode ")
    assert_right(call)


@pytest.mark.parametrize("heads", [5, 16, 64])
@pytest.mark.parametrize("sigma", [1e-6, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scales_of_any_size(dtype, sigma, heads):
    """Those of neighbours differ by up to 2^60; 16-bit factors would not hold them."""
    stored = store(replace(LATENT, storage_dtype=dtype), Sizes((6000, 70, 513), page_size=64), sigma)
    for n, (k, v) in enumerate(stored.tokens):
        at = torch.arange(len(k))
        factor = torch.tensor([2.0**-60, 1.0, 2.0**-20, 0.0, 4.0, 1.0, 2.0**-9])[at % 7]
        pages = stored.view.table[n].cpu()[at // 64].long()
        stored.view.k_scale[pages.to(DEVICE), (at % 64).to(DEVICE), 0] *= factor.to(DEVICE)
        k[..., :512] *= factor[:, None, None]
        v[..., :512] = k[..., :512]
    assert_right(stored.call(1, heads))


@pytest.mark.parametrize("page_size", [16, 24])
def test_pages_that_no_tile_fits_are_for_the_plain_kernel(page_size):
    assert kernel(store(LATENT, Sizes(LENGTHS, page_size=page_size)).call(1, 128)).startswith("decode ")


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_a_thousand_repeats_are_the_same_bits(heads, stored):
    call = (
        store(replace(LATENT, storage_dtype=stored), Sizes((4000,) * 20, page_size=64))
        .call(1, heads)
        .scheduled()
    )
    first = call.solve()
    for _ in range(1000):
        assert_same_bits(*zip(call.solve(), first, strict=True))


def shows_some_tiles(b, h, i, j):
    return (j < 900) & (j // 64 % 3 != 1)


def functions() -> dict:
    """Mask functions, and a score function with each; the last hides tiles of 64 keys, also the last ones."""
    drafts = torch.rand(64, 64, device=DEVICE).tril() > 0.4
    drafts.fill_diagonal_(True)
    numbers = torch.randint(0, 4, (6, 2048), device=DEVICE).sort().values.int()
    bias, gain = torch.randn(128, 9, device=DEVICE), torch.tensor(1.3, device=DEVICE)
    return {
        "tree": (mask_mod(tree, QUERY_OFFSET, drafts), None),
        "documents": (CAUSAL & mask_mod(same_document, numbers), None),
        "changed": (CAUSAL, score_mod(relative, bias, gain)),
        "hidden": (
            CAUSAL & mask_mod(lambda b, h, i, j: (j < 900) & (j // 64 % 3 != 1)),
            score_mod(relative, bias, gain),
        ),
    }


def assert_right_by_definition(call, mask, score) -> None:
    """The accuracy rule of each sequence, against the functions themselves with all pairs."""
    view = call.stored.view
    out, lse = cached_attention_with_lse(call.q.to(DEVICE), view, mask=mask, score=score, backend="triton")
    found, naive, golden = [], [], []
    for n, (k, v) in enumerate(call.stored.tokens):
        q, _ = call.of(n, call.q, call.q[..., 0].transpose(-1, -2))
        mine, _ = call.of(n, out, lse)
        at = torch.tensor([n], device=DEVICE)[:, None, None, None]
        keys, values = k[None].to(DEVICE), v[None].to(DEVICE)
        seen = mask & mask_mod(lambda b, h, i, j, start=int(view.starts[n]): j >= start)
        with torch.device(DEVICE):
            right, _ = by_definition(q.to(DEVICE).double(), keys.double(), values.double(), seen, score, at)
            close, _ = by_definition(q.to(DEVICE), keys.to(q.dtype), values.to(q.dtype), seen, score, at)
        found.append(mine.flatten())
        naive.append(close.to(q.dtype).flatten())
        golden.append(right.flatten())
    noise = 2 * torch.finfo(call.q.dtype).eps
    assert_close("out", torch.cat(found), [torch.cat(naive)], torch.cat(golden), 2, noise)


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["tree", "documents", "changed", "hidden"])
@pytest.mark.parametrize(
    ("heads", "counts"), [(16, 1), (128, 1), (16, 7), (64, (1, 40, 0, 1, 5, 2))], ids=str
)
def test_functions(heads, counts, name, stored):
    """Hidden tiles are not read: what lies there is NaN."""
    torch.manual_seed(0)
    mask, score = functions()[name]
    stored = store(replace(LATENT, storage_dtype=stored), Sizes((1024, 41, 327, 513, 70, 2000), page_size=64))
    call = replace(stored.call(counts, heads), mask=mask)
    rows = heads * (counts if isinstance(counts, int) else 9)
    assert kernel(call, score) == f"decode_mla {16 if rows <= 16 else 64}"
    if name == "hidden":
        view = call.stored.view
        for n, length in enumerate(view.lengths.tolist()):
            for page in range(-(-length // 64)):
                if page % 3 == 1 or page > 900 // 64:
                    for plane in (view.k_scale if view.k_scale is not None else view.k, view.k_rope):
                        plane[view.table[n, page].long()] = torch.nan
    assert_right_by_definition(call, mask, score)


@pytest.mark.parametrize("heads", [5, 6])
def test_functions_that_no_row_of_states_fits_are_for_the_plain_kernel(heads):
    mask = CAUSAL & mask_mod(lambda b, h, i, j: (i + j + h * (heads == 6)) % 3 > 0)
    call = replace(store(LATENT, Sizes(LENGTHS, page_size=64)).call(1, heads), mask=mask)
    assert kernel(call).startswith("decode ")
    assert_right_by_definition(call, mask, None)
