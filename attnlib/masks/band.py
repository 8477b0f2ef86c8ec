"""Band masks: a band of visible keys around each query, plus a prefix that every query sees."""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..internal.checks import INT32
from ..internal.signatures import kind
from ..tracing.program import INDICES, Operand, Program, Steps, Value, constant
from .function import EVERYWHERE, MaskFunction, RetainedKeys


@kind
@dataclass(frozen=True, slots=True, repr=False)
class Mask:
    """A band of visible keys around each query, plus a prefix that every query sees.

    Key ``j`` is visible to query ``i`` if ``i - left <= j <= i + right`` or ``j < prefix``. ``None`` leaves a
    side unbounded; a bound may be negative. Indices are storage indices: with ``s`` queries and ``t`` keys,
    the queries belong to the last ``s`` keys, so row ``r`` of q is query ``i = t - s + r``.

    ``&``, ``|`` and ``~`` combine masks. The result is a Mask if it is a band, otherwise a MaskFunction.

    Raises:
        TypeError: a bound is not an int.
        ValueError: a bound does not fit int32, or the prefix is negative or combined with a bounded ``left``.

    >>> CAUSAL.visible(3, 3), CAUSAL.visible(3, 4), sliding(2).visible(3, 1)
    (True, False, False)
    >>> CAUSAL & Mask(left=3) == sliding(4), ~CAUSAL, sliding(2) | CAUSAL.shift(2)
    (True, Mask(left=-1, right=None, prefix=0), Mask(left=None, right=2, prefix=0))
    """

    left: int | None = None
    right: int | None = None
    prefix: int = 0

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right), ("prefix", self.prefix)):
            if isinstance(value, bool) or not (
                isinstance(value, int) or (value is None and name != "prefix")
            ):
                raise TypeError(f"mask: expected an int for {name}, got {value!r}")
            if value is not None and not -INT32 <= value <= INT32:
                raise ValueError(
                    f"mask: expected {name} within +-{INT32}, since lengths are int32, got {value}"
                )
        if self.prefix < 0:
            raise ValueError(f"mask: expected prefix >= 0, got {self.prefix}")
        if self.prefix and self.left is not None:
            raise ValueError(f"mask: a prefix needs left=None, got left={self.left}, prefix={self.prefix}")

    def __repr__(self) -> str:
        if (self.right, self.prefix) == (0, 0) and (self.left is None or self.left >= 0):
            return "CAUSAL" if self.left is None else f"sliding({self.left + 1})"
        if (self.left, self.right, self.prefix) == (None, None, 0):
            return "FULL"
        return f"Mask(left={self.left}, right={self.right}, prefix={self.prefix})"

    def visible(self, i: Tensor | int, j: Tensor | int) -> Any:
        """Return True if query ``i`` sees key ``j``; integer tensors give a bool tensor.

        This is the definition of the mask.
        """
        seen = (i == i) & (j == j)
        if self.left is not None:
            seen = seen & (j >= i - self.left)
        if self.right is not None:
            seen = seen & (j <= i + self.right)
        return seen | (j < self.prefix)

    def __and__(self, other: "AnyMask") -> "AnyMask":
        met = self.meet(other) if isinstance(other, Mask) else None
        return self.as_function() & other if met is None else met

    def __or__(self, other: "AnyMask") -> "AnyMask":
        joined = self.join(other) if isinstance(other, Mask) else None
        return self.as_function() | other if joined is None else joined

    def __invert__(self) -> "AnyMask":
        if self.prefix or None not in (self.left, self.right):
            return ~self.as_function()
        if self.right is not None:
            return Mask(left=-self.right - 1)
        return NOTHING if self.left is None else Mask(right=-self.left - 1)

    @property
    def band(self) -> "Mask":
        """The mask itself, so that code can read ``.band`` of a Mask as well as of a MaskFunction."""
        return self

    def block_mask(
        self, b: int, h: int, s: int, t: int, *, device: torch.device | str | None = None
    ) -> "Mask":
        """Return the mask itself: kernels compute a band without precomputed tiles, unlike a MaskFunction."""
        return self

    def as_function(self) -> MaskFunction:
        """Return an equivalent MaskFunction, for code that combines masks of both kinds."""
        return MaskFunction(self, EVERYWHERE, ())

    def meet(self, other: "Mask") -> "Mask | None":
        """Return the intersection of two masks, or None if it is not a band."""
        left, right = (_least(x, y) for x, y in ((self.left, other.left), (self.right, other.right)))
        if not (self.prefix or other.prefix):
            return Mask(left, right)
        for x, y in ((self, other), (other, self)):
            if x.right is None and x.left is None:
                return y
            within = y.right is None or (x.right is not None and x.right <= y.right)
            if left is None and within and (y.right is None or x.prefix <= y.prefix or x.right == y.right):
                return Mask(None, x.right, x.prefix if y.right is None else min(x.prefix, y.prefix))
        return None

    def join(self, other: "Mask") -> "Mask | None":
        """Return the union of two masks, or None if it is not a band."""
        if self._is_empty or other._is_empty:
            return other if self._is_empty else self
        bounds = [
            (-INT32 if x.left is None else -x.left, INT32 if x.right is None else x.right)
            for x in (self, other)
        ]
        (start, stop), (other_start, other_stop) = sorted(bounds)
        is_whole = stop >= other_start - 1 and start <= stop and other_start <= other_stop
        hull = self.hull(other)
        return hull if is_whole and (hull.left is None or not hull.prefix) else None

    def hull(self, other: "Mask") -> "Mask":
        """Return the smallest band that contains both masks."""
        left, right = (
            None if None in both else max(both) for both in zip(self._sides, other._sides, strict=True)
        )
        return Mask(left, right, max(self.prefix, other.prefix) if right is not None else 0)

    @property
    def _is_empty(self) -> bool:
        """True if the mask hides every key from every query."""
        return None not in self._sides and self.left + self.right < 0

    @property
    def _sides(self) -> tuple[int | None, int | None]:
        return self.left, self.right

    def unbounded(self) -> "Mask":
        """Return the mask that shows all keys to every query."""
        return FULL

    def beyond_causal(self) -> "Mask":
        """Return the part of the mask that hides more than causal attention does.

        >>> sliding(4).beyond_causal(), CAUSAL.beyond_causal()
        (Mask(left=3, right=None, prefix=0), FULL)
        """
        is_implied = self.right is None or (self.right >= 0 and not self.prefix)
        return Mask(self.left, None if is_implied else self.right, self.prefix)

    @property
    def lone_reach(self) -> int | None:
        """The :attr:`reach` of a mask that has no other bound; None for other masks."""
        return self.left if self.right is None else None

    def program(self) -> Program:
        """Return the mask as a program (a list of operations on token indices), which backends can run."""
        return Program(_band_text(self.left, self.right, self.prefix))

    def keys(self, first: int, last: int, total: int) -> tuple[int, int]:
        """Return the half-open range of keys, out of ``total``, that some query in ``[first, last)`` sees.

        Each key in the range is visible to at least one of the queries, and no key outside it is visible to
        any. An empty range is ``(0, 0)``.
        """
        if first >= last or self._is_empty:
            return (0, 0)
        start = 0 if self.left is None else max(0, first - self.left)
        stop = total if self.right is None else min(total, max(last + self.right, self.prefix))
        return (start, stop) if start < stop else (0, 0)

    def covers(self, first: int, last: int, start: int, stop: int) -> bool:
        """True if every query in ``[first, last)`` sees every key in ``[start, stop)``.

        Kernels then compute the tile of these queries and keys without applying the mask.
        """
        if stop <= self.prefix:
            return True
        after_left = self.left is None or start >= last - 1 - self.left
        before_right = self.right is None or stop - 1 <= first + self.right
        return after_left and before_right

    @property
    def kept(self) -> RetainedKeys:
        """The keys that a cache must retain for this mask.

        >>> sliding(4).kept, CAUSAL.kept
        (RetainedKeys(window=4, first=0), RetainedKeys(window=None, first=0))
        """
        return RetainedKeys(None if self.reach is None or self.reach < 0 else self.reach + 1)

    @property
    def spelled(self) -> str:
        """The shortest Python expression for this mask, such as ``sliding(4)``, for messages."""
        if self.left is None and self.prefix == 0 and self.right in (None, 0):
            return "FULL" if self.right is None else "CAUSAL"
        is_window = self.left is not None and self.right == self.prefix == 0
        return f"sliding({self.left + 1})" if is_window else repr(self)

    @property
    def reach(self) -> int | None:
        """The number of keys that a query sees before its own key.

        None means that there is no limit. A negative number means that a query only sees keys after its own.

        >>> sliding(4).reach, CAUSAL.reach, sliding(4).shift(9).reach
        (3, None, -6)
        """
        return self.left

    @property
    def sees_all_before(self) -> bool:
        """True if every query sees its own key and all keys before it.

        >>> CAUSAL.sees_all_before, sliding(4).sees_all_before, CAUSAL.shift(-1).sees_all_before
        (True, False, False)
        """
        return self.left is None and (self.right is None or self.right >= 0)

    @property
    def hides_all_after(self) -> bool:
        """True if every query sees no key after its own.

        >>> CAUSAL.hides_all_after, sliding(4).hides_all_after, Mask(right=0, prefix=5).hides_all_after
        (True, True, False)
        """
        return self.right is not None and self.right <= 0 and not self.prefix

    def without_prefix(self) -> "Mask":
        """Return the same band without its prefix.

        >>> Mask(right=0, prefix=5).without_prefix() == CAUSAL
        True
        """
        return Mask(self.left, self.right) if self.prefix else self

    def shift(self, n: int) -> "Mask":
        """Return the same band moved ``n`` keys to the right.

        Under ``CAUSAL.shift(n)``, a query also sees the ``n`` keys after its own key. With ``s`` queries and
        ``t`` keys, ``CAUSAL.shift(s - t)`` aligns the first query with the first key (top-left alignment).
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n: expected an int, got {n!r}")
        left = None if self.left is None else self.left - n
        right = None if self.right is None else self.right + n
        return Mask(left, right, self.prefix)

    def queries(self, first: int, last: int, start: int, stop: int) -> tuple[int, int]:
        """Return the half-open range of queries in ``[first, last)`` that see some key in ``[start, stop)``.

        Every query in the returned range sees such a key, and no query outside it does. An empty range is
        ``(0, 0)``.

        >>> sliding(3).queries(0, 9, 4, 6)
        (4, 8)
        """
        if start >= stop or self._is_empty:
            return (0, 0)
        if self.right is not None and start >= self.prefix:
            first = max(first, start - self.right)
        if self.left is not None:
            last = min(last, stop + self.left)
        return (first, last) if first < last else (0, 0)

    def is_causal_among(self, first: int, last: int) -> bool:
        """True if the mask is plain causal attention among the queries and keys in ``[first, last)``.

        Each query in the range then sees exactly the keys from ``first`` up to its own key. The range must
        contain at least two queries.

        >>> sliding(3).is_causal_among(5, 8), sliding(3).is_causal_among(5, 9)
        (True, False)
        """
        after_left = self.left is None or self.left >= last - 1 - first
        return after_left and self.right == 0 and self.prefix <= first + 1

    def counted_from(self, key: int) -> "Mask":
        """Return the same mask for indices that start from 0 at key ``key``; only the prefix changes.

        >>> Mask(right=0, prefix=5).counted_from(3)
        Mask(left=None, right=0, prefix=2)
        """
        return Mask(self.left, self.right, max(0, min(self.prefix - key, INT32))) if self.prefix else self


AnyMask = Mask | MaskFunction
FULL = Mask()
CAUSAL = Mask(right=0)
NOTHING = Mask(left=0, right=-1)


def refuse_mask(mask: object) -> NoReturn:
    """Raise a TypeError that explains how to convert an object that is not a mask into one."""
    remedy = "; mask=FULL hides nothing" if mask is None else ""
    if isinstance(mask, Tensor):
        remedy = (
            "; wrap a bool tensor [b|1, h|1, s, t], True where a key is visible, in "
            "attnlib.masks.mask_tensor(shown)"
        )
    elif callable(mask):
        remedy = "; wrap a function of b, h, i, j in attnlib.mask_mod(function, *tensors)"
    expected = "a Mask such as CAUSAL, FULL or sliding(n), or a mask from masks.mask_tensor() or mask_mod()"
    raise TypeError(f"mask: expected {expected}, got {type(mask).__name__}{remedy}")


@constant
def _band_text(left: int | None, right: int | None, prefix: int) -> str:
    """Return the program that computes a band from two indices, as text."""
    steps, i, j = Steps(INDICES, ()), Value("i"), Value("j")
    seen: Operand = True
    if left is not None:
        seen = steps.add("ge", j, steps.add("sub", i, left))
    if right is not None:
        seen = steps.add("logical_and", seen, steps.add("le", j, steps.add("add", i, right)))
    if prefix:
        seen = steps.add("logical_or", seen, steps.add("lt", j, prefix))
    return steps.program("mask", seen).text


def _least(x: int | None, y: int | None) -> int | None:
    return y if x is None else x if y is None else min(x, y)


@kind
def sliding(window: int) -> Mask:
    """Return the mask of causal attention to the last ``window`` keys, the query's own key included.

    Raises:
        TypeError: ``window`` is not an int.
        ValueError: ``window`` is below 1, or does not fit int32.
    """
    if isinstance(window, bool) or not isinstance(window, int):
        raise TypeError(f"window: expected an int, got {window!r}")
    if not 1 <= window <= INT32:
        bound = (
            "at least 1 key (the query's own counts)"
            if window < 1
            else f"at most {INT32} keys, which int32 holds"
        )
        raise ValueError(f"window: expected {bound}, got {window}")
    return Mask(left=window - 1, right=0)
