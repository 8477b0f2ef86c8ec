"""Softcap and ALiBi are found in score functions however they are written, and nothing else is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import score_mod
from attnlib.tracing.evaluation import evaluated
from attnlib.tracing.program import Program
from attnlib.tracing.score_options import options_in

H, B = 4, 2
where, tanh = torch.where, torch.tanh
# Each function takes slopes [h]. Expected are the softcap, if there are slopes, and if the bias is
# ALiBi's only for keys behind.
CAP, CAPPED = 30.0, (30.0, False, False)
BEHIND, BOTH_SIDES = (None, True, True), (None, True, False)
WRITTEN = {
    "cap": (lambda s, b, h, i, j, m: 30 * tanh(s / 30), CAPPED),
    "cap, after": (lambda s, b, h, i, j, m: tanh(s / 30) * 30.0, CAPPED),
    "cap, inverse": (lambda s, b, h, i, j, m: 30.0 * tanh(s * (1 / 30)), CAPPED),
    "cap, methods": (lambda s, b, h, i, j, m: s.div(30).tanh().mul(30), CAPPED),
    "cap, by a default": (lambda s, b, h, i, j, m, c=30.0: c * tanh(s / c), CAPPED),
    "cap, negative": (lambda s, b, h, i, j, m: -30 * tanh(-s / 30), CAPPED),
    "cap, negated": (lambda s, b, h, i, j, m: -(tanh(s / -30) * 30), CAPPED),
    "cap, in steps": (lambda s, b, h, i, j, m: 3 * (10 * tanh(s / 5 / 6)), CAPPED),
    "cap, divided": (lambda s, b, h, i, j, m: tanh(s / 30) / (1 / 30), CAPPED),
    "cap, cast": (lambda s, b, h, i, j, m: tanh(s.float() / 30).float() * 30, CAPPED),
    "cap of 1": (lambda s, b, h, i, j, m: tanh(s), (1.0, False, False)),
    "cap of 49": (lambda s, b, h, i, j, m: tanh(s * (1 / 49)) * 49, (49.0, False, False)),
    "cap of 0.1": (lambda s, b, h, i, j, m: tanh(s * 10) * 0.1, (0.1, False, False)),
    "slopes": (lambda s, b, h, i, j, m: s - m[h] * (i - j).abs(), BOTH_SIDES),
    "slopes, abs()": (lambda s, b, h, i, j, m: s - abs(j - i) * m[h], BOTH_SIDES),
    "slopes, added": (lambda s, b, h, i, j, m: s + -m[h] * torch.abs(i - j), BOTH_SIDES),
    "slopes, abs of floats": (lambda s, b, h, i, j, m: s - m[h] * (i.float() - j.float()).abs(), BOTH_SIDES),
    "slopes, maximum": (lambda s, b, h, i, j, m: s - m[h] * torch.maximum(i - j, j - i), BOTH_SIDES),
    "slopes, minimum": (lambda s, b, h, i, j, m: s + m[h] * torch.minimum(i - j, j - i), BOTH_SIDES),
    "slopes, chosen": (lambda s, b, h, i, j, m: s - m[h] * where(i > j, i - j, j - i), BOTH_SIDES),
    "slopes, chosen before": (lambda s, b, h, i, j, m: s + m[h] * where(j >= i, i - j, j - i), BOTH_SIDES),
    "slopes, doubled": (lambda s, b, h, i, j, m: s - m[h] * (2 * i - 2 * j).abs() / 2, BOTH_SIDES),
    "slopes, negated": (lambda s, b, h, i, j, m: -((i - j).abs() * m[h] - s), BOTH_SIDES),
    "behind": (lambda s, b, h, i, j, m: s + m[h] * (j - i), BEHIND),
    "behind, before": (lambda s, b, h, i, j, m: (j - i) * m[h] + s, BEHIND),
    "behind, subtracted": (lambda s, b, h, i, j, m: s - m[h] * (i - j), BEHIND),
    "behind, negated": (lambda s, b, h, i, j, m: s + -(m[h] * (i - j)), BEHIND),
    "behind, from 0": (lambda s, b, h, i, j, m: 0 - (m[h] * (i - j) - s), BEHIND),
    "behind, cast": (lambda s, b, h, i, j, m: s + m[h].float() * (j - i).to(torch.float32), BEHIND),
    "behind, int32": (lambda s, b, h, i, j, m: s + m[h.int()] * (j.int() - i.int()), BEHIND),
    "behind, clamped": (lambda s, b, h, i, j, m: s - m[h] * (i - j).clamp(min=0), BEHIND),
    "behind, clamped before": (lambda s, b, h, i, j, m: s + m[h] * (j - i).clamp(max=0), BEHIND),
    "behind, chosen": (lambda s, b, h, i, j, m: s - m[h] * where(i > j, i - j, 0), BEHIND),
    "behind, chosen before": (lambda s, b, h, i, j, m: s + m[h] * where(i < j, 0, j - i), BEHIND),
    "behind, apart": (lambda s, b, h, i, j, m: s + m[h] * j - m[h] * i, BEHIND),
    "behind, halves": (lambda s, b, h, i, j, m: s - m[h] * (i - j) / 2 - 0.5 * m[h] * (i - j), BEHIND),
    "behind, both": (lambda s, b, h, i, j, m: s - m[h] * ((i - j) + (i - j).abs()) / 2, BEHIND),
    "behind, twice": (lambda s, b, h, i, j, m: (2 * s - 2 * m[h] * (i - j)) / 2, BEHIND),
    "behind, shifted": (lambda s, b, h, i, j, m: s + m[h] * ((j + 5) - (i + 5)), BEHIND),
    "slope of a head": (lambda s, b, h, i, j, m: s - torch.exp2(-(h + 1) * 2) * (i - j).abs(), BOTH_SIDES),
    "behind, of a head": (lambda s, b, h, i, j, m: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / H)), BEHIND),
    "behind, power of a head": (lambda s, b, h, i, j, m: s - 0.5 * 2 ** (-2.0 * (h + 1)) * (i - j), BEHIND),
    "behind, times a head's": (lambda s, b, h, i, j, m: s + 3 * torch.exp(-h.float()) * (j - i) / 2, BEHIND),
    "behind, negative": (lambda s, b, h, i, j, m: s + torch.exp2(-h) * (i - j), BEHIND),
    "slope of 1": (lambda s, b, h, i, j, m: s - (i - j), BEHIND),
    "slope of a half": (lambda s, b, h, i, j, m: s - 0.5 * (i - j).abs(), BOTH_SIDES),
    "both, by head": (lambda s, b, h, i, j, m: 30 * tanh(s / 30) - 1 / (h + 1) * (i - j), (CAP, True, True)),
    "both": (lambda s, b, h, i, j, m: 30 * tanh(s / 30) - m[h] * (i - j).abs(), (CAP, True, False)),
    "both, behind": (lambda s, b, h, i, j, m: m[h] * (j - i) + tanh(s / 30) * 30, (CAP, True, True)),
}  # fmt: skip
UNKNOWN = {
    "another cap": lambda s, b, h, i, j, m: 30 * tanh(s / 31),
    "a rounded cap": lambda s, b, h, i, j, m: 30 * tanh(s * 0.033333333),
    "a cap of its opposite": lambda s, b, h, i, j, m: -30 * tanh(s / 30),
    "a cap of an absolute score": lambda s, b, h, i, j, m: 30 * tanh(s.abs() / 30),
    "a cap of a shifted score": lambda s, b, h, i, j, m: 30 * tanh((s + 1) / 30),
    "a cap per head": lambda s, b, h, i, j, m: m[h] * tanh(s / m[h]),
    "a cap of a bias": lambda s, b, h, i, j, m: s + 30 * tanh(m[h] / 30),
    "a cap of a cap": lambda s, b, h, i, j, m: 30 * tanh(20 * tanh(s / 20) / 30),
    "the same cap twice": lambda s, b, h, i, j, m: tanh(tanh(s)),
    "a cap beside the score": lambda s, b, h, i, j, m: s + 30 * tanh(s / 30),
    "a cap of some keys": lambda s, b, h, i, j, m: where(i - j > 9, 30 * tanh(s / 30), s),
    "a cap beyond fp32": lambda s, b, h, i, j, m: tanh(s / 1e30 / 1e30) * 1e30 * 1e30,
    "a sigmoid": lambda s, b, h, i, j, m: 30 * torch.sigmoid(s / 30),
    "a sigmoid of two": lambda s, b, h, i, j, m: 30 * (2 * torch.sigmoid(s / 30) - 1),
    "an integer": lambda s, b, h, i, j, m: (30 * tanh(s.int() / 30)),
    "a rounded cap's result": lambda s, b, h, i, j, m: (30 * tanh(s // 30)),
    "another distance": lambda s, b, h, i, j, m: s + m[h] * (j - i + 1),
    "a doubled distance": lambda s, b, h, i, j, m: s - 2 * m[h] * (i - j),
    "a sum of indices": lambda s, b, h, i, j, m: s - m[h] * (i + j),
    "an index": lambda s, b, h, i, j, m: s - m[h] * i,
    "an opposite": lambda s, b, h, i, j, m: s + m[h] * (i - j).abs(),
    "keys after": lambda s, b, h, i, j, m: s + m[h] * (i - j),
    "distances of keys after": lambda s, b, h, i, j, m: s - m[h] * (j - i).clamp(0),
    "chosen distances of keys after": lambda s, b, h, i, j, m: s - m[h] * where(i > j, 0, i - j),
    "a choice by another distance": lambda s, b, h, i, j, m: s - m[h] * where(i > j + 1, i - j, 0),
    "a limited distance": lambda s, b, h, i, j, m: s - m[h] * (i - j).clamp(0, 9),
    "a squared distance": lambda s, b, h, i, j, m: s - m[h] * (i - j) * (i - j),
    "a squared slope": lambda s, b, h, i, j, m: s - m[h] * m[h] * (i - j),
    "a narrow distance": lambda s, b, h, i, j, m: s - m[h] * (i - j).to(torch.int8),
    "indices in int8": lambda s, b, h, i, j, m: s - m[h] * (i.to(torch.int8) - j.to(torch.int8)).abs(),
    "int32 beyond its range": lambda s, b, h, i, j, m: s - m[h] * ((i.int() * 3) - (j.int() * 3)).abs() / 3,
    "a rounded distance": lambda s, b, h, i, j, m: s - m[h] * ((i - j) // 1.5),
    "a slope by key": lambda s, b, h, i, j, m: s - m[j] * (i - j),
    "a slope by sequence": lambda s, b, h, i, j, m: s - m[b] * (i - j),
    "a slope of the next head": lambda s, b, h, i, j, m: s - m[h + 1] * (i - j),
    "a slope of a KV head": lambda s, b, h, i, j, m: s - m[h // 2] * (i - j),
    "the first slope": lambda s, b, h, i, j, m: s - m[0] * (i - j),
    "an absolute slope": lambda s, b, h, i, j, m: s - m[h].abs() * (i - j),
    "a slope by query": lambda s, b, h, i, j, m: s - torch.exp2(-i) * (i - j),
    "slopes of heads and of sequences": lambda s, b, h, i, j, m: s - torch.exp2(-h - b) * (i - j),
    "a learned slope's power": lambda s, b, h, i, j, m: s - torch.exp2(m[h]) * (i - j),
    "a scaled score": lambda s, b, h, i, j, m: 2 * s - m[h] * (i - j),
    "a negative score": lambda s, b, h, i, j, m: -s - m[h] * (i - j),
    "the score twice": lambda s, b, h, i, j, m: s * s - m[h] * (i - j) + s,
    "a slope times the score": lambda s, b, h, i, j, m: s * (1 - m[h] * (i - j)),
    "a distance to the first query": lambda s, b, h, i, j, m: s - m[h] * (i - i),
    "ALiBi of some scores": lambda s, b, h, i, j, m: where(s > 0, s - m[h] * (i - j), s),
    "nothing": lambda s, b, h, i, j, m: s,
    "a constant": lambda s, b, h, i, j, m: 1.5,
}  # fmt: skip


def values():
    """Scores of four heads, two sequences and all pairs of seven queries and keys, and their indices."""
    score = torch.randn(B, H, 7, 7, dtype=torch.float64) * 20
    b, h, i, j = (
        torch.arange(n).view(*x) for n, x in ((B, (-1, 1, 1, 1)), (H, (-1, 1, 1)), (7, (-1, 1)), (7, (-1,)))
    )
    return {"score": score, "b": b, "h": h, "i": i, "j": j, "first": torch.tensor(0)}


def assert_equal(program, found, tensors):
    """The options and what is left give the same scores as the whole program."""
    given, rest, last = values(), found.rest, found.last
    expected = evaluated(program, given, tensors, torch.float64)
    x = given["score"] if found.cap is None else found.cap * torch.tanh(given["score"] / found.cap)
    capped = x if rest is None else evaluated(rest, given | {"score": x}, tensors, torch.float64)
    torch.testing.assert_close(capped, expected, rtol=1e-12, atol=1e-12)
    if found.slopes is not None:
        if isinstance(found.slopes, Program):
            slopes = evaluated(found.slopes, {"h": given["h"]}, (), torch.float64)
        else:
            slopes = tensors[found.slopes][..., None, None]
        x = x - slopes * (given["i"] - given["j"]).abs()
        x = x if last is None else evaluated(last, given | {"score": x}, tensors, torch.float64)
        shown = given["j"] <= given["i"] if found.only_behind else torch.ones(7, 7, dtype=torch.bool)
        x, expected = (torch.where(shown, y, 0) for y in (x, expected))
        torch.testing.assert_close(x, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", WRITTEN)
def test_options_are_found_however_they_are_written(name):
    function, expected = WRITTEN[name]
    slopes = torch.randn(H, dtype=torch.float64)
    program = score_mod(function, slopes).program
    found = options_in(program)
    assert (found.cap, found.slopes is not None, found.only_behind) == expected
    assert found.last is None
    assert_equal(program, found, [slopes])


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_functions_contain_none(name):
    assert options_in(score_mod(UNKNOWN[name], torch.rand(H)).program) is None


def test_slopes_of_sequences():
    slopes = torch.randn(B, H, dtype=torch.float64)
    for function in (
        lambda s, b, h, i, j, m: s - m[b, h] * (i - j).abs(),
        lambda s, b, h, i, j, m: 5 * tanh(s / 5) - abs(i - j) * m[b.int(), h],
    ):
        program = score_mod(function, slopes).program
        assert options_in(program).slopes == 0
        assert_equal(program, options_in(program), [slopes])
    square = torch.rand(H, H)
    for function in (
        lambda s, b, h, i, j, m: s - m[h, b] * (i - j).abs(),
        lambda s, b, h, i, j, m: s - m[h, j] * (i - j).abs(),
        lambda s, b, h, i, j, m: s - m[0, h] * (i - j).abs(),
        lambda s, b, h, i, j, m: s - m[h, h] * (i - j).abs(),
    ):
        assert options_in(score_mod(function, square).program) is None
    whole = torch.ones(H, dtype=torch.int32)
    assert options_in(score_mod(lambda s, b, h, i, j, m: s - m[h] * (i - j).abs(), whole).program) is None


# What follows the options, as functions of the score that they give.
RESTS = {
    "bias": lambda s, b, h, i, j, m, x: s + x[h, (i - j).clamp(0, 8)],
    "bias before": lambda s, b, h, i, j, m, x: x[h, (i - j).clamp(0, 8)] - (-s),
    "bool": lambda s, b, h, i, j, m, x: s - (x[h, 0] + (i == j)),
    "gain": lambda s, b, h, i, j, m, x: s * x[h, 0] + m[h],
    "hidden": lambda s, b, h, i, j, m, x: where(j > i - 3, s, -torch.inf),
    "twice": lambda s, b, h, i, j, m, x: s * torch.sigmoid(s) + h,
    "another cap": lambda s, b, h, i, j, m, x: 3 * tanh(s / 3),
    "other slopes": lambda s, b, h, i, j, m, x: s - x[h, 0] * (i - j),
    "nothing of it": lambda s, b, h, i, j, m, x: s * 0 + j,
}
BEFORE = {
    "cap": lambda s, b, h, i, j, m: 7 * tanh(s / 7),
    "slopes": lambda s, b, h, i, j, m: s - m[h] * (i - j).abs(),
    "both": lambda s, b, h, i, j, m: m[h] * (j - i) + 7 * tanh(s / 7),
}


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("before", BEFORE)
def test_the_rest_stays_a_function(before, rest):
    def function(s, b, h, i, j, m, x):
        return RESTS[rest](BEFORE[before](s, b, h, i, j, m), b, h, i, j, m, x)

    tensors = torch.rand(H, dtype=torch.float64), torch.rand(H, 9, dtype=torch.float64)
    program = score_mod(function, *tensors).program
    found = options_in(program)
    if (before, rest) == ("cap", "another cap"):
        assert found is None
        return
    assert (found.cap is None, found.slopes is None) == (before == "slopes", before == "cap")
    assert found.last is not None
    assert_equal(program, found, tensors)


def test_the_rest_has_no_steps_too_many():
    program = score_mod(
        lambda s, b, h, i, j, m: 2 * (5 * tanh(s / 5) - m[h] * (i - j)), torch.rand(H)
    ).program
    assert options_in(program).last.text.partition(": x0")[2] == " = mul(2, score); return x0"
    long = score_mod(
        lambda s, b, h, i, j, m: sum([m[h] * n for n in range(99)], s) - m[h] * (i - j).abs(), torch.rand(H)
    )
    assert options_in(long.program) is None


# Rewrites of a number that leave it the same.
REWRITES = st.sampled_from([
    lambda x: 0 - (-x), lambda x: x * 4 / 4, lambda x: 0.5 * x * 2, lambda x: 3 * (x * (1 / 3)),
    lambda x: x.float(), lambda x: x.double(), lambda x: -1 * (x / -1), lambda x: 8 * x / 2**3, lambda x: +x,
    lambda x: (x * -1).neg(), lambda x: x + 0,
])  # fmt: skip
DISTANCES = st.sampled_from([
    lambda i, j: i - j, lambda i, j: (j - i).abs(), lambda i, j: -(j - i), lambda i, j: (i - j).clamp(0),
    lambda i, j: torch.maximum(i - j, j - i), lambda i, j: where(i < j, j - i, i - j),
    lambda i, j: (i.int() - j.int()).float(),
    lambda i, j: (i + 1) - (j + 1), lambda i, j: (i.float() - j), lambda i, j: -torch.minimum(j - i, i - j),
    lambda i, j: (3 * i - 3 * j) / 3, lambda i, j: (i - j + abs(i - j)) / 2,
])  # fmt: skip
SUMS = st.sampled_from([
    lambda x, y: x - y, lambda x, y: x + -y, lambda x, y: -y + x, lambda x, y: -(y - x),
    lambda x, y: (2 * x - y * 2) / 2, lambda x, y: x - y * 0.75 - y / 4,
])  # fmt: skip
CAPS = st.one_of(st.floats(0.01, 1000), st.integers(1, 1000))


def rewritten(times, x):
    for rewrite in times:
        x = rewrite(x)
    return x


SOME = st.lists(REWRITES, max_size=2)


@settings(deadline=None)
@given(CAPS, st.sampled_from([0, 1, 2]), DISTANCES, SUMS, SOME, SOME, SOME, SOME, SOME, st.booleans())
def test_rewritten_options_are_found(cap, which, distance, minus, one, two, three, four, five, swaps):
    def capped(s):
        x = rewritten(one, s) * (1 / cap) if swaps else rewritten(one, s) / cap
        return cap * rewritten(two, tanh(x)) if swaps else rewritten(two, tanh(x) * cap)

    def function(s, b, h, i, j, m):
        s = s if which == 1 else capped(s)
        slope, far = rewritten(three, m[h]), rewritten(four, distance(i, j))
        return s if which == 0 else rewritten(five, minus(s, slope * far if swaps else far * slope))

    slopes = torch.randn(H, dtype=torch.float64)
    program = score_mod(function, slopes).program
    found = options_in(program)
    assert (found.cap is None, found.slopes is None, found.last) == (which == 1, which == 0, None)
    assert found.cap is None or abs(found.cap - cap) <= 1e-14 * cap
    assert_equal(program, found, [slopes])


# Numbers of any kind, among them many that are nearly a softcap or ALiBi.
PARTS = st.sampled_from([
    lambda s, i, j, m: s, lambda s, i, j, m: 3 * tanh(s / 3), lambda s, i, j, m: 2 * tanh(s / 3),
    lambda s, i, j, m: m * (j - i), lambda s, i, j, m: m * (i - j).abs(), lambda s, i, j, m: m * i,
    lambda s, i, j, m: s - m * (i - j).abs(), lambda s, i, j, m: s + m * (j - i), lambda s, i, j, m: m,
    lambda s, i, j, m: m * (i - j).clamp(0), lambda s, i, j, m: i - j, lambda s, i, j, m: 2,
])  # fmt: skip
JOINED = st.recursive(
    PARTS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda x: lambda *at: x[0](*at) + x[1](*at)),
        st.tuples(inner, inner).map(lambda x: lambda *at: x[0](*at) - x[1](*at)),
        st.tuples(inner, st.sampled_from([-1, 0.5, 2, 3])).map(lambda x: lambda *at: x[0](*at) * x[1]),
        st.tuples(inner, inner).map(lambda x: lambda *at: x[0](*at) * x[1](*at)),
        inner.map(lambda x: lambda s, i, j, m: x(3 * tanh(s / 3), i, j, m)),
        inner.map(lambda x: lambda s, i, j, m: x(s - m * (i - j).abs(), i, j, m)),
        inner.map(lambda x: lambda s, i, j, m: where(i > j, x(s, i, j, m), s)),
        inner.map(lambda x: lambda s, i, j, m: abs(x(s, i, j, m))),
    ),
    max_leaves=5,
)


@settings(deadline=None)
@given(JOINED)
def test_whatever_is_found_gives_the_same_scores(joined):
    slopes = torch.randn(H, dtype=torch.float64)
    program = score_mod(lambda s, b, h, i, j, m: joined(s, i, j, m[h]), slopes).program
    found = options_in(program)
    if found is not None:
        assert_equal(program, found, [slopes])
