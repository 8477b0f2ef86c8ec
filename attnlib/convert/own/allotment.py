"""Divide one cache budget between the layers of a model so that the total loss is minimal."""

from collections.abc import Mapping, Sequence
from math import gcd

import torch


def allot(losses: Sequence[Mapping[int, float]], total: int) -> list[int]:
    """Choose a size for each layer from the keys of ``losses`` so that the sum of losses is minimal.

    The sum of the sizes is at most ``total``. The choice is optimal, since it is found by dynamic programming
    (this is the multiple-choice knapsack problem). Among equally good choices, later layers are smaller.

    Raises:
        ValueError: even the smallest sizes exceed ``total``.

    >>> allot([{1: 5.0, 2: 0.0}, {1: 1.0, 2: 0.5}], 3)
    [2, 1]
    """
    least = sum(min(options) for options in losses)
    if least > total:
        raise ValueError(f"total: expected at least {least}, the sum of the smallest sizes, got {total}")
    unit = gcd(*(size for options in losses for size in options))
    room = total // unit
    # best[n] is the smallest total loss of the layers so far if their sizes sum to at most n.
    best = torch.zeros(room + 1, dtype=torch.float64)
    choices = []
    for options in losses:
        sizes = sorted(options)
        tried = torch.full((len(sizes), room + 1), torch.inf, dtype=torch.float64)
        for row, size in zip(tried, sizes, strict=True):
            taken = size // unit
            row[taken:] = best[: max(0, room + 1 - taken)] + options[size]
        best, chosen = tried.min(0)
        choices.append((sizes, chosen))
    found = []
    for sizes, chosen in reversed(choices):
        found.append(sizes[int(chosen[room])])
        room -= found[-1] // unit
    return found[::-1]
