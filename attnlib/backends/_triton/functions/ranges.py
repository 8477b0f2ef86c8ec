"""The ranges of integers in a mask or score function, which decide between int32 and int64 in kernels."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from ....tracing.kinds import BITS, FLOAT, limits
from ....tracing.program import INDICES

FARTHEST = 1 << 30  # bounds indices that shapes do not limit, as in a chunk of a larger call


class Range(NamedTuple):
    """The integers from ``least`` to ``most``, both included."""

    least: int
    most: int

    def within(self, other: "Range") -> bool:
        """True if ``other`` contains this range."""
        return other.least <= self.least and self.most <= other.most

    def joined(self, other: "Range") -> "Range":
        """Return the smallest range that contains both this range and ``other``."""
        return Range(min(self.least, other.least), max(self.most, other.most))


INT32 = Range(-(1 << 31), (1 << 31) - 1)


class Bounds(NamedTuple):
    """Upper bounds on the indices of sequences, heads and tokens in a call, as powers of two.

    A kernel is compiled for each combination of bounds. The defaults are the smallest bounds, so calls of
    usual sizes share a kernel.
    """

    sequences: int = 1 << 16
    heads: int = 1 << 10
    tokens: int = 1 << 15

    @classmethod
    def of(cls, sequences: int, heads: int, tokens: int) -> "Bounds":
        """Return the bounds of a call with these numbers of sequences, heads and tokens."""
        known = zip(cls(), (sequences, heads, tokens), strict=True)
        return cls(*(max(least, 1 << max(0, n - 1).bit_length()) for least, n in known))

    def inputs(self) -> dict[str, Range]:
        """Return the range of each index; query indices may be negative if queries outnumber keys."""
        known = dict.fromkeys(INDICES, Range(-self.tokens, self.tokens - 1))
        return known | {"b": Range(0, self.sequences - 1), "h": Range(0, self.heads - 1)}


ANYWHERE = Bounds(FARTHEST, FARTHEST, FARTHEST)


def range_of(kind: str) -> Range | None:
    """Return the range of all integers of a kind (such as int32 or bool); None for floats."""
    return None if kind == FLOAT else Range(*limits(kind))


def exact(operation: str, takes: str, operands: Sequence[Range]) -> Range:
    """Return the range of the exact results of an integer operation, before any overflow.

    ``takes`` is the kind of the operands, such as int32; results beyond its limits would wrap around.
    """
    (a, b), (c, d) = operands[0], operands[-1]
    match operation:
        case "add":
            return Range(a + c, b + d)
        case "sub":
            return Range(a - d, b - c)
        case "mul":
            return _hull(x * y for x, y in product((a, b), (c, d)))
        case "neg":
            return Range(-b, -a)
        case "abs":
            return Range(max(0, a, -b), max(-a, b))
        case "minimum" | "clamp_max":
            return Range(min(a, c), min(b, d))
        case "maximum" | "clamp_min":
            return Range(max(a, c), max(b, d))
        case "floordiv":
            return _hull(x // y for x, y in product((a, b), _divisors(c, d)))
        case "mod":
            return Range(0, min(b, d - 1)) if a >= 0 and c > 0 else Range(min(0, c + 1), max(0, d - 1))
        case "bitand" | "bitor" | "bitxor":
            bits = max(x.bit_length() if x >= 0 else (~x).bit_length() for x in (a, b, c, d))
            whole = Range(-(1 << bits) if min(a, c) < 0 else 0, (1 << bits) - 1)
            masked = [x.most for x in operands if x.least >= 0] if operation == "bitand" else []
            return Range(0, min(masked)) if masked else whole
        case "bitnot":
            return Range(~b, ~a)
        case "lshift":
            shifts = range(max(c, 0), min(d, BITS[takes] - 1) + 1)  # other shifts give 0
            shifted = [x << y for x, y in product((a, b), (shifts[0], shifts[-1]))] if shifts else []
            return _hull([*shifted, *[0] * (c < 0 or d >= BITS[takes])])
        case "rshift":
            return Range(min(a, 0), max(b, 0))
    raise AssertionError(f"unknown integer operation: {operation}")


def _divisors(c: int, d: int) -> list[int]:
    """Return divisors in ``[c, d]`` with the largest and smallest quotients; a divisor of 0 counts as 1."""
    found = [x for x in (c, d) if x] + [x for x in (-1, 1) if c <= x <= d]
    return [*found, 1] if c <= 0 <= d else found


def _hull(numbers: Iterable[int]) -> Range:
    numbers = list(numbers)
    return Range(min(numbers), max(numbers))
