"""Tiled matrix product: its traffic lies between the two extremes of the IO model."""

from torch import Tensor

from .traffic import SlowMemory, tiles


def matmul(a: Tensor, b: Tensor, *, tile: int, memory: SlowMemory) -> Tensor:
    """Return ``a @ b`` of a ``[s, m]`` and b ``[m, t]``, with three square tiles on chip.

    Reads for n x n matrices:

      tile=1   2 n**3         (each dot product reads its row and its column)
      tile     2 n**3 / tile
      tile=n   2 n**2         (each element is read once)
    """
    a, b = memory.inputs(a, b)
    product = memory.output(a, a.shape[0], b.shape[1])
    for i in tiles(a.shape[0], tile):
        for j in tiles(b.shape[1], tile):
            total = product.tile(i.stop - i.start, j.stop - j.start)
            for m in tiles(a.shape[1], tile):
                total = total + a[i, m] @ b[m, j]
            product[i, j] = total
    return product.tensor
