"""Programs whose token indices are depths, or whose packed tensors have offsets, against their definition."""

import pytest
import torch

from attnlib import QUERY_OFFSET, mask_mod, score_mod
from attnlib.tracing.depths import by_depth, counts_tokens, rebased, with_alibi
from attnlib.tracing.evaluation import evaluated
from attnlib.tracing.program import INDICES, Program
from attnlib.tracing.trace import captured_of, traced

T = 6
DEPTHS = torch.tensor([[0, 1, 1, 2, 3, 3], [0, 0, 1, 2, 2, 1]], dtype=torch.int32)
TABLE = torch.randint(0, 5, (T, T))
AT = {
    "b": torch.arange(2)[:, None, None],
    "h": torch.tensor(1),
    "i": torch.arange(T)[:, None],
    "j": torch.arange(T),
    "first": torch.tensor(2),
}


def of_depth(b, h, i, j, first, table):
    return ((i - j) // 2 % 2 == 0) | (j == first[b]) | (i * j > first[b] + 5)


def of_rows(b, h, i, j, first, table):
    return (table[i - first[b], j] > 2) ^ (table[j, i.int()] > table[(i - first[b]).int(), h])


def of_both(b, h, i, j, first, table):
    row = i - first[b]
    return (table[row, j] > 1) & (row > j) | (table[i // 2, j - first[b]] == 2)


def both_by_hand(b, h, i, j, first, table, depth_i, depth_j):
    row = (i - first).clamp(0)
    return (table[row, j] > 1) & (depth_i - first > depth_j) | (
        table[depth_i // 2, (j - first).clamp(0)] == 2
    )


def evaluate(program: Program, tensors, **given):
    return evaluated(program, AT | given, tensors)


def changed(function, depths=DEPTHS):
    program, tensors = traced("mask", function, (QUERY_OFFSET, TABLE)), (TABLE, depths)
    return evaluate(by_depth(program, captured_of("mask", tensors), 1), tensors)


@pytest.mark.parametrize("depths", [DEPTHS, DEPTHS[0]], ids=["by sequence", "one"])
def test_numbers_are_depths(depths):
    of = {"i": depths[..., :, None].long(), "j": depths[..., None, :].long()}
    program = traced("mask", of_depth, (QUERY_OFFSET, TABLE))
    expected = evaluate(program, (TABLE,), **of)
    assert torch.equal(changed(of_depth, depths), expected)
    assert not torch.equal(expected, evaluate(program, (TABLE,)).expand_as(expected))
    assert counts_tokens(program)


def test_rows_of_tensors_stay_rows():
    program = traced("mask", of_rows, (QUERY_OFFSET, TABLE))
    assert not counts_tokens(program)
    assert torch.equal(changed(of_rows), evaluate(program, (TABLE,)))
    program = traced("mask", of_both, (QUERY_OFFSET, TABLE))
    assert counts_tokens(program)
    indices = (AT[x] for x in INDICES)
    expected = both_by_hand(*indices, TABLE, DEPTHS[:, :, None].long(), DEPTHS[:, None, :].long())
    assert torch.equal(changed(of_both), expected)


@pytest.mark.parametrize("constant", [True, False])
def test_constants_stay(constant):
    program = traced("mask", lambda b, h, i, j: constant, ())
    assert by_depth(program, captured_of("mask", (DEPTHS,)), 0).text.endswith(f"return {constant}")


def test_a_second_time_changes_nothing():
    program = traced("mask", of_both, (QUERY_OFFSET, TABLE))
    kinds = captured_of("mask", (TABLE, DEPTHS))
    once = by_depth(program, kinds, 1)
    assert by_depth(once, kinds, 1) == once


def test_packed_tensors_are_read_from_their_sequence_on():
    packed, offsets = DEPTHS.flatten(), torch.tensor([0, T, 2 * T])
    mask = mask_mod(lambda b, h, i, j, x, other: (x[i] > x[j]) & (other[j] > 1), packed, TABLE[0])
    kinds = captured_of("mask", (*mask.tensors, offsets))
    found = evaluate(rebased(mask.program, kinds, [0], 2), (*mask.tensors, offsets))
    assert torch.equal(found, (DEPTHS[:, :, None] > DEPTHS[:, None, :]) & (TABLE[0] > 1))


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi_is_a_score_function(shape):
    slopes, score = torch.rand(shape), torch.randn(2, T, T)
    distance = (AT["i"] - AT["j"]).abs()
    of_head = slopes[..., 2].expand(2)[:, None, None]
    given = {"score": score, "h": torch.tensor(5), "b": AT["b"] + 7}
    program = with_alibi(None, captured_of("score", (slopes,)), head=3, sequence=7)
    found = evaluate(program, (slopes,), **given)
    torch.testing.assert_close(found, score - of_head * distance)
    doubled = score_mod(lambda score, b, h, i, j, x: 2 * score + x[i], torch.rand(T))
    tensors = (*doubled.tensors, slopes)
    program = with_alibi(doubled.program, captured_of("score", tensors), head=3, sequence=7)
    found = evaluate(program, tensors, **given)
    expected = 2 * (score - of_head * distance) + doubled.tensors[0][:, None]
    torch.testing.assert_close(found, expected)
