"""One layer of a random cache: its layout, what it appends, and what the oracle says is stored of that."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnlib import Angles, KVLayout

from .draw import SAME, Draw
from .oracle import Memory, Token, quantised, rotated

STORES = (None, None, None, torch.int8, torch.float8_e4m3fn)
TIES = 1e-4  # relative distance from a tie within which nobody is sure how to round


class New(NamedTuple):
    """The tokens of a step in one layer: what is appended, and what is stored for each sequence."""

    k: Tensor
    v: Tensor | None
    angles: Angles | None
    tokens: dict
    index: Tensor | None


class Layer:
    """A layout, the query heads that read it, and how many channels of its keys are rotated, or None."""

    def __init__(self, draw: Draw, dtype: torch.dtype):
        window, store = draw.one((None, None, 1, 2, 3, 5, 8, 20)), draw.one(STORES)
        kind = {"window": window, "dtype": dtype, "storage_dtype": store}
        if draw.maybe(0.3):
            rank, rope = draw.one((1, 4, 16, 24, 32, 64)), draw.one((0, 2, 4, 8, 16))
            self.layout, self.heads, widest = (
                KVLayout.latent(rank, rope, **kind),
                draw.one((1, 2, 3, 5, 16)),
                rope,
            )
        else:
            (self.heads, g), d = (
                draw.one(((1, 1), (2, 2), (4, 2), (6, 2), (3, 1), (5, 1), (16, 1), (9, 3))),
                draw.dim(),
            )
            e = d if draw.maybe(0.6) else draw.dim()
            self.layout, widest = KVLayout.grouped(g, d, e, **kind), d
        if draw.maybe(0.3):
            index = {"index_dim": draw.dim(), "index_heads": draw.one((1, 1, 2, 4))}
            self.layout = replace(self.layout, **index, index_dtype=draw.one((None, torch.float8_e4m3fn)))
        self.turned = 2 * draw.upto(widest // 2, 1) if widest > 1 and draw.maybe(0.4) else None
        self.interleaved = draw.maybe(0.5)
        self._usual: dict | None = None

    def __repr__(self):
        rope = "" if self.turned is None else f" with {self.turned} channels rotated"
        return f"{self.heads} heads on {self.layout}{rope}"

    def usual(self, draw: Draw) -> dict:
        """The mask that this layer is mostly asked with."""
        self._usual = self._usual or draw.band(20, window=self.layout.window)
        return self._usual

    def new(self, draw: Draw, counts: dict, memory: Memory, lead: tuple[int, ...]) -> New:
        """Random tokens, so many for each sequence and of shape ``lead``; NaN in left padding, and seldom
        elsewhere.
        """
        layout, total = self.layout, sum(counts.values())
        angles, cos, sin = self._angles(draw, lead)
        widths = [layout.dim, layout.rope_dim] if layout.is_latent else [layout.dim, layout.value_dim]
        heads = layout.heads
        planes = [draw.normal(total, heads, width).to(layout.dtype) for width in widths]
        hidden = [
            j < memory.padding[name] for name, n in counts.items() for j in self._places(memory, name, n)
        ]
        for i, plane in enumerate(planes):
            quantises = layout.storage_dtype is not None and not (i and layout.is_latent)
            turns = angles is not None and i == layout.is_latent
            if quantises:
                turn = (cos, sin) if turns else None
                plane = self._without_ties(draw, plane, layout.storage_dtype, turn)
            if hidden and draw.maybe(0.5):
                plane[torch.tensor(hidden)] = torch.nan
            if plane.numel() and draw.maybe(0.02):
                plane[tuple(draw.upto(n - 1) for n in plane.shape)] = torch.nan
            how = draw.how()
            if how in SAME and quantises and turns:
                how = "plain"
            planes[i] = draw.arranged(plane.unflatten(0, lead), how)
        rows = [x.cpu().flatten(0, len(lead) - 1) for x in planes]
        index, stored = self._index(draw, total, lead)
        tokens = self._tokens(counts, rows, None if angles is None else (cos, sin), stored)
        k, v = (x.squeeze(-2) if layout.is_latent else x for x in planes)
        return New(k, None if layout.is_latent and not layout.rope_dim else v, angles, tokens, index)

    def _index(self, draw: Draw, total: int, lead: tuple[int, ...]) -> tuple[Tensor | None, Sequence]:
        """Random index keys as given to append, and what is stored of them for each token."""
        layout, store = self.layout, self.layout.index_dtype
        if not layout.index_dim:
            return None, [None] * total
        index = draw.normal(total, layout.index_heads, layout.index_dim).to(layout.dtype)
        index = index if store is None else self._without_ties(draw, index, store, None)
        index = draw.arranged(index.unflatten(0, lead), draw.how())
        rows = index.cpu().flatten(0, len(lead) - 1)
        return index, rows.double() if store is None else quantised(rows, store)

    def _places(self, memory: Memory, name, n: int) -> range:
        return range(memory.length(name), memory.length(name) + n)

    def _angles(
        self, draw: Draw, lead: tuple[int, ...]
    ) -> tuple[Angles | None, Tensor | None, Tensor | None]:
        """Angles as given to append, and cos and sin of every token, ``[tokens, p / 2]``."""
        if self.turned is None:
            return None, None, None
        alike = len(lead) == 2 and draw.maybe(0.3)  # in all sequences of a batch
        phases = draw.normal(*((1, lead[1]) if alike else lead), self.turned // 2) * 3
        given = phases[0] if alike and draw.maybe(0.5) else phases
        angles = Angles(given.cos().to(draw.place), given.sin().to(draw.place), self.interleaved)
        phases = phases.expand(*lead, -1).reshape(-1, self.turned // 2)
        return angles, phases.cos(), phases.sin()

    def _without_ties(
        self, draw: Draw, x: Tensor, store: torch.dtype, turn: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """x, 0 where one byte a value would not be sure to round as the oracle does."""
        for _ in range(8):
            y = x if turn is None else rotated(x, *turn, interleaved=self.interleaved)
            low, high = (quantised(y, store, 1 + sign * TIES) for sign in (-1, 1))
            unsure = low != high
            if not unsure.any():
                return x
            if turn is not None:  # both channels of a pair decide
                unsure = unsure.any(-1, keepdim=True).expand(unsure.shape) & (draw.normal(*unsure.shape) < 0)
            x = x.masked_fill(unsure, 0)
        return torch.zeros_like(x)

    def _tokens(
        self, counts: dict, planes: list[Tensor], turn: tuple[Tensor, Tensor] | None, index: Sequence
    ) -> dict:
        layout, (k, v) = self.layout, planes
        if turn is not None and layout.is_latent:
            v = rotated(v, *turn, interleaved=self.interleaved)
        elif turn is not None:
            k = rotated(k, *turn, interleaved=self.interleaved)
        k, v = (
            x.double()
            if layout.storage_dtype is None or (i and layout.is_latent)
            else quantised(x, layout.storage_dtype)
            for i, x in enumerate((k, v))
        )
        if layout.is_latent:
            k, v = torch.cat((k, v), -1), k
        tokens = iter([Token(*x) for x in zip(k, v, index, strict=True)])
        return {name: [next(tokens) for _ in range(n)] for name, n in counts.items()}
