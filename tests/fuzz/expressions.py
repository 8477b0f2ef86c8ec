"""Random expressions of indices and tables, as Python's source, and what Python gives of them pair by
pair.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .draw import Draw

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
CONSTANTS = (0, 1, 2, 3, 5, 7, 100, -1, -4)
LARGE = (2**31, 3_000_000_000, -(2**33), 2**62 + 1)
ODD = (2**53 + 1, 2**54 + 1, 2**60 + 1, 2**63 - 1)  # which fp64 rounds to powers of two
# Each raises in Python or torch, or gives what no kernel could know; {} is an integer.
UNTRACEABLE = (
    "np.abs({}) > 2", "torch.tensor({}) > 2", "round({}) > 2", "{{0: 1}}[{}] > 0", "[1, 2][{}] > 1",
    "int({}) > 1", "unknown > {}", "({} if i > j else 2) > 1", "(i > j) and {} > 1", "None if True else {}",
    "len({}) > 1", "{} in (1, 2)", "i.__setitem__({}, 0)", "math.sqrt({}) > 1", "divmod({}, 2)[0] > 1",
    "(i > j) - (j > {})", "1 // 0 > {}", "[][0] > {}", "{{}}[2] > {}",
)  # fmt: skip


class Expression(NamedTuple):
    """The source of an expression of ``b, h, i, j``, ``score`` and the tables that are named in it."""

    text: str
    tables: dict[str, Tensor]

    def function(self, first: tuple[str, ...]) -> Any:
        """The function of numbers and of tables."""
        import math

        import numpy as np

        names = {"torch": torch, "np": np, "math": math}
        source = f"lambda {', '.join((*first, *self.tables))}: {self.text}"
        return eval(compile(source, "<fuzz>", "eval"), names)


class Grammar:
    """Draws expressions; ``read`` holds the tables that they read."""

    def __init__(self, draw: Draw, heads: int):
        self.draw, self.heads, self.tables = draw, heads, {}

    def expression(self, text: str) -> Expression:
        return Expression(text, self.tables)

    def bool(self, depth: int) -> str:
        draw = self.draw
        if draw.maybe(0.2):
            return f"({self.beyond()} {draw.one(('<', '>='))} {draw.one('hij')})"
        if depth == 0 or draw.maybe(0.15):
            return (
                self.read(torch.bool)
                if draw.maybe(0.3)
                else f"({self.int(0)} {self._compares()} {self.int(0)})"
            )
        x, y = self.bool(depth - 1), self.bool(depth - 1)
        if draw.maybe(0.35):
            operator = draw.one(("&", "|", "^", "&", "|", "+", "*", "==", "-"))
            return f"({x} {operator} {y})"
        if draw.maybe(0.1):
            return f"(~{x})"
        if draw.maybe(0.1):
            return f"torch.where({x}, {y}, {self.bool(0)})"
        if draw.maybe(0.1):
            return f"(({self.int(depth - 1)}) / {draw.one((2, 3, 7))} > {draw.one((0.5, 1.25))})"
        return f"({self.int(depth - 1)} {self._compares()} {self.int(depth - 1, constant=True)})"

    def int(self, depth: int, *, constant: bool = False) -> str:
        """An integer; a ``constant`` may be one that stands beside a number that varies."""
        draw = self.draw
        if constant and draw.maybe(0.3):
            return f"({draw.one(LARGE) if draw.maybe(0.1) else draw.one(CONSTANTS)})"
        if depth == 0 or draw.maybe(0.15):
            if draw.maybe(0.1):
                return self.beyond()
            return draw.one("bhiijj") if draw.maybe(0.6) else self.read(draw.one(INTEGERS))
        x, y = self.int(depth - 1), self.int(depth - 1, constant=True)
        kind = draw.upto(12)
        if kind < 4:
            return f"({x} {draw.one('+-*')} {y})"
        if kind == 4:
            return f"({x} {draw.one(('//', '%'))} {draw.one((2, 3, 4, -3, -5, 8))})"
        if kind == 5:
            return f"({x} {draw.one(('//', '%'))} (({self.int(0)} & 7) | 1))"
        if kind == 6:
            shift = draw.one(("<<", ">>"))
            return f"({x} {shift} {draw.one((0, 1, 3, 7, 33, 64, -1)) if draw.maybe(0.6) else y})"
        if kind == 7:
            return f"({x} {draw.one('&|^')} {y})"
        if kind == 8:
            return f"torch.{draw.one(('minimum', 'maximum'))}({x}, {self.int(depth - 1)})"
        if kind == 9:
            return f"torch.where({self.bool(depth - 1)}, {x}, {self.int(depth - 1)})"
        if kind == 10:
            casts = ("int()", "long()", "to(torch.uint8)", "short()", "clamp(1, 9)", "clamp(max=50)")
            return f"({x}).{draw.one(casts)}"
        if kind == 11:
            return f"({x} ** {draw.one((0, 1, 2, 3))})"
        return draw.one((f"(-{x})", f"(~{x})", f"({x}).abs()", f"({self.bool(depth - 1)} + {y})"))

    def beyond(self) -> str:
        """An element divided or shifted by a constant near the limits of its dtype, or beyond them."""
        draw, operator = self.draw, self.draw.one(("<<", ">>", "//", "%", "%"))
        dtype = draw.one(INTEGERS) if operator in ("<<", ">>") or draw.maybe(0.5) else torch.int64
        bits, most = torch.iinfo(dtype).bits, torch.iinfo(dtype).max
        if operator in ("<<", ">>"):
            numbers = [bits - 1, bits, 2**bits - 1, 2**bits, 2**bits + 2, 1 - 2**bits]
        else:
            numbers = (most + 1, -most - 2, *(ODD if operator == "%" else (most,)))
            numbers = [n for n in numbers if n % 2**bits]  # none that wraps around to 0
        n = draw.one([n for n in numbers if -(2**63) <= n < 2**63])
        return f"({self.read(dtype)} {operator} {n})"

    def float(self, depth: int) -> str:
        """A smooth function of the score and of tables, whose values stay small."""
        draw = self.draw
        if depth == 0:
            return draw.one(("score", "score", self.read(torch.float32), f"(({self.int(1)}) % 7 * 0.25)"))
        x, y = self.float(depth - 1), self.float(depth - 1)
        return draw.one(
            (
                f"({x} + {y})", f"({x} - {y})", f"({x} * torch.sigmoid({y}))", f"torch.tanh({x})", f"(-{x})",
                f"torch.where({self.bool(1)}, {x}, {y})", f"(({x}) ** 2 / (1 + {y} ** 2))",
                f"torch.sqrt({x} ** 2 + 1)", f"torch.rsqrt({x} * {x} + 0.5)",
                f"((torch.tanh({x}) + 2) ** {draw.one((0.5, -0.5, 1.7, -2, 3))})",
                f"(1.5 ** torch.tanh({x}))", f"torch.exp(-({x}).abs()).exp2()", f"({x}).clamp(-1.7, 2.1)",
                f"torch.log({x} ** 2 + 0.5)",
            )
        )  # fmt: skip

    def unread(self) -> str:
        """A score that does not read the score: a constant, or a function of few indices."""
        draw = self.draw
        kind = draw.upto(2)
        if kind == 0:
            return draw.one(("1.5", "-2", "-math.inf"))
        return f"({self.int(kind - 1)}) % 7 * 0.25" if draw.maybe(0.5) else self.read(torch.float32)

    def read(self, dtype: torch.dtype) -> str:
        """An element of a new table."""
        draw, name = self.draw, f"t{len(self.tables)}"
        indices = [draw.one(("b", "h", "i", "j", "(i - j)", "-1", "-2", "0")) for _ in range(draw.upto(3, 1))]
        shape = [draw.upto(8, 2) for _ in indices]
        self.tables[name] = self.table(shape, dtype)
        return f"{name}[{', '.join(indices)}]"

    def table(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        draw = self.draw
        if dtype.is_floating_point:
            return draw.normal(*shape).to(draw.one((torch.float32, torch.bfloat16, torch.float16)))
        if dtype == torch.bool:
            return draw.normal(*shape) > 0
        wide = draw.maybe(0.5)
        numbers = torch.randint(-9, 10, shape, generator=draw.generator) * (
            draw.one((2**31, 2**32)) if wide else 1
        )
        return numbers.to(dtype) if dtype == torch.int64 else (numbers % 251).to(dtype)

    def _compares(self) -> str:
        return self.draw.one(("<", "<=", ">", ">=", "==", "!="))


class Table:
    """A table as a function is given it for one pair: floats are widened, and indices that vary are
    clamped.
    """

    def __init__(self, x: Tensor, wide: torch.dtype):
        self.x = x.to(wide) if x.is_floating_point() else x

    def __getitem__(self, at: Any) -> Tensor:
        at = at if isinstance(at, tuple) else (at,)
        sizes = zip(at, self.x.shape, strict=True)
        return self.x[tuple(n if isinstance(n, int) else n.clamp(0, size - 1) for n, size in sizes)]
