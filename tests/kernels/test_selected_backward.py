"""The backward kernels for selected keys, against the torch backend in fp64, and their laws."""

import pytest
import torch
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED, moved
from selected_cases import BANDS, FORMS, lists, made

from attnlib import CAUSAL, Mask, attention_with_lse, mask_mod, score_mod, varlen_attention_with_lse
from attnlib.backends._triton.dense import selected_tables as tables
from attnlib.backends._triton.launching.launch import plan_cache
from attnlib.masks import selected

HALF = torch.float16 if INTERPRETED else torch.bfloat16
SHARED = (18, 2, 1, 9, 1)  # tokens of a list that many heads share, whose entries have partial sums
LEARNT = ("sinks", "alibi_slopes")


def gradients(run, tensors, mask, **options) -> dict[str, torch.Tensor]:
    """The gradients of q, k, v, sinks and slopes, if any; those of the output and the LSE are random."""
    options = {name: x.clone().requires_grad_() if name in LEARNT else x for name, x in options.items()}
    leaves = dict(zip("qkv", (x.detach().requires_grad_() for x in tensors), strict=True))
    out, lse = run(*leaves.values(), mask=mask, **options)
    generator = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator).to(x) for x in (out, lse))
    total = (out * dout).sum() + (lse * dlse).masked_fill(lse == -torch.inf, 0).sum()
    leaves |= {name: options[name] for name in LEARNT if name in options}
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def on_triton(run, tensors, indices, size, band, **options) -> dict[str, torch.Tensor]:
    here, mask = [x.to(DEVICE) for x in tensors], band & selected(indices.to(DEVICE), size)
    return gradients(run, here, mask, backend="triton", **moved(options))


def assert_right(run, tensors, indices, size, band, **options) -> None:
    """The error against fp64 is at most three times that of the torch backend in the same dtype."""
    mask, tensors = band & selected(indices, size), list(tensors)
    wide = {n: x.double() if n in LEARNT else x for n, x in options.items()}
    exact = gradients(run, [x.double() for x in tensors], mask, backend="torch", **wide)
    naive = gradients(run, tensors, mask, backend="torch", **options)
    for name, ours in on_triton(run, tensors, indices, size, band, **options).items():
        assert ours.dtype == naive[name].dtype
        right, theirs = exact[name], naive[name].double()
        noise = 4 * torch.finfo(tensors[0].dtype).eps * max(1, right.abs().max().item())
        if name in LEARNT:
            noise *= 8  # sums over all queries
        assert (ours.cpu().double() - right).abs().max() <= 3 * (theirs - right).abs().max() + noise, name


@pytest.mark.parametrize("form", [*FORMS[1:3], *FORMS[4:]], ids=str)
def test_any_form_of_lists(form):
    *tensors, indices, size = made(form, torch.float32, s=5, t=150 if form[-1] > 16 else 40)
    assert_right(attention_with_lse, tensors, indices, size, CAUSAL)


@pytest.mark.parametrize("form", [FORMS[0], SHARED], ids=str)
def test_16_bits(form):
    *tensors, indices, size = made(form, HALF, s=5, t=150 if form is FORMS[0] else 20)
    assert_right(attention_with_lse, tensors, indices, size, CAUSAL)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(
    ("form", "dtype"), [(FORMS[0], torch.float32), (FORMS[0], HALF), (SHARED, torch.float32)], ids=str
)
def test_any_band(form, dtype, band):
    *tensors, indices, size = made(form, dtype, s=5, t=110 if form is FORMS[0] else 15)
    assert_right(attention_with_lse, tensors, indices, size, BANDS[band])


SLOPES = torch.linspace(0, 0.1, 8)  # steeper ones would make scores so large that fp32 rounds them
OPTIONS = {
    "scores": {"softcap": 2.0, "scale": 0.3, "alibi_slopes": SLOPES, "sinks": torch.linspace(-2, 2, 8)},
    "sequences": {
        "alibi_slopes": torch.stack((SLOPES, SLOPES.flip(0))),
        "key_starts": torch.tensor([40, 0]).int(),
        "key_ends": torch.tensor([150, 99]).int(),
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_any_option(name, dtype):
    *tensors, indices, size = made(FORMS[0], dtype)
    assert_right(attention_with_lse, tensors, indices, size, CAUSAL, **OPTIONS[name])


def _capped(score, b, h, i, j, bias):
    return torch.tanh((score * score).sqrt() + bias[h, (i - j).clamp(0, 19)])


# numpy, in which the interpreter computes, warns of every NaN that it makes.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_learnt_score_function():
    """Its tensor has a gradient, and its derivative depends on the score: it is NaN where this is 0."""
    *tensors, indices, size = made(FORMS[0], torch.float32)
    found = {}
    for backend, device in (("torch", "cpu"), ("triton", DEVICE)):
        leaves = [x.to(device).requires_grad_() for x in (*tensors, torch.ones(8, 20))]
        score = score_mod(_capped, leaves[3])
        mask = CAUSAL & selected(indices.to(device), size)
        out, _ = attention_with_lse(*leaves[:3], mask=mask, score=score, backend=backend)
        found[backend] = torch.autograd.grad(out.square().sum(), leaves)
    for x, y in zip(found["triton"], found["torch"], strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("widths", [(80, 64), (160, 16), (16, 48)])
def test_any_width(widths):
    *tensors, indices, size = made(FORMS[5], torch.float32, s=3, t=40, d=widths[0], e=widths[1])
    assert_right(attention_with_lse, tensors, indices, size, CAUSAL)


def test_latents():
    """Values are the first channels of the keys, so that autograd adds dv to dk."""
    q, latent, indices = torch.randn(1, 3, 16, 48), torch.randn(1, 40, 1, 48), lists(1, 3, 1, 17, 40)

    def gradient(device: str, **options) -> tuple[torch.Tensor, ...]:
        leaves = [x.to(device).requires_grad_() for x in (q, latent)]
        mask = CAUSAL & selected(indices.to(device))
        out, _ = attention_with_lse(*leaves, leaves[1][..., :32], mask=mask, **options)
        return torch.autograd.grad(out.square().sum(), leaves)

    for x, y in zip(gradient(DEVICE, backend="triton"), gradient("cpu", backend="torch"), strict=True):
        torch.testing.assert_close(x.cpu(), y)


@pytest.mark.parametrize(
    ("form", "dtype"), [(FORMS[0], torch.float32), (FORMS[0], HALF), (SHARED, torch.float32)], ids=str
)
def test_packed_sequences(form, dtype):
    """With queries and keys of nobody after the last one, which may be NaN, and have zero gradients."""
    h, g, c, n, size = form
    queries, keys = (5, 0, 3, 1), (20, 7, 3, 33)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys))
    q, k, v = (torch.randn(x, heads, 16).to(dtype) for x, heads in ((11, h), (66, g), (66, g)))
    indices, offsets = lists(1, 11, c, n, 1 + 33 // size)[0], {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    options = offsets | {"alibi_slopes": torch.linspace(0, 0.1, 4 * h).view(4, h)}
    assert_right(varlen_attention_with_lse, (q, k, v), indices, size, CAUSAL, **options)
    clean = on_triton(varlen_attention_with_lse, (q, k, v), indices, size, CAUSAL, **options)
    q[9:], k[63:], v[63:] = torch.nan, torch.nan, torch.nan
    found = on_triton(varlen_attention_with_lse, (q, k, v), indices, size, CAUSAL, **options)
    assert_same_bits(*zip(found.values(), clean.values(), strict=True))
    assert not any(found[name][at:].any() for name, at in (("q", 9), ("k", 63), ("v", 63)))


def test_keys_that_a_query_does_not_see_are_not_read():
    """NaN keys before its window and after it, in a block that it selects, and all of other blocks."""
    q, k, v = (torch.randn(1, x, 2, 16) for x in (1, 100, 100))
    indices = torch.tensor([[[[2, 0, 2, -1]]]], dtype=torch.int32)
    call = (q, k, v), indices, 32, Mask(left=30, right=-5)  # keys 69 to 94
    expected = on_triton(attention_with_lse, *call)
    k[:, :69], v[:, :69], k[:, 95:], v[:, 95:] = (torch.nan,) * 4
    found = on_triton(attention_with_lse, *call)
    assert_same_bits(*zip(found.values(), expected.values(), strict=True))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_lists_that_select_nothing(n):
    q, k = torch.randn(2, 3, 16, 8), torch.randn(2, 9, 2, 8)
    indices = torch.full((2, 3, 1, n), 2**31 - 1, dtype=torch.int32)
    if n == 3:
        indices[..., 0], indices[..., 1] = -1, 20
    for size in (1, 16):
        found = on_triton(attention_with_lse, (q, k, k), indices, size, CAUSAL)
        assert not any(x.any() for x in found.values())


@pytest.mark.parametrize("form", [FORMS[0], SHARED], ids=str)
def test_strides_gaps_repeats_and_another_run_change_no_bit(form):
    *tensors, indices, size = made(form, torch.float32, s=5, t=70 if form is FORMS[0] else 12)
    first = on_triton(attention_with_lse, tensors, indices, size, CAUSAL)
    gaps = torch.full_like(indices, -1)
    wide = torch.stack((gaps, indices), -1).flatten(-2)  # each entry after a gap
    wide = torch.cat((wide, indices.flip(-1)), -1)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for given, other in ((tensors, indices), (tensors, wide), (apart, indices)):
        found = on_triton(attention_with_lse, given, other, size, CAUSAL)
        assert_same_bits(*zip(found.values(), first.values(), strict=True))


def test_passes_over_some_lists_at_a_time_change_no_bit(monkeypatch):
    *tensors, indices, size = made(SHARED, torch.float32, s=5, t=12)
    first = on_triton(attention_with_lse, tensors, indices, size, CAUSAL)
    monkeypatch.setattr(tables, "PARTS", 4 * 9 * 2 * 32 * 4)  # 4 of 10 lists
    plan_cache.cache_clear()
    found = on_triton(attention_with_lse, tensors, indices, size, CAUSAL)
    assert_same_bits(*zip(found.values(), first.values(), strict=True))


@pytest.mark.parametrize("parts", [1 << 30, 0])
def test_many_lists_with_the_same_block(parts, monkeypatch):
    """Each program adds two lists, or all, if only a few partial sums may be stored."""
    monkeypatch.setattr(tables, "ITEM", 2)
    monkeypatch.setattr(tables, "PARTS", parts)
    *tensors, indices, size = made(FORMS[5], torch.float32, s=9, t=40)
    assert_right(attention_with_lse, tensors, indices, size, CAUSAL)


@pytest.mark.parametrize("query", range(5))
def test_lists_of_neighbours_change_no_bit_of_dq(query):
    *tensors, indices, size = made(FORMS[0], HALF, s=5)
    others = torch.randint_like(indices, -1, 6)
    others[:, query] = indices[:, query]
    first, found = (on_triton(attention_with_lse, tensors, x, size, CAUSAL)["q"] for x in (indices, others))
    assert_same_bits((found[:, query], first[:, query]))


def test_a_mask_function_of_heads():
    *tensors, indices, size = made(FORMS[5], torch.float32, s=5, t=60)
    band = CAUSAL & mask_mod(lambda b, h, i, j: i - j < 3 + 11 * h)
    assert_right(attention_with_lse, tensors, indices, size, band)
