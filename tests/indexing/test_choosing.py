"""The choice of keys: as transformers and a stable sort choose, in chunks, packed and with a history."""

from dataclasses import replace

import pytest
import torch
from index_cases import HIDDEN, INDEXERS, RANK, WIDTH, Family, shown
from index_plain import plain_choice, plain_scores
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attnlib import Indexer
from attnlib.indexing import IndexTensors, choose

LENGTHS = (1, 5, 24, 27, 41)


def inputs(t: int, b: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(b, t, HIDDEN), torch.randn(b, t, RANK)


def random_index(s: int, t: int, indexer: Indexer, b: int = 2) -> IndexTensors:
    """Small whole numbers, so that many scores are equal, and sums have no rounding."""
    h, d = indexer.heads, indexer.head_dim
    whole = [torch.randint(-1, 2, x).float() for x in ((b, s, h, d), (b, t, d), (b, s, h))]
    return IndexTensors(*whole[:2], whole[2] if indexer.weighted else None)


def assert_packed_to_the_left(lists: torch.Tensor) -> None:
    missing = lists < 0
    assert not (missing[..., :-1] & ~missing[..., 1:]).any()
    assert lists.dtype == torch.int32
    assert lists.min() >= -1


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", INDEXERS)
def test_transformers_chooses_the_same_keys(name, t):
    """Where the sets differ, scores are equal up to rounding."""
    family, (x, latent) = Family.of(name), inputs(t)
    indexer, index = family.branch.indexer, family.tensors(x, latent)
    lists = choose(*index, indexer, finish=family.branch.finish)
    assert lists.shape == (2, t, indexer.lists, min(indexer.entries, -(-t // indexer.block_size)))
    assert_packed_to_the_left(lists)
    causal = torch.ones(t, t, dtype=torch.bool).tril()[:, None]
    ours, theirs = shown(lists, t, indexer.block_size) & causal, family.their_choice(x, latent)
    if torch.equal(ours, theirs):
        return
    scores = plain_scores(index, indexer, family.branch).repeat_interleave(indexer.block_size, -1)[..., :t]
    scores = F.pad(scores, (0, t - scores.shape[-1]), value=-torch.inf)
    scored = ours & (scores > -torch.inf)  # an incomplete block has no score
    least = scores.masked_fill(~scored, torch.inf).amin(-1, keepdim=True)
    torch.testing.assert_close(scores[ours != theirs], least.expand_as(scores)[ours != theirs])


CASES = {name: x for name, x in INDEXERS.items() if "without" not in name}
CASES |= {
    "first and local": replace(INDEXERS["deepseek_v32"], first=2, local=3),
    "blocks": replace(INDEXERS["minimax_m3"], per="all", activation="relu", first=1, local=1),
    "complete blocks": replace(INDEXERS["minimax_m3"], tail=True, first=1),
    "local before the tail": replace(INDEXERS["qwen4_exp"], local=2, norm_after_pool=False),
    "one": replace(INDEXERS["deepseek_v32"], top=1),
    "negative": replace(INDEXERS["deepseek_v32"], activation=None),
}


@pytest.mark.parametrize(("s", "t"), [(41, 41), (7, 41), (1, 40), (3, 3), (0, 4)])
@pytest.mark.parametrize("name", CASES)
def test_lists_are_those_of_a_stable_sort(name, s, t):
    """Queries are the last s of t tokens, and of equal scores the lower position wins."""
    indexer = CASES[name]
    index = random_index(s, t, indexer)
    branch = Family.of("qwen4_exp").branch if indexer.norm_after_pool else None
    lists = choose(*index, indexer, finish=branch and branch.finish)
    if s:
        assert_packed_to_the_left(lists)
    scores = plain_scores(index, indexer, branch)
    causal = (torch.arange(t) <= torch.arange(t - s, t)[:, None])[:, None]
    ours = shown(lists, t, indexer.block_size)
    expected = plain_choice(scores, indexer, t)
    assert torch.equal(ours & causal, expected & causal)
    assert (lists >= 0).sum() == expected[..., :: indexer.block_size].sum()


@pytest.mark.parametrize("name", CASES)
def test_chunks_do_not_matter(name):
    indexer = CASES[name]
    index = random_index(37, 41, indexer)
    finish = Family.of("qwen4_exp").branch.finish
    whole, *others = (choose(*index, indexer, finish=finish, budget=n) for n in (1 << 30, 1, 20_000))
    for lists in others:
        assert torch.equal(lists.sort(-1).values, whole.sort(-1).values)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation returns."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return found


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3", "qwen4_exp"])
def test_scores_fit_into_the_budget(name):
    indexer = replace(INDEXERS[name], top=2)
    index = random_index(300, 300, indexer)
    finish, budget = Family.of("qwen4_exp").branch.finish, 200_000
    with Largest() as largest:
        choose(*index, indexer, finish=finish, budget=budget)
    assert 1000 < largest.bytes <= budget


@pytest.mark.parametrize("name", CASES)
def test_packed_sequences_do_not_see_each_other(name):
    indexer, finish = CASES[name], Family.of("qwen4_exp").branch.finish
    lengths = [(5, 9), (30, 30), (0, 3), (1, 27)]
    parts = [random_index(s, t, indexer, b=1) for s, t in lengths]
    packed = [None if x[0] is None else torch.cat(x, 1)[0] for x in zip(*parts, strict=True)]
    of_q, of_k = (torch.tensor([0, *x], dtype=torch.int32).cumsum(0) for x in zip(*lengths, strict=True))
    lists = choose(*packed, indexer, finish=finish, cu_seqlens_q=of_q.int(), cu_seqlens_k=of_k.int())
    for part, rows in zip(parts, lists.split([s for s, _ in lengths]), strict=True):
        own = choose(*part, indexer, finish=finish)[0]
        assert torch.equal(rows[..., : own.shape[-1]], own)
        assert (rows[..., own.shape[-1] :] == -1).all()


@pytest.mark.parametrize("name", CASES)
def test_lengths_end_sequences(name):
    """What lies behind a length, NaN here, does not count."""
    indexer, finish = CASES[name], Family.of("qwen4_exp").branch.finish
    index, lengths = random_index(3, 41, indexer), torch.tensor([41, 30], dtype=torch.int32)
    index.keys[1, 30:] = torch.nan
    lists = choose(*index, indexer, finish=finish, lengths=lengths)
    for n, length in enumerate(lengths.tolist()):
        part = [None if x is None else x[n : n + 1] for x in index]
        own = choose(part[0], part[1][:, :length], part[2], indexer, finish=finish)[0]
        assert torch.equal(lists[n, ..., : own.shape[-1]].sort(-1).values, own.sort(-1).values)
        assert (lists[n, ..., own.shape[-1] :] == -1).all()


@pytest.mark.parametrize("name", ["deepseek_v32", "negative", "blocks", "complete blocks", "minimax_m3"])
def test_starts_begin_sequences(name):
    """Whole blocks of left padding are chosen only in place of nothing."""
    indexer = replace(CASES[name], first=0)
    index, t = random_index(41, 41, indexer), 41
    starts = torch.tensor([0, 3 * indexer.block_size], dtype=torch.int32)
    lists = choose(*index, indexer, starts=starts)
    causal = torch.ones(t, t, dtype=torch.bool).tril()[:, None]
    for n, start in enumerate(starts.tolist()):
        part = [None if x is None else x[n : n + 1, start:] for x in index]
        own = shown(choose(*part, indexer), t - start, indexer.block_size) & causal[start:, :, start:]
        ours = shown(lists[n : n + 1], t, indexer.block_size)[:, start:]
        assert torch.equal(ours[..., start:] & causal[start:, :, start:], own)
        has_enough = indexer.top * indexer.block_size + indexer.block_size
        assert not ours[:, has_enough:, :, :start].any()


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3"])
def test_compiled_code_chooses_the_same_of_equal_scores(name):
    torch._dynamo.reset()
    indexer = CASES[name]
    index = random_index(41, 41, indexer)
    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    ours, theirs = (shown(run(*index, indexer), 41, indexer.block_size) for run in (compiled, choose))
    causal = torch.ones(41, 41, dtype=torch.bool).tril()[:, None]
    assert torch.equal(ours & causal, theirs & causal)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_are_wide_under_autocast(dtype):
    indexer = INDEXERS["deepseek_v32"]
    index = [torch.randn_like(x).to(dtype) for x in random_index(33, 33, indexer)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lists = choose(*index, indexer)
    expected = plain_choice(plain_scores(IndexTensors(*(x.double() for x in index)), indexer), indexer, 33)
    causal = torch.ones(33, 33, dtype=torch.bool).tril()[:, None]
    assert torch.equal(shown(lists, 33) & causal, expected & causal)


def test_refusals():
    indexer = INDEXERS["deepseek_v32"]
    queries, keys, weights = random_index(5, 9, indexer)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="keys: expected at least the s=5 tokens of the queries, got t=4"):
        choose(queries, keys[:, :4], weights, indexer)
    with pytest.raises(TypeError, match=r"keys: expected torch.float32 like queries, got"):
        choose(queries, keys.double(), weights, indexer)
    with pytest.raises(ValueError, match=r"starts: expected int32 \[b=2\], got"):
        choose(queries, keys, weights, indexer, starts=torch.zeros(2))
    with pytest.raises(ValueError, match="weights: expected a tensor for weighted=True, got None"):
        choose(queries, keys, None, indexer)
    with pytest.raises(ValueError, match=rf"queries: expected .*h=4, d={WIDTH}"):
        choose(queries[:, :, :3], keys, weights, indexer)
    with pytest.raises(ValueError, match="finish: expected IndexBranch"):
        choose(queries, keys, None, INDEXERS["qwen4_exp"])
    with pytest.raises(ValueError, match="cu_seqlens_k: expected offsets"):
        choose(queries[0], keys[0], weights[0], indexer, cu_seqlens_q=offsets)
    with pytest.raises(ValueError, match="lengths: expected"):
        choose(queries, keys, weights, indexer, lengths=offsets[:1])
