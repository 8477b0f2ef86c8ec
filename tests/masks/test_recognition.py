"""Masks written as functions become bands where they are bands, and show the same pairs as before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import CAUSAL, FULL, Mask, attention, explain, mask_mod, masks, sliding
from attnlib.masks import NOTHING, MaskFunction
from attnlib.masks.function import function_of

WINDOW, FIRST = 1024, 7
PREFIX = Mask(right=0, prefix=FIRST)
SPELLED = {
    "causal": (lambda b, h, i, j: j <= i, CAUSAL),
    "causal, mirrored": (lambda b, h, i, j: i >= j, CAUSAL),
    "causal, strictly": (lambda b, h, i, j: j < i + 1, CAUSAL),
    "causal, as a difference": (lambda b, h, i, j: i - j > -1, CAUSAL),
    "causal, negated": (lambda b, h, i, j: ~(j > i), CAUSAL),
    "causal, as a minimum": (lambda b, h, i, j: torch.minimum(i, j) == j, CAUSAL),
    "window": (lambda b, h, i, j: (j <= i) & (i - j < WINDOW), sliding(WINDOW)),
    "window, inclusive": (lambda b, h, i, j: (i - j <= WINDOW - 1) & (i - j >= 0), sliding(WINDOW)),
    "window, from the key": (lambda b, h, i, j: (j > i - WINDOW) & (i >= j), sliding(WINDOW)),
    "window, in floats": (lambda b, h, i, j: ((i - j).float() < 1023.5) & (j <= i), sliding(WINDOW)),
    "window, in int32": (lambda b, h, i, j: (i.int() - j.int() < WINDOW) & (j <= i), sliding(WINDOW)),
    "window, twice": (lambda b, h, i, j: (2 * i - 2 * j < 2 * WINDOW) & (j <= i), sliding(WINDOW)),
    "window, by a choice": (lambda b, h, i, j: torch.where(i >= j, i - j < WINDOW, False), sliding(WINDOW)),
    "window, clamped": (lambda b, h, i, j: ((i - j).clamp(0) < WINDOW) & (j <= i), sliding(WINDOW)),
    "window, rounded up": (lambda b, h, i, j: (i - j <= 1022.99999999) & (j <= i), sliding(WINDOW)),
    "window, quotient below": (lambda b, h, i, j: ((i - j) // WINDOW < 1) & (j <= i), sliding(WINDOW)),
    "window, divided": (lambda b, h, i, j: (i - j) // WINDOW == 0, sliding(WINDOW)),
    "window, by a default": (lambda b, h, i, j, n=WINDOW: (j <= i) & (i < j + n), sliding(WINDOW)),
    "both sides": (lambda b, h, i, j: (i - j).abs() <= 3, Mask(3, 3)),
    "both sides, apart": (lambda b, h, i, j: -((j - i).abs()) > -4, Mask(3, 3)),
    "itself": (lambda b, h, i, j: i == j, Mask(0, 0)),
    "prefix": (lambda b, h, i, j: (j <= i) | (j < FIRST), PREFIX),
    "prefix, negated": (lambda b, h, i, j: ~((j > i) & (j >= FIRST)), PREFIX),
    "prefix, as a maximum": (lambda b, h, i, j: j <= torch.maximum(i, j * 0 + FIRST - 1), PREFIX),
    "prefix, clamped": (lambda b, h, i, j: j <= i.clamp(min=FIRST - 1), PREFIX),
    "everything": (lambda b, h, i, j: i >= 0, FULL),
    "nothing": (lambda b, h, i, j: (j <= i) & (i < 0), NOTHING),
    "far away": (lambda b, h, i, j: i - j < 1 << 40, FULL),
}


@pytest.mark.parametrize("name", SPELLED)
def test_a_band_is_recognised_however_it_is_written(name):
    function, band = SPELLED[name]
    assert mask_mod(function) == band
    torch.compiler.reset()
    compiled = torch.compile(lambda x: (x + 1, mask_mod(function)), backend="eager", fullgraph=True)
    assert compiled(torch.ones(1))[1] == band


def test_the_rest_of_a_function_stays():
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    mask = mask_mod(lambda b, h, i, j, x: (x[b, i] == x[b, j]) & (i >= j) & (i - j < 4), documents)
    assert mask.band == sliding(4)
    assert mask.program == masks.documents(documents).program
    unchanged = mask_mod(lambda b, h, i, j: (j <= i) & (j < 9))
    assert (unchanged.band, unchanged.program.text.count("=")) == (CAUSAL, 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, i, j: (i - j) % 5 == 0,
        lambda b, h, i, j: j < 9,
        lambda b, h, i, j: i > 9,
        lambda b, h, i, j: i - j < h,
        lambda b, h, i, j: i + j < 9,
        lambda b, h, i, j: i // 8 == j // 8,
        lambda b, h, i, j: i.float() - j.float() < 9,  # rounded from 2 ** 24 on
        lambda b, h, i, j: (i - j).float() < 2**24 + 1,  # the bound is rounded
        lambda b, h, i, j: i.to(torch.int8) >= j.to(torch.int8),
        lambda b, h, i, j: i * j < 9,
        lambda b, h, i, j: (i - j < 4) | (i - j > 6),
        lambda b, h, i, j: (j <= i) ^ (j < 9),
    ],
)  # fmt: skip
def test_what_is_no_band_stays_a_function(function):
    assert isinstance(mask_mod(function), MaskFunction)
    assert mask_mod(function).program == function_of(FULL, function, ()).program


def test_a_window_in_a_tensor_may_change():
    window = torch.tensor(3)
    mask = mask_mod(lambda b, h, i, j, n: (j <= i) & (i - j < n), window)
    assert mask.band == CAUSAL
    q = torch.randn(1, 20, 2, 8)
    window.fill_(5)
    torch.testing.assert_close(attention(q, q, q, mask=mask), attention(q, q, q, mask=sliding(5)))


def test_calls_and_trees_take_the_band():
    q = torch.randn(1, 20, 2, 8)
    written = mask_mod(lambda b, h, i, j: (j <= i) & (i - j < 4))
    assert "sliding(4)" in str(explain(attention, q, q, q, mask=written))
    assert written.block_mask(1, 2, 20, 20) == written
    ends, positions = torch.tensor([[4, 3, 3, 4]], dtype=torch.int32), torch.tensor([[0, 1, 2, 1]])
    assert (masks.until(ends, positions) & written).tree.reach == 3


NUMBERS = st.recursive(
    st.one_of(
        st.just(lambda i, j: i), st.just(lambda i, j: j), st.just(lambda i, j: i - j),
        st.integers(-9, 9).map(lambda n: lambda i, j: i * 0 + n),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda x: lambda i, j: x[0](i, j) + x[1](i, j)),
        st.tuples(inner, inner).map(lambda x: lambda i, j: x[0](i, j) - x[1](i, j)),
        st.tuples(inner, inner).map(lambda x: lambda i, j: torch.maximum(x[0](i, j), x[1](i, j))),
        st.tuples(inner, inner).map(lambda x: lambda i, j: torch.minimum(x[0](i, j), x[1](i, j))),
        st.tuples(inner, st.integers(-3, 3)).map(lambda x: lambda i, j: x[0](i, j) * x[1]),
        st.tuples(inner, st.integers(1, 5)).map(lambda x: lambda i, j: x[0](i, j) // x[1]),
        st.tuples(inner, st.integers(-5, 5)).map(lambda x: lambda i, j: x[0](i, j).clamp(x[1])),
        inner.map(lambda x: lambda i, j: x(i, j).abs()),
        inner.map(lambda x: lambda i, j: -x(i, j)),
        inner.map(lambda x: lambda i, j: x(i, j).int()),
    ),
    max_leaves=5,
)  # fmt: skip
COMPARED = st.sampled_from(["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"])
# The last ones are integers once fp32 rounds them.
BOUNDS = st.one_of(
    st.integers(-9, 9),
    st.floats(-9, 9).map(lambda x: round(x * 2) / 2),
    st.integers(-9, 9).map(lambda n: n - 1e-9),
)


def compared(x):
    number, operation, bound = x
    other = bound if callable(bound) else lambda i, j: bound
    return lambda i, j: getattr(number(i, j), operation)(other(i, j))


CONDITIONS = st.recursive(
    st.tuples(NUMBERS, COMPARED, st.one_of(NUMBERS, BOUNDS)).map(compared),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda x: lambda i, j: x[0](i, j) & x[1](i, j)),
        st.tuples(inner, inner).map(lambda x: lambda i, j: x[0](i, j) | x[1](i, j)),
        inner.map(lambda x: lambda i, j: ~x(i, j)),
        st.tuples(inner, inner, inner).map(
            lambda x: lambda i, j: torch.where(x[0](i, j), x[1](i, j), x[2](i, j))
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None)
@given(CONDITIONS)
def test_recognition_changes_no_pair(condition):
    def function(b, h, i, j):
        return condition(i, j)

    at = [torch.zeros((), dtype=torch.int64)] * 2
    i, j = torch.arange(40)[:, None], torch.arange(40)
    expected = function_of(FULL, function, ()).visible(*at, i, j, at[0]).expand(40, 40)
    mask = mask_mod(function)
    found = mask.as_function().visible(*at, i, j, at[0]).expand(40, 40)
    assert torch.equal(found, expected)
