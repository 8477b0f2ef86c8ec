"""Which keys a query sees: a band of storage indices, with an optional always-visible prefix."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from ..internal.checks import INT32
from ..internal.signatures import kind
from ..tracing.program import INDICES, Operand, Program, Steps, Value, constant
from ..tracing.trace import FirstQuery
from .function import EVERYWHERE, MaskFunction, RetainedKeys, function_of


@kind
@dataclass(frozen=True, slots=True)
class Mask:
    """A band of visible keys around each query, and a prefix that every query sees.

    Key ``j`` is visible to query ``i`` when ``i - left <= j <= i + right`` or ``j < prefix``.
    ``None`` leaves a side unbounded; a side may be negative. Indices are storage indices, and the
    queries of a call are the last ``s`` of its ``t`` keys, so row ``r`` is query ``i = t - s + r``.

    ``&``, ``|`` and ``~`` of masks are masks: a band where it is one, and else a MaskFunction.

    Raises:
        TypeError: a bound is not an int.
        ValueError: a bound is beyond int32, or the prefix is negative or combined with a bounded ``left``.

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

    def visible(self, i: Tensor | int, j: Tensor | int) -> Any:
        """Whether query ``i`` sees key ``j``: the definition. Ints give a bool, integer tensors a bool
        tensor.
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
        joined = self._join(other) if isinstance(other, Mask) else None
        return self.as_function() | other if joined is None else joined

    def __invert__(self) -> "AnyMask":
        if self.prefix or None not in (self.left, self.right):
            return ~self.as_function()
        if self.right is not None:
            return Mask(left=-self.right - 1)
        return NOTHING if self.left is None else Mask(right=-self.left - 1)

    @property
    def band(self) -> "Mask":
        """Itself, as the band of a MaskFunction."""
        return self

    def as_function(self) -> MaskFunction:
        """The function that says what the band says."""
        return MaskFunction(self, EVERYWHERE, ())

    def meet(self, other: "Mask") -> "Mask | None":
        """The keys that both show, if they are a band."""
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

    def _join(self, other: "Mask") -> "Mask | None":
        """The keys that either shows, if they are a band: none lies between them."""
        if self._is_hollow or other._is_hollow:
            return other if self._is_hollow else self
        bounds = [
            (-INT32 if x.left is None else -x.left, INT32 if x.right is None else x.right)
            for x in (self, other)
        ]
        (start, stop), (other_start, other_stop) = sorted(bounds)
        is_whole = stop >= other_start - 1 and start <= stop and other_start <= other_stop
        hull = self.hull(other)
        return hull if is_whole and (hull.left is None or not hull.prefix) else None

    def hull(self, other: "Mask") -> "Mask":
        """The least band that shows what either shows."""
        left, right = (
            None if None in both else max(both) for both in zip(self._sides, other._sides, strict=True)
        )
        return Mask(left, right, max(self.prefix, other.prefix) if right is not None else 0)

    @property
    def _is_hollow(self) -> bool:
        """Whether it shows no key to any query."""
        return None not in self._sides and self.left + self.right < 0

    @property
    def _sides(self) -> tuple[int | None, int | None]:
        return self.left, self.right

    def unbounded(self) -> "Mask":
        """The band of all keys."""
        return FULL

    def program(self) -> Program:
        """Whether query ``i`` sees key ``j``, as a program."""
        return Program(_text_of(self.left, self.right, self.prefix))

    def keys(self, first: int, last: int, total: int) -> tuple[int, int]:
        """The exact half-open range of keys, of ``total``, that some query in ``[first, last)`` sees.

        The range has no hole: every key in it is seen by at least one of these queries. An empty
        range is ``(0, 0)``.
        """
        if first >= last or self._is_hollow:
            return (0, 0)
        start = 0 if self.left is None else max(0, first - self.left)
        stop = total if self.right is None else min(total, max(last + self.right, self.prefix))
        return (start, stop) if start < stop else (0, 0)

    def covers(self, first: int, last: int, start: int, stop: int) -> bool:
        """Whether every query in ``[first, last)`` sees every key in ``[start, stop)``: such a tile needs no
        mask.
        """
        if stop <= self.prefix:
            return True
        after_left = self.left is None or start >= last - 1 - self.left
        before_right = self.right is None or stop - 1 <= first + self.right
        return after_left and before_right

    @property
    def kept(self) -> RetainedKeys:
        """What a cache must keep for this mask.

        >>> sliding(4).kept, CAUSAL.kept
        (RetainedKeys(window=4, first=0), RetainedKeys(window=None, first=0))
        """
        return RetainedKeys(None if self.reach is None or self.reach < 0 else self.reach + 1)

    @property
    def spelled(self) -> str:
        """As people write it."""
        if self.left is None and self.prefix == 0 and self.right in (None, 0):
            return "FULL" if self.right is None else "CAUSAL"
        is_window = self.left is not None and self.right == self.prefix == 0
        return f"sliding({self.left + 1})" if is_window else repr(self)

    @property
    def reach(self) -> int | None:
        """How many keys before its own a query sees; None without bound, negative where it sees later keys
        alone.

        >>> sliding(4).reach, CAUSAL.reach, sliding(4).shift(9).reach
        (3, None, -6)
        """
        return self.left

    @property
    def sees_all_before(self) -> bool:
        """Whether every query sees its own key and all keys before it.

        >>> CAUSAL.sees_all_before, sliding(4).sees_all_before, CAUSAL.shift(-1).sees_all_before
        (True, False, False)
        """
        return self.left is None and (self.right is None or self.right >= 0)

    def without_prefix(self) -> "Mask":
        """The band alone.

        >>> Mask(right=0, prefix=5).without_prefix() == CAUSAL
        True
        """
        return Mask(self.left, self.right) if self.prefix else self

    def shift(self, n: int) -> "Mask":
        """The same band moved ``n`` keys to the right: ``CAUSAL.shift(n)`` sees ``n`` keys past itself.

        With ``s`` queries and ``t`` keys, ``CAUSAL.shift(s - t)`` is the top-left alignment.
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n: expected an int, got {n!r}")
        left = None if self.left is None else self.left - n
        right = None if self.right is None else self.right + n
        return Mask(left, right, self.prefix)

    def queries(self, first: int, last: int, start: int, stop: int) -> tuple[int, int]:
        """The exact half-open range of queries, of ``[first, last)``, that see some key in ``[start, stop)``.

        The range has no hole. An empty range is ``(0, 0)``.

        >>> sliding(3).queries(0, 9, 4, 6)
        (4, 8)
        """
        if start >= stop or self._is_hollow:
            return (0, 0)
        if self.right is not None and start >= self.prefix:
            first = max(first, start - self.right)
        if self.left is not None:
            last = min(last, stop + self.left)
        return (first, last) if first < last else (0, 0)

    def is_causal_among(self, first: int, last: int) -> bool:
        """Whether each query in ``[first, last)``, two or more, sees of the keys there those up to its own
        alone.

        >>> sliding(3).is_causal_among(5, 8), sliding(3).is_causal_among(5, 9)
        (True, False)
        """
        after_left = self.left is None or self.left >= last - 1 - first
        return after_left and self.right == 0 and self.prefix <= first + 1

    def counted_from(self, key: int) -> "Mask":
        """The same mask for indices of queries and keys that count from key ``key``: the prefix moves.

        >>> Mask(right=0, prefix=5).counted_from(3)
        Mask(left=None, right=0, prefix=2)
        """
        return Mask(self.left, self.right, max(0, min(self.prefix - key, INT32))) if self.prefix else self


AnyMask = Mask | MaskFunction
FULL = Mask()
CAUSAL = Mask(right=0)
NOTHING = Mask(left=0, right=-1)


def refuse_mask(mask: object) -> NoReturn:
    """Raise TypeError for what is no mask, and name what makes one of it."""
    remedy = "; mask=FULL hides nothing" if mask is None else ""
    if isinstance(mask, Tensor):
        remedy = (
            "; a bool one [b|1, h|1, s, t], True where a key is seen, is attnlib.masks.mask_tensor(shown)"
        )
    elif callable(mask):
        remedy = "; a function of b, h, i, j is attnlib.mask_mod(function, *tensors)"
    expected = "a Mask such as CAUSAL, FULL or sliding(n), or what masks.mask_tensor() or mask_mod() makes"
    raise TypeError(f"mask: expected {expected}, got {type(mask).__name__}{remedy}")


@kind
def mask_mod(function: Callable, *arguments: Tensor | FirstQuery) -> MaskFunction:
    """The keys that a function of indices lets a query see: ``function(b, h, i, j, *arguments)`` gives a
    bool.

    ``b`` is the sequence, ``h`` the query head, ``i`` and ``j`` the storage indices of query and key, as in
    :class:`Mask`. They are int64, and bools and integers mean what they mean in torch; floats are fp32. The
    function may use arithmetic, ``**`` with a constant, comparisons, ``& | ^ ~ << >>``, ``torch.where``,
    ``abs``, ``minimum``, ``maximum``, ``clamp``, ``exp``, ``log``, ``tanh``, ``sigmoid``, ``sqrt`` and the
    indexing of tensors that are passed as arguments, whose indices are clamped to what there is. It is called
    once, with stand-ins, so that Python's ``if`` cannot look at an index. ``FIRST_QUERY`` among the arguments
    stands for int64 ``[b]``, the storage index of the first query of each sequence.

    Raises:
        TraceError: what the function does cannot run in a kernel; the message names the line.

    >>> documents = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    >>> mask = CAUSAL & mask_mod(lambda b, h, i, j, document: document[b, i] == document[b, j], documents)
    >>> print(mask.program)
    def mask(b, h, i, j, first, t0: int32[2]):
        x0 = load(t0, b, i)
        x1 = load(t0, b, j)
        x2 = eq(x0, x1)
        return x2
    """
    return function_of(FULL, function, arguments)


@constant
def _text_of(left: int | None, right: int | None, prefix: int) -> str:
    """The text of a band's program."""
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
    """Causal attention to the last ``window`` keys, the query's own included.

    Raises:
        ValueError: the window holds no key.
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
