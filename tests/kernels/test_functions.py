"""Masks and scores by function in the kernels, against the functions called with all pairs."""

import pytest
import torch
from function_cases import (
    MASK_NAMES,
    NOTHING,
    SCORE_NAMES,
    assert_zeros_of_nothing,
    by_definition,
    close,
    functions,
    loss,
    narrow,
    same_document,
    tensors,
    undefined,
)
from kernel_helpers import DEVICE

from attnlib import (
    CAUSAL,
    FULL,
    KVCache,
    KVLayout,
    attention,
    attention_with_lse,
    cached_attention_with_lse,
    mask_mod,
    score_mod,
    sliding,
    varlen_attention_with_lse,
)
from attnlib.masks.function import function_of


@pytest.fixture(autouse=True)
def _here():
    """Every tensor where kernels run."""
    with torch.device(DEVICE):
        yield


@pytest.mark.parametrize("score_name", SCORE_NAMES)
@pytest.mark.parametrize("mask_name", MASK_NAMES)
def test_training(mask_name, score_name):
    masks, scores = functions()
    mask, (score, reads) = masks[mask_name], scores.get(score_name, (None, ()))
    golden = [*tensors(d=16), *reads]
    leaves = narrow(*golden)
    ours = attention_with_lse(
        *leaves[:3], mask=mask, score=score and score.reading(leaves[3:]), backend="triton"
    )
    theirs = by_definition(*golden[:3], mask, score)
    close(ours, theirs)
    options = {"allow_unused": True, "materialize_grads": True}
    close(
        torch.autograd.grad(loss(*ours), leaves, **options),
        torch.autograd.grad(loss(*theirs), golden, **options),
    )


@pytest.mark.filterwarnings("ignore::attnlib.LayoutWarning")
@pytest.mark.parametrize(
    ("mask_name", "score_name"), [("documents", None), ("by head", "faded"), ("tree", "relative")]
)
@pytest.mark.parametrize(("b", "s", "t"), NOTHING)
def test_no_pair_gives_zeros(b, s, t, mask_name, score_name):
    assert_zeros_of_nothing(b, s, t, mask_name, score_name, "triton")


@pytest.mark.parametrize("mask_name", MASK_NAMES)
def test_packed_sequences(mask_name):
    masks, scores = functions()
    lengths = ((37, 60), (0, 3), (5, 5), (1, 59))
    mask = masks[mask_name]
    if mask_name == "documents":  # of as many sequences as there are
        mask = CAUSAL & mask_mod(same_document, torch.randint(0, 4, (4, 60)).sort().values)
    golden = [
        *tensors(1, sum(s for s, _ in lengths), sum(t for _, t in lengths), d=16),
        *scores["relative"][1],
    ]
    leaves, score = narrow(*golden), scores["relative"][0]
    cu = [
        torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for x in zip(*lengths, strict=True)
    ]
    options = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "mask": mask, "score": score.reading(leaves[3:])}
    out, lse = varlen_attention_with_lse(*(x[0] for x in leaves[:3]), **options, backend="triton")
    total = torch.zeros((), dtype=torch.float64)
    for n, (rows, keys) in enumerate(zip(*(map(slice, x[:-1], x[1:]) for x in cu), strict=True)):
        q, k, v = golden[0][:, rows], golden[1][:, keys], golden[2][:, keys]
        alone = by_definition(q, k, v, mask, score, sequences=torch.tensor(n))
        close((out[rows], lse[:, rows]), (alone[0][0], alone[1][0]))
        total = total + loss(*alone)
    options = {"allow_unused": True, "materialize_grads": True}
    close(
        torch.autograd.grad(loss(out, lse), leaves, **options), torch.autograd.grad(total, golden, **options)
    )


LAYOUTS = {
    "pages": (KVLayout.grouped(2, 16), 4),
    "rows": (KVLayout.grouped(2, 16), None),
    "int8": (KVLayout.grouped(2, 16, storage_dtype=torch.int8), 4),
    "latent": (KVLayout.latent(16, 8), 4),
    "latent, int8": (KVLayout.latent(16, 8, storage_dtype=torch.int8), None),
    "any batch": (KVLayout.grouped(2, 16), 4),
}


CASES = [
    *((mask, None) for mask in MASK_NAMES),
    *((None, score) for score in SCORE_NAMES),
    ("documents", "relative"),
]


@pytest.mark.parametrize(("mask_name", "score_name"), CASES)
@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_over_a_cache(name, mask_name, score_name):
    """As in the reference backend, over a prompt, one token and several, dense steps and packed ones."""
    layout, page_size = LAYOUTS[name]
    invariant = {"batch_invariant": name == "any batch"}
    if page_size:
        cache = KVCache.paged([layout], pages=40, page_size=page_size, max_sequences=2, **invariant)
    else:
        cache = KVCache.contiguous([layout], max_sequences=2, max_length=60, **invariant)
    masks, scores = functions(h=8)
    mask, (score, _) = (
        masks.get(mask_name, CAUSAL if score_name else FULL),
        scores.get(score_name, (None, ())),
    )
    handles, done = cache.admit(2), 0
    shapes = ((2, 60, 16), (2, 60, 8)) if layout.is_latent else ((2, 60, 2, 16),) * 2
    q, k, v = torch.randn(2, 60, 8, layout.dim + layout.rope_dim), *map(torch.randn, shapes)
    for counts in (45, 1, (9, 2)):
        packed = isinstance(counts, tuple)
        steps = counts if packed else (counts, counts)
        parts = [slice(done, done + n) for n in steps]

        def of(x, parts=parts, packed=packed):
            return torch.cat([x[n, part] for n, part in enumerate(parts)]) if packed else x[:, parts[0]]

        with cache.step(dict(zip(handles, counts, strict=True)) if packed else counts) as (layer,):
            view = layer.append(of(k), of(v))
            options = {"mask": mask, "score": score}
            ours, theirs = (
                cached_attention_with_lse(of(q), view, **options, backend=backend)
                for backend in ("triton", "reference")
            )
            close(ours, [x.double() for x in theirs])
        done += steps[0]


def test_a_mask_by_function_gives_the_bits_of_its_band():
    """Where both mask every tile."""
    q, k, v = (x.float() for x in tensors(d=16))
    for mask in (sliding(7), CAUSAL):
        by_function = function_of(mask, lambda b, h, i, j, m=mask: m.visible(i, j), ())
        ours, theirs = (attention(q, k, v, mask=x, backend="triton") for x in (by_function, mask))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-21)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numbers, which are hidden
@pytest.mark.parametrize("mask", [CAUSAL, sliding(9)], ids=str)
def test_what_a_function_makes_of_hidden_pairs_reaches_no_gradient(mask):
    golden = [*tensors(d=16), torch.randn(2, 4, dtype=torch.float64, requires_grad=True)]
    leaves = narrow(*golden)
    ours = attention_with_lse(*leaves[:3], mask=mask, score=score_mod(undefined, leaves[3]), backend="triton")
    theirs = attention_with_lse(
        *golden[:3], mask=mask, score=score_mod(undefined, golden[3]), backend="reference"
    )
    close(ours, theirs)
    close(*(torch.autograd.grad(loss(*x), y) for x, y in ((ours, leaves), (theirs, golden))))
