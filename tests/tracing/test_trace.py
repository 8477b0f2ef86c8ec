"""From functions to programs: what they say, what is refused and how, and what torch makes of their steps."""

import math
from contextlib import suppress
from functools import lru_cache

import numpy as np
import pytest
import torch
from program_cases import MASKS, SCORES, Tile, program_of
from torch import Tensor

from attnlib import CAUSAL, FIRST_QUERY, TraceError, attention, mask_mod, score_mod
from attnlib.backends._torch.programs import differentiated
from attnlib.tracing.derivative import derivative
from attnlib.tracing.evaluation import evaluated
from attnlib.tracing.program import INDICES, CapturedKind, Program, Steps, Value
from attnlib.tracing.trace import traced

DOCUMENT = torch.zeros(2, 9, dtype=torch.int32)
TABLE, GAIN = torch.randn(4, 9).double(), torch.tensor(1.3).double()
AT = {
    "b": torch.arange(2)[:, None, None, None],
    "h": torch.arange(4)[:, None, None],
    "i": torch.arange(-3, 4)[:, None],
    "j": torch.arange(9),
    "first": torch.tensor(3),
}


def given(function, *tensors, score=None):
    """What a program gives of all pairs, and what the function gives when called with them."""
    program = traced("mask" if score is None else "score", function, tensors)
    inputs = AT if score is None else {"score": score} | AT
    ours = evaluated(program, inputs, [x for x in tensors if x is not FIRST_QUERY], torch.float64)
    return ours, function(*(x for name, x in inputs.items() if name != "first"), *tensors)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, i, j: i // 3 == j % 4,
        lambda b, h, i, j: (i - 5) // -3 < (i - 7) % -4,
        lambda b, h, i, j: ~(i > j) | (i != h) & (b >= 1),
        lambda b, h, i, j: abs(i) <= -(1 - j),
        lambda b, h, i, j: torch.where(i > 0, i, j) > 2,
        lambda b, h, i, j: torch.where(i > 0, i > j, b == 0),
        lambda b, h, i, j: torch.minimum(i, j).eq(torch.maximum(i, h)),
        lambda b, h, i, j: i.clamp(0, 3) + j.clamp(max=4) == torch.clamp(h, min=2) + j.clamp_min(1),
        lambda b, h, i, j: torch.logical_not(torch.logical_and(i > 0, j > 0)),
        lambda b, h, i, j: (i / 2).to(torch.int64) * 2 == i,
        lambda b, h, i, j: (j * 0.5).int() + (i > 0) == torch.div(j, 2, rounding_mode="floor"),
        lambda b, h, i, j: 3 - i > 7 - 2 * j,
        lambda b, h, i, j: (j > 3).float() * 1.5 + 0.25 > i.float().exp(),
    ],
)
def test_a_mask_gives_what_its_function_gives(function):
    ours, theirs = given(function)
    assert torch.equal(*torch.broadcast_tensors(ours, theirs))


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda s, b, h, i, j, t: s + t[h, j], (TABLE,)),

        (lambda s, b, h, i, j, t, g: torch.where(i > j, s * g + t[h, j].exp(), -s.tanh() / t[b, j]), (TABLE, GAIN)),
        (lambda s, b, h, i, j, t: (s * s + 1).log() * t[b, 0] - (s - 1).abs() + s % 0.7, (TABLE,)),
        (lambda s, b, h, i, j, t: torch.maximum(s, t[h, 0]) + s.minimum(t[h, j]) * s.clamp(-0.3, 0.4), (TABLE,)),
        (lambda s, b, h, i, j: (i * 1.5).double(), ()),
        (lambda s, b, h, i, j, t: 3 - t[b, j] / s - (-s) + s.float(), (DOCUMENT,)),
        (lambda s, b, h, i, j, t: s * t[b, j].double() + t[0, 0], (TABLE,)),
    ],
)  # fmt: skip
def test_a_score_and_its_derivative_are_torchs(function, tensors):
    score, d = (torch.randn(2, 4, 7, 9, dtype=torch.float64) for _ in "12")
    leaves = [x.clone().requires_grad_() for x in (score, *tensors) if x.is_floating_point()]
    reading = iter(leaves[1:])
    ours, theirs = given(
        function, *(next(reading) if x.is_floating_point() else x for x in tensors), score=leaves[0]
    )
    torch.testing.assert_close(*torch.broadcast_tensors(ours, theirs))
    options = {"allow_unused": True, "materialize_grads": True}
    wanted = (
        torch.autograd.grad(theirs.broadcast_to(d.shape), leaves, d, **options)
        if theirs.requires_grad
        else None
    )
    grads = torch.zeros(sum(x.numel() for x in leaves[1:]), dtype=torch.float64)
    by = derivative(traced("score", function, tensors))
    by_score = differentiated(by, d, None, {"score": score} | AT, tensors, grads)
    wanted = [torch.zeros_like(x) for x in leaves] if wanted is None else wanted
    torch.testing.assert_close(by_score, wanted[0])
    torch.testing.assert_close(grads, torch.cat([grads[:0], *(x.flatten() for x in wanted[1:])]))


class Given:
    """A table, or FIRST_QUERY's, as a function is given it for one pair: floats are widened, indices
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
        Given(first.expand(8), wide) if x is FIRST_QUERY else Given(x, wide) if x.dim() else x.to(wide)
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
    ours = evaluated(program, inputs, [x for x in arguments if x is not FIRST_QUERY])
    theirs = by_pairs(case, arguments, SMALL_TILE, score)
    assert score is not None or theirs.dtype == torch.bool
    torch.testing.assert_close(ours.broadcast_to(theirs.shape), theirs.to(ours.dtype), equal_nan=True)


def test_of_two_equal_numbers_each_has_half_and_a_clamped_one_has_all():
    score = torch.tensor([[1.0, 2.0]], requires_grad=True)
    for function in (
        lambda s, b, h, i, j, t: torch.maximum(s, t[j]),
        lambda s, b, h, i, j, t: torch.minimum(s, t[j]),
        lambda s, b, h, i, j, t: s.clamp(1, 2) * t[0],
        lambda s, b, h, i, j, t: (s - 1).abs() * t[0],
    ):
        tensor = torch.tensor([1.0, 2.0])
        at = {"b": torch.tensor(0), "h": torch.tensor(0), "i": torch.zeros(1, 1).long(), "j": torch.arange(2)}
        (wanted,) = torch.autograd.grad(function(score, *at.values(), tensor).sum(), score)
        by = derivative(traced("score", function, (tensor,)))
        ours = differentiated(
            by,
            torch.ones(1, 2),
            None,
            {"score": score.detach(), "first": torch.tensor(0)} | at,
            [tensor],
            torch.zeros(2),
        )
        assert torch.equal(ours, wanted)


def test_indices_are_clamped_and_a_divisor_of_zero_is_one():
    program = traced("mask", lambda b, h, i, j: (i // h == i) & (i % h == 0), ())
    assert evaluated(program, AT, [], torch.float32)[0].all()
    program = traced("mask", lambda b, h, i, j, t: t[i, j * 5] == 8, (torch.arange(9).view(1, 9),))
    seen = evaluated(program, AT, [torch.arange(9).view(1, 9)], torch.float32)
    assert torch.equal(seen, (AT["j"] * 5 >= 8).expand(7, 9))


def test_a_program_is_its_text():
    steps = Steps(INDICES, [CapturedKind("float", 1)])
    x = steps.add("mul", steps.load(0, Value("h")), -2.5)
    y = steps.where(steps.add("lt", Value("i"), -3), x, float("-inf"))
    program = steps.program("score", steps.add("add", y, steps.add("mul", Value("j"), 1e-30)))
    assert Program(program.text).parsed == steps.parsed(program.parsed.result)
    assert "\n" not in program.text  # torch.compile quotes an operator's arguments in comments of a line
    assert str(program).splitlines()[-1] == "    return x5"
    assert Program("def mask(b, h, i, j, first): return True").parsed.result is True
    assert traced("mask", lambda b, h, i, j: i == j, ()) == traced("mask", lambda w, x, y, z: y == z, ())


def test_what_is_computed_twice_is_one_step():
    program = traced("mask", lambda b, h, i, j: ((i - j) > 2) | ((i - j) < 0), ())
    assert [step.operation for step in program.parsed.steps] == ["sub", "gt", "lt", "logical_or"]
    assert traced("mask", lambda b, h, i, j: (1 == True) & (i < 1.0), ()) != traced(
        "mask", lambda b, h, i, j: i < 1, ()
    )


SMALL, ARRAY = torch.zeros(9, dtype=torch.uint8), np.zeros(9)


def assigns(b, h, i, j, d):
    d[b, i] = 3
    return d[b, i] > 2


def swallows(b, h, i, j):
    try:
        if i > j:
            return j == 0
    except TypeError:
        pass
    return j >= 0


def swallows_a_list(b, h, i, j):
    with suppress(Exception):
        return [i > j, i < j][h]
    return j >= 0


def gives_none(b, h, i, j):
    i > j  # noqa: B015


def enclosed():
    around = torch.ones(3)
    return lambda b, h, i, j: around[i] > 0


@pytest.mark.parametrize(
    ("function", "tensors", "message"),
    [
        (lambda b, h, i, j: i - j, (), "expected a function that gives a bool, got one that gives a int"),
        (lambda b, h, i, j: i if i > j else j, (), r"test_trace.py:\d+: Python's if, and, or"),
        (lambda b, h, i, j: (i > j) and (j > 2), (), "use torch.where, & | ~"),
        (lambda b, h, i, j: not (i > j), (), "Python's if"),
        (lambda b, h, i, j: min(i, j) > 2, (), "torch.minimum"),
        (lambda b, h, i, j: i in (1, 2), (), "Python's if"),
        (
            lambda b, h, i, j: DOCUMENT[b, i] == 0,
            (),
            r"DOCUMENT is a tensor from around .* pass it as an argument",
        ),
        (enclosed(), (), "around is a tensor from around the function"),
        (
            lambda b, h, i, j, d=DOCUMENT: d[b, i] == 0,
            (),
            r"test_trace.py:\d+: .* tensors from around the function cannot",
        ),
        (
            lambda b, h, i, j: i + torch.ones(()) > 0,
            (),
            "made in the function or around it; pass it as an argument, or write a number",
        ),
        (
            lambda b, h, i, j, d: d[b] == 0,
            (DOCUMENT,),
            r"expected 2 indices, got 1; write an index for each .* in one pair of brackets, as in t\[b, j\]",
        ),
        (lambda b, h, i, j, d: d == 0, (DOCUMENT,), "tensor 0 is used as a whole; index it"),
        (lambda b, h, i, j, d: d[b, i * 1.0] == 0, (DOCUMENT,), "tensor 0: expected int indices, got float"),
        (lambda b, h, i, j, d: i < d.shape[1], (DOCUMENT,), ".shape cannot be known"),
        (lambda b, h, i, j, d: i < len(d), (DOCUMENT,), r"len\(\), torch.tensor\(\) and lists cannot take"),
        (lambda b, h, i, j, first: i < first, (FIRST_QUERY,), "FIRST_QUERY is used as a whole"),
        (lambda b, h, i, j, first: i < first[h], (FIRST_QUERY,), "index it by b"),
        (
            lambda b, h, i, j: i.cos() > 2,
            (),
            r"cos\(\) of 1 argument is not known; a function may use arithmetic",
        ),
        (lambda b, h, i, j: torch.sin(i) > 2, (), r"sin\(\) of 1 argument is"),
        (lambda b, h, i, j: i**j > 2, (), r"\*\* of two numbers that vary; one of them must be a constant"),
        (lambda b, h, i, j: i**-1 > 2, (), r"integers have no negative powers; write .float\(\)"),
        (lambda b, h, i, j: 3**i > 2, (), r"3 \*\* an integer: write 3.0 \*\* it, or 2 \*\* it"),
        (lambda b, h, i, j: (-3.0) ** i > 2, (), "expected a base above 0, got -3.0"),
        (lambda b, h, i, j: i ** float("inf") > 2, (), "expected a finite number as exponent, got inf"),
        (lambda b, h, i, j: i / 2 << 1, (), r"lshift: expected integers or bools, got float; write .int\(\)"),
        (lambda b, h, i, j: (i > j) - (i < j), (), "sub: torch has no difference with a bool"),
        (lambda b, h, i, j: (i > j) // (i < j), (), r"floordiv: torch has none of bools; write .int\(\)"),
        (lambda b, h, i, j: -(i > j), (), "neg: torch has none of bools"),
        (lambda b, h, i, j: +(i > j), (), r"torch has no \+ of a bool"),
        (
            lambda b, h, i, j, t: torch.where(i > j, t[i], 300) > 2,
            (SMALL,),
            "expected a number of uint8, got 300",
        ),
        (lambda b, h, i, j, t: t[i].clamp(-1) > 2, (SMALL,), "clamp_min: expected a number of uint8, got -1"),
        (lambda b, h, i, j, t, x: x[t[i]] > 2, (SMALL, SMALL), "an index of uint8 for a mask; write .long()"),
        (lambda b, h, i, j: i.half() > 2, (), "half: floats are those of the scores, fp32; leave it out"),
        (
            lambda b, h, i, j: i.to(torch.bfloat16) > 2,
            (),
            "to torch.bfloat16: floats are those of the scores",
        ),
        (
            lambda b, h, i, j: torch.max(i, 1) > 2,
            (),
            "max of a tensor and a number is that along a dimension",
        ),
        (
            lambda b, h, i, j, d: d[b, 9] == 0,
            (DOCUMENT,),
            r"test_trace.py:\d+: tensor 0: expected an index below 9",
        ),
        (
            lambda b, h, i, j, d: d[-3, i] == 0,
            (DOCUMENT,),
            "expected an index below 2 of dimension 0, got -3",
        ),
        # what Python, numpy and lists do
        (
            lambda b, h, i, j: np.abs(i) > 2,
            (),
            r"test_trace.py:\d+: numpy cannot take an index; use torch's functions",
        ),
        (lambda b, h, i, j: np.int64(3) * i > 2, (), "numpy cannot take an index"),
        (lambda b, h, i, j: i * np.int64(3) > 2, (), r"got np.int64\(3\); write int\(\) or float\(\) of it"),
        (lambda b, h, i, j: np.where(i > j, 1, 0) > 0, (), "test_trace.py"),
        (lambda b, h, i, j: torch.tensor(i) > 2, (), r"test_trace.py:\d+: .*torch.tensor\(\)"),
        (lambda b, h, i, j: torch.as_tensor(i) > 2, (), "test_trace.py"),
        (
            lambda b, h, i, j: round(i) > 2,
            (),
            r"round\(\) cannot know an index; write \(x \+ 0.5\) // 1",
        ),
        (lambda b, h, i, j: math.floor(i) > 2, (), r"floor\(\) cannot know an index; write x // 1"),
        (lambda b, h, i, j: math.sqrt(i) > 2, (), r"write .float\(\) and torch's functions"),
        (lambda b, h, i, j: divmod(i, 2)[0] > 2, (), r"divmod\(\) cannot know an index; write // and %"),
        (
            lambda b, h, i, j: {0: 1}[h] > 2,
            (),
            r"test_trace.py:\d+: a dict, a set or functools.cache cannot hold an index",
        ),
        (lambda b, h, i, j: h in {0, 1}, (), "a dict, a set or"),
        (
            lambda b, h, i, j: [1, 2][h] > 2,
            (),
            r"range\(\), lists, arrays and .* cannot take an index; pass a tensor as",
        ),
        (lambda b, h, i, j: ARRAY[h] > 2, (), "numpy cannot take an index"),
        (lambda b, h, i, j: sum(range(i)) > 2, (), "or loop over a fixed number"),
        (lambda b, h, i, j: i.item() > 2, (), r"\.item\(\) cannot read an index"),
        (lambda b, h, i, j: i @ j > 2, (), r"matmul\(\) of 2 arguments is not known"),
        (lambda b, h, i, j: i > unknown, (), r"test_trace.py:\d+: NameError: name 'unknown' is not defined"),  # noqa: F821
        (lambda b, h, i, j: i > 1 // 0, (), r"test_trace.py:\d+: ZeroDivisionError"),
        (assigns, (DOCUMENT,), r"test_trace.py:\d+: tensors are not written to; use torch.where"),
        (
            gives_none,
            (),
            r"expected a function that returns a number, got NoneType; does it say return",
        ),
        (lambda b, h, i, j: (i > j, j > i), (), "expected a function that returns a number, got tuple"),
        (
            lambda b, h, i, j: torch.div(i, 2, rounding_mode="trunc") > 2,
            (),
            r"div\(\) of 2 arguments and rounding_mode",
        ),
        (lambda b, h, i, j: i & j, (), "expected a function that gives a bool, got one that gives a int64"),
        (lambda b, h, i, j: i & 1.5, (), "bitand: expected integers or bools, got float"),
        (lambda b, h, i, j: torch.where(i, i, j) > 1, (), "where: expected a bool to choose by, got int"),
        (lambda b, h, i, j: int(i) > 2, (), r"int\(\) cannot know an index"),
        (lambda b, h, i, j: float(i) > 2, (), r"float\(\) and math cannot know"),
        (lambda b, h, i, j: list(i) == j, (), "cannot be iterated over"),
        (lambda b, h, i, j: i < 2**63, (), "expected ints of 64 bits, got 9223372036854775808"),
        (lambda b, h, i, j: i < "3", (), "expected a number, got str"),
        (lambda b, h, i, j: i[0] > 2, (), "a number is indexed"),
        (
            lambda b, h, i, j, d: d[b][j] > 2,
            (DOCUMENT,),
            "expected 2 indices, got 1; write an index for each",
        ),
        (
            lambda b, h, i, j, d: d[b][j] > 2,
            (SMALL,),
            "a number is indexed; write an index for each dimension",
        ),
        (
            lambda b, h, i, j, d: d[:, j] > 2,
            (DOCUMENT,),
            "lists would give many numbers; write an index for each",
        ),
        (lambda b, h, i, j, d: d[..., j] > 2, (DOCUMENT,), "lists would give many numbers"),
        (
            lambda b, h, i, j: i.tolist() > 2,
            (),
            r"\.tolist\(\) cannot read an index, which stands for all of them",
        ),
        (lambda b, h, i, j: i.numpy() > 2, (), r"\.numpy\(\) cannot read an index"),
        (
            lambda b, h, i, j: torch.stack([i, j])[0] > 2,
            (),
            r"stack\(\) makes a tensor; a function computes one",
        ),
        (
            lambda b, h, i, j: torch.full((), i) > 2,
            (),
            r"full\(\) makes a tensor; .* use its numbers as they are",
        ),
        (lambda b, h, i, j: torch.rand(()) > i, (), "a tensor that is made in the function"),
        (lambda b, h, i, j: i * 1j > 2, (), "expected a number, got complex"),
        (
            lambda b, h, i, j: i > j if hasattr(i, "x") else i < j,
            (),
            r"test_trace.py:\d+: \.x cannot be known",
        ),
        (lambda b, h, i, j: i > j if getattr(i, "x", None) is None else i < j, (), r"\.x cannot be known"),
        (lambda b, h, i, j: i > j if i.is_cuda else i < j, (), r"\.is_cuda cannot be known"),
        (
            lambda b, h, i, j: i > j if str(i) == "3" else i < j,
            (),
            r"str\(\), print\(\) and f-strings cannot know",
        ),
        (
            lambda b, h, i, j: i > j if f"{i}" == "3" else i < j,
            (),
            "f-strings cannot know an index; leave them out",
        ),
        (swallows, (), r"test_trace.py:\d+: Python's if, and, or"),
        (swallows_a_list, (), r"test_trace.py:\d+: range\(\), lists, arrays"),
        # functions whose own code is not Python's, or which take other arguments
        (
            lru_cache(lambda b, h, i, j: i > j),
            (),
            r"mask_mod: .*test_trace.py:\d+: a dict, a set or functools.cache",
        ),
        (max, (), "mask_mod: <built-in function max>: Python's if"),
        (
            torch.vmap(lambda b, h, i, j: i > j),
            (),
            r"test_trace.py:\d+: expected a Python function that takes \(b, h, i, j\); .* ValueError: vmap",
        ),
        (
            torch.ge,
            (DOCUMENT,),
            r"mask_mod: <built-in method ge.*that takes \(b, h, i, j, t0\); .*TypeError: ge\(\)[^\n]*$",
        ),
        (int, (), r"mask_mod: <class 'int'>: expected a Python function that takes"),
    ],
)
def test_what_no_kernel_could_do_is_refused(function, tensors, message):
    with pytest.raises(TraceError, match=message):
        mask_mod(function, *tensors)


def reads_all(b, h, i, j, x):
    return x[j] > 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mask_mod(3), TypeError, "mask_mod: expected a function of indices, got int"),
        (
            lambda: mask_mod(reads_all, 3),
            TypeError,
            "expected a tensor or FIRST_QUERY as argument 0, got int",
        ),
        (lambda: mask_mod(reads_all, torch.zeros(3).to_sparse()), TypeError, "one that is not strided"),
        (
            lambda: mask_mod(reads_all, torch.zeros(3, dtype=torch.complex64)),
            TypeError,
            "bools, integers or floats",
        ),
        (
            lambda: score_mod(lambda s: s),
            TraceError,
            r"score_mod: .*that takes \(score, b, h, i, j\); .* but 5 were",
        ),
        (
            lambda: score_mod(lambda s, b, h, i, j: i > j),
            TraceError,
            "gives a float, got one that gives a bool",
        ),
        (
            lambda: mask_mod(lambda b, h: True),
            TypeError,
            r"mask_mod: .*expected a Python function that takes \(b, h, i, j\); .* takes 2 pos",
        ),
    ],
)
def test_other_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def call(mask, **options):
    q = torch.randn(2, 5, 4, 8)
    return attention(q, q, q, mask=mask, **options)


def test_what_does_not_fit_a_call_is_refused():
    of_nothing = mask_mod(lambda b, h, i, j, x: x[j] > 0, torch.zeros(0))
    with pytest.raises(
        ValueError, match=r"tensor 0 of mask_mod: expected an element in each dimension, got \(0,\)"
    ):
        call(of_nothing)
    elsewhere = score_mod(lambda s, b, h, i, j, x: s + x[h], torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match="tensor 0 of score_mod: expected device cpu like q, got meta"):
        call(CAUSAL, score=elsewhere)
    with pytest.raises(TypeError, match="score: expected what score_mod"):
        call(CAUSAL, score=lambda *x: 0)
    with pytest.raises(TypeError, match="mask: expected a Mask"):
        call(lambda *x: True)


LAST = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_constant_index_below_0_counts_from_the_end(backend):
    """As in torch, and in tensors of any size that the function is given later."""
    q = torch.randn(1, 6, 2, 8)
    last = mask_mod(lambda b, h, i, j, x: j < x[-1, -1], LAST)
    for mask, keys in ((last, 6), (last.reading([LAST[:1]]), 3)):
        fewer = mask_mod(lambda b, h, i, j, keys=keys: j < keys)
        ours, theirs = (attention(q, q, q, mask=x, backend=backend) for x in (mask, fewer))
        assert torch.equal(ours, theirs)
    with pytest.raises(
        ValueError, match=r"tensor 0 of a function: expected a larger one, got \(1, 2\).*at 2 in"
    ):
        call(mask_mod(lambda b, h, i, j, x: x[0, 2] > j, LAST).reading([LAST[:1, :2]]))


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


def test_compiled_functions_are_one_graph():
    """Also where they are made and composed within; other numbers in the same tensors compile nothing
    again.
    """
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    def attend(q: Tensor, document: Tensor, bias: Tensor) -> Tensor:
        mask = CAUSAL & mask_mod(lambda b, h, i, j, d: d[b, i] == d[b, j], document)
        return attention(q, q, q, mask=mask, score=score_mod(lambda s, b, h, i, j, t: s + t[h], bias))

    compiled = torch.compile(attend, fullgraph=True, backend=count)
    for _ in range(3):
        q, bias = torch.randn(2, 9, 4, 8, requires_grad=True), torch.randn(4, requires_grad=True)
        document = torch.randint(0, 3, (2, 9)).sort().values.int()
        ours, theirs = compiled(q, document, bias), attend(q, document, bias)
        torch.testing.assert_close(ours, theirs)
        grads = [torch.autograd.grad(x.sin().sum(), (q, bias)) for x in (ours, theirs)]
        torch.testing.assert_close(*grads)
    assert len(graphs) == 1
