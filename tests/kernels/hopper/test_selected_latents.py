"""Hopper's kernel for selected tokens of latents, against the torch backend in fp64; it needs an sm_90."""

import pytest
import torch
from helpers import assert_same_bits
from kernel_helpers import INTERPRETED, wait_for
from selected_cases import lists

from attnlib import CAUSAL, FULL, Mask, attention_with_lse, explain, masks, sliding, varlen_attention_with_lse
from attnlib.masks import selected

IS_HOPPER = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs an sm_90")

BANDS = {
    "full": FULL,
    "sliding": sliding(700),
    "prefix": Mask(right=0, prefix=90),
    "hollow": Mask(left=900, right=-500),
}


def made(h: int = 64, s: int = 5, t: int = 3000, dtype: torch.dtype = torch.bfloat16, b: int = 2):
    """Queries, and latents whose first 512 channels are the values."""
    return (torch.randn(b, n, heads, 576, device="cuda", dtype=dtype) for n, heads in ((s, h), (t, 1)))


def attend(q, latents, mask, run=attention_with_lse, backend="triton", **options):
    return run(q, latents, latents[..., :512], mask=mask, backend=backend, **options)


def variant(q, latents, mask, run=attention_with_lse, **options) -> str:
    return explain(run, q, latents, latents[..., :512], mask=mask, **options).variant


def assert_right(q, latents, mask, run=attention_with_lse, **options) -> None:
    """The Hopper kernel runs, with an error of at most twice that of the torch backend in the same dtype."""
    assert variant(q, latents, mask, run, **options) == "Hopper"
    found = attend(q, latents, mask, run, **options)
    wait_for()
    naive = attend(q, latents, mask, run, "torch", **options)
    exact = attend(q.double(), latents.double(), mask, run, "torch", **options)
    for ours, theirs, right in zip(found, naive, exact, strict=True):
        assert torch.equal(ours == -torch.inf, right == -torch.inf)
        assert ours.dtype == theirs.dtype
        ours, theirs, right = (x.double().nan_to_num(torch.nan, 0, 0) for x in (ours, theirs, right))
        noise = 4 * torch.finfo(found[0].dtype).eps * max(1, right.abs().max().item())
        assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + noise


@pytest.mark.parametrize("n", [1, 63, 64, 65, 128, 129, 200, 2048])
@pytest.mark.parametrize("h", [64, 128, 192])
def test_any_length_of_lists(h, n):
    """With repeats, -1 anywhere, tokens that do not exist, and empty lists among them."""
    for dtype in (torch.bfloat16, torch.float16):
        q, latents = made(h, dtype=dtype)
        assert_right(q, latents, CAUSAL & selected(lists(2, 5, 1, n, 3000).cuda()))


def test_lists_that_a_causal_mask_shortens():
    q, latents = made(128, s=700, t=700)
    indices = torch.arange(700, dtype=torch.int32, device="cuda").flip(0).expand(2, 700, 1, 700)
    assert_right(q, latents, CAUSAL & selected(indices.contiguous()))


@pytest.mark.parametrize("band", BANDS)
def test_any_band(band):
    q, latents = made()
    assert_right(q, latents, BANDS[band] & selected(lists(2, 5, 1, 300, 3000).cuda()))


@pytest.mark.parametrize("h", [64, 128])
def test_any_option(h):
    q, latents = made(h)
    mask = CAUSAL & selected(lists(2, 5, 1, 300, 3000).cuda())
    assert_right(q, latents, mask, softcap=2.0, scale=0.3)
    assert_right(q, latents, mask, sinks=3 * torch.randn(h, device="cuda"))
    assert_right(q, latents, mask, softcap=5.0, sinks=torch.randn(h, device="cuda"))
    bounds = {
        "key_starts": torch.tensor([40, 0]).int().cuda(),
        "key_ends": torch.tensor([2990, 99]).int().cuda(),
    }
    assert_right(q, latents, mask, **bounds)


def test_maxima_that_move_far():
    q, latents = made()
    latents[..., 0] = torch.linspace(-300, 300, 3000, device="cuda")[None, :, None]
    q[..., 0] = 8.0
    indices = torch.arange(0, 3000, 2, dtype=torch.int32, device="cuda")
    for order in (indices, indices.flip(0)):
        assert_right(q, latents, CAUSAL & selected(order.expand(2, 5, 1, -1).contiguous()))


@pytest.mark.parametrize("h", [64, 128])
def test_packed_sequences(h):
    """With queries and keys of nobody after the last one, of which keys are NaN."""
    queries, keys = (5, 0, 3, 1), (400, 7, 3, 1300)
    offsets = [torch.tensor([0, *x]).cumsum(0).int().cuda() for x in (queries, keys)]
    q = torch.randn(11, h, 576, device="cuda", dtype=torch.bfloat16)
    latents = torch.randn(1760, 1, 576, device="cuda", dtype=torch.bfloat16)
    latents[1710:] = torch.nan
    mask = CAUSAL & selected(lists(1, 11, 1, 300, 1300)[0].cuda())
    assert_right(
        q, latents, mask, varlen_attention_with_lse, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1]
    )


@pytest.mark.parametrize("width", [584, 640])
def test_a_plane_of_a_larger_tensor(width):
    """Rows that lie 16 bytes, or 128, further apart than they are long; and queries in another order."""
    q, _ = made(128)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    larger = torch.full((2, 3000, 3, width), torch.nan, device="cuda", dtype=torch.bfloat16)
    latents = larger[:, :, 1:2, :576]
    latents.normal_()
    assert_right(q, latents, CAUSAL & selected(lists(2, 5, 1, 200, 3000).cuda()))


@pytest.mark.parametrize("n", [1, 65, 200])
def test_tokens_that_a_query_does_not_see_are_not_read(n):
    q, latents = made(128)
    indices = lists(2, 5, 1, n, 3000).cuda()
    mask = Mask(left=2500, right=-300) & selected(indices)
    before = attend(q, latents, mask)
    i = torch.arange(2995, 3000, device="cuda")[:, None]
    seen = torch.zeros(2, 5, 3002, dtype=torch.bool, device="cuda")
    seen.scatter_(2, torch.where(indices < 0, 3001, indices)[:, :, 0].long(), True)
    j = torch.arange(3000, device="cuda")
    seen = seen[..., :3000] & (j >= i - 2500) & (j <= i - 300)
    latents[~seen.any(1)] = torch.nan
    assert_same_bits(*zip(before, attend(q, latents, mask), strict=True))


@pytest.mark.parametrize("n", [0, 1, 3, 200])
def test_rows_that_select_nothing(n):
    q, latents = made()
    latents[:] = torch.nan
    indices = torch.full((2, 5, 1, n), 2**31 - 1, dtype=torch.int32, device="cuda")
    indices[..., 1::2] = -1
    out, lse = attend(q, latents, CAUSAL & selected(indices))
    assert not out.any()
    assert (lse == -torch.inf).all()
    sinks = torch.randn(64, device="cuda")
    out, lse = attend(q, latents, CAUSAL & selected(indices), sinks=sinks)
    assert not out.any()
    torch.testing.assert_close(lse, sinks[None, :, None].expand_as(lse))


def test_a_hundred_repeats_are_the_same_bits():
    q, latents = made(128, s=200)
    mask = CAUSAL & selected(lists(2, 200, 1, 2048, 3000).cuda())
    first = attend(q, latents, mask)
    for _ in range(100):
        assert_same_bits(*zip(attend(q, latents, mask), first, strict=True))
    wait_for()


def test_other_calls_are_for_the_generic_kernel():
    q, latents = made()
    indices = lists(2, 5, 1, 65, 3000).cuda()
    slopes = torch.rand(64, device="cuda")
    assert variant(q, latents, CAUSAL & masks.dilated(2) & selected(indices)) == "plain"
    assert variant(q, latents, CAUSAL & selected(indices), alibi_slopes=slopes) == "plain"
    assert variant(q, latents, CAUSAL & selected(indices, 2)) == "plain"
    assert variant(q[:, :, :32], latents, CAUSAL & selected(indices)) == "plain"
    values = latents[..., :512].clone()
    assert explain(attention_with_lse, q, latents, values, mask=selected(indices)).variant == "plain"
