"""Calls over random trees of sequences against every sequence by itself."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attnlib import (
    CAUSAL,
    Mask,
    attention_with_lse,
    explain,
    mask_mod,
    masks,
    packing,
    sliding,
    varlen_attention_with_lse,
)

from .draw import HEADS, Draw
from .drawn import BACKENDS
from .judge import Mismatch, Question, Tensors, gradients, judge
from .oracle import Rule, Sequence

Path = tuple[int, ...]
FORMS = ("[b, t]", "[t]", "packed [b, t]", "packed [t]")
MOST = 150  # rows of all trees, so that a case takes milliseconds


def tree(draw: Draw) -> "TreeCall":
    """Draw a dense or packed call over trees, with a window that counts depths in some of them."""
    (h, g), d = draw.one(HEADS), draw.dim()
    form, longest = draw.one(FORMS), draw.one((1, 3, 9, 20, 40))
    every = [_sequences(draw, longest) for _ in range(1 if form == "[t]" else draw.upto(3, 1))]
    while sum(len(x) for y in every for x in y) > MOST:
        every = [[x[: len(x) // 2] for x in y] for y in every]
    if not any(len(x) for y in every for x in y):
        every[0].append([0])  # functions read no empty tensors
    options = draw.options(len(every), h, d, reach=longest)
    leaves = [x for x in ("q", "k", "v", *options) if draw.maybe(0.8) and x not in ("scale", "softcap")]
    window = draw.upto(2 * longest, 1) if draw.maybe(0.5) else None
    name = draw.one(BACKENDS[draw.device])
    sizes = h, g, d, d if draw.maybe(0.6) else draw.dim()
    slack = draw.one((0, 0, 3)) if form.startswith("packed") else 0
    return TreeCall(draw, every, form, draw.dtype(), sizes, window, options, slack, leaves, name)


def _sequences(draw: Draw, longest: int) -> list[list[int]]:
    """Sequences of which some continue an earlier one from any of its tokens on; some are empty or equal."""
    found: list[list[int]] = []
    for _ in range(draw.upto(6, 1)):
        source = draw.one(found) if found and draw.maybe(0.8) else []
        kept = source[: draw.upto(len(source))]
        found.append([*kept, *(draw.upto(2) for _ in range(draw.upto(longest)))])
    return found


def merged(sequences: list[list[int]]) -> dict[Path, int]:
    """The row of each token, by all tokens up to it: depth first, branches as they first appear."""
    paths = dict.fromkeys(tuple(x[: n + 1]) for x in sequences for n in range(len(x)))
    children: dict[Path, list[Path]] = {}
    for path in paths:
        children.setdefault(path[:-1], []).append(path)
    rows, stack = {}, children.get((), [])[::-1]
    while stack:
        path = stack.pop()
        rows[path] = len(rows)
        stack += children.get(path, [])[::-1]
    return rows


@dataclass
class TreeCall:
    """One call over trees, whose results are those of their sequences."""

    draw: Draw = field(repr=False)
    every: list[list[list[int]]]  # the sequences of each tree
    form: str
    dtype: torch.dtype
    sizes: tuple[int, int, int, int]  # h, g, d, e
    window: int | None
    options: dict[str, Any]
    slack: int  # packed rows that belong to no tree
    leaves: list[str]
    backend: str | None

    @cached_property
    def trees(self) -> list[dict[Path, int]]:
        return [merged(x) for x in self.every]

    @property
    def lengths(self) -> list[int]:
        return [len(x) for x in self.trees]

    @property
    def is_packed(self) -> bool:
        return self.form.startswith("packed")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of q up to its heads."""
        return (sum(self.lengths) + self.slack,) if self.is_packed else (len(self.trees), max(self.lengths))

    @property
    def starts(self) -> list[int]:
        """The first row of each tree, in all rows of the call."""
        if self.is_packed:
            return [0, *accumulate(self.lengths)][:-1]
        return [n * self.shape[1] for n in range(len(self.trees))]

    def paths(self) -> list[list[int]]:
        """The rows of every sequence, in all rows of the call; behind them the padding of every tree."""
        found = []
        for start, rows, sequences in zip(self.starts, self.trees, self.every, strict=True):
            found += [[start + rows[tuple(x[: n + 1])] for n in range(len(x))] for x in sequences]
        if self.is_packed:
            return found
        sizes = zip(self.starts, self.lengths, strict=True)
        return [*found, *([*range(start + n, start + self.shape[1])] for start, n in sizes)]

    def cut(self, tensors: Tensors) -> list[Sequence]:
        """Every sequence by itself; all but the first one through a token read a copy of it."""
        slopes, dims = tensors.get("alibi_slopes"), len(self.shape)
        q, k, v = (tensors[x].flatten(0, dims - 1) for x in "qkv")
        owners = [(n, None) for n, x in enumerate(self.every) for _ in x]
        owners += [] if self.is_packed else [(n, 0) for n in range(len(self.every))]  # padding sees nothing
        return [
            Sequence(
                *(x[rows] for x in (q, k, v)),
                slopes[n] if slopes is not None and slopes.dim() == 2 else slopes,
                tensors.get("sinks"),
                end=end,
                number=n,
            )
            for (n, end), rows in zip(owners, self.paths(), strict=True)
        ]

    def places(self) -> Tensor:
        """Where each row of the call is among the rows of all sequences; behind them if it is nowhere."""
        paths = self.paths()
        total, size = sum(map(len, paths)), self.shape[0] * (1 if self.is_packed else self.shape[1])
        places = torch.full((size,), total)
        for n, row in reversed([*enumerate(x for rows in paths for x in rows)]):
            places[row] = n
        return places

    def join_rows(self, parts: list[Tensor], width: int) -> Tensor:
        rest = parts[0].new_zeros(1, self.sizes[0], width)
        return torch.cat((*parts, rest))[self.places()].unflatten(0, self.shape)

    def join_lse(self, parts: list[Tensor]) -> Tensor:
        rest = parts[0].new_full((self.sizes[0], 1), -torch.inf)
        lse = torch.cat((*parts, rest), 1)[:, self.places()]
        return lse if self.is_packed else lse.unflatten(1, self.shape).movedim(1, 0)

    def check(self) -> None:
        """Run it, and raise Mismatch unless all is as the oracle says."""
        draw, (h, g, d, e) = self.draw, self.sizes
        numbers = {x for x in self.options if isinstance(self.options[x], Tensor)}
        shapes = {"q": (h, d), "k": (g, d), "v": (g, e)}
        values = {x: draw.normal(*self.shape, *heads).to(self.dtype) for x, heads in shapes.items()}
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        dlse = draw.normal(*self.shape[:-1], h, self.shape[-1]).to(wide)
        directions = {"out": draw.normal(*self.shape, h, e).to(self.dtype), "lse": dlse}
        if self.slack:
            for x in (*values.values(), directions["out"]):
                x[-self.slack :] = torch.nan
        values |= {x: self.options[x] for x in numbers}
        tensors = {x: y.to(draw.place).requires_grad_(x in self.leaves) for x, y in values.items()}
        arguments = self.arguments() | {x: y for x, y in self.options.items() if x not in numbers}
        arguments |= {x: tensors[x] for x in numbers}
        function = varlen_attention_with_lse if self.is_packed else attention_with_lse
        qkv = [tensors[x] for x in "qkv"]
        if explain(function, *qkv, **arguments).chosen is None:
            return
        found = dict(zip(("out", "lse"), function(*qkv, **arguments), strict=True))
        given = {x: y.to(draw.place) for x, y in directions.items()} if self.leaves else {}
        found |= gradients(found, given, {x: tensors[x] for x in self.leaves})
        left = None if self.window is None else self.window - 1
        rule = Rule(left, 0, 0, self.options.get("scale", d**-0.5), self.options.get("softcap"))
        question = Question(values, rule, self.dtype, self.cut, lambda x: self.join_rows(x, e), self.join_lse)
        ours = {x: y.detach().cpu() for x, y in found.items()}
        judge(question, ours, directions if self.leaves else {}, self.leaves)

    def arguments(self) -> dict[str, Any]:
        """The mask, as one of the ways to write it, and the offsets of packed trees."""
        draw, lengths, place = self.draw, self.lengths, self.draw.place
        made = [packing.tree(x) for x in self.every]
        for x, rows in zip(made, self.trees, strict=True):
            if x.positions.tolist() != [len(path) - 1 for path in sorted(rows, key=rows.get)]:
                raise Mismatch("packing.tree: other positions")
        if self.form.endswith("[b, t]"):
            most = max(lengths)
            ends, positions = (torch.zeros(len(made), most, dtype=torch.int64) for _ in range(2))
            for n, x in enumerate(made):
                ends[n, : lengths[n]], positions[n, : lengths[n]] = x.ends, x.positions
        else:
            rest = torch.zeros(self.slack, dtype=torch.int64)
            ends, positions = (
                torch.cat((*(getattr(x, y) for x in made), rest)) for y in ("ends", "positions")
            )
        mask = masks.until(draw.strided(ends.int()), draw.strided(positions))
        if self.window is not None:
            window = self.window
            written = draw.one(("sliding", "left", "function"))
            mask = (
                mask
                & {
                    "sliding": sliding(window),
                    "left": Mask(left=window - 1),
                    "function": mask_mod(lambda b, h, i, j: i - j < window),
                }[written]
            )
        mask = CAUSAL & mask if draw.maybe(0.3) else mask
        if not self.is_packed:
            return {"mask": mask, "backend": self.backend}
        cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=place)
        return {"mask": mask, "backend": self.backend, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
