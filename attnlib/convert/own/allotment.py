"""One cache for all layers: how much of it each should get, so that what all of them lose is least."""

from collections.abc import Mapping, Sequence
from math import gcd

import torch


def allot(losses: Sequence[Mapping[int, float]], total: int) -> list[int]:
    """The size of each layer, of those that it has ``losses`` for, with the least sum that fits into
    ``total``.

    Exact, by dynamic programming over what is left (the multiple-choice knapsack). Of equal sums the one is
    taken whose last layers are smallest.

    Raises:
        ValueError: the smallest sizes are too large together.

    >>> allot([{1: 5.0, 2: 0.0}, {1: 1.0, 2: 0.5}], 3)
    [2, 1]
    """
    least = sum(min(options) for options in losses)
    if least > total:
        raise ValueError(f"expected at least {least}, the least that these layers take, got {total}")
    unit = gcd(*(size for options in losses for size in options))
    room = total // unit
    best = torch.zeros(
        room + 1, dtype=torch.float64
    )  # the least loss of the layers so far, by what they may take
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
