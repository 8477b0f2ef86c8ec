"""A model of slow memory, which counts how many elements an algorithm reads, writes and allocates."""

from typing import NamedTuple

import torch
from torch import Tensor

Where = int | slice | tuple[int | slice, ...]


class Traffic(NamedTuple):
    """The number of elements that an algorithm reads from slow memory, writes to it, and allocates as extra.

    ``extra`` counts neither inputs nor results, but it counts statistics that a forward pass saves for its
    backward pass.
    """

    read: int
    written: int
    extra: int = 0

    @property
    def moved(self) -> int:
        return self.read + self.written


class SlowMemory:
    """The large, slow memory of a chip. It counts accesses to arrays; tiles are on chip and cost nothing.

    >>> memory = SlowMemory()
    >>> (x,) = memory.inputs(torch.ones(4, 3))
    >>> total = memory.output(x, 3, fill=0.0)
    >>> for i in tiles(4, 2):
    ...     total[:] += x[i].sum(0)
    >>> memory.traffic
    Traffic(read=18, written=9, extra=0)
    """

    def __init__(self):
        self.traffic: Traffic = Traffic(0, 0)

    def inputs(self, *tensors: Tensor) -> list["Array"]:
        """Put tensors into slow memory as the inputs of an algorithm, and return them as arrays."""
        return [Array(x.detach(), self) for x in tensors]

    def output(self, like: "Array", *shape: int, fill: float | None = None) -> "Array":
        """Allocate an array for a result, with the dtype of ``like``; filling it counts as writing."""
        tensor = like.tensor.new_empty(shape)
        array = Array(tensor, self)
        if fill is not None:
            array[:] = fill
        return array

    def scratch(self, like: "Array", *shape: int, fill: float | None = None) -> "Array":
        """Allocate an array that is not a result, and count it as extra.

        Such arrays are never freed, since freeing them would not lower the peak of any algorithm here.
        """
        array = self.output(like, *shape, fill=fill)
        self.count(extra=array.tensor.numel())
        return array

    def count(self, read: int = 0, written: int = 0, extra: int = 0) -> None:
        self.traffic = Traffic(
            self.traffic.read + read, self.traffic.written + written, self.traffic.extra + extra
        )


class Array:
    """A tensor in slow memory.

    ``x[i]`` reads a copy of a tile, ``x[i] = tile`` writes a tile, and ``x[i] += tile`` does both. Only the
    caller of an algorithm uses ``tensor``, to get the result; that access does not count.
    """

    def __init__(self, tensor: Tensor, memory: SlowMemory):
        self.tensor = tensor
        self._memory = memory

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def tile(self, *shape: int, fill: float = 0.0) -> Tensor:
        """Return a new tile on chip, with the dtype of this array."""
        return self.tensor.new_full(shape, fill)

    def __getitem__(self, where: Where) -> Tensor:
        tile = self.tensor[where].clone()
        self._memory.count(read=tile.numel())
        return tile

    def __setitem__(self, where: Where, tile: Tensor | float) -> None:
        self.tensor[where] = tile
        self._memory.count(written=self.tensor[where].numel())


def tiles(total: int, size: int) -> list[slice]:
    """Split ``range(total)`` into slices of ``size``; the last one may be shorter."""
    if size < 1:
        raise ValueError(f"tiles: expected a size of at least 1, got {size}")
    return [slice(start, min(total, start + size)) for start in range(0, total, size)]
