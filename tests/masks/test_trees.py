"""The mask of a tree of sequences: who sees whom, how it combines, and attention over unshared copies."""

import pickle
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from tree_cases import EXAMPLE, OPTIONS, ROWS_ONLY, SEQUENCES, ancestors, copies, merged_loss, qkv, trees

from attnlib import (
    CAUSAL,
    FULL,
    Mask,
    attention,
    attention_with_lse,
    mask_mod,
    masks,
    scores,
    sliding,
    varlen_attention_with_lse,
)
from attnlib.packing import tree

MADE = tree(EXAMPLE)
TREE = masks.until(MADE.ends, MADE.positions)
ZERO = torch.tensor(0)
OTHERS = [[[2], [1], [3, 1]], [[1], [1, 2, 2, 2, 2]], [[]]]


def shown(mask, t):
    i, j = torch.arange(t)[:, None], torch.arange(t)
    return mask.visible(ZERO, ZERO, i, j, ZERO).expand(t, t)


@given(SEQUENCES)
def test_a_token_sees_its_ancestors_and_itself(sequences):
    made = tree(sequences)
    if not len(made.tokens):
        return
    for ends in (made.ends, made.ends[None], made.ends.long()):
        assert torch.equal(shown(masks.until(ends), len(made.tokens)), ancestors(made))


def test_one_level_is_the_shared_prefix_of_attention_gym():
    """``attn_gym/masks/shared_prefix.py``: causal in a document, and all of the one that it continues."""
    offsets, owner = torch.tensor([0, 3, 5, 7, 10, 12]), torch.tensor([0, 0, 0, 3, 3])
    document = torch.repeat_interleave(torch.arange(5), offsets.diff())
    i, j = torch.arange(12)[:, None], torch.arange(12)
    theirs = (j <= i) & ((document[i] == document[j]) | (owner[document[i]] == document[j]))
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [8, 9, 10], [8, 9, 10, 11, 12]]
    assert torch.equal(shown(masks.until(tree(prompts).ends), 12), theirs)


@pytest.mark.parametrize("form", [lambda x: x, lambda x: x[None]])
def test_padding_sees_nothing_and_is_not_seen(form):
    """Also between the tokens of a subtree."""
    seen = ancestors(tree([[1, 2, 3], [1, 4]]))
    rows = torch.tensor([0, 1, 3, 5])
    padded = torch.zeros(7, 7, dtype=torch.bool)
    padded[rows[:, None], rows] = seen
    assert torch.equal(shown(masks.until(form(torch.tensor([6, 4, 0, 4, 0, 6, 0]))), 7), padded)


@given(SEQUENCES)
def test_any_depth_is_the_rule_of_trl(sequences):
    """TRL #7328: a query sees a key if ``tin[k] <= tin[q] < tout[k]``, times of a depth-first search."""
    made = tree(sequences)
    t_in, t_out = torch.arange(len(made.ends)), made.ends
    if len(t_in):
        theirs = (t_in <= t_in[:, None]) & (t_in[:, None] < t_out)
        assert torch.equal(shown(masks.until(made.ends), len(t_in)), theirs)


def found_over(made, run, xs, options, leaves, **more):
    """The results of a call on a tree, sequence by sequence, and the call's own."""
    mask = options.mask & masks.until(made.ends, made.positions)
    out, lse = run(*xs, mask=mask, **options.arguments(leaves), **more)
    out, lse = (out[0], lse[0]) if out.dim() == 4 else (out, lse)
    return [x for rows in made.rows for x in (out[rows], lse[:, rows])]


def assert_equal(found, expected, leaves):
    """Results and gradients, which are sums over the copies, to 1e-12."""
    close = {"rtol": 1e-12, "atol": 1e-12}
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, **close)
    grads = (torch.autograd.grad(merged_loss(x), leaves, retain_graph=True) for x in (found, expected))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, **close)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_tree_computes_what_its_sequences_do(name, backend):
    options, xs = OPTIONS[name], qkv(len(MADE.tokens))
    leaves = options.leaves()
    expected = copies(MADE, xs, options, leaves)
    found = found_over(MADE, attention_with_lse, [x[None] for x in xs], options, leaves, backend=backend)
    assert_equal(found, expected, [*xs, *leaves])


@pytest.mark.parametrize("form", ["offsets", "rows"])
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_trees_compute_what_their_sequences_do(name, form):
    """Counted inside each sequence, as ``[t]`` or as a row for each of them; what is outside may be NaN."""
    options, (made, ends, positions) = OPTIONS[name], trees(EXAMPLE, *OTHERS)
    leaves, lengths = options.leaves(), [len(x.tokens) for x in made]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    total = int(cu[-1])
    xs = qkv(total + 3)
    if form == "offsets":
        of_padding = torch.zeros(3, dtype=torch.int32)
        ends, positions = (
            torch.cat((*(getattr(x, field) for x in made), of_padding)) for field in ("ends", "positions")
        )
    mask = masks.until(ends, positions) & options.mask
    poisoned = [torch.cat((x[:total], torch.full_like(x[total:], torch.nan))) for x in xs]
    out, lse = varlen_attention_with_lse(
        *poisoned, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=mask, **options.arguments(leaves)
    )
    expected, found = [], []
    for x, start in zip(made, cu.tolist(), strict=False):
        own = x._replace(rows=[rows + start for rows in x.rows])
        expected += copies(own, xs, options, leaves)
        found += [y for rows in own.rows for y in (out[rows], lse[:, rows])]
    assert_equal(found, expected, [*xs, *leaves])


def test_each_row_of_a_batch_has_its_own_tree_and_slopes():
    made, ends, positions = trees(EXAMPLE, *OTHERS)
    b, t = ends.shape
    xs, slopes = qkv(b * t), torch.rand(b, 4, dtype=torch.float64, requires_grad=True)
    mask = masks.until(ends, positions)
    arguments = {"mask": mask, "alibi_slopes": slopes}
    out, lse = attention_with_lse(*(x.view(b, t, *x.shape[1:]) for x in xs), **arguments)
    padding = ends == 0
    assert padding.any()
    assert not out[padding].any()
    assert (lse.mT[padding] == -torch.inf).all()
    expected, found = [], []
    for n, x in enumerate(made):
        expected += copies(x, [y.view(b, t, *y.shape[1:])[n] for y in xs], OPTIONS["alibi"], [slopes[n]])
        found += [y for rows in x.rows for y in (out[n, rows], lse[n][:, rows])]
    assert_equal(found, expected, [*xs, slopes])


def test_the_last_queries_alone():
    q, k, v = (x[None] for x in qkv(len(MADE.tokens)))
    mask, slopes = TREE & sliding(3), torch.rand(4)
    whole = attention(q, k, v, mask=mask, alibi_slopes=slopes)
    torch.testing.assert_close(attention(q[:, 9:], k, v, mask=mask, alibi_slopes=slopes), whole[:, 9:])


def test_restrictions_in_any_order_are_one_mask():
    t, f = len(MADE.tokens), masks.dilated(2)
    made = [
        TREE & sliding(4) & f,
        sliding(4) & TREE & f,
        f & (sliding(4) & TREE),
        (TREE & f) & (TREE & sliding(4)),
    ]
    every = [shown(x, t) for x in (*made, TREE & (sliding(4) & f))]
    assert all(torch.equal(x, every[0]) for x in every)
    assert not torch.equal(every[0], shown(TREE & f, t))
    assert all(x.band == CAUSAL for x in made)


def test_a_tree_and_a_window_alone_are_known():
    """Kernels tell tiles of these apart without calling the function."""
    assert (TREE.tree.is_alone, TREE.tree.reach) == (True, None)
    both = TREE & sliding(5) & Mask(left=2) & FULL
    assert (both.tree.is_alone, both.tree.reach) == (True, 2)
    assert (TREE & sliding(3) & TREE).tree.reach == 2
    for other in (masks.dilated(2), CAUSAL.shift(-1), Mask(right=-1, prefix=2), ROWS_ONLY):
        both = TREE & sliding(3) & other
        assert both.tree.is_alone is (TREE & other & sliding(3)).tree.is_alone is False
        assert (both & TREE).tree.is_alone is False


@pytest.mark.parametrize(
    "change", [deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.reading(x.tensors)]
)
def test_a_copy_is_a_tree(change):
    copy = change(TREE & sliding(3))
    assert copy.tree == (TREE & sliding(3)).tree
    assert torch.equal(shown(copy, len(MADE.tokens)), shown(TREE & sliding(3), len(MADE.tokens)))


def test_a_tree_prints_itself():
    assert TREE.spelled == "CAUSAL & a tree"
    assert "int32[1], t1: int32[1]" in repr(TREE)


WITHOUT = masks.until(MADE.ends)
COUNTING = {
    "a window": (lambda q: WITHOUT & sliding(3), r"since sliding\(3\) counts"),
    "keys before": (lambda q: CAUSAL.shift(-1) & WITHOUT, "since Mask"),
    "a prefix": (lambda q: WITHOUT & Mask(right=0, prefix=2), "since Mask"),
    "a function": (lambda q: WITHOUT & masks.dilated(2), "since FULL & a function counts"),
    "alibi": (
        lambda q: attention(q, q, q, mask=WITHOUT, alibi_slopes=torch.ones(4)),
        "since ALiBi counts",
    ),
    "a score": (
        lambda q: attention(q, q, q, mask=WITHOUT, score=scores.distance_bias(torch.ones(4, 2))),
        "since a score function counts",
    ),
}


@pytest.mark.parametrize("name", COUNTING)
def test_distances_need_positions(name):
    run, message = COUNTING[name]
    with pytest.raises(
        ValueError, match=rf"^positions: expected .* {message}.* masks\.until\(ends, positions="
    ):
        run(torch.randn(1, len(MADE.tokens), 4, 8))


def test_rows_need_no_positions():
    """Functions that only read tensors at tokens, or no tokens at all."""
    t = len(MADE.tokens)
    q, bias = torch.randn(1, t, 4, 8), torch.randn(1, 4, t, t)
    mask = WITHOUT & ROWS_ONLY & mask_mod(lambda b, h, i, j: h < 3) & FULL & Mask(right=4)
    found = attention(q, q, q, mask=mask, score=scores.bias_tensor(bias))
    theirs = masks.mask_tensor((ancestors(MADE) & (torch.arange(4) < 3)[:, None, None])[None])
    torch.testing.assert_close(found, attention(q, q, q, mask=theirs, score=scores.bias_tensor(bias)))


REFUSED = {
    "floats": (lambda: masks.until(torch.ones(3)), TypeError, "ends: expected integers, got torch.float32"),
    "bools": (lambda: masks.until(torch.ones(3) > 0), TypeError, "ends: expected integers, got torch.bool"),
    "a list": (lambda: masks.until([3, 2]), TypeError, "ends: expected a tensor, got list"),
    "three dimensions": (
        lambda: masks.until(torch.ones(1, 2, 3).int()),
        ValueError,
        r"ends: expected \[b, t\] or packed \[t\], got \(1, 2, 3\)",
    ),
    "other positions": (
        lambda: masks.until(MADE.ends, MADE.positions[1:]),
        ValueError,
        r"positions: expected \(18,\) on cpu like ends, got \(17,\)",
    ),
    "two trees": (
        lambda: TREE & masks.until(MADE.ends.clone(), MADE.positions),
        ValueError,
        "mask: expected one tree",
    ),
    "or": (lambda: TREE | sliding(2), NotImplementedError, r"mask: expected & .* got \|"),
    "or of a band": (lambda: sliding(2) | TREE, NotImplementedError, r"mask: expected & .* got \|"),
    "not": (lambda: ~TREE, NotImplementedError, "mask: expected & .* got ~"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tree_is_refused(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


UNNESTED = {
    "crossing": ([4, 5, 3, 4, 5], "expected 0 or an end from 2 to 4, where the subtree around token 1 "),
    "itself": ([5, 1, 3, 4, 5], "token 1 of sequence 0 ends, got 1"),
    "beyond": ([6, 2, 3, 4, 5], "token 0 of sequence 0 ends, got 6"),
    "negative": ([5, -1, 3, 4, 5], "got -1"),
}


@pytest.mark.parametrize("name", UNNESTED)
def test_ends_that_do_not_nest_are_refused_where_values_are_read(name, monkeypatch):
    ends, message = UNNESTED[name]
    ends, q = torch.tensor(ends), torch.randn(1, 5, 2, 8)
    masks.until(ends[None])
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    for run in (lambda: masks.until(ends[None]), lambda: attention(q, q, q, mask=masks.until(ends))):
        with pytest.raises(ValueError, match=f"^ends: .*{message}"):
            run()
    fine = masks.until(torch.tensor([[5, 2, 0, 4, 5]]))  # with padding between two tokens
    attention(q, q, q, mask=fine)
    fine.tensors[0][0, 4] = 4
    with pytest.raises(ValueError, match="token 4 of sequence 0"):
        attention(q, q, q, mask=fine)


def test_packed_ends_nest_in_their_sequence(monkeypatch):
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    q, cu = torch.randn(5, 2, 8), torch.tensor([0, 3, 5], dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    varlen_attention_with_lse(q, q, q, mask=masks.until(torch.tensor([3, 2, 3, 2, 2])), **options)
    with pytest.raises(ValueError, match="token 0 of sequence 1 ends, got 5"):
        varlen_attention_with_lse(q, q, q, mask=masks.until(torch.tensor([3, 2, 3, 5, 5])), **options)
