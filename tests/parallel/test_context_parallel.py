"""Attention over tokens that ranks share is that of the whole sequence: outputs and gradients, on CPUs with
gloo.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from leaving import leave
from shared_sequences import HEADS, PACK, TOKENS, Case, cases, learning, packs, tensors, whole
from torch import Tensor
from torch.distributed import init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from attnlib import CAUSAL, QUERY_OFFSET, attention, explain, mask_mod
from attnlib.call.call import Call
from attnlib.dispatch.run import ExplainOnly
from attnlib.masks.ready_made import documents
from attnlib.parallel import (
    ContextParallel,
    context_attention,
    gather_attention,
    head_attention,
    ring_attention,
    shard,
    unshard,
)
from attnlib.parallel.context_parallel import FORMS
from attnlib.parallel.sharding import joined, sharded, starts_of
from attnlib.parallel.source import KeyValueSource
from attnlib.scores import bias_tensor

FUNCTIONS = (context_attention, gather_attention, head_attention, ring_attention)


def begin(rank: int, ranks: int, file: str) -> DeviceMesh:
    torch.set_num_threads(1)
    init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    return init_device_mesh("cpu", (ranks,))


def summed(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def found(case: Case, form: str, mesh: DeviceMesh, *, zigzag: bool, packed: bool) -> list[Tensor]:
    """The output and all gradients, whole, of what ranks compute together."""
    (q, k, v), dout = tensors(case, packed=packed)
    dim, cu = (0, {"cu_seqlens": torch.tensor(PACK, dtype=torch.int32)}) if packed else (1, {})
    own = [shard(x.detach(), mesh, dim=dim, zigzag=zigzag).requires_grad_() for x in (q, k, v)]
    options, leaves = learning(case)
    out = context_attention(*own, mask=case.mask, mesh=mesh, form=form, zigzag=zigzag, **options, **cu)
    grads = torch.autograd.grad(out, (*own, *leaves), shard(dout, mesh, dim=dim, zigzag=zigzag))
    shared = [unshard(x, mesh, dim=dim, zigzag=zigzag) for x in (out, *grads[:3])]
    return [*shared, *(summed(x) for x in grads[3:])]


def expected(case: Case, *, packed: bool) -> list[Tensor]:
    """The same of one process."""
    qkv, dout = tensors(case, packed=packed)
    options, leaves = learning(case)
    out = whole(case, *qkv, options, packed=packed)
    return [out, *torch.autograd.grad(out, (*qkv, *leaves), dout)]


def compare(rank: int, ranks: int, file: str) -> None:
    """One process: what it computes with the others is what one would."""
    mesh = begin(rank, ranks, file)
    for packed, every in ((False, cases()), (True, packs())):
        for case in every:
            right = expected(case, packed=packed)
            for form in FORMS:
                if form == "heads" and case.kv_heads % ranks:
                    continue
                for zigzag in (True, False):
                    got = found(case, form, mesh, zigzag=zigzag, packed=packed)
                    for n, (x, y) in enumerate(zip(got, right, strict=True)):
                        at = (form, case.name, zigzag, n, (x - y).abs().max())
                        assert torch.allclose(x, y, rtol=1e-5, atol=2e-6), at
    leave()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_compute_what_one_would(ranks, tmp_path):
    mp.spawn(compare, (ranks, str(tmp_path / "store")), nprocs=ranks)


def compare_latents(rank: int, ranks: int, file: str) -> None:
    """One process: what travels are latents, and the gradients of what expands them are those of all
    tokens.
    """
    mesh = begin(rank, ranks, file)
    torch.manual_seed(4)
    q, latent = torch.randn(2, TOKENS, HEADS, 8), torch.randn(2, TOKENS, 6)
    weight, dout = torch.randn(6, HEADS, 8, requires_grad=True), torch.randn(2, TOKENS, HEADS, 8)

    def expand(x: Tensor) -> tuple[Tensor, Tensor]:
        k = torch.einsum("bsr,rhd->bshd", x, weight)
        return k, k.cos()

    leaves = [x.clone().requires_grad_() for x in (q, latent)]
    out = attention(leaves[0], *expand(leaves[1]), mask=CAUSAL)
    right = out, *torch.autograd.grad(out, (*leaves, weight), dout)
    for form in FORMS:
        own = [shard(x, mesh).requires_grad_() for x in (q, latent)]
        source = KeyValueSource((own[1],), expand, (weight,))
        out = ContextParallel(mesh, form).attend(Call(own[0], CAUSAL), source=source)
        *shards, of_weight = out, *torch.autograd.grad(out, (*own, weight), shard(dout, mesh))
        for x, y in zip((*(unshard(x, mesh) for x in shards), summed(of_weight)), right, strict=True):
            assert (x - y).abs().max() <= 1e-5 * y.abs().max(), (form, (x - y).abs().max(), y.abs().max())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # forward and backward compute in bf16
        own = [shard(x, mesh).requires_grad_() for x in (q, latent)]
        out = ContextParallel(mesh, "ring").attend(
            Call(own[0], CAUSAL), source=KeyValueSource((own[1],), expand, (weight,))
        )
    assert out.dtype == torch.bfloat16
    of_q, of_latent, _ = torch.autograd.grad(out, (*own, weight), shard(dout, mesh).bfloat16())
    assert of_q.dtype == of_latent.dtype == torch.float32
    assert torch.allclose(unshard(of_q, mesh), right[1], atol=0.1)
    leave()


def test_latents_travel_and_are_expanded_where_they_are_read(tmp_path):
    mp.spawn(compare_latents, (2, str(tmp_path / "store")), nprocs=2)


def fail(rank: int, ranks: int, file: str) -> None:
    """One rank ends before its part is done; the other must not wait for ever."""
    mesh = begin(rank, ranks, file)
    q = torch.randn(1, 8, 2, 8)
    ring_attention(q, q, q, mask=CAUSAL, mesh=mesh)  # all are connected
    if rank == 1:
        raise ValueError("this rank fails")
    try:
        ring_attention(q, q, q, mask=CAUSAL, mesh=mesh)
    except RuntimeError:
        raise SystemExit(3) from None


def test_a_rank_that_fails_ends_the_others(tmp_path):
    context = mp.get_context("spawn")
    every = [context.Process(target=fail, args=(rank, 2, str(tmp_path / "store"))) for rank in range(2)]
    for process in every:
        process.start()
    for process in every:
        process.join(60)
    assert [process.exitcode for process in every] == [3, 1]


def test_explain_tells_the_form_without_other_ranks():
    mesh = SimpleNamespace(size=lambda: 4, get_local_rank=lambda: 1, get_group=lambda: None, ndim=1)
    q, k = torch.randn(1, 8, 4, 8), torch.randn(1, 8, 1, 8)
    for form in ("ring", "gather"):
        told = str(explain(context_attention, q, k, k, mask=CAUSAL, mesh=mesh, form=form))
        assert f"shared: {form} over 4 ranks" in told
        assert "heads" not in told.partition("shared:")[2]  # which four ranks cannot share
    told = str(explain(head_attention, q, q, q, mask=CAUSAL, mesh=mesh))
    assert "shared: heads over 4 ranks" in told
    assert "ms, 6,144 bytes received; gather" in told  # of keys and values of three others
    assert "ms, 3,072 bytes received\n" in told  # of three quarters of all heads' four tensors
    assert "shared: " not in str(explain(attention, q, q, q, mask=CAUSAL))


def test_every_form_is_the_fastest_somewhere():
    mesh = SimpleNamespace(size=lambda: 8, get_local_rank=lambda: 0, get_group=lambda: None, ndim=1)

    def form(tokens: int, kv_heads: int, bandwidth: float) -> str:
        q, k = (torch.empty(1, tokens, heads, 128, device="meta") for heads in (32, kv_heads))
        sharing = ContextParallel(mesh, bandwidth=bandwidth)
        asked = ExplainOnly(None)
        sharing.attend(Call(q, CAUSAL, k=k, v=k), asked)
        return asked.explanations[0].ranks.partition(" ")[0]

    assert form(4096, 32, 300e9) == "heads"
    assert form(4096, 1, 300e9) == "gather"
    assert form(65536, 4, 10e9) == "ring"


def test_every_token_is_dealt_once_and_joined_in_order():
    x = torch.arange(48)[:, None]
    for zigzag in (True, False):
        for ranks in (1, 2, 4):
            parts = sharded(x, ranks, zigzag=zigzag)
            assert parts.shape == (ranks, 48 // ranks, 1)
            assert torch.equal(joined(parts, zigzag=zigzag), x)
            for rank, part in enumerate(parts):
                starts = starts_of(rank, ranks, 48, zigzag=zigzag)
                assert [int(chunk[0]) for chunk in part.chunk(len(starts))] == starts


def test_zigzag_gives_every_rank_as_many_pairs_under_a_causal_mask():
    pairs = sharded(torch.arange(1, 65)[:, None], 4, zigzag=True).sum((1, 2))
    assert len(set(pairs.tolist())) == 1


FIRST = mask_mod(lambda b, h, i, j, first: j <= first[b], QUERY_OFFSET)


@pytest.mark.parametrize("function", [gather_attention, ring_attention])
def test_functions_of_the_first_query_are_refused(function):
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0, get_group=lambda: None, ndim=1)
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(ValueError, match="QUERY_OFFSET: expected functions without it"):
        function(q, q, q, mask=FIRST, mesh=mesh)


@pytest.mark.parametrize(
    ("function", "tokens", "options", "why"),
    [
        (gather_attention, 8, {"window": 3}, "window: no such argument; use mask=sliding"),
        (ring_attention, 8, {"dropout_p": 0.5}, "dropout_seed: expected int64"),
        (head_attention, 8, {}, "q: expected heads that 2 ranks can share, got 3; use another form"),
        (
            context_attention,
            8,
            {"form": "star"},
            "form: expected None or one of ring, gather, heads, got 'star'",
        ),
    ],
)
def test_refusals_come_before_anything_is_sent(function, tokens, options, why):
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0, get_group=lambda: None, ndim=1)
    q = torch.randn(1, tokens, 3, 8)
    with pytest.raises((TypeError, ValueError), match=why):
        function(q, q, q, mask=CAUSAL, mesh=mesh, **options)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("q", "k", "why"),
    [
        ((1, 8, 4, 8), (1, 6, 4, 8), "k: expected 8 tokens here, as q has, got 6; shard both the same"),
        ((8, 4, 8), (8, 4, 8), r"q: expected \[b, tokens here, heads, d\], got \(8, 4, 8\)"),
        ((1, 7, 4, 8), (1, 7, 4, 8), "q: expected two equal chunks of tokens, got 7 tokens"),
    ],
)
def test_what_is_no_shard_is_refused(function, q, k, why):
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0, get_group=lambda: None, ndim=1)
    with pytest.raises(ValueError, match=why):
        function(torch.zeros(q), torch.zeros(k), torch.zeros(k), mask=CAUSAL, mesh=mesh)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_are_compared_with_the_whole_sequence(function):
    """A rank's part is no measure of what its masks and scores read."""
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0, get_group=lambda: None, ndim=1)
    q = torch.zeros(1, 4, 2, 8)
    for option, why in (
        ({"mask": documents(torch.zeros(1, 7).int())}, r"mask: .*\[b=1, t>=8\] .*got \(1, 7\)"),
        ({"mask": CAUSAL, "score": bias_tensor(torch.zeros(1, 2, 4, 4))}, r"score: .*\[1, h=2, s=8, t=8\]"),
    ):
        with pytest.raises(ValueError, match=why):
            function(q, q, q, mesh=mesh, **option)


def test_a_mesh_has_one_dimension_and_a_bandwidth():
    with pytest.raises(ValueError, match=r"mesh: expected one dimension, as of mesh\['cp'\], got 2"):
        ContextParallel(SimpleNamespace(ndim=2))
    for mesh in (2, dist.ProcessGroup, None):
        for typed in (
            ContextParallel,
            lambda x: shard(torch.zeros(1, 8), x),
            lambda x: unshard(torch.zeros(1, 8), x),
        ):
            with pytest.raises(
                TypeError, match=r"mesh: expected a DeviceMesh, as init_device_mesh\(\) or .*, got \w+$"
            ):
                typed(mesh)
    with pytest.raises(TypeError, match=r"mask: expected a Mask .*got Tensor; .*mask_tensor"):
        context_attention(*[torch.zeros(1, 8, 4, 8)] * 3, mask=torch.ones(8, 8) > 0, mesh=None)
    with pytest.raises(ValueError, match="bandwidth: expected bytes a second above 0, got 0"):
        ContextParallel(SimpleNamespace(ndim=1), bandwidth=0)


def test_tokens_that_cannot_be_shared_out():
    with pytest.raises(
        ValueError, match=r"x: expected tokens in 8 equal chunks, got 20 tokens; pad the sequence"
    ):
        sharded(torch.zeros(20), 4, zigzag=True)


def test_parts_that_nobody_dealt_are_not_joined():
    with pytest.raises(
        ValueError, match="x: expected two equal chunks of tokens in zigzag order, got 3 tokens"
    ):
        joined(torch.zeros(2, 3, 1), zigzag=True)
    assert joined(torch.zeros(2, 3, 1), zigzag=False).shape == (6, 1)
