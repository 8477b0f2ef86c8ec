"""The choice among blocks of visible keys: as Qwen 4's indexer chooses, with any mask and any positions."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from index_cases import CONFIG, HALF, HIDDEN, INDEXERS, WIDTH, renamed, shown
from torch import Tensor, nn
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer

from attnlib.indexing import IndexBranch, choose_compacted
from attnlib.rope.rope import Angles

T, HEADS = 41, 16  # with fewer heads, scores of 0 would be equal
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def numbered(*lengths: int) -> Tensor:
    return torch.cat([torch.full((n,), float(i)) for i, n in enumerate(lengths)])


def masks_of_rows() -> dict[str, Tensor]:
    """Masks ``[2, t, t]``, in which the rows differ."""
    left, holes = torch.ones(2, T, dtype=torch.bool), torch.rand(2, T) < 0.7
    left[0, :7], left[1, :30] = False, False
    documents = torch.stack((numbered(3, 30, 8), numbered(40, 1)))
    return {
        "causal": CAUSAL.expand(2, T, T),
        "left padding": CAUSAL & left[:, None],
        "holes": CAUSAL & holes[:, None],
        "documents": CAUSAL & (documents[:, None] == documents[..., None]),
        "any": CAUSAL & (torch.rand(2, T, T) < 0.8),
    }


class Pair:
    """A branch of ours and an indexer of theirs with the same weights, and tokens at any positions."""

    def __init__(self):
        torch.manual_seed(0)
        self.theirs = Qwen4ExpTextQSAIndexer(SimpleNamespace(**vars(CONFIG) | {"indexer_n_heads": HEADS}), 0)
        for parameter in self.theirs.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.branch = IndexBranch(replace(INDEXERS["qwen4_exp"], heads=HEADS), HIDDEN)
        state = self.theirs.state_dict()
        both = state.pop("index_qk_proj.weight")
        state["q_proj.weight"], state["k_proj.weight"] = both.split((HEADS * WIDTH, WIDTH))
        self.branch.load_state_dict(renamed(state, one_more=True))
        self.x, self.angles = torch.randn(2, T, HIDDEN), HALF.angles(torch.randint(0, 99, (2, T)))

    def finish(self, pooled: Tensor, at: Tensor) -> Tensor:
        cos, sin = (x.take_along_dim(at[..., None], 1) for x in (self.angles.cos, self.angles.sin))
        return self.branch.finished(pooled, Angles(cos, sin, False))

    @torch.no_grad()
    def chosen(self, visible: Tensor, queries: slice = slice(None), **options: int) -> Tensor:
        """The keys ``[b, s, t]`` that we choose for some queries."""
        index = self.branch(self.x, angles=self.angles)
        index = index._replace(queries=index.queries[:, queries])
        lists = choose_compacted(index, self.branch.indexer, visible, self.finish, **options)
        assert lists.dtype == torch.int32
        return shown(lists, T)[:, :, 0]

    @torch.no_grad()
    def expected(self, visible: Tensor) -> Tensor:
        embeddings = [torch.cat((x, x), -1) for x in (self.angles.cos, self.angles.sin)]
        return self.theirs(self.x, embeddings, visible[:, None], None)[:, 0]


@pytest.mark.parametrize("budget", [1, 100_000, 1 << 29])
@pytest.mark.parametrize("name", masks_of_rows())
def test_transformers_chooses_the_same_keys(name, budget):
    pair = Pair()
    visible = masks_of_rows()[name]
    expected = pair.expected(visible)
    assert (expected.sum(-1) < visible.sum(-1)).any()
    assert torch.equal(pair.chosen(visible, budget=budget), expected)


@pytest.mark.parametrize("queries", [1, 5, 11])
@pytest.mark.parametrize("name", masks_of_rows())
def test_queries_are_the_last_tokens(name, queries):
    pair = Pair()
    visible = masks_of_rows()[name]
    found = pair.chosen(visible[:, -queries:], slice(-queries, None))
    assert torch.equal(found, pair.expected(visible)[:, -queries:])


@pytest.mark.parametrize("queries", [1, 11, 20, T])
@pytest.mark.parametrize("name", ["causal", "left padding"])
def test_queries_that_share_a_row(name, queries):
    """Each sees one key more than the one before it, and queries of padding see none."""
    pair = Pair()
    visible = masks_of_rows()[name]
    found = pair.chosen(visible[:, -1:], slice(-queries, None))
    assert torch.equal(found, pair.expected(visible)[:, -queries:])


def test_keys_beyond_the_mask_are_not_visible():
    """As those of a static cache, of which the first 30 are in use."""
    pair = Pair()
    visible, used = masks_of_rows()["holes"], slice(23, 30)
    found = pair.chosen(visible[:, used, :30], used)
    assert torch.equal(found, pair.expected(visible)[:, used])
