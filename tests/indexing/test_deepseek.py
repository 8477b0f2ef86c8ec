"""DeepSeek-V3.2-Exp's Indexer as in inference/model.py, written down anew without fp8, over its own cache.

Its Hadamard transform is orthogonal, so it changes no score.
"""

import pytest
import torch
from index_cases import HIDDEN, INDEXERS, RANK, Family, shown
from torch import Tensor

from attnlib.indexing import choose


def hadamard(n: int) -> Tensor:
    """The orthogonal Hadamard matrix of a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / n**0.5


class Theirs:
    """The branch with the weights of ours; it keeps the keys of all tokens that it has seen."""

    def __init__(self, family: Family):
        self.weights, self.indexer = family.branch.state_dict(), family.branch.indexer
        self.keys = torch.empty(2, 0, self.indexer.head_dim, dtype=torch.float64)

    def rotated(self, x: Tensor, first: int) -> Tensor:
        """The first channels of ``[b, s, h, d]`` as complex numbers of both halves, times their phases."""
        p = self.indexer.rope.dim
        rates = self.indexer.rope.theta ** (-torch.arange(0, p, 2, dtype=torch.float64) / p)
        phases = torch.arange(first, first + x.shape[1])[:, None] * rates
        numbers = (
            torch.complex(*x[..., :p].chunk(2, -1)) * torch.polar(torch.ones_like(phases), phases)[:, None]
        )
        return torch.cat((numbers.real, numbers.imag, x[..., p:]), -1)

    def choice(self, x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen keys of new tokens, bool ``[b, s, t]``, and all scores."""
        w, first = self.weights, self.keys.shape[1]
        h, d = self.indexer.heads, self.indexer.head_dim
        q = self.rotated((latent @ w["q_proj.weight"].T).unflatten(-1, (h, d)), first) @ hadamard(d)
        k = x @ w["k_proj.weight"].T
        k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        k = k * w["k_norm.weight"] + w["k_norm.bias"]
        self.keys = torch.cat((self.keys, self.rotated(k[:, :, None], first)[:, :, 0] @ hadamard(d)), 1)
        weights = x @ w["weights_proj.weight"].T * h**-0.5 * d**-0.5
        scores = torch.einsum("bsht,bsh->bst", torch.einsum("bshd,btd->bsht", q, self.keys).relu(), weights)
        t = self.keys.shape[1]
        hidden = torch.arange(t) > torch.arange(first, t)[:, None]
        top = scores.masked_fill(hidden, -torch.inf).topk(min(self.indexer.top, t)).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, top, True) & ~hidden, scores


@pytest.mark.parametrize("steps", [(30,), (11, 1, 1, 9, 8)])
def test_steps_choose_as_deepseek_does(steps):
    """Random scores of fp64 are equal only where all products are negative; of these any may be chosen."""
    family = Family.of("deepseek_v32", torch.float64)
    theirs, keys = Theirs(family), torch.empty(2, 0, INDEXERS["deepseek_v32"].head_dim, dtype=torch.float64)
    for s in steps:
        x, latent = (torch.randn(2, s, n, dtype=torch.float64) for n in (HIDDEN, RANK))
        index = family.tensors(x, latent, first=keys.shape[1])
        keys = torch.cat((keys, index.keys), 1)
        lists = choose(index.queries, keys, index.weights, family.branch.indexer)
        ours, (chosen, scores) = shown(lists, keys.shape[1])[:, :, 0], theirs.choice(x, latent)
        assert torch.equal(ours.sum(-1), chosen.sum(-1))
        assert scores[ours != chosen].abs().sum() < 1e-12
        assert (ours == chosen).all(-1).sum() > s  # of 2 * s rows
