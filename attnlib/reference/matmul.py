"""A matrix product by tiles, between the two ends that an IO model speaks of."""

from torch import Tensor

from .traffic import SlowMemory, tiles


def matmul(a: Tensor, b: Tensor, *, tile: int, memory: SlowMemory) -> Tensor:
    """``a @ b`` of a ``[s, m]`` and b ``[m, t]`` with three square tiles on chip.

    With ``tile=1`` each dot product reads its row and its column: 2 n**3 reads for n x n matrices. With
    ``tile=n`` each element is read once: 2 n**2. Between them it is 2 n**3 / tile.
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
