"""The index loss: against plain autograd in fp64 and Megatron's formula, in chunks, packed, and its reach."""

from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp
from index_cases import HIDDEN, INDEXERS, RANK, Family
from index_plain import plain_scores
from leaving import leave
from torch import Tensor

from attnlib import CAUSAL, attention_with_lse, masks
from attnlib.indexing import Indexer, IndexTensors, MainAttention, choose, index_loss
from attnlib.scores import Score
from tests.indexing.test_choosing import Largest

CASES = {name: x for name, x in INDEXERS.items() if "without" not in name}
CASES |= {
    "complete blocks": replace(INDEXERS["minimax_m3"], tail=True),
    "blocks": replace(INDEXERS["minimax_m3"], per="all", activation="relu", first=1),
    "means of keys": replace(INDEXERS["qwen4_exp"], norm_after_pool=False, local=1),
}
H, G, D = 8, 4, 12
SCALE, SOFTCAP = 0.4, 5.0
SCORE = Score(SCALE, SOFTCAP)


def index_of(s: int, t: int, indexer: Indexer, b: int = 2) -> IndexTensors:
    shapes = (b, s, indexer.heads, indexer.head_dim), (b, t, indexer.head_dim), (b, s, indexer.heads)
    made = [torch.randn(x, dtype=torch.float64, requires_grad=True) for x in shapes]
    return IndexTensors(*made[:2], made[2] if indexer.weighted else None)


def main_of(s: int, t: int, mask=CAUSAL, b: int = 2) -> MainAttention:
    q, k = (torch.randn(b, n, h, D, dtype=torch.float64) for n, h in ((s, H), (t, G)))
    lse = attention_with_lse(q, k, k, mask=mask, scale=SCALE, softcap=SOFTCAP)[1]
    return MainAttention(q, k, lse, SCORE)


def branch_of(indexer: Indexer):
    return Family.of("qwen4_exp", torch.float64).branch if indexer.norm_after_pool else None


def leaves(index: IndexTensors) -> list[Tensor]:
    return [x for x in index if x is not None]


def dense_loss(index, main, indexer, chosen=None, branch=None) -> Tensor:
    """The formula over all pairs at once. Megatron's: KL by rows of targets divided by their sums."""
    s, t, size, c = main.q.shape[1], main.k.shape[1], indexer.block_size, indexer.lists
    seen = torch.arange(t) <= torch.arange(t - s, t)[:, None]
    products = torch.einsum("bsgfd,btgd->bgfst", main.q.unflatten(2, (G, -1)), main.k).flatten(1, 2)
    logits = (SOFTCAP * torch.tanh(SCALE * products / SOFTCAP)).masked_fill(~seen, -torch.inf)
    p = torch.exp(logits - main.lse[..., None]).unflatten(1, (c, -1)).mean(2).transpose(1, 2)  # [b, s, c, t]
    scores = plain_scores(index, indexer, branch)
    p = torch.stack([x.sum(-1) for x in p.split(size, -1)], -1)[..., : scores.shape[-1]]
    valid = scores > -torch.inf
    if chosen is not None:
        blocks = scores.shape[-1]
        at = torch.where((chosen >= 0) & (chosen < blocks), chosen, blocks).long()
        listed = torch.zeros(*valid.shape[:-1], blocks + 1, dtype=torch.bool).scatter_(-1, at, True)
        valid = valid & listed[..., :-1]
    target = p.masked_fill(~valid, 0)
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-10)
    rows = valid.any(-1)
    log_s = torch.where(valid, scores, -1e30).log_softmax(-1)
    terms = target * (torch.log(target.clamp_min(1e-10)) - log_s)
    return terms.masked_fill(~valid, 0).sum(-1)[rows].sum() / max(1, int(rows.sum()))


def assert_same(found: Tensor, expected: Tensor, parameters: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(3 * x, parameters, allow_unused=True) for x in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        if theirs is None:
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("budget", [1, 40_000, 1 << 30])
@pytest.mark.parametrize(("s", "t"), [(33, 33), (6, 30), (1, 3)])
@pytest.mark.parametrize("stage", ["warm-up", "chosen"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_autograd(name, stage, s, t, budget):
    indexer = CASES[name]
    index, branch = index_of(s, t, indexer), branch_of(indexer)
    finish = branch and branch.finish
    lists = choose(*index, indexer, finish=finish) if stage == "chosen" else None
    mask = CAUSAL
    if stage == "chosen":
        mask = CAUSAL & masks.selected(lists, indexer.block_size)  # which its LSE is of
    main = main_of(s, t, mask)
    parameters = leaves(index) + ([] if branch is None else [branch.k_norm.weight])
    found = index_loss(index, main, indexer, chosen=lists, finish=finish, budget=budget)
    assert_same(found, dense_loss(index, main, indexer, lists, branch), parameters)


def test_a_loss_of_its_own_targets_is_zero():
    """Index heads that are the main attention's only head, without relu, have its probabilities."""
    indexer = Indexer(1, D, activation=None, weighted=False, scale=SCALE)
    q, k = torch.randn(2, 9, 1, D), torch.randn(2, 9, 1, D)
    lse = attention_with_lse(q, k, k, mask=CAUSAL, scale=SCALE)[1]
    loss = index_loss(IndexTensors(q, k[:, :, 0], None), MainAttention(q, k, lse, Score(SCALE)), indexer)
    torch.testing.assert_close(loss, torch.zeros(()), atol=1e-6, rtol=0)


@pytest.mark.parametrize("stage", ["warm-up", "chosen"])
@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3", "qwen4_exp"])
def test_packed_sequences_are_weighed_by_their_queries(name, stage):
    indexer = CASES[name]
    lengths, branch = [(5, 9), (17, 17), (0, 3), (1, 27)], branch_of(indexer)
    finish = branch and branch.finish
    parts = [(index_of(s, t, indexer, b=1), main_of(s, t, b=1)) for s, t in lengths]
    packed = [None if x[0] is None else torch.cat(x, 1)[0] for x in zip(*(x for x, _ in parts), strict=True)]
    q, k = (torch.cat([getattr(x, side) for _, x in parts], 1)[0] for side in "qk")
    lse = torch.cat([x.lse for _, x in parts], 2)[0]
    of_q, of_k = (torch.tensor([0, *x]).cumsum(0).int() for x in zip(*lengths, strict=True))
    offsets = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
    lists = choose(*packed, indexer, finish=finish, **offsets) if stage == "chosen" else None
    found = index_loss(
        IndexTensors(*packed),
        MainAttention(q, k, lse, SCORE),
        indexer,
        chosen=lists,
        finish=finish,
        **offsets,
    )
    total, count = 0, 0
    for n, (own, attention) in enumerate(parts):
        s, t = lengths[n]
        own_lists = None if lists is None else lists[None, of_q[n] : of_q[n + 1]]
        rows = sum(t - s + i + 1 >= (indexer.block_size if indexer.tail else 1) for i in range(s))
        if rows:
            total = total + rows * dense_loss(own, attention, indexer, own_lists, branch)
        count += rows
    assert_same(found, total / count, [x for own, _ in parts for x in leaves(own)])


@pytest.mark.parametrize("name", INDEXERS)
def test_it_trains_the_branch_only(name):
    """Neither x, nor the q latent, nor the main attention has a gradient."""
    family = Family.of(name)
    x, latent = torch.randn(2, 30, HIDDEN, requires_grad=True), torch.randn(2, 30, RANK, requires_grad=True)
    q, k = torch.randn(2, 30, H, D, requires_grad=True), torch.randn(2, 30, G, D, requires_grad=True)
    lse = attention_with_lse(q, k, k, mask=CAUSAL)[1]
    index, indexer = family.tensors(x, latent), family.branch.indexer
    index_loss(index, MainAttention(q, k, lse), indexer, finish=family.branch.finish).backward()
    assert all(leaf.grad is None for leaf in (x, latent, q, k))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in family.branch.parameters())
    assert sum(p.grad.abs().sum() for p in family.branch.parameters()) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype):
    """Also under autocast. The result is that of the rounded tensors."""
    indexer = CASES["deepseek_v32"]
    index, main = index_of(20, 20, indexer), main_of(20, 20)
    half = IndexTensors(*(x.detach().to(dtype).requires_grad_() for x in index))
    rounded = main._replace(q=main.q.to(dtype), k=main.k.to(dtype), lse=main.lse.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = index_loss(half, rounded, indexer)
    assert found.dtype == torch.float32
    wide = IndexTensors(*(x.detach().double().requires_grad_() for x in half))
    expected = dense_loss(wide, main._replace(q=rounded.q.double(), k=rounded.k.double()), indexer)
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)
    ours, theirs = torch.autograd.grad(found, half), torch.autograd.grad(expected, wide)
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), y, rtol=0.02, atol=float(0.02 * y.abs().max()))


def test_queries_that_see_nothing_do_not_count():
    """Of a padded sequence; their LSE is -inf."""
    indexer = CASES["deepseek_v32"]
    index, main = index_of(20, 20, indexer, b=1), main_of(20, 20, b=1)
    lse = main.lse.clone()
    lse[..., 12:] = -torch.inf
    found = index_loss(index, main._replace(lse=lse), indexer)
    few = IndexTensors(*(x[:, :12] for x in index))
    short = MainAttention(main.q[:, :12], main.k[:, :12], main.lse[..., :12], SCORE)
    assert_same(found, dense_loss(few, short, indexer), leaves(index))


def test_without_a_scored_block_it_is_zero():
    indexer, branch = CASES["qwen4_exp"], branch_of(CASES["qwen4_exp"])
    index = index_of(3, 3, indexer)
    loss = index_loss(index, main_of(3, 3), indexer, finish=branch.finish)
    assert loss == 0
    loss.backward()
    assert index.queries.grad.abs().sum() == 0


def test_numbers_of_keys_are_in_range(monkeypatch):
    """The last block of a list may reach beyond the keys of a chunk."""
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    indexer = CASES["minimax_m3"]
    index = index_of(30, 30, indexer)
    lists = choose(*(x if x is None else x.detach() for x in index), indexer)
    assert index_loss(index, main_of(30, 30), indexer, chosen=lists, budget=1).isfinite()


def test_no_second_derivative():
    indexer = CASES["deepseek_v32"]
    index = index_of(5, 5, indexer)
    loss = index_loss(index, main_of(5, 5), indexer)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(loss, index.keys, create_graph=True)


def test_refusals():
    indexer, main = CASES["minimax_m3"], main_of(9, 9)
    index = index_of(9, 9, indexer)
    with pytest.raises(ValueError, match=r"indexer.heads: expected the 2 KV heads of k .* got 4"):
        index_loss(index, main._replace(k=main.k[:, :, :2]), indexer)
    sinks = Score(sinks=torch.zeros(H))
    with pytest.raises(NotImplementedError, match="expected a score of numbers only, got sinks"):
        index_loss(index, main._replace(score=sinks), indexer)
    with pytest.raises(ValueError, match=r"lse: expected \[b=2, h=8, s=9\]"):
        index_loss(index, main._replace(lse=main.lse[..., 1:]), indexer)
    with pytest.raises(ValueError, match=r"k: expected \[b=2, t=9, g, d=12\]"):
        index_loss(index, main._replace(k=main.k[:, 1:]), indexer)
    with pytest.raises(ValueError, match=r"chosen: expected \[b=2, s=9, c=4, n\]"):
        index_loss(index, main, indexer, chosen=torch.zeros(2, 9, 1, 3, dtype=torch.int32))


@pytest.mark.parametrize("stage", ["warm-up", "chosen"])
@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3", "qwen4_exp"])
def test_chunks_fit_into_the_budget(name, stage):
    """No tensor of all pairs is made: of queries, keys and heads there are 800 x 800 x 4."""
    indexer, budget = replace(CASES[name], top=3), 1 << 20
    index = IndexTensors(*(None if x is None else x.detach().float() for x in index_of(800, 800, indexer, 1)))
    index.keys.requires_grad_()
    main, finish = main_of(800, 800, b=1), Family.of("qwen4_exp").branch.finish
    main = main._replace(q=main.q.float(), k=main.k.float())
    lists = choose(*index, indexer, finish=finish, budget=budget) if stage == "chosen" else None
    with Largest() as largest:
        index_loss(index, main, indexer, chosen=lists, finish=finish, budget=budget).backward()
    assert largest.bytes <= budget


def compare(rank: int, path: str):
    """With two of four KV heads a rank, the loss and the gradients of both ranks are the whole ones."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(0)
    group = torch.distributed.group.WORLD
    indexer, lists = CASES["deepseek_v32"], None
    for _ in range(2):
        index, main = index_of(20, 20, indexer), main_of(20, 20)
        own_q = main.q.unflatten(2, (2, -1))[:, :, rank], main.k.unflatten(2, (2, -1))[:, :, rank]
        own = MainAttention(*own_q, main.lse.unflatten(1, (2, -1))[:, rank], SCORE, group)
        found = index_loss(index, own, indexer, chosen=lists)
        assert_same(found, dense_loss(index, main, indexer, lists), leaves(index))
        lists = choose(*(x.detach() for x in index), indexer)
    leave()


def test_ranks_with_other_heads(tmp_path):
    mp.spawn(compare, (str(tmp_path / "store"),), nprocs=2)
