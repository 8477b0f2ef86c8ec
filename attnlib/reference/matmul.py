"""Tiled matrix product, with less memory traffic for larger tiles."""

from torch import Tensor

from .traffic import SlowMemory, tiles


def matmul(a: Tensor, b: Tensor, *, tile: int, memory: SlowMemory) -> Tensor:
    """Return ``a @ b`` for a ``[s, m]`` and b ``[m, t]``; three square tiles are on chip at a time.

    The number of elements read for n x n matrices depends on the tile size:

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
