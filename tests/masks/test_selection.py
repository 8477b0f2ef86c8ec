"""The mask of selected keys: its laws, its gradients against a dense mask, and what it refuses."""

import pickle
from copy import deepcopy
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
import torch
from selected_cases import as_tensor, by_entries, lists
from torch.utils._python_dispatch import TorchDispatchMode

from attnlib import (
    CAUSAL,
    FULL,
    Mask,
    attention,
    attention_maxima,
    attention_weights,
    attention_with_lse,
    explain,
    mask_mod,
    masks,
    merge_states,
    packing,
    score_mod,
    sliding,
    varlen_attention_with_lse,
)
from attnlib.call.call import Call, Origin, Packing
from attnlib.dispatch.run import attend
from attnlib.masks import selected

B, H, G, D = 2, 4, 2, 8
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def qkv(s: int, t: int, *, b: int = B, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, s, H, D), (b, t, G, D), (b, t, G, D + 3)
    return [torch.randn(x, generator=generator, dtype=torch.float64).requires_grad_() for x in shapes]


def learnt(results, leaves) -> list[torch.Tensor]:
    """Results, and the gradients of a sum of all their numbers with different weights."""
    total = 0
    for x in results:
        weights = torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)
        total = total + (x.masked_fill(x == -torch.inf, 0) * weights).sum()
    return [*results, *torch.autograd.grad(total, leaves, retain_graph=True)]


def assert_close(found, expected) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.rand(B, H, dtype=torch.float64).requires_grad_()},
    "sinks": {"sinks": torch.randn(H, dtype=torch.float64).requires_grad_()},
    "dropout": {"dropout_p": 0.4, "dropout_seed": torch.tensor([7])},
    "bounds": {"key_starts": torch.tensor([3, 0]).int(), "key_ends": torch.tensor([50, 41]).int()},
    "score": {"score": score_mod(lambda x, b, h, i, j: x * (1 + h) - (i - j) / 16)},
}


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("c", [1, G, H])
def test_it_computes_what_a_dense_mask_does(c, name, backend):
    """In fp64, with every gradient; a few queries of longer keys, and blocks that end after the keys."""
    s, t, size = 21, 53, 4
    indices, leaves, options = lists(B, s, c, 5, 14), qkv(s, t), OPTIONS[name]
    given = [*leaves, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
    runs = (
        attention_with_lse(*leaves, mask=mask, backend=backend, **options)
        for mask in (CAUSAL & selected(indices, size), as_tensor(indices, size, H, t))
    )
    assert_close(*(learnt(run, given) for run in runs))


@pytest.mark.parametrize("band", [FULL, sliding(9), Mask(right=0, prefix=3), Mask(left=20, right=-4)])
@pytest.mark.parametrize("size", [1, 16])
def test_any_band_and_function_restrict_it(band, size):
    s = t = 40
    indices, leaves = lists(B, s, G, 9, t // size + 1), qkv(s, t)
    odd = mask_mod(lambda b, h, i, j: (i + j + h) % 3 > 0)
    made = [
        band & selected(indices, size) & odd,
        odd & (selected(indices, size) & band),
        as_tensor(indices, size, H, t, band & odd),
    ]
    first, *rest = (learnt(attention_with_lse(*leaves, mask=mask), leaves) for mask in made)
    assert all(x.band == band for x in made[:2])
    for other in rest:
        assert_close(other, first)


@pytest.mark.parametrize("s", [1, 300])
def test_tiles_of_more_keys_than_one_read(s):
    t = 1300
    indices, leaves = lists(B, s, G, 6, t // 32), qkv(s, t)
    masks_of_both = CAUSAL & selected(indices, 32), as_tensor(indices, 32, H, t)
    assert_close(*(learnt(attention_with_lse(*leaves, mask=x), leaves) for x in masks_of_both))


@pytest.mark.parametrize("band", [CAUSAL, FULL, sliding(5)])
def test_all_blocks_are_the_band(band):
    s, t = 19, 30
    every = torch.arange(8).int().expand(B, s, 1, 8)
    leaves = qkv(s, t)
    found = learnt(attention_with_lse(*leaves, mask=band & selected(every, 4)), leaves)
    assert_close(found, learnt(attention_with_lse(*leaves, mask=band), leaves))


def test_order_repeats_and_gaps_change_nothing():
    """To the bit."""
    s, t = 23, 64
    clean = torch.stack([torch.randperm(16)[:5] for _ in range(B * s * G)]).view(B, s, G, 5).int()
    wide = torch.cat((clean, clean[..., :3], torch.full_like(clean, -1), clean + 16), -1)
    order = torch.rand(wide.shape).argsort(-1)
    leaves = qkv(s, t)
    first = learnt(attention_with_lse(*leaves, mask=CAUSAL & selected(clean, 4)), leaves)
    for indices in (clean.flip(-1), wide, wide.gather(-1, order)):
        again = learnt(attention_with_lse(*leaves, mask=CAUSAL & selected(indices, 4)), leaves)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


def test_a_list_is_the_merge_of_its_parts():
    s, t = 17, 48
    indices, leaves = torch.stack([torch.randperm(12)[:6] for _ in range(B * s)]).view(B, s, 1, 6), qkv(s, t)
    whole = attention_with_lse(*leaves, mask=CAUSAL & selected(indices.int(), 4))
    parts = [
        attention_with_lse(*leaves, mask=CAUSAL & selected(x.int(), 4)) for x in indices.split((2, 4), -1)
    ]
    assert_close(learnt(merge_states(*parts[0], *parts[1]), leaves), learnt(whole, leaves))


def test_fewer_lists_are_those_of_all_their_heads():
    s = t = 20
    leaves = qkv(s, t)
    for c in (1, G):
        indices = lists(B, s, c, 4, 6)
        every = indices.repeat_interleave(H // c, 2)
        runs = (
            attention_with_lse(*leaves, mask=CAUSAL & selected(x.contiguous(), 4)) for x in (indices, every)
        )
        assert_close(*(learnt(run, leaves) for run in runs))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("c", [1, G, H])
def test_packed_sequences_are_each_alone(c, backend):
    """Entries count inside a sequence; what is outside of all may be NaN."""
    queries, keys, slack = (5, 0, 9, 1), (12, 3, 9, 30), 2
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys))
    q, k, v = (x[0] for x in qkv(sum(queries) + slack, sum(keys) + slack, b=1))
    indices = lists(1, len(q), c, 4, 8)[0]
    with torch.no_grad():
        for x in (q, k, v):
            x[-slack:] = torch.nan
    mask, offsets = CAUSAL & selected(indices, 4), {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    out, lse = varlen_attention_with_lse(q, k, v, mask=mask, backend=backend, **offsets)
    found, expected = [], []
    for r, t in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        rows, tokens = slice(*r), slice(*t)
        own = CAUSAL & selected(indices[None, rows], 4)
        alone = attention_with_lse(q[None, rows], k[None, tokens], v[None, tokens], mask=own)
        found += [out[rows], lse[:, rows]]
        expected += [x[0] for x in alone]
    assert_close(learnt(found, [q, k, v]), learnt(expected, [q, k, v]))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_keys_that_nobody_selects_may_be_nan(backend):
    """Neither results nor gradients see them, whether other keys of their tile are selected or not."""
    s, t = 33, 600
    indices = lists(B, s, 1, 5, 70).clamp(min=0) * 2  # nobody selects keys of odd blocks, and from 576 on
    leaves = qkv(s, t)
    hidden = ~by_entries(indices, 4, H, t).any(2).any(1)
    expected = learnt(attention_with_lse(*leaves, mask=FULL & selected(indices, 4), backend=backend), leaves)
    with torch.no_grad():
        leaves[1][hidden], leaves[2][hidden] = torch.nan, torch.inf
    found = learnt(attention_with_lse(*leaves, mask=FULL & selected(indices, 4), backend=backend), leaves)
    assert_close(found, expected)


@pytest.mark.parametrize("n", [0, 3])
def test_rows_that_select_nothing(n):
    """Empty lists, only -1, blocks that do not exist, and blocks that the band hides."""
    s = t = 12
    indices = torch.full((B, s, 1, n), -1, dtype=torch.int32)
    if n:
        indices[:, 3:6], indices[:, 6] = 3, 2**30
        indices[:, 7] = torch.tensor([2, -1, 2])  # keys 8 to 11
    leaves = qkv(s, t)
    sinks = torch.randn(H, dtype=torch.float64)
    out, lse, *grads = learnt(attention_with_lse(*leaves, mask=CAUSAL & selected(indices, 4)), leaves)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not any(x.any() for x in grads)
    out, lse = attention_with_lse(*leaves, mask=CAUSAL & selected(indices, 4), sinks=sinks)
    assert not out.any()
    torch.testing.assert_close(lse, sinks[:, None].expand(B, H, s))


def test_entries_count_the_keys_of_a_larger_call():
    """A chunk of the keys that begins with key 8 of the whole."""
    s, t, first = 10, 40, 8
    indices, (q, k, v) = lists(B, s, G, 6, 11), qkv(s, t)
    mask = CAUSAL & selected(indices, 4)
    last = attend(Call(q, mask, k=k[:, first:], v=v[:, first:], origin=Origin(query=first, key=first)))
    rest = attend(Call(q, mask, k=k[:, :first], v=v[:, :first], origin=Origin(query=t - first)), "torch")
    assert_close(merge_states(*last, *rest), attention_with_lse(q, k, v, mask=mask))


def test_documents_of_a_row_keep_the_rows_blocks():
    s = t = 24
    indices, leaves = lists(1, s, G, 5, 6), qkv(s, t, b=1)
    documents = masks.documents_of(torch.tensor([0, 10, 24]).int(), t)
    both = (x & documents & CAUSAL for x in (selected(indices, 4), as_tensor(indices, 4, H, t)))
    assert_close(*(attention_with_lse(*leaves, mask=x) for x in both))


def test_a_tree_of_sequences():
    tree = packing.tree([[1, 2, 3, 4], [1, 2, 5], [6, 7]])
    t = len(tree.tokens)
    indices, leaves, slopes = lists(1, t, 1, 4, t), qkv(t, t, b=1), torch.rand(H)
    until = masks.until(tree.ends[None], tree.positions[None]) & sliding(3)
    both = (until & x for x in (selected(indices), as_tensor(indices, 1, H, t, FULL)))
    assert_close(*(attention_with_lse(*leaves, mask=x, alibi_slopes=slopes) for x in both))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("c", [1, G, H])
def test_weights_and_maxima(c, backend):
    s, t = 13, 45
    indices, (q, k, v) = lists(B, s, c, 5, 12), qkv(s, t)
    ours, theirs = CAUSAL & selected(indices, 4), as_tensor(indices, 4, H, t)
    _, lse = attention_with_lse(q, k, v, mask=theirs)
    at = torch.randint(-1, t, (B, s, 7))
    for asked in (
        {"over": "none", "rows": torch.tensor([0, 5, 6, 12, -1])},
        {"over": "queries"},
        {"over": "queries", "rows": torch.tensor([[1, 2], [12, -1]])},
        {"over": "heads", "at": at},
    ):
        found = attention_weights(q, k, lse, mask=ours, backend=backend, **asked)
        torch.testing.assert_close(found, attention_weights(q, k, lse, mask=theirs, **asked), **CLOSE)
    for of in ("scores", "products"):
        found = attention_maxima(q, k, mask=ours, of=of, softcap=2.0, backend=backend)
        torch.testing.assert_close(found, attention_maxima(q, k, mask=theirs, of=of, softcap=2.0), **CLOSE)


def test_maxima_of_packed_queries_that_see_nothing():
    q, cu = torch.randn(5, 1, 8), torch.tensor([0, 1, 5]).int()
    mask = CAUSAL & selected(torch.full((5, 1, 1), -1).int())
    found = attention_maxima(q, q, mask=mask, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert (found == -torch.inf).all()


def test_no_tensor_has_a_bool_for_each_pair():
    """Lists are expanded for a few queries at a time."""
    s = t = 2048
    q, k = torch.randn(1, s, 1, 8, requires_grad=True), torch.randn(1, t, 1, 8)

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes = [x.numel() for x in (result if isinstance(result, tuple) else (result,))
                     if isinstance(x, torch.Tensor)]  # fmt: skip
            self.size = max(self.size, *sizes, 0)
            return result

    call = Call(q, CAUSAL & selected(lists(1, s, 1, 8, t // 16), 16), k=k, v=k)
    with Largest() as largest:
        attend(call, "torch")[0].sum().backward()
    assert 0 < largest.size <= s * t // 4


def test_mixed_precision_and_e4m3():
    s = t = 64
    indices = lists(B, s, G, 6, 9)
    q, k, v = (x.detach().bfloat16() for x in qkv(s, t))
    for options in ({}, {"compute_dtype": torch.float8_e4m3fn}):
        both = (CAUSAL & selected(indices, 8), as_tensor(indices, 8, H, t))
        ours, theirs = (attention(q, k, v[..., :D], mask=x, **options) for x in both)
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_vmap_runs_each_alone():
    s = t = 9
    q, k, v = (x.detach() for x in qkv(s, t, b=3))
    indices = lists(3, s, 1, 3, 4)

    def run(q, k, v, indices):
        return attention(q[None], k[None], v[None], mask=CAUSAL & selected(indices[None], 4))[0]

    expected = attention(q, k, v, mask=CAUSAL & selected(indices, 4))
    torch.testing.assert_close(torch.vmap(run)(q, k, v, indices), expected)


@pytest.mark.parametrize(
    "change", [deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.reading(x.tensors)]
)
def test_a_copy_is_the_same_mask(change):
    q, k, v = qkv(6, 6)
    mask = sliding(4) & selected(lists(B, 6, 1, 3, 3), 2)
    assert torch.equal(attention(q, k, v, mask=change(mask)), attention(q, k, v, mask=mask))


def test_the_value_is_frozen_and_prints_itself():
    mask = selected(lists(B, 6, 1, 3, 3), 2)
    with pytest.raises(FrozenInstanceError):
        mask.selection = None
    assert (CAUSAL & mask).spelled == "CAUSAL & selected(block_size=2)"
    assert (masks.dilated(2) & mask).spelled == "FULL & a function & selected(block_size=2)"
    assert (CAUSAL & mask).with_lists(None).band == CAUSAL
    assert (mask & sliding(3) & mask).selection is mask.selection


def test_explain_names_the_lists_and_what_other_backends_lack():
    q, k, v = qkv(6, 6)
    found = explain(attention, q, k, v, mask=CAUSAL & selected(lists(B, 6, G, 3, 3), 2), dropout_p=0.5)
    assert found.chosen == "torch"
    assert "selected   2 x 3 blocks of 2 keys for each query" in str(found)
    lacks = "has no kernels yet for masks.selected() with dropout; use backend='torch'"
    assert f"not on triton: {lacks}" in str(found)
    tokens = explain(attention, q, k, v, mask=selected(lists(B, 6, 1, 5, 3)))
    assert "selected   1 x 5 keys for each query" in str(tokens)


INDICES = lists(B, 6, G, 3, 3)
MASK = selected(INDICES, 2)
REFUSED = {
    "a list": (lambda: selected([[1]]), TypeError, "indices: expected a tensor, got list"),
    "int64": (
        lambda: selected(INDICES.long()),
        TypeError,
        r"indices: expected torch.int32, got torch.int64; cast it with .int\(\)",
    ),
    "two dimensions": (
        lambda: selected(INDICES[0, 0]),
        ValueError,
        r"indices: expected \[b, s, c, n\] or packed \[t, c, n\], got \(2, 3\)",
    ),
    "no block": (lambda: selected(INDICES, 0), ValueError, "block_size: expected at least 1, got 0"),
    "half a block": (lambda: selected(INDICES, 0.5), TypeError, "block_size: expected an int, got 0.5"),
    "or": (lambda: MASK | CAUSAL, NotImplementedError, r"mask: expected & .* masks.selected\(\) .* got \|"),
    "or of a band": (lambda: CAUSAL | MASK, NotImplementedError, r"mask: expected & .* got \|"),
    "not": (lambda: ~MASK, NotImplementedError, "mask: expected & .* got ~.*merge_states"),
    "two lists": (
        lambda: MASK & selected(INDICES, 2),
        NotImplementedError,
        r"mask: expected lists of one masks.selected\(\).* in one list",
    ),
    "visible": (
        lambda: MASK.visible(*torch.zeros(5, 1).int()),
        NotImplementedError,
        r"mask: expected no lists.*with_lists\(None\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_selection_is_refused(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=f"^{message}"):
        make()


@pytest.mark.parametrize(
    "shape", [(B, 5, G, 3), (1, 6, G, 3), (B, 6, 3, 3), (B, 6, 8, 3), (6, G, 3), (B, 6, 0, 3)]
)
def test_lists_fit_the_queries(shape):
    q, k, v = qkv(6, 6)
    expected = r"^indices: expected \[b=2, s=6, c, n\] like q, with c=1, g=2 or h=4 lists, got \("
    with pytest.raises(ValueError, match=expected):
        attention(q, k, v, mask=selected(torch.zeros(shape, dtype=torch.int32)))


def test_lists_fit_packed_queries():
    q, k, v = (x[0] for x in qkv(6, 6))
    cu = torch.tensor([0, 6]).int()
    call = Call(q, selected(INDICES[0, 1:]), k=k, v=v, packing=Packing(cu, cu))
    with pytest.raises(ValueError, match=r"^indices: expected \[t=6, c, n\] like q"):
        attend(call)


def test_lists_are_where_q_is():
    with pytest.raises(ValueError, match=r"^indices: expected device cpu like q, got meta"):
        attention(*qkv(6, 6), mask=selected(INDICES.to("meta")))


def test_entries_are_checked_where_values_are_read(monkeypatch):
    twice = torch.tensor([[[[1, -1, 3, -1, 1]]]]).int()
    selected(twice, 2)
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    selected(torch.tensor([[[[1, -1, 3, -1, 9]]]]).int(), 2)
    with pytest.raises(
        ValueError, match=r"^indices: expected each block at most once in a list, got block 1"
    ):
        selected(twice, 2)
    with pytest.raises(ValueError, match=r"^indices: expected block numbers, or -1 for no entry, got -2"):
        selected(twice - 1, 2)
    shown = mask_mod(lambda b, h, i, j, x: x[b, j] > 0, torch.ones(B, 6).int())
    attention(*qkv(6, 6), mask=selected(torch.arange(3).int().expand(B, 6, 1, 3), 2) & shown)
