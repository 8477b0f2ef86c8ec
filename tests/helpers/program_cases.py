"""Functions of indices with the tensors that they read, which are smaller than a tile's indices reach, and
those.

Floats keep away from where a function jumps, or has no derivative.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.tracing.program import Program
from attnlib.tracing.trace import QUERY_OFFSET, FirstQuery, traced

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(-3, 8, shape, dtype=torch.int64).to(dtype)


def bools(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


class _Table:
    """A tensor as a function is given it: floats are widened, and indices that vary are clamped to what there
    is.
    """

    def __init__(self, x: Tensor, wide: torch.dtype):
        self._x = x.to(wide) if x.is_floating_point() else x

    def __getitem__(self, at: object) -> Tensor:
        at = at if isinstance(at, tuple) else (at,)
        clamped = (
            n if isinstance(n, int) else n.clamp(0, size - 1)
            for n, size in zip(at, self._x.shape, strict=True)
        )
        return _with_dimensions(self._x[tuple(clamped)])


class _First:
    """The first query of one sequence, which QUERY_OFFSET stands for."""

    def __init__(self, first: Tensor):
        self._first = first

    def __getitem__(self, b: Tensor) -> Tensor:
        return self._first


def _with_dimensions(x: Tensor) -> Tensor:
    """torch promotes tensors with dimensions to each other as it does such without, but not both."""
    return x if x.dim() else x.view(1, 1)


def applied(function: Callable, arguments: list, first: Tensor, *numbers: Tensor) -> Tensor:
    """Call a function with numbers: tensors that broadcast.

    ``first`` is the storage index of the first query of the sequence that all indices are of.
    """
    wide = numbers[0].dtype if numbers[0].is_floating_point() else torch.float32
    given = [
        _First(_with_dimensions(first))
        if x is QUERY_OFFSET
        else _Table(x, wide)
        if x.dim()
        else _with_dimensions(x.to(wide) if x.is_floating_point() else x)
        for x in arguments
    ]
    return function(*map(_with_dimensions, numbers), *given)


class Case(NamedTuple):
    """A function of indices, and what makes its arguments."""

    function: Callable
    makers: tuple[Callable[[], Tensor] | FirstQuery, ...] = ()

    def arguments(self) -> list[Tensor | FirstQuery]:
        """New arguments."""
        return [make if make is QUERY_OFFSET else make() for make in self.makers]


class Tile(NamedTuple):
    """Where a tile lies: whose it is, the indices along its two sides, and the first query's.

    The heads of a group take turns along its rows.
    """

    b: int = 1
    h: int = 2
    i: range = range(-3, 13)
    j: range = range(-6, 26)
    first: int = 4
    group: int = 1

    def indices(self) -> tuple[Tensor, ...]:
        """b, h, i and j for functions."""
        i, j = torch.tensor(self.i)[:, None], torch.tensor(self.j)[None, :]
        heads = torch.arange(len(self.i))[:, None] % self.group
        return torch.tensor(self.b), self.h + heads if self.group > 1 else torch.tensor(self.h), i, j

    def called(self, case: Case, arguments: list[Tensor | FirstQuery], *score: Tensor) -> Tensor:
        """What a function gives of the whole tile."""
        result = applied(case.function, arguments, torch.tensor(self.first), *score, *self.indices())
        return torch.as_tensor(result).broadcast_to(len(self.i), len(self.j))


def program_of(name: str, case: Case, arguments: list[Tensor | FirstQuery]) -> Program:
    return traced(name, case.function, arguments)


def _tree(b, h, i, j, first, tree):
    return (j < first[b]) | tree[i - first[b], (j - first[b]).clamp(0)]


MASKS = MappingProxyType(
    {
        "causal": Case(lambda b, h, i, j: i >= j),
        "every head, or one": Case(lambda b, h, i, j: h == 2),
        "documents": Case(
            lambda b, h, i, j, t: t[b, i] == t[b, j], (lambda: ints(2, 11, dtype=torch.int64),)
        ),
        "dilated": Case(lambda b, h, i, j: (i - j) % 3 == 0),
        "blocks": Case(lambda b, h, i, j: (i // 4 == j // 4) & (j // -3 < i % -5)),
        "tree": Case(_tree, (QUERY_OFFSET, lambda: bools(7, 9))),
        "windows of heads": Case(
            lambda b, h, i, j, t: (i - j).abs() <= t[h], (lambda: ints(4, dtype=torch.uint8),)
        ),
        "any divisor": Case(
            lambda b, h, i, j, t: (i // t[j] > j % t[j]) | (7 // t[i] == 2), (lambda: ints(13) * 2 + 1,)
        ),
        "a float scalar": Case(lambda b, h, i, j, t: ~(t > 0) & (i > j) | (t != 0.25), (lambda: floats(),)),
        "bools": Case(
            lambda b, h, i, j, s, t: (~s | t[h, j]) & torch.where(i > 3, t[h, i], s),
            (lambda: bools(), lambda: bools(4, 9)),
        ),
        "halves": Case(lambda b, h, i, j: (i / 3).int() >= (j / 4).int()),
        "quotients": Case(lambda b, h, i, j: (i / 7) * 7 == i.float()),
        "looked up": Case(
            lambda b, h, i, j, s, t: t[s[j], b] < i,
            (lambda: ints(9, dtype=torch.int64), lambda: ints(4, 2, dtype=torch.int16)),
        ),
        "long numbers": Case(
            lambda b, h, i, j, t: (t[i] == t[j]) | (t[j] - t[i] > 3),
            (lambda: ints(9, dtype=torch.int64) * 2**32,),
        ),
        "beyond int32": Case(
            lambda b, h, i, j, t: (i * 3_000_000_000 > j * 2_000_000_000) & ((i + t[h]) * (j + t[j]) % 7 < 4),
            (lambda: ints(20, dtype=torch.int32) + 2**31 - 9,),
        ),
        "back from int64": Case(
            lambda b, h, i, j, t: (
                ((i << 40) // (1 << 39) == 2 * i) & (((j * 2**33).int() == 0) | (t[j] // 2**33 < h))
            ),
            (lambda: ints(20, dtype=torch.int64) * 2**35,),
        ),
        "int32 wraps around": Case(
            lambda b, h, i, j, t: (t[i] + t[j] > 0) ^ (t[h] * t[j] > t[b]) | (-t[i] - 2 > t[j]),
            (lambda: ints(20, dtype=torch.int32) + 2**31 - 9,),
        ),
        "sums of bools": Case(
            lambda b, h, i, j, t: (
                ((i > 3) + (j > 3) == t[j]) ^ ((i > j) * t[i] + 2 == 3) | torch.logical_xor(i, t[h])
            ),
            (lambda: bools(20),),
        ),
        "bytes": Case(
            lambda b, h, i, j, t: (
                (t[j] + t[i] < t[h]) ^ (t[i] * 3 - 7 > ~t[j]) | (-t[i] == 300) ^ (t[b] << 5 > t[j])
            ),
            (lambda: ints(20, dtype=torch.uint8) * 21,),
        ),
        "small numbers": Case(
            lambda b, h, i, j, s, t: (
                (s[i] + s[j] > s[h]) ^ (s[i] + t[j] > 200) | (abs(s[j]) // 3 < s[i] % -5)
            ),
            (lambda: ints(20, dtype=torch.int8) * 19, lambda: ints(20, dtype=torch.uint8) * 30),
        ),
        "shifts": Case(
            lambda b, h, i, j, t: (
                ((i << j) > (j << t[i])) ^ ((i >> j) < t[j] >> 70) | (1 << (j - 3) > i) ^ (t[j] << -1 == 0)
            ),
            (lambda: ints(20, dtype=torch.int64) * 9,),
        ),
        "constants beyond their dtype": Case(
            lambda b, h, i, j, s, t, u: (
                (s[j] % 128 > s[i] // 128) ^ (t[j] % 2**31 > t[i] // 2**31)
                | (u[j] % (2**53 + 1) > u[i] % 2**62) ^ (s[j] << 256 > s[i] >> 257)
                | (u[h] // (2**63 - 1) > t[j] << 2**32)
            ),
            (
                lambda: ints(20, dtype=torch.int8) * 19,
                lambda: ints(20) * 2**28,
                lambda: ints(20, dtype=torch.int64),
            ),
        ),
        "bits": Case(
            lambda b, h, i, j, t: ((i & j) - (i ^ t[j]) > (t[i] | 5)) | (~i & 7 == j) ^ (t[j] & (i > j) > 0),
            (lambda: ints(20, dtype=torch.int16),),
        ),
        "powers": Case(
            lambda b, h, i, j, t: (
                (i**2 + (j**3) > 40) ^ (t[j] ** 2 > 99) | (2**j > i) ^ ((i > j) ** 2 + i**0 > t[h])
            ),
            (lambda: ints(20, dtype=torch.uint8) * 9,),
        ),
        "square roots": Case(lambda b, h, i, j: (i.abs() ** 0.5 == 2) | (torch.sqrt(j.abs()) == 3)),
        "the last": Case(
            lambda b, h, i, j, t: (t[-1, j] > i) | (t[h, -2] < t[-4, -1]),
            (lambda: ints(4, 9, dtype=torch.int64),),
        ),
        "logic of numbers": Case(
            lambda b, h, i, j, t: (
                torch.logical_and(i % 3, t[j]) | torch.logical_not(t[i]) & (i > 2).where(j > 3, i > j)
            ),
            (lambda: floats(20).round(),),
        ),
        "kinds": Case(
            lambda b, h, i, j, t: (torch.minimum(i, t[j]) < j * 0.5) | ((i > j).int() + b == 2),
            (lambda: floats(20, dtype=torch.bfloat16),),
        ),
    }
)

SCORES = MappingProxyType(
    {
        "nothing": Case(lambda score, b, h, i, j: score),
        "a constant": Case(lambda score, b, h, i, j: 1.5),
        "an index": Case(lambda score, b, h, i, j: j),
        "constants beyond fp32": Case(lambda score, b, h, i, j: score * 1e-300 + 1e-40 + h),
        "an element": Case(lambda score, b, h, i, j, t: t[h], (lambda: floats(4),)),
        "relative": Case(
            lambda score, b, h, i, j, t: score + t[h, (i - j).clamp(-3, 3) + 3],
            (lambda: floats(4, 7, dtype=torch.bfloat16),),
        ),
        "bias": Case(lambda score, b, h, i, j, t: score + t[b, h, i, j], (lambda: floats(2, 3, 9, 14),)),
        "broadcast bias": Case(
            lambda score, b, h, i, j, t: score + t[0, h, 0, j],
            (lambda: floats(1, 4, 1, 1).expand(1, 4, 1, 9),),
        ),
        "alibi": Case(lambda score, b, h, i, j, t: score - t[h] * abs(i - j), (lambda: floats(4),)),
        "softcap": Case(lambda score, b, h, i, j: 3 * torch.tanh(score / 3)),
        "temperature": Case(
            lambda score, b, h, i, j, t: score * torch.exp(t[h, i]) / (i * i + 1), (lambda: floats(4, 9),)
        ),
        "logarithm": Case(
            lambda score, b, h, i, j, t: score * torch.log(t[j] * t[j] + 1), (lambda: floats(31),)
        ),
        "where": Case(
            lambda score, b, h, i, j, t: torch.where(i >= j, score, t[j] * score), (lambda: floats(20),)
        ),
        "hidden": Case(
            lambda score, b, h, i, j, s, t: torch.where(s[j], score * t, float("-inf")),
            (lambda: bools(22), lambda: floats()),
        ),
        "minimum": Case(lambda score, b, h, i, j, t: torch.minimum(score, t[h, j]), (lambda: floats(4, 20),)),
        "maximum": Case(
            lambda score, b, h, i, j, t: torch.maximum(t[i] * score, score), (lambda: floats(20),)
        ),
        "clamp": Case(lambda score, b, h, i, j: score.clamp(-0.5, 1)),
        "abs": Case(lambda score, b, h, i, j, t: score.abs() * t, (lambda: floats(dtype=torch.float64),)),
        "remainder": Case(
            lambda score, b, h, i, j, t: score % 1.7 + t[i] * torch.div(score, -0.6, rounding_mode="floor"),
            (lambda: floats(20),),
        ),
        "remainder of elements": Case(
            lambda score, b, h, i, j, t: 5 * score % (t[h] * t[h] + 1), (lambda: floats(4),)
        ),
        "signs": Case(
            lambda score, b, h, i, j, t: -score - (-t[j]), (lambda: floats(20, dtype=torch.float16),)
        ),
        "squares": Case(lambda score, b, h, i, j, t: score * score * t[h] * t[h], (lambda: floats(4),)),
        "quotient": Case(
            lambda score, b, h, i, j, t: t[j] / (score.abs() + 1) + 1 / (1 + score * score),
            (lambda: floats(20),),
        ),
        "powers": Case(
            lambda score, b, h, i, j, t: (
                score**3 - (score.abs() + 1) ** -2 * t[h] + (t[j] * t[j] + 0.5) ** 1.7 + score**0
            ),
            (lambda: floats(20),),
        ),
        "powers of constants": Case(
            lambda score, b, h, i, j, t: 1.5**score + 2 ** (t[j] * 2) - 2.0 ** -(i.abs() / 4),
            (lambda: floats(20),),
        ),
        "far powers": Case(
            lambda score, b, h, i, j, t: (t[h] + score / 9) ** 11 + (t[j] / 3) ** 12, (lambda: floats(20),)
        ),
        "roots": Case(
            lambda score, b, h, i, j, t: (
                torch.sqrt(score * score + 0.5) * torch.rsqrt(t[h] * t[h] + 0.5) + (t[j] + 4) ** 0.5
            ),
            (lambda: floats(20).clamp(-3, 3),),
        ),
        "sigmoid": Case(
            lambda score, b, h, i, j, t: torch.sigmoid(score * t[h]) + (t[j] * 2).sigmoid() * score.exp2(),
            (lambda: floats(20),),
        ),
        "the last": Case(
            lambda score, b, h, i, j, t: score * t[h, -1] + t[-2, j],
            (lambda: floats(4, 9, dtype=torch.bfloat16),),
        ),
        "clamp by elements": Case(
            lambda score, b, h, i, j, s, t: score.clamp(t[h], s[j]).clamp(max=t[j] + 1),
            (lambda: floats(20), lambda: floats(20)),
        ),
        "integers": Case(
            lambda score, b, h, i, j, t, s: (
                score * (i & 3) + ((i ^ j) >> 1) * s[j] + (t[j] + t[i]) + (i << 33) / 2**33
            ),
            (lambda: ints(20, dtype=torch.uint8) * 33, lambda: floats(20)),
        ),
        "casts": Case(
            lambda score, b, h, i, j, t: (
                score * (i > j).float() + t[j % 3] * score.int() + (score * 3).bool()
            ),
            (lambda: floats(3),),
        ),
        "buckets": Case(
            lambda score, b, h, i, j, s, t: score + t[s[i, j]],
            (lambda: ints(9, 15, dtype=torch.int64), lambda: floats(5)),
        ),
        "many reads": Case(
            lambda score, b, h, i, j, t: t[h, i] * t[h, j] + score * t[b, 0], (lambda: floats(4, 20),)
        ),
        "from the first query": Case(
            lambda score, b, h, i, j, s, t: score + t[i - s[b], j], (QUERY_OFFSET, lambda: floats(10, 20).mT)
        ),
        "negative": Case(
            lambda score, b, h, i, j, t: score * t[(i - j) // 3 + 4, (j - i) % -4], (lambda: floats(9, 4),)
        ),
        "a decision": Case(
            lambda score, b, h, i, j, t: torch.where(t > 0.1, score, -score), (lambda: floats(),)
        ),
        "strided": Case(lambda score, b, h, i, j, t: score + t[b, j], (lambda: floats(2, 40)[:, ::2],)),
    }
)

# The indices of two sequences, four heads, seven queries and nine keys, which broadcast to all pairs.
AT = {
    "b": torch.arange(2)[:, None, None, None],
    "h": torch.arange(4)[:, None, None],
    "i": torch.arange(-3, 4)[:, None],
    "j": torch.arange(9),
    "first": torch.tensor(3),
}
