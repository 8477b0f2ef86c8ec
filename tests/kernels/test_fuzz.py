"""A share of the fuzzer's cases on the kernels, and bugs planted there."""

import math

import pytest
from fuzz.cases import failures
from kernel_helpers import INTERPRETED

from attnlib.backends._triton.decode import shapes as decode_shapes
from attnlib.backends._triton.dense import shapes as triton_plans
from attnlib.backends._triton.dense.operators import Dense
from attnlib.backends._triton.functions import sources
from attnlib.backends._triton.functions.ranges import Range
from attnlib.backends._triton.launching.launch import plan_cache
from attnlib.tracing.program import Value

DEVICE = "interpreter" if INTERPRETED else "cuda"
FUNCTIONS = 20  # cases by default, in which bugs of functions are to be found
# Kind -> first seed and cases: 20 s interpreted on one core of an EPYC, with those behind -m slow.
SHARES = [
    ("dense", 0, 8),
    pytest.param("dense", 8, 8, marks=pytest.mark.slow),
    ("varlen", 0, 10),
    ("cached", 0, 2),
    ("function", 0, FUNCTIONS),
    pytest.param("function", FUNCTIONS, 24, marks=pytest.mark.slow),
    pytest.param("cached", 2, 2, marks=pytest.mark.slow),
    pytest.param("selected", 0, 6, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def _launches_anew():
    """What a planted bug plans is no other test's."""
    plan_cache.cache_clear()
    yield
    plan_cache.cache_clear()


@pytest.mark.parametrize(("kind", "first", "count"), SHARES)
def test_a_share_of_the_cases_finds_nothing(kind, first, count):
    found = [str(failure) for failure in failures(first, count, DEVICE, (kind,))]
    assert not found, "\n\n".join(found)


def as_if_contiguous(strides):
    """Strides that tensors of these shapes would have in one piece."""
    return lambda dims, **of: strides(
        dims, **{name: x and triton_plans.contiguous(x.shape, x.dtype) for name, x in of.items()}
    )


def one_too_far(scoring):
    def wrong(arguments, heads, reach):
        numbers = scoring(arguments, heads, reach)
        return numbers | {name: n + 1 for name in ("left", "right") if (n := numbers[name]) is not None}

    return wrong


def cut_to_int32(width):
    """Integers of 64 bits are cut to 32 (F7)."""
    return lambda body, x: 32


def unwrapped(range_of_operand):
    """Constants are not brought to the kind of the number beside them (F8)."""

    def wrong(body, x, kind):
        return range_of_operand(body, x, kind) if isinstance(x, Value) else Range(int(x), int(x))

    return wrong


def rounded_to_powers_of_two(rounded_down):
    """Odd divisors beyond fp64 count as powers of two."""

    def wrong(operation, divisor, x, y, width):
        if not isinstance(divisor, Value) and divisor > 0 and math.frexp(divisor)[0] == 0.5:
            return f"{x} >> {divisor.bit_length() - 1}" if operation == "floordiv" else f"{x} & {divisor - 1}"
        return rounded_down(operation, divisor, x, y, width)

    return wrong


def without_tiles(with_tiles):
    """No tiles of a mask by function where there are no queries or no keys (F12)."""
    return lambda dense, a: with_tiles(dense, a) if a.q.numel() and a.k.numel() else a


@pytest.mark.parametrize(
    ("kind", "where", "attribute", "bug"),
    [
        ("function", sources._Body, "_width", cut_to_int32),
        ("function", sources._Body, "_range", unwrapped),
        ("function", sources, "_rounded_down", rounded_to_powers_of_two),
        ("function", Dense, "_with_tiles", without_tiles),
        ("dense", triton_plans, "strides", as_if_contiguous),
        ("varlen", triton_plans, "scoring", one_too_far),
        ("cached", decode_shapes, "scoring", one_too_far),
    ],
)
def test_a_planted_bug_is_found(kind, where, attribute, bug, monkeypatch):
    monkeypatch.setattr(where, attribute, bug(getattr(where, attribute)))
    assert next(failures(0, FUNCTIONS if kind == "function" else 12, DEVICE, (kind,)), None) is not None
