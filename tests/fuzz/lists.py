"""Random lists of selected keys, with gaps, repeats, empty rows and blocks that are nowhere."""

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnlib import MaskFunction, masks

from .draw import Draw
from .oracle import chosen

SIZES = (1, 1, 1, 2, 3, 4, 16, 32, 64, 100)
FAR = 2**31 - 1


@dataclass
class Lists:
    """Lists ``[..., c, n]`` of the queries of a call, on the CPU."""

    indices: Tensor = field(repr=False)
    block_size: int
    c: int
    n: int

    @classmethod
    def drawn(cls, draw: Draw, rows: tuple[int, ...], heads: tuple[int, int], keys: int) -> "Lists":
        """Draw lists for queries of this shape, KV heads and query heads, and at most this many keys."""
        size, c = draw.one(SIZES), draw.one((1, *heads))
        blocks = -(-keys // size)
        n = draw.one((0, 1, 2, 3, 5, 8, min(blocks, 40)))
        generator = torch.Generator().manual_seed(draw.random.randrange(2**62))

        def some(low: int, high: int) -> Tensor:
            return torch.randint(low, high, (*rows, c, n), generator=generator, dtype=torch.int32)

        def where(chance: float, *shape: int) -> Tensor:
            return torch.rand(shape, generator=generator) < chance

        indices = some(0, max(1, blocks))
        if draw.maybe(0.5):  # in order, and without repeats, as most who choose do
            every = torch.rand((*rows, c, max(n, blocks)), generator=generator).argsort(-1)
            indices = every[..., :n].sort(-1).values.int()
        if draw.maybe(0.7):
            indices[where(draw.one((0.1, 0.5)), *indices.shape)] = -1
        if draw.maybe(0.3):  # behind the last key
            indices = torch.where(where(0.2, *indices.shape), draw.one((blocks, blocks + 7, FAR)), indices)
        if draw.maybe(0.5):
            indices[where(0.2, *rows, c)] = draw.one((-1, -1, max(0, blocks - 1), FAR))
        if os.environ.get("ATTNLIB_CHECK") == "1":  # which refuses repeats
            indices = indices.sort(-1).values
            indices[..., 1:].masked_fill_(indices[..., 1:] == indices[..., :-1], -1)
        return cls(indices.int(), size, c, n)

    def mask(self, draw: Draw) -> MaskFunction:
        """The library's mask, of lists on the device of the call, now and then as columns of wider ones."""
        return masks.selected(draw.strided(self.indices), self.block_size)

    def chosen(self, indices: Tensor, heads: int, keys: int) -> Tensor:
        """What some of the lists choose, bool ``[h, s, t]``."""
        return chosen(indices, self.block_size, heads, keys)
