"""Programs on torch's tensors: what the function gives for each pair, and indices that lie outside."""

import pytest
import torch
from program_cases import AT, MASKS, SCORES, Tile, program_of
from torch import Tensor

from attnlib import CAUSAL, QUERY_OFFSET, attention, mask_mod, score_mod
from attnlib.tracing.evaluation import evaluated
from attnlib.tracing.trace import traced


def call(mask, **options):
    q = torch.randn(2, 5, 4, 8)
    return attention(q, q, q, mask=mask, **options)


class Given:
    """A table, or QUERY_OFFSET's, as a function is given it for one pair: floats are widened, indices
    clamped.
    """

    def __init__(self, x: Tensor, wide: torch.dtype):
        self.x = x.to(wide) if x.is_floating_point() else x

    def __getitem__(self, at: object) -> Tensor:
        at = at if isinstance(at, tuple) else (at,)
        sizes = zip(at, self.x.shape, strict=True)
        return self.x[tuple(n if isinstance(n, int) else n.clamp(0, size - 1) for n, size in sizes)]


def by_pairs(case, arguments, tile, score=None):
    """Call a function once per pair, with 0-dimensional tensors."""
    wide, first = torch.float32 if score is None else score.dtype, torch.tensor(tile.first)
    given = [
        Given(first.expand(8), wide) if x is QUERY_OFFSET else Given(x, wide) if x.dim() else x.to(wide)
        if x.is_floating_point() else x for x in arguments
    ]  # fmt: skip
    own = torch.tensor(tile.b), torch.tensor(tile.h)
    found = [
        function_of_pair(case.function, own, i, j, given, () if score is None else (score[m, n],))
        for m, i in enumerate(tile.i) for n, j in enumerate(tile.j)
    ]  # fmt: skip
    return torch.stack(found).view(len(tile.i), len(tile.j))


def function_of_pair(function, own, i, j, given, score):
    return torch.as_tensor(function(*score, *own, torch.tensor(i), torch.tensor(j), *given))


SMALL_TILE = Tile(i=range(-2, 9), j=range(-1, 12))


@pytest.mark.parametrize(("name", "case"), [*MASKS.items(), *SCORES.items()])
def test_a_program_gives_what_its_function_gives_of_each_pair(name, case):
    """In torch's meaning for 0-dimensional tensors, which no broadcasting changes."""
    arguments, (b, h, i, j) = case.arguments(), SMALL_TILE.indices()
    inputs = {"b": b, "h": h, "i": i, "j": j, "first": torch.tensor(SMALL_TILE.first)}
    score = None if case in MASKS.values() else torch.randn(len(SMALL_TILE.i), len(SMALL_TILE.j))
    program = program_of("mask" if score is None else "score", case, arguments)
    inputs |= {} if score is None else {"score": score}
    ours = evaluated(program, inputs, [x for x in arguments if x is not QUERY_OFFSET])
    theirs = by_pairs(case, arguments, SMALL_TILE, score)
    assert score is not None or theirs.dtype == torch.bool
    torch.testing.assert_close(ours.broadcast_to(theirs.shape), theirs.to(ours.dtype), equal_nan=True)


def test_indices_are_clamped_and_a_divisor_of_zero_is_one():
    program = traced("mask", lambda b, h, i, j: (i // h == i) & (i % h == 0), ())
    assert evaluated(program, AT, [], torch.float32)[0].all()
    program = traced("mask", lambda b, h, i, j, t: t[i, j * 5] == 8, (torch.arange(9).view(1, 9),))
    seen = evaluated(program, AT, [torch.arange(9).view(1, 9)], torch.float32)
    assert torch.equal(seen, (AT["j"] * 5 >= 8).expand(7, 9))


def test_an_index_outside_is_an_error_where_checks_are_on(monkeypatch):
    short = mask_mod(lambda b, h, i, j, x: x[j] > 0, torch.ones(3))
    call(CAUSAL & short)
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    with pytest.raises(IndexError, match=r"t0: expected indices in \[0, 3\) of dimension 0, got 3"):
        call(CAUSAL & short)
    before = score_mod(lambda s, b, h, i, j, x: s + x[i - j], torch.ones(5))
    call(CAUSAL, score=before)  # a hidden pair may read anywhere
    with pytest.raises(IndexError, match="got -1"):
        call(~CAUSAL, score=before)
