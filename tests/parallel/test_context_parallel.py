"""Attention over tokens that ranks share is that of the whole sequence: outputs and gradients, on CPUs with gloo."""

from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh

from attnlib import CAUSAL, FULL, Mask, attention, masks, scores, sliding
from attnlib.parallel import gather_attention, head_attention, shard, unshard
from attnlib.parallel.sharding import dealt, joined, starts_of

TOKENS, HEADS, KV_HEADS, CHANNELS = 48, 4, 4, 8
FORMS = {"gather": gather_attention, "heads": head_attention}


def cases():
    """Masks and options, the same in every process."""
    torch.manual_seed(1)
    document = torch.randint(0, 4, (2, TOKENS)).sort().values
    slopes, sinks = torch.rand(HEADS), torch.randn(HEADS)
    bias = scores.distance_bias(torch.randn(HEADS, 9))
    yield "full", FULL, {}
    yield "causal", CAUSAL, {"softcap": 3.0, "sinks": sinks}
    yield "window", sliding(7), {"alibi_slopes": slopes}
    yield "both ways", Mask(5, 3), {}
    yield "prefix", Mask(None, 0, prefix=20), {"scale": 0.3}
    yield "shifted", CAUSAL.shift(-3), {}
    yield "documents", CAUSAL & masks.documents(document), {}
    yield "scores", CAUSAL & masks.dilated(2), {"score": bias}
    yield "bounds", CAUSAL, {"key_starts": torch.tensor([3, 0]), "key_ends": torch.tensor([40, 48])}
    yield "dropout", CAUSAL, {"dropout_p": 0.3, "dropout_seed": torch.tensor([5])}


def compare(rank: int, ranks: int, file: str) -> None:
    """One process: its rows of outputs and gradients are those of the whole."""
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, TOKENS, heads, CHANNELS, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    dout = torch.randn(2, TOKENS, HEADS, CHANNELS)
    for zigzag in (True, False):
        for name, mask, options in cases():
            options = {x: y.int() if x.startswith("key_") else y for x, y in options.items()}
            whole = attention(q, k, v, mask=mask, **options)
            expected = whole, *torch.autograd.grad(whole, (q, k, v), dout)
            for form, function in FORMS.items():
                own = [shard(x.detach(), mesh, zigzag=zigzag).requires_grad_() for x in (q, k, v)]
                out = function(*own, mask=mask, mesh=mesh, zigzag=zigzag, **options)
                found = out, *torch.autograd.grad(out, own, shard(dout, mesh, zigzag=zigzag))
                for x, y in zip(found, expected, strict=True):
                    x = unshard(x, mesh, zigzag=zigzag)
                    assert torch.allclose(x, y, rtol=1e-5, atol=1e-6), (form, name, zigzag, (x - y).abs().max())
    destroy_process_group()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_compute_what_one_would(ranks, tmp_path):
    mp.spawn(compare, (ranks, str(tmp_path / "store")), nprocs=ranks)


def test_every_token_is_dealt_once_and_joined_in_order():
    x = torch.arange(48)[:, None]
    for zigzag in (True, False):
        for ranks in (1, 2, 4):
            parts = dealt(x, ranks, zigzag=zigzag)
            assert parts.shape == (ranks, 48 // ranks, 1)
            assert torch.equal(joined(parts, zigzag=zigzag), x)
            for rank, part in enumerate(parts):
                starts = starts_of(rank, ranks, 48, zigzag=zigzag)
                assert [int(chunk[0]) for chunk in part.chunk(len(starts))] == starts


def test_zigzag_gives_every_rank_as_many_pairs_under_a_causal_mask():
    pairs = dealt(torch.arange(1, 65)[:, None], 4, zigzag=True).sum((1, 2))
    assert len(set(pairs.tolist())) == 1


@pytest.mark.parametrize(
    ("function", "tokens", "options", "why"),
    [
        (gather_attention, 8, {"window": 3}, "window: expected one of scale, softcap"),
        (gather_attention, 8, {"dropout_p": 0.5}, "dropout_seed: expected int64"),
        (head_attention, 8, {}, "q: expected heads that 2 ranks can share, got 3; use gather_attention"),
    ],
)
def test_refusals_come_before_anything_is_sent(function, tokens, options, why):
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0, get_group=lambda: None)
    q = torch.randn(1, tokens, 3, 8)
    with pytest.raises((TypeError, ValueError), match=why):
        function(q, q, q, mask=CAUSAL, mesh=mesh, **options)


@pytest.mark.parametrize("function", [gather_attention, head_attention])
@pytest.mark.parametrize(
    ("q", "k", "why"),
    [
        ((1, 8, 4, 8), (1, 6, 4, 8), "k: expected 8 tokens here, as q has, got 6; shard both alike"),
        ((8, 4, 8), (8, 4, 8), r"q: expected \[b, tokens here, heads, d\], got \(8, 4, 8\)"),
        ((1, 7, 4, 8), (1, 7, 4, 8), "q: expected two equal chunks of tokens, got 7 tokens"),
    ],
)
def test_what_is_no_shard_is_refused(function, q, k, why):
    with pytest.raises(ValueError, match=why):
        function(torch.zeros(q), torch.zeros(k), torch.zeros(k), mask=CAUSAL, mesh=None)


def test_tokens_that_cannot_be_shared_out():
    with pytest.raises(ValueError, match=r"x: expected tokens in 8 equal chunks, got 20 tokens; pad the sequence"):
        dealt(torch.zeros(20), 4, zigzag=True)
