"""The papers' algorithms equal the definition, forward and backward, whatever the tiles, the mask and the
dropout.
"""

import pytest
import torch
from helpers import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from paper_problems import (
    BACKWARD,
    DROPOUT,
    EXACT,
    FORWARD,
    SEED,
    back_one_pass,
    back_two_pass,
    heads,
    keep,
    make,
    run_flash2,
)

from attnlib import CAUSAL, attention_with_lse, sliding
from attnlib.reference import flash2, incremental, standard
from attnlib.reference.heads import over_heads
from attnlib.reference.pairs import Pairs
from attnlib.reference.traffic import SlowMemory, tiles

close = torch.testing.assert_close


@pytest.mark.parametrize("name", FORWARD)
@given(head=heads())
def test_forward_equals_the_definition(name, head):
    out, lse = FORWARD[name](head, SlowMemory())
    golden = head.defined()
    close(out, golden["out"], **EXACT)
    close(lse, golden["lse"], **EXACT)


@given(heads())
def test_standard_attention_equals_the_definition(head):
    out, p = standard.forward(*head.tensors, head.pairs, memory=SlowMemory())
    golden = head.defined()
    close(out, golden["out"], **EXACT)
    scores = (head.scale * head.q @ head.k.T).masked_fill(~head.visible(), -torch.inf)
    lse = golden["lse"][:, None].masked_fill(golden["lse"][:, None] == -torch.inf, 0)
    close(p, torch.exp(scores - lse), **EXACT)


@pytest.mark.parametrize("name", BACKWARD)
@given(head=heads())
def test_backward_equals_autograd_of_the_definition(name, head):
    golden = head.defined()
    for x, which in zip(BACKWARD[name](head, SlowMemory()), ("dq", "dk", "dv"), strict=True):
        close(x, golden[which], **EXACT)


@given(heads(), st.sampled_from("qkv"), st.integers(0, 16))
def test_a_nan_reaches_only_who_sees_it(head, which, at):
    """A NaN in one query, key or value shows in every result that is a function of it, and in no other."""
    x = getattr(head, which)
    if len(x):
        x[at % len(x)] = torch.nan
    golden = head.defined()
    for run in FORWARD.values():
        for result, name in zip(run(head, SlowMemory()), ("out", "lse"), strict=True):
            close(result, golden[name], **EXACT, equal_nan=True)
    for run in BACKWARD.values():
        for result, name in zip(run(head, SlowMemory()), ("dq", "dk", "dv"), strict=True):
            close(result, golden[name], **EXACT, equal_nan=True)


@given(heads())
def test_both_forms_of_the_flash2_backward_give_the_same_bits(head):
    one, two = back_one_pass(head, SlowMemory()), back_two_pass(head, SlowMemory())
    assert_same_bits(*zip(one, two, strict=True))


@given(heads())
def test_incremental_attention_is_flash2_with_one_tile_of_queries(head):
    out, c, pi = incremental.forward(*head.tensors, head.pairs, columns=head.columns, memory=SlowMemory())
    other, lse = run_flash2(head.change(rows=max(1, len(head.q))), SlowMemory())
    assert_same_bits((out, other), (c + pi.log(), lse))


@given(heads(dropout=(False,)), st.integers(0, 16))
def test_programs_of_flash2_do_not_see_each_other(head, n):
    """Tiles of queries may run at once or apart: the last ones alone give the bits that they give among
    all.
    """
    cut = min(n * head.rows, len(head.q))
    out, lse = run_flash2(head, SlowMemory())
    assert_same_bits(
        *zip(run_flash2(head.change(q=head.q[cut:]), SlowMemory()), (out[cut:], lse[cut:]), strict=True)
    )


@given(heads())
def test_row_sums_of_p_and_dp_need_only_the_output(head):
    """The lemma of the backward pass, dropout included: rowsum(P * dP) = rowsum(dO * O)."""
    out, p = standard.forward(*head.tensors, head.pairs, memory=SlowMemory())
    dp = head.pairs.drop(head.do @ head.v.T, *head.pairs.whole)
    close((p * dp).sum(1), (head.do * out).sum(1), **EXACT)


@given(heads())
def test_tiles_that_meet_are_those_with_a_visible_pair(head):
    visible, (i, j) = head.visible(), head.pairs.whole
    for n in tiles(i.stop, head.rows):
        assert head.pairs.seen_by(n, head.columns) == [
            m for m in tiles(j.stop, head.columns) if visible[n, m].any()
        ]
    for m in tiles(j.stop, head.columns):
        assert head.pairs.seeing(m, head.rows) == [n for n in tiles(i.stop, head.rows) if visible[n, m].any()]


def test_only_tiles_on_the_diagonal_are_masked():
    """Of a causal head in 4 x 4 square tiles, 6 are skipped, 4 masked, and 6 neither."""
    asked = []

    class Spy:
        keys, covers = CAUSAL.keys, CAUSAL.covers

        def visible(self, i, j):
            asked.append((int(i[0]), int(j[0])))
            return CAUSAL.visible(i, j)

    head = make(32, 32, 4, 4, mask=CAUSAL, rows=8, columns=8)
    pairs = Pairs(Spy(), 32, 32, head.scale)
    flash2.forward(*head.tensors, pairs, **head.tile, memory=SlowMemory())
    assert set(asked) == {(0, 0), (8, 8), (16, 16), (24, 24)}


def test_dropout_is_made_again_and_never_stored():
    """Forward and backward ask for the same tiles, and nothing of their size is allocated."""
    head = make(24, 24, 4, 4, mask=CAUSAL, rows=8, columns=8)
    asked = []

    def kept(i, j):
        asked.append((i.start, j.start))
        return keep(i, j)

    pairs, memory = Pairs(CAUSAL, 24, 24, head.scale, DROPOUT, kept), SlowMemory()
    saved = flash2.forward(*head.tensors, pairs, **head.tile, memory=memory)
    first = list(asked)
    flash2.backward_one_pass(
        flash2.Flash2Saved(*head.tensors, *saved), head.do, pairs, **head.tile, memory=memory
    )
    assert set(asked[len(first) :]) == set(first) == {(0, 0), (8, 0), (8, 8), (16, 0), (16, 8), (16, 16)}
    assert memory.traffic.extra == 2 * 24  # L and u


@pytest.mark.parametrize("mask", [CAUSAL, sliding(5)])
def test_over_heads_is_grouped_attention(mask):
    """Every sequence and head on its own, its dropout bits included."""
    b, s, t, h, g, d, e = 2, 9, 12, 6, 2, 4, 3
    q, k, v = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((b, s, h, d), (b, t, g, d), (b, t, g, e))
    )

    def algorithm(q, k, v, sequence, head):
        def kept(i, j):  # the bits belong to storage indices
            return keep(slice(i.start + t - s, i.stop + t - s), j, sequence=sequence, head=head)

        pairs = Pairs(mask, s, t, d**-0.5, DROPOUT, kept)
        return flash2.forward(q, k, v, pairs, rows=4, columns=5, memory=SlowMemory())

    dropout = {"dropout_p": DROPOUT, "dropout_seed": torch.tensor([SEED])}
    golden = attention_with_lse(q, k, v, mask=mask, **dropout, backend="reference")
    for ours, theirs in zip(over_heads(algorithm, q, k, v), golden, strict=True):
        close(ours, theirs, **EXACT)


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_dtype_of_the_inputs(name, dtype):
    head = make(9, 9, 4, 4, mask=CAUSAL, dropout=True)
    head = head.change(q=head.q.to(dtype), k=head.k.to(dtype), v=head.v.to(dtype))
    assert {x.dtype for x in FORWARD[name](head, SlowMemory())} == {dtype}
