"""Tracing a function of indices: what is refused, with the line that did it, and compiled functions."""

import math
from contextlib import suppress
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from attnlib import CAUSAL, QUERY_OFFSET, TraceError, attention, mask_mod, score_mod
from attnlib.backends._torch.programs import differentiated
from attnlib.tracing.derivative import derivative
from attnlib.tracing.trace import traced

DOCUMENT = torch.zeros(2, 9, dtype=torch.int32)


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
        (lambda b, h, i, j: i - j, (), "expected a function that returns a bool, got one that returns a int"),
        (lambda b, h, i, j: i if i > j else j, (), r"test_trace.py:\d+: Python's if, and, or"),
        (lambda b, h, i, j: (i > j) and (j > 2), (), "use torch.where, & | ~"),
        (lambda b, h, i, j: not (i > j), (), "Python's if"),
        (lambda b, h, i, j: min(i, j) > 2, (), "torch.minimum"),
        (lambda b, h, i, j: i in (1, 2), (), "Python's if"),
        (
            lambda b, h, i, j: DOCUMENT[b, i] == 0,
            (),
            r"DOCUMENT is a tensor from outside .* pass it as an argument",
        ),
        (enclosed(), (), "around is a tensor from outside the function"),
        (
            lambda b, h, i, j, d=DOCUMENT: d[b, i] == 0,
            (),
            r"test_trace.py:\d+: .* tensors from outside the function cannot",
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
        (lambda b, h, i, j, first: i < first, (QUERY_OFFSET,), "QUERY_OFFSET is used as a whole"),
        (lambda b, h, i, j, first: i < first[h], (QUERY_OFFSET,), "index it by b"),
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
        (lambda b, h, i, j: i.half() > 2, (), "half: floats are fp32, as the scores are; leave it out"),
        (
            lambda b, h, i, j: i.to(torch.bfloat16) > 2,
            (),
            "to torch.bfloat16: floats are fp32",
        ),
        (
            lambda b, h, i, j: torch.max(i, 1) > 2,
            (),
            "max of a tensor and a number reduces a dimension in torch",
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
            r"expected a function that returns a number, got NoneType; is a return missing",
        ),
        (lambda b, h, i, j: (i > j, j > i), (), "expected a function that returns a number, got tuple"),
        (
            lambda b, h, i, j: torch.div(i, 2, rounding_mode="trunc") > 2,
            (),
            r"div\(\) of 2 arguments and rounding_mode",
        ),
        (
            lambda b, h, i, j: i & j,
            (),
            "expected a function that returns a bool, got one that returns a int64",
        ),
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
            "expected a tensor or QUERY_OFFSET as argument 0, got int",
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
            "returns a float, got one that returns a bool",
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
