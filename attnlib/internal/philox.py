"""Dropout masks from the random number generator Philox-4x32-10.

The random numbers depend only on the seed and on positions. No mask needs to be stored, and all backends use
the same mask.
"""

import math

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Return four random 32-bit numbers, as int64 tensors, for each counter of four int64 words.

    The words broadcast. See Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
    2011.
    """
    a, b, c, d = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap around, but their 64 bits are the same as those of the unsigned product.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            ((second >> 32) & _LOW) ^ b ^ k0,
            second & _LOW,
            ((first >> 32) & _LOW) ^ d ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [a, b, c, d]


def dropout_keep(
    seed: int, p: float, *, sequences: Tensor, heads: Tensor, rows: Tensor, first: int, last: int
) -> Tensor:
    """Return the dropout mask of keys ``first <= j < last``, bool ``[n, h, s, last - first]``.

    True means that dropout keeps the probability, because its random 32-bit number is at least ``p * 2**32``.
    Philox's counter is ``(j // 4, i, head, sequence)``, and ``j % 4`` selects one of the four numbers that it
    returns. ``i`` (an element of ``rows``) and ``j`` are storage indices within the sequence; of a negative
    index, the low 32 bits are used.
    """
    quads = torch.arange(first // 4, (last + 3) // 4, device=rows.device)
    counter = (quads, rows[:, None], heads[:, None, None], sequences[:, None, None, None])
    counter = tuple(word & _LOW for word in counter)
    bits = torch.stack(philox(counter, (seed & _LOW, (seed >> 32) & _LOW)), -1).flatten(-2)
    return bits[..., first % 4 : first % 4 + last - first] >= math.ceil(p * 2**32)
