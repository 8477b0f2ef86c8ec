"""Grouping of KV heads before a merge: put neighbours or similar heads into groups of equal size."""

import math
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from ...internal.checks import check_count

Groups = tuple[tuple[int, ...], ...]
EXCHANGES = 256  # number of swaps that simulated annealing tries


def neighbours(heads: int, groups: int) -> Groups:
    """Return groups of consecutive heads, as in Ainslie et al., 2023 (arXiv 2305.13245).

    Raises:
        ValueError: ``groups`` does not divide ``heads``.

    >>> neighbours(6, 2)
    ((0, 1, 2), (3, 4, 5))
    """
    check_count("num_kv_heads", groups, least=1)
    if heads % groups:
        raise ValueError(f"num_kv_heads: expected a divisor of the {heads} KV heads, got {groups}")
    return _canonical(torch.arange(heads).unflatten(0, (groups, -1)).tolist())


def similar(similarity: Tensor, groups: int) -> Groups:
    """Return groups of equal size that put similar heads together.

    ``similarity`` is symmetric, ``[heads, heads]``. The search swaps two heads of different groups as long as
    this raises the sum of similarities within groups. It starts once from neighbours and once from groups
    grown greedily around the most similar pairs, and returns the better result. The result is deterministic,
    never worse than neighbours, and no single swap can improve it. (Chen et al., 2024, arXiv 2406.14963 also
    group by activations, in unequal sizes; Jin et al., 2024, arXiv 2412.20677 use simulated annealing.)

    >>> similar(torch.tensor([[1.0, 0, 1], [0, 1, 0], [1, 0, 1]]).kron(torch.eye(2)), 3)
    ((0, 4), (1, 5), (2, 3))
    """
    plain = neighbours(len(similarity), groups)
    if len(similarity) == groups:
        return plain
    s = similarity.detach().double().cpu().clone().fill_diagonal_(0)
    return max(
        (_exchanged(s, start) for start in (plain, _grown(s, groups))), key=lambda ends: within(s, ends)
    )


def annealed(loss: Callable[[tuple[int, ...]], float], heads: int, groups: int) -> Groups:
    """Return groups of equal size with a small sum of ``loss``, found by simulated annealing.

    ``loss`` computes the loss of merging one group; cache it, because it is called many times. The search
    starts from neighbours or from the groups that :func:`similar` finds for the losses of pairs, whichever is
    better. Each step swaps two heads; swaps that increase the loss are accepted less and less often
    (Kirkpatrick et al., 1983). The result is the best of all groups tried. It is deterministic and never
    worse than neighbours.
    """
    plain = neighbours(heads, groups)
    if groups in (1, heads):
        return plain
    pairs = torch.zeros(heads, heads, dtype=torch.float64)
    for i, j in torch.combinations(torch.arange(heads)).tolist():
        pairs[i, j] = pairs[j, i] = -loss((i, j))

    def total(grouped: Groups) -> float:
        return sum(loss(group) for group in grouped)

    current = best = min((plain, similar(pairs, groups)), key=total)
    random, least = Random(0), total(best)
    hot = least / groups
    for n in range(EXCHANGES):
        (a, b), parts = random.sample(range(groups), 2), [list(group) for group in current]
        i, j = random.randrange(len(parts[a])), random.randrange(len(parts[b]))
        parts[a][i], parts[b][j] = parts[b][j], parts[a][i]
        tried = _canonical(parts)
        worse, cold = total(tried) - total(current), hot * (1 - n / EXCHANGES)
        if worse <= 0 or (cold > 0 and random.random() < math.exp(-10 * worse / cold)):
            current = tried
        if total(current) < least * (1 - 1e-9):  # smaller differences are rounding errors
            best, least = current, total(current)
    return best


def within(similarity: Tensor, groups: Groups) -> float:
    """Return the sum of similarities between heads of the same group; each pair counts twice."""
    blocks = (similarity[list(group)][:, list(group)] for group in groups)
    return sum((block.sum() - block.trace()).item() for block in blocks)


def _exchanged(s: Tensor, groups: Groups) -> Groups:
    label = torch.empty(len(s), dtype=torch.int64)
    for n, group in enumerate(groups):
        label[list(group)] = n
    least = 1e-12 * s.abs().sum().item()  # smaller gains are rounding errors and could loop forever
    while True:
        to_group = s @ torch.nn.functional.one_hot(label, len(groups)).to(s.dtype)  # [heads, groups]
        crosswise = to_group[:, label]  # [i, j]: similarity of head i to the group of head j
        own = crosswise.diagonal()
        gain = crosswise + crosswise.T - 2 * s - own[:, None] - own
        gain = gain.masked_fill(label[:, None] == label, -torch.inf)
        i, j = divmod(gain.argmax().item(), len(s))
        if len(groups) == 1 or gain[i, j] <= least:
            return _canonical([(label == n).nonzero()[:, 0].tolist() for n in range(len(groups))])
        label[i], label[j] = label[j].clone(), label[i].clone()


def _grown(s: Tensor, groups: int) -> Groups:
    free, grown = list(range(len(s))), []
    for _ in range(groups):
        among = s[free][:, free].fill_diagonal_(-torch.inf)
        group = [free[among.max(1).values.argmax().item()]]
        free.remove(group[0])
        while len(group) < len(s) // groups:
            group.append(free[s[group][:, free].sum(0).argmax().item()])
            free.remove(group[-1])
        grown.append(group)
    return _canonical(grown)


def _canonical(groups: list[list[int]]) -> Groups:
    return tuple(sorted(tuple(sorted(group)) for group in groups))
