"""Masks and scores by function in Hopper's kernels, and in the plain ones at their sizes, against the torch
backend.
"""

import pytest
import torch
from function_cases import loss, same_document

from attnlib import (
    CAUSAL,
    FULL,
    attention_with_lse,
    explain,
    mask_mod,
    score_mod,
    sliding,
    varlen_attention_with_lse,
)
from attnlib.masks.function import function_of

pytestmark = pytest.mark.gpu
HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
TOKENS = 1000  # in which no tile ends


def masks(b: int, t: int):
    """Masks that hide tiles, cut them and leave them whole."""
    document = torch.randint(0, 5, (b, t), device="cuda").sort().values.int()
    return {
        "documents": CAUSAL & mask_mod(same_document, document),
        "stripes": mask_mod(lambda b, h, i, j: (i // 200 + j // 100 + h) % 2 == 0),
        "window": sliding(700) & mask_mod(lambda b, h, i, j: (i - j < 100) | (j < 70)),
        "nothing": mask_mod(lambda b, h, i, j: i * j < 0),
        "causal": CAUSAL,
    }


def scores(h: int):
    """Scores of which one learns, one's derivative needs the score, and one takes all of Hopper's kernels."""
    bias = torch.randn(h, 257, device="cuda")
    return {
        "": None,
        "distance": score_mod(lambda s, b, h, i, j, x: s + x[h, (i - j).clamp(-128, 128) + 128], bias),
        "learns": score_mod(lambda s, b, h, i, j, x: s * x[h, 0], bias.abs().requires_grad_()),
        "capped": score_mod(lambda s, b, h, i, j: torch.tanh(s / 3) * 4),
    }


def assert_alike(ours, theirs, exact):
    """At most three times as far from fp64 as the torch backend, and its rounding."""
    for x, y, z in zip(ours, theirs, exact, strict=True):
        assert x.isfinite().equal(z.isfinite())
        x, y, z = (torch.where(n.isfinite(), n.double(), 0) for n in (x, y, z))
        scale = z.square().mean().sqrt()
        assert (x - z).square().mean().sqrt() <= 3 * (y - z).square().mean().sqrt() + 1e-3 * scale
        assert (x - z).abs().max() <= 3 * (y - z).abs().max() + 4e-2 * scale


def solve(call, q, k, v, score, dtype, **options):
    """Output, LSE and gradients, also of what scores learn."""
    reads = [] if score is None else [x.to(dtype) if dtype == torch.float64 else x for x in score.tensors]
    reads = [
        x.detach().requires_grad_(y.requires_grad)
        for x, y in zip(reads, score.tensors if score else (), strict=True)
    ]
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)] + [
        x for x in reads if x.requires_grad
    ]
    out, lse = call(*leaves[:3], score=score and score.reading(reads), **options)
    return out, lse, *torch.autograd.grad(loss(out.double(), lse.double()), leaves)


def assert_all(call, tensors, mask, score, **options):
    ours, theirs, exact = (
        solve(call, *tensors, score, dtype, mask=mask, backend=backend, **options)
        for backend, dtype in (
            ("triton", torch.bfloat16),
            ("torch", torch.bfloat16),
            ("torch", torch.float64),
        )
    )
    assert_alike(ours, theirs, exact)


def tensors(b, h, g, d, e, s=TOKENS, t=TOKENS):
    return [
        torch.randn(b, n, heads, w, device="cuda").bfloat16()
        for n, heads, w in ((s, h, d), (t, g, d), (t, g, e))
    ]


@pytest.fixture(autouse=True)
def _in_any_order():
    """Gradients as they are added up by default: in a fixed order other kernels run."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("score", ["", "distance", "learns", "capped"])
@pytest.mark.parametrize("mask", ["documents", "stripes", "window", "nothing", "causal"])
@pytest.mark.parametrize(("d", "e"), HEADS)
def test_against_fp64(d, e, mask, score):
    b, h = 2, 4
    assert_all(attention_with_lse, tensors(b, h, 2, d, e, s=870), masks(b, TOKENS)[mask], scores(h)[score])


@pytest.mark.parametrize("mask", ["documents", "stripes", "window"])
@pytest.mark.parametrize("d", [64, 128])
def test_packed(d, mask):
    lengths, heads = (0, 700, 13, 1287, 256), (4, 2)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (x[0] for x in tensors(1, *heads, d, d, s=sum(lengths), t=sum(lengths)))
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    assert_all(varlen_attention_with_lse, (q, k, v), masks(5, 1287)[mask], scores(4)["distance"], **options)


def test_bounds_of_sequences():
    bounds = {"key_starts": torch.tensor([3, 501]), "key_ends": torch.tensor([999, 640])}
    options = {name: x.int().cuda() for name, x in bounds.items()}
    assert_all(attention_with_lse, tensors(2, 4, 2, 128, 128), masks(2, TOKENS)["window"], None, **options)


@pytest.mark.parametrize("d", [64, 128])
def test_hoppers_own_kernels_run_them(d):
    q, k, v = (x.requires_grad_() for x in tensors(1, 4, 2, d, d))
    documents = masks(1, TOKENS)["documents"]
    runs = {
        name: explain(attention_with_lse, q, k, v, mask=documents, score=x).variant
        for name, x in scores(4).items()
    }
    assert runs["distance"] == runs[""] == "Hopper"
    assert runs["learns"] == ("plain" if d == 64 else "Hopper forward, plain backward")
    assert runs["capped"] == "plain forward, Hopper backward"


@pytest.mark.parametrize("score", ["distance", "capped"])
@pytest.mark.parametrize("g", [2, 4])
@pytest.mark.parametrize("d", [64, 128])
def test_scores_in_order(d, g, score):
    """Under deterministic algorithms the same kernel adds in a fixed order."""
    torch.use_deterministic_algorithms(True)
    q, k, v = given = [x.requires_grad_() for x in tensors(2, 4, g, d, d, s=870)]
    function, options = scores(4)[score], {"mask": CAUSAL}
    assert "ordered Hopper" in explain(attention_with_lse, q, k, v, score=function, **options).variant
    assert_all(attention_with_lse, given, CAUSAL, function)
    first, again = (solve(attention_with_lse, *given, function, torch.bfloat16, **options) for _ in range(2))
    assert all(x.equal(y) for x, y in zip(first, again, strict=True))


def test_a_mask_by_function_is_as_exact_as_its_band():
    """In the same kernels, which visit the same blocks in another order."""
    q, k, v = tensors(1, 4, 2, 128, 128)
    for band in (CAUSAL, sliding(300), FULL):
        by_function = function_of(FULL, lambda b, h, i, j, band=band: band.visible(i, j), ())
        ours, theirs = (
            attention_with_lse(q, k, v, mask=mask, backend="triton") for mask in (by_function, band)
        )
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=4e-3)
