"""The kernels for selected keys, against the torch backend in fp64: every form of lists, band and option."""

import pytest
import torch
from kernel_helpers import DEVICE, INTERPRETED, moved
from selected_cases import BANDS, FORMS, lists, made

from attnlib import (
    CAUSAL,
    Mask,
    attention,
    attention_with_lse,
    explain,
    scores,
    varlen_attention_with_lse,
)
from attnlib.backends._triton.dense import tables
from attnlib.masks import selected

DTYPES = (torch.float32, torch.float16) + (() if INTERPRETED else (torch.bfloat16,))


def assert_right(run, tensors, indices, size, band, **options) -> None:
    """The error against fp64 is at most twice that of the torch backend in the same dtype."""
    wide = (x.double() for x in tensors)
    exact = run(*wide, mask=band & selected(indices, size), backend="torch", **options)
    naive = run(*tensors, mask=band & selected(indices, size), backend="torch", **options)
    here, mask = (x.to(DEVICE) for x in tensors), band & selected(indices.to(DEVICE), size)
    found = run(*here, mask=mask, backend="triton", **moved(options))
    for ours, theirs, right in zip(found, naive, exact, strict=True):
        ours = ours.cpu()
        assert torch.equal(ours == -torch.inf, right == -torch.inf)
        assert ours.dtype == theirs.dtype
        ours, theirs, right = (x.double().nan_to_num(torch.nan, 0, 0) for x in (ours, theirs, right))
        noise = 4 * torch.finfo(found[0].dtype).eps * max(1, right.abs().max().item())
        assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + noise


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_any_form_of_lists(form, dtype):
    *tensors, indices, size = made(form, dtype)
    assert_right(attention_with_lse, tensors, indices, size, CAUSAL)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]], ids=str)
def test_any_band(form, band):
    *tensors, indices, size = made(form, torch.float32, s=9, t=110)
    assert_right(attention_with_lse, tensors, indices, size, BANDS[band])


OPTIONS = {
    "softcap": {"softcap": 2.0, "scale": 0.3},
    "slopes": {"alibi_slopes": torch.rand(8)},
    "slopes of sequences": {"alibi_slopes": torch.rand(2, 8), "sinks": torch.randn(8)},
    "sinks": {"sinks": torch.randn(8)},
    "bounds": {"key_starts": torch.tensor([40, 0]).int(), "key_ends": torch.tensor([150, 99]).int()},
    "score": {"score": scores.distance_bias(torch.randn(8, 20))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_any_option(name):
    *tensors, indices, size = made(FORMS[0], torch.float32)
    options = OPTIONS[name]
    if name == "score":
        score = options["score"]
        wanted = attention_with_lse(*tensors, mask=CAUSAL & selected(indices, size), **options)
        here = score.reading([x.to(DEVICE) for x in score.tensors])
        mask = CAUSAL & selected(indices.to(DEVICE), size)
        found = attention_with_lse(*(x.to(DEVICE) for x in tensors), mask=mask, score=here, backend="triton")
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x.cpu(), y)
    else:
        assert_right(attention_with_lse, tensors, indices, size, CAUSAL, **options)


@pytest.mark.parametrize("widths", [(40, 24), (80, 64), (160, 16), (16, 48)])
def test_any_width(widths):
    *tensors, indices, size = made(FORMS[5], torch.float16, s=3, t=60, d=widths[0], e=widths[1])
    assert_right(attention_with_lse, tensors, indices, size, CAUSAL)


def test_latents():
    """One KV head whose values are the first channels of its keys, and tokens that all heads share."""
    q, latent = torch.randn(1, 3, 20, 48), torch.randn(1, 90, 1, 48)
    indices = lists(1, 3, 1, 33, 90)
    tensors = q, latent, latent[..., :32]
    assert_right(attention_with_lse, tensors, indices, 1, CAUSAL)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[4]], ids=str)
def test_packed_sequences(form):
    """With queries and keys of nobody after the last one, of which keys may be NaN."""
    h, g, c, n, size = form
    queries, keys = (5, 0, 3, 1), (40, 7, 3, 130)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys))
    q, k, v = torch.randn(11, h, 16), torch.randn(183, g, 16), torch.randn(183, g, 16)
    k[180:], v[180:] = torch.nan, torch.nan
    indices, offsets = lists(1, 11, c, n, 140 // size)[0], {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    assert_right(varlen_attention_with_lse, (q, k, v), indices, size, CAUSAL, **offsets)


def test_keys_that_a_query_does_not_see_are_not_read():
    """NaN keys before its window and after it, in a block that it selects, and all of other blocks."""
    q, k, v = (torch.randn(1, x, 2, 16, device=DEVICE) for x in (1, 100, 100))
    indices = torch.tensor([[[[2, 0, 2, -1]]]], dtype=torch.int32, device=DEVICE)
    mask = Mask(left=30, right=-5) & selected(indices, 32)  # keys 69 to 94
    expected = attention(q, k, v, mask=mask, backend="triton")
    k[:, :69], v[:, :69], k[:, 95:], v[:, 95:] = (torch.nan,) * 4
    assert torch.equal(attention(q, k, v, mask=mask, backend="triton"), expected)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_rows_that_select_nothing(n):
    q, k = torch.randn(2, 5, 4, 16, device=DEVICE), torch.randn(2, 9, 2, 16, device=DEVICE)
    indices = torch.full((2, 5, 2, n), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    if n == 3:
        indices[..., 0], indices[..., 1] = -1, 1  # of 16 keys, which do not exist
    for size in (1, 16, 64):
        out, lse = attention_with_lse(q, k, k, mask=CAUSAL & selected(indices, size), backend="triton")
        if n < 3 or size > 1:
            assert not out.any()
            assert (lse == -torch.inf).all()


def test_what_kernels_lack_runs_elsewhere():
    q = torch.randn(1, 5, 2, 16, requires_grad=True, device=DEVICE)
    indices = torch.zeros(1, 5, 1, 1, dtype=torch.int32, device=DEVICE)
    asked = {
        "with dropout": {"dropout_p": 0.5},
        "in fp8": {"compute_dtype": torch.float8_e4m3fn},
    }
    for name, options in asked.items():
        x = q.half() if "compute_dtype" in options else q
        found = explain(attention, x, x, x, mask=selected(indices), **options)
        assert (
            f"has no kernels yet for masks.selected() {name}; use backend='torch'" in found.rejected["triton"]
        )
        assert found.chosen == "torch"
    assert explain(attention, q, q, q, mask=selected(indices)).chosen == "triton"


@pytest.mark.parametrize("arch", [80, 90])
def test_tiles_fit_blocks_and_heads(arch):
    case = tables.DenseCase(128, 128, itemsize=2, causal=True, plain=True, arch=arch, aligned=True)
    for block_size, tile in ((1, 64), (16, 64), (32, 32), (96, 32), (100, 64), (128, 64)):
        assert tables.selected(case, rows=4, block_size=block_size).block_n == tile
    assert [tables.selected(case, rows=x, block_size=64).block_m for x in (1, 16, 17, 128)] == [
        16,
        16,
        32,
        64,
    ]
