"""Dropout bits from Philox-4x32-10.

The bits are a function of position only, so nothing is stored and every backend agrees.
"""

import math

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Return four tensors of u32 values, stored as int64, for four int64 counter words that broadcast.

    Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    a, b, c, d = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap, and their low 64 bits are those of the unsigned product.
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
    """Return the dropout mask, bool ``[n, h, s, last - first]``, of keys ``first <= j < last``.

    True keeps the probability. The counter words are ``(j // 4, i, head, sequence)`` and the lane is
    ``j % 4``; ``i``, given as ``rows``, and ``j`` are storage indices within the sequence. If an index is
    negative, its low 32 bits count. A probability is kept if its u32 is at least ``p * 2**32``.
    """
    quads = torch.arange(first // 4, (last + 3) // 4, device=rows.device)
    counter = (quads, rows[:, None], heads[:, None, None], sequences[:, None, None, None])
    counter = tuple(word & _LOW for word in counter)
    bits = torch.stack(philox(counter, (seed & _LOW, (seed >> 32) & _LOW)), -1).flatten(-2)
    return bits[..., first % 4 : first % 4 + last - first] >= math.ceil(p * 2**32)
