"""Masks and scores by function: their algebra, and attention by them against the function itself, pair by
pair.
"""

from functools import reduce

import pytest
import torch
from function_cases import (
    MASK_NAMES,
    NOTHING,
    SCORE_NAMES,
    assert_zeros_of_nothing,
    by_definition,
    functions,
    loss,
    relative,
    same_document,
    striped,
    tensors,
    undefined,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from attnlib import (
    CAUSAL,
    FULL,
    KVCache,
    KVLayout,
    Mask,
    MaskFunction,
    attention,
    attention_with_lse,
    cached_attention_with_lse,
    explain,
    mask_mod,
    score_mod,
    sliding,
    varlen_attention_with_lse,
)
from attnlib.masks.function import function_of

N = 12
ROWS, COLUMNS = torch.arange(-N, N)[:, None], torch.arange(N)
ZERO = torch.tensor(0)
SIDES = (None, -3, -1, 0, 2, 5)
BANDS = [Mask(left, right) for left in SIDES for right in SIDES]
BANDS += [Mask(None, right, prefix) for right in SIDES for prefix in (1, 4)]


def table(mask):
    """Which of the pairs a mask shows."""
    if isinstance(mask, Mask):
        return mask.visible(ROWS, COLUMNS)
    return mask.visible(ZERO, ZERO, ROWS, COLUMNS, ZERO).broadcast_to(2 * N, N)


def chosen(b, h, i, j, keys):
    return keys[j] | (i > 2)


KEYS = torch.tensor([True, False] * N)
FUNCTIONS = [mask_mod(striped), mask_mod(chosen, KEYS), mask_mod(lambda b, h, i, j: i % 4 != j % 4)]
MASKS = st.recursive(
    st.sampled_from(BANDS + FUNCTIONS * 10).map(lambda mask: (mask, table(mask))),
    lambda parts: st.one_of(
        parts.map(lambda x: (~x[0], ~x[1])),
        st.tuples(parts, parts).map(lambda x: (x[0][0] & x[1][0], x[0][1] & x[1][1])),
        st.tuples(parts, parts).map(lambda x: (x[0][0] | x[1][0], x[0][1] | x[1][1])),
    ),
    max_leaves=5,
)


@given(MASKS)
def test_composition_is_of_what_is_seen(pair):
    mask, seen = pair
    assert torch.equal(table(mask), seen)


def test_two_bands_stay_a_band_where_they_are_one():
    """By brute force: what a band could say is said by one."""
    bands = BANDS[: len(SIDES) ** 2]
    sayable = {
        table(Mask(left, right)).numpy().tobytes()
        for left in (None, *range(-6, 7))
        for right in (None, *range(-6, 7))
    }
    for x in bands:
        for y in bands:
            assert isinstance(x & y, Mask)
            assert isinstance(x | y, Mask) == ((table(x) | table(y)).numpy().tobytes() in sayable)
    assert CAUSAL & Mask(left=3) == sliding(4)
    assert CAUSAL & Mask(right=0, prefix=5) == CAUSAL
    assert isinstance(sliding(4) & Mask(right=0, prefix=2), MaskFunction)
    assert FULL & CAUSAL == CAUSAL
    assert ~~CAUSAL == CAUSAL


def test_a_tensor_that_both_read_is_read_once():
    both = mask_mod(chosen, KEYS) & ~mask_mod(chosen, KEYS)
    assert len(both.tensors) == 1
    assert len(both.program.parsed.captured) == 1
    assert not table(both).any()


def test_the_band_of_a_function_bounds_what_is_visited():
    mask = sliding(5) & mask_mod(striped)
    assert mask.band == sliding(5)
    assert (mask | sliding(3)).band == sliding(5)
    assert (~mask).band == FULL


# ---- attention by them


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("score_name", SCORE_NAMES)
@pytest.mark.parametrize("mask_name", MASK_NAMES)
def test_attention_is_that_of_the_function(mask_name, score_name, backend):
    masks, scores = functions()
    mask, (score, leaves) = masks[mask_name], scores.get(score_name, (None, ()))
    leaves = [*tensors(), *leaves]
    ours, theirs = (
        attention_with_lse(*leaves[:3], mask=mask, score=score, backend=backend),
        by_definition(*leaves[:3], mask, score),
    )
    torch.testing.assert_close(ours, theirs)
    grads = [
        torch.autograd.grad(loss(*x), leaves, allow_unused=True, materialize_grads=True)
        for x in (ours, theirs)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore::attnlib.LayoutWarning")
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("score_name", SCORE_NAMES)
@pytest.mark.parametrize("mask_name", MASK_NAMES)
@pytest.mark.parametrize(("b", "s", "t"), NOTHING)
def test_no_pair_gives_zeros(b, s, t, mask_name, score_name, backend):
    assert_zeros_of_nothing(b, s, t, mask_name, score_name, backend)


@pytest.mark.parametrize("mask_name", MASK_NAMES)
def test_packed_sequences_are_numbered(mask_name):
    masks, scores = functions()
    mask, (score, leaves) = masks[mask_name], scores["relative"]
    lengths = ((37, 60), (0, 3), (5, 5), (1, 59))
    q, k, v = tensors(1, sum(s for s, _ in lengths), sum(t for _, t in lengths))
    if mask_name == "documents":  # of as many sequences as there are
        mask = CAUSAL & mask_mod(same_document, torch.randint(0, 4, (4, 60)).sort().values)
    cu = [
        torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for x in zip(*lengths, strict=True)
    ]
    out, lse = varlen_attention_with_lse(
        q[0], k[0], v[0], cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], mask=mask, score=score
    )
    parts = []
    for n, (rows, keys) in enumerate(zip(*(map(slice, x[:-1], x[1:]) for x in cu), strict=True)):
        alone = by_definition(q[:, rows], k[:, keys], v[:, keys], mask, score, sequences=torch.tensor(n))
        torch.testing.assert_close((out[rows], lse[:, rows]), (alone[0][0], alone[1][0]))
        parts.append(loss(*alone))
    leaves = [q, k, v, *leaves]
    ours = torch.autograd.grad(loss(out, lse), leaves, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(reduce(torch.add, parts), leaves, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("score_name", SCORE_NAMES)
@pytest.mark.parametrize("mask_name", MASK_NAMES)
@torch.no_grad()
def test_over_a_cache_indices_go_on(mask_name, score_name, backend):
    """A prompt and then some tokens see what all of them see at once."""
    masks, scores = functions()
    mask, (score, _) = masks[mask_name], scores.get(score_name, (None, ()))
    q, k, v = tensors(s=60)
    cache = KVCache.paged(
        [KVLayout.grouped(2, 8, 5, dtype=torch.float64)], pages=40, page_size=4, max_sequences=2
    )
    cache.admit(2)
    done = 0
    for count in (50, 1, 9):
        part = slice(done, done := done + count)
        with cache.step(count) as (layer,):
            view = layer.append(k[:, part], v[:, part])
            ours = cached_attention_with_lse(q[:, part], view, mask=mask, score=score, backend=backend)
        torch.testing.assert_close(ours, by_definition(q[:, part], k[:, :done], v[:, :done], mask, score))


def test_a_band_by_function_gives_the_bits_of_the_band():
    """Within the same band, which says what tiles there are."""
    q, k, v = (x.float() for x in tensors())
    for mask in (CAUSAL, sliding(9), Mask(3, 2), Mask(right=0, prefix=7)):
        by_function = function_of(mask, lambda b, h, i, j, m=mask: m.visible(i, j), ())
        ours, theirs = (attention_with_lse(q, k, v, mask=x, backend="torch") for x in (by_function, mask))
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_gradcheck_of_what_scores_read():
    q, k, v = tensors(1, 5, 7, 2, 1, 3)
    for score, leaves in functions(1, 2, 7)[1].values():
        torch.autograd.gradcheck(
            lambda *x, score=score: attention_with_lse(*x[:3], mask=CAUSAL, score=score.reading(x[3:])),
            (q, k, v, *leaves),
        )


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, i, j, x: s**2 + x[h, j] ** 3 + (s.abs() + 1) ** 1.7,
        lambda s, b, h, i, j, x: (s * s + 1) ** -2 + 2 ** x[h, i] + 1.5**s,
        lambda s, b, h, i, j, x: (
            torch.sqrt(s * s + 1) * torch.rsqrt(x[h, j] * x[h, j] + 1) + (x[h, -1] + 9) ** 0.5
        ),
        lambda s, b, h, i, j, x: torch.sigmoid(s * x[h, j]) + (s / 3).exp2() * (i & 3),
        lambda s, b, h, i, j, x: s * ((i ^ j) & 1) + x[h, (i << 1 | j >> 1) % 5] * (~i & 7),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_gradcheck_of_what_people_write(backend, function):
    q, k, v = tensors(1, 5, 7, 2, 1, 3)
    x = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda *x: attention_with_lse(*x[:3], mask=CAUSAL, score=score_mod(function, x[3]), backend=backend),
        (q, k, v, x),
    )


def test_scores_that_read_nothing_train():
    """Under torch 2.14 an empty list among an operator's arguments wanted a gradient of its own."""
    q, k, v = tensors()
    score = score_mod(lambda s, b, h, i, j: s / 2 + h)
    grads = [
        torch.autograd.grad(
            loss(*attention_with_lse(q, k, v, mask=CAUSAL, score=score, backend=backend)), (q, k, v)
        )
        for backend in ("torch", "reference")
    ]
    torch.testing.assert_close(*grads)
    compiled = torch.compile(
        lambda *x: attention_with_lse(*x, mask=CAUSAL, score=score)[0], backend="aot_eager"
    )
    torch.testing.assert_close(
        torch.autograd.grad(compiled(q, k, v).sum(), q),
        torch.autograd.grad(attention_with_lse(q, k, v, mask=CAUSAL, score=score)[0].sum(), q),
    )


@pytest.mark.parametrize("mask", [FULL, CAUSAL, mask_mod(striped)], ids=["full", "causal", "striped"])
@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, i, j, x: x[h],
        lambda s, b, h, i, j, x: x[j % 4],
        lambda s, b, h, i, j, x: i - j,
        lambda s, b, h, i, j, x: 1.5,
        lambda s, b, h, i, j, x: float("-inf"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_score_need_not_read_score_or_key(backend, function, mask):
    q, k, v = tensors(1, 5, 7)
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def found(score, backend):
        out, lse = attention_with_lse(q, k, v, mask=mask, score=score_mod(score, x), backend=backend)
        return (
            out,
            lse,
            *torch.autograd.grad((out.sin().sum() + lse.exp().sum()), (q, k, v, x), materialize_grads=True),
        )

    with_score = found(lambda s, b, h, i, j, x: torch.where(j >= 0, function(s, b, h, i, j, x), s), "torch")
    torch.testing.assert_close(found(function, backend), with_score, equal_nan=True)


BY_HEAD = sliding(9) | mask_mod(lambda b, h, i, j: (h == 1) & (j % 3 == 0))


def biased(q, bias):
    return attention(q, q, q, mask=BY_HEAD, score=score_mod(relative, bias, torch.tensor(1.3)))


def test_calls_may_be_mapped_and_checkpointed():
    """As calls without functions may."""
    qs, biases = torch.randn(3, 2, 20, 4, 8, requires_grad=True), torch.randn(3, 4, 9, requires_grad=True)
    for dims in ((0, 0), (0, None), (None, 0)):
        pairs = [
            [x[n] if dim == 0 else x[0] for x, dim in zip((qs, biases), dims, strict=True)] for n in range(3)
        ]
        given = [x if dim == 0 else x[0] for x, dim in zip((qs, biases), dims, strict=True)]
        mapped, looped = torch.vmap(biased, dims)(*given), torch.stack([biased(*pair) for pair in pairs])
        torch.testing.assert_close(mapped, looped)
        of_mapped, of_looped = (torch.autograd.grad(x.sin().sum(), (qs, biases)) for x in (mapped, looped))
        torch.testing.assert_close(of_mapped, of_looped)
    leaves = (qs[0].detach().requires_grad_(), biases[0].detach().requires_grad_())
    out = biased(*leaves)
    douts = torch.randn(5, *out.shape)
    many = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    one = zip(*(torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts), strict=True)
    torch.testing.assert_close(many, tuple(map(torch.stack, one)))
    again = checkpoint(biased, *leaves, use_reentrant=False)
    grads = [torch.autograd.grad(x.sin().sum(), leaves) for x in (again, out)]
    torch.testing.assert_close(*grads)


def test_gradients_under_autocast_add_up_in_fp32():
    q, bias = torch.randn(2, 20, 4, 8, requires_grad=True), torch.randn(4, 9, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = biased(q, bias)
        inside = torch.autograd.grad(out.float().sin().sum(), (q, bias), retain_graph=True)
    outside = torch.autograd.grad(out.float().sin().sum(), (q, bias))
    assert [x.dtype for x in inside] == [torch.float32, torch.float32]
    torch.testing.assert_close(inside, outside)


@given(MASKS, st.integers(0, 2**32))
def test_any_composition_in_attention(pair, seed):
    mask, _ = pair
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n, 2, 4, dtype=torch.float64, generator=generator) for n in (5, 9, 9))
    torch.testing.assert_close(attention_with_lse(q, k, v, mask=mask), by_definition(q, k, v, mask, None))


def test_explain_shows_the_steps():
    q, k, v = tensors()
    shown = str(
        explain(attention, q, k, v, mask=functions()[0]["documents"], score=functions()[1]["relative"][0])
    )
    assert "x0 = load(t0, b, i)" in shown
    assert "def score(score, b, h, i, j, first, t0: float[2], t1: float[0]):" in shown


@pytest.mark.parametrize("mask", [CAUSAL, sliding(9)], ids=str)
def test_what_a_function_makes_of_hidden_pairs_reaches_no_gradient(mask):
    golden = [*tensors(d=16), torch.randn(2, 4, dtype=torch.float64, requires_grad=True)]
    leaves = [x.detach().requires_grad_() for x in golden]
    ours = attention_with_lse(*leaves[:3], mask=mask, score=score_mod(undefined, leaves[3]), backend="torch")
    theirs = attention_with_lse(
        *golden[:3], mask=mask, score=score_mod(undefined, golden[3]), backend="reference"
    )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss(*x), y) for x, y in ((ours, leaves), (theirs, golden)))
    )
