"""Layers that choose the keys of each query: one choice in every kind of call, and a loss that trains it."""

from dataclasses import replace

import pytest
import torch
from index_plain import plain_choice, plain_scores
from layer_helpers import HIDDEN, Stack, alone, cache_for, close, feed, tokens
from selecting_cases import INDEXERS, T, choosing, keys_of, make, most, steps, without_branch
from torch import Tensor, nn

from attnlib import (
    CAUSAL,
    GroupedQueryAttention,
    Indexer,
    KVCache,
    MultiHeadLatentAttention,
    Rope,
    explain,
    masks,
)
from attnlib.indexing import Chosen


def plain_mask(layer: nn.Module, x: Tensor):
    """The mask of what the index branch chooses by the published formula."""
    indexer, t = layer.select, x.shape[1]
    positions = torch.arange(t)
    angles = None if indexer.rope is None else indexer.rope.angles(positions)
    source = layer.query_source(x) if indexer.source == "latent" else None
    index = layer.indexer(x, source, angles=angles, positions=positions)
    shown = plain_choice(plain_scores(index, indexer, layer.indexer), indexer, t).transpose(1, 2)
    shown = shown.repeat_interleave(layer.num_heads, 1) if shown.shape[1] == 1 else shown
    return masks.mask_tensor(shown.repeat_interleave(layer.num_heads // shown.shape[1], 1))


@pytest.mark.parametrize("name", INDEXERS)
def test_attention_is_over_what_the_published_formula_chooses(name):
    layer, x = choosing(name), tokens(2, T)
    plain = without_branch(layer, name)
    expected = plain(x, mask=plain_mask(layer, x))
    close(layer(x), expected)
    assert not torch.allclose(expected, plain(x))
    chosen = layer.choose(x)
    assert chosen.indices.dtype == torch.int32
    close(layer(x, selected=chosen), expected)
    close(plain(x, selected=chosen), expected)
    close(plain(x, mask=chosen.mask), expected)
    close(layer(x, selected=chosen.indices), expected)


@pytest.mark.parametrize("name", INDEXERS)
def test_short_sequences_are_dense_to_the_bit(name):
    layer = choosing(name)
    plain, t = without_branch(layer, name), most(layer)
    x = tokens(2, t + 1)
    assert layer.choose(x[:, :t]) == Chosen(None, layer.select.block_size)
    assert layer.choose(x).indices is not None
    assert torch.equal(layer(x[:, :t]), plain(x[:, :t]))
    packed, cu_seqlens = x[0, :t], torch.tensor([0, 2, t], dtype=torch.int32)
    assert torch.equal(layer(packed, cu_seqlens=cu_seqlens), plain(packed, cu_seqlens=cu_seqlens))
    caches = [cache_for(Stack(one), sequences=2) for one in (layer, plain)]
    for cache in caches:
        cache.admit(2)
    for part in x[:, :t].split(1, 1):
        with torch.no_grad(), caches[0].step(1) as kv:
            is_dense = kv[0].history + 1 <= t
            assert (layer.choose(part, kv=kv[0]).indices is None) == is_dense
            out = layer(part, kv=kv[0])
        with torch.no_grad(), caches[1].step(1) as kv:
            expected = plain(part, kv=kv[0])
        close(out, expected)
        assert not is_dense or torch.equal(out, expected)


@pytest.mark.parametrize("page_size", [4, None], ids=["paged", "contiguous"])
@pytest.mark.parametrize("name", INDEXERS)
def test_steps_over_a_cache_choose_as_one_forward(name, page_size, monkeypatch):
    """Also among keys that earlier dense steps have stored; nothing that was never written matters."""
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    layer, x = choosing(name), tokens(2, T)
    cache = cache_for(Stack(layer), page_size, sequences=2)
    cache.admit(2)
    sizes = [3, 1, 2, 17, 1, 1, 9, 1, 1, 1]
    out, found = steps(layer, x, cache, sizes)
    close(out, layer(x))
    whole, at = keys_of(layer.choose(x), T), 0
    causal = torch.ones(T, T, dtype=torch.bool).tril()[:, None]
    for n, chosen in zip(sizes, found, strict=True):
        rows = slice(at, at + n)
        at += n
        if chosen.indices is not None:
            seen = keys_of(chosen, T) & causal[rows]
            assert torch.equal(seen, whole[:, rows] & causal[rows])
    assert found[0].indices is None
    assert found[-1].indices is not None


@pytest.mark.parametrize("name", INDEXERS)
def test_packed_sequences_and_steps_choose_as_each_alone(name):
    layer, x = choosing(name), tokens(T + 25)
    parts = x.split([T, 3, 22])
    cu_seqlens = torch.tensor([0, T, T + 3, T + 25], dtype=torch.int32)
    expected = [alone(layer, part) for part in parts]
    close(layer(x, cu_seqlens=cu_seqlens), torch.cat(expected))
    model, cache = Stack(layer), cache_for(Stack(layer), length=48)
    handles, at = cache.admit(3), [0, 0, 0]
    expected = [part + out for part, out in zip(parts, expected, strict=True)]
    for counts in ((20, 1, 0), (1, 1, 18), (15, 1, 1), (1, 0, 3)):
        given = {
            handle: parts[n][at[n] : at[n] + count]
            for n, (handle, count) in enumerate(zip(handles, counts, strict=True))
            if count
        }
        out = feed(model, cache, given)
        for n, handle in enumerate(handles):
            if handle in out:
                close(out[handle], expected[n][at[n] : at[n] + counts[n]])
            at[n] += counts[n]
    assert at == [T, 3, 22]


@pytest.mark.parametrize("name", INDEXERS)
def test_forks_and_rollbacks_choose_among_their_own_keys(name):
    layer = choosing(name)
    model, cache = Stack(layer), cache_for(Stack(layer))
    [handle] = cache.admit(1)
    x, drafts, others = tokens(30), tokens(4, seed=1), tokens(5, seed=2)
    feed(model, cache, {handle: x})
    feed(model, cache, {handle: drafts})
    cache.truncate(handle, 30)
    [fork] = cache.fork(handle, 1)
    out = feed(model, cache, {handle: others, fork: drafts})
    for of, new in ((handle, others), (fork, drafts)):
        whole = torch.cat((x, new))
        close(out[of], (whole + alone(layer, whole))[30:])


@pytest.mark.parametrize("name", ["deepseek", "of x", "mistral"])
def test_left_padding_is_never_chosen_in_place_of_tokens(name):
    layer, x = choosing(name), tokens(2, T)
    counts = torch.tensor([T, 20])
    starts = (T - counts).int()
    there = torch.arange(T) >= starts[:, None]
    expected = alone(layer, x[1, T - 20 :])
    positions = (torch.arange(T) - starts[:, None]).clamp(min=0)
    close(layer(x, key_starts=starts, positions=positions)[1, T - 20 :], expected)
    close(layer(x, attention_mask=there, positions=positions)[1, T - 20 :], expected)
    cache = cache_for(Stack(layer))
    handles = cache.admit(2, left_padding=starts.tolist())
    out, _ = steps(layer, x[:, :35], cache, (30, 1, 1, 3))
    packed = feed(Stack(layer), cache, dict(zip(handles, x[:, 35:], strict=True)))
    out = torch.cat((out, torch.stack(list(packed.values())) - x[:, 35:]), 1)
    close(out[1, T - 20 :], expected)
    close(out[0], alone(layer, x[0]))


def test_right_padding_changes_nothing():
    layer, x = choosing("minimax"), tokens(2, T)
    there = torch.arange(T) < torch.tensor([[T], [20]])
    close(layer(x, attention_mask=there)[1, :20], layer(x)[1, :20])


@pytest.mark.parametrize("name", INDEXERS)
def test_later_layers_reuse_a_choice(name):
    """Over tokens, and over the caches of both."""
    layer, reader = choosing(name), make(name)
    x, other = tokens(2, T), tokens(2, T, seed=3)
    expected = reader(other, mask=layer.choose(x).mask)
    close(reader(other, selected=layer.choose(x)), expected)
    cache = cache_for(Stack(layer, reader))
    cache.admit(2)
    outs = []
    for part, of_reader in zip(x.split([20, 1, 1, 15], 1), other.split([20, 1, 1, 15], 1), strict=True):
        with torch.no_grad(), cache.step(part.shape[1]) as kv:
            chosen = layer.choose(part, kv=kv[0])
            layer(part, kv=kv[0], selected=chosen)
            outs.append(reader(of_reader, kv=kv[1], selected=chosen))
    close(torch.cat(outs, 1), expected)


@pytest.mark.parametrize("name", ["minimax", "deepseek"])
def test_a_layer_without_keys_reads_the_chosen_ones(name):
    layer, reader = choosing(name), make(name, own_keys=False)
    x = tokens(2, T)
    angles = layer.rope.angles(torch.arange(T))
    keys = (layer.latent if name == "deepseek" else layer.key_value)(x, angles)
    chosen = layer.choose(x)
    expected = reader(x, keys=keys, mask=chosen.mask)
    close(reader(x, keys=keys, selected=chosen), expected)
    cache = cache_for(Stack(layer))
    cache.admit(2)
    with torch.no_grad(), cache.step(T) as kv:
        layer(x, kv=kv[0])
        close(reader(x, keys=kv[0].view(), selected=chosen), expected)


@pytest.mark.parametrize("name", INDEXERS)
def test_each_loss_trains_its_own_weights(name):
    layer, x = choosing(name), tokens(2, T).requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad.abs().sum() > 0
    for at, parameter in layer.named_parameters():
        assert (parameter.grad is None) == at.startswith("indexer."), at
    layer.zero_grad()
    x.grad = None
    for selected in (None, layer.choose(x)):
        loss = layer.index_loss(x, selected=selected)
        assert loss > 0
        loss.backward()
        assert x.grad is None
        for at, parameter in layer.named_parameters():
            assert (parameter.grad is None) != at.startswith("indexer."), at
        layer.zero_grad()


def plain_loss(layer: nn.Module, x: Tensor, chosen: Chosen | None) -> Tensor:
    """The loss of a layer with one list of tokens, from its probabilities and scores, row by row."""
    indexer, t = layer.select, x.shape[1]
    positions = torch.arange(t)
    angles = None if indexer.rope is None else indexer.rope.angles(positions)
    source = layer.query_source(x) if indexer.source == "latent" else None
    index = layer.indexer(x, source, angles=angles, positions=positions)
    scores = plain_scores(index, indexer)[:, :, 0]
    shown = torch.ones(t, t, dtype=torch.bool).tril().expand(len(x), t, t)
    shown = shown if chosen is None else shown & keys_of(chosen, t)[:, :, 0]
    selected = Chosen(None) if chosen is None else chosen
    p = layer.weights(x, over="none", rows=positions, selected=selected).mean(1)
    p = p / p.sum(-1, keepdim=True)
    logs = scores.masked_fill(~shown, -torch.inf).log_softmax(-1)
    return torch.where(shown, torch.xlogy(p, p) - p * logs.masked_fill(~shown, 0), 0).sum(-1).mean()


@pytest.mark.parametrize("is_sparse", [False, True], ids=["warm-up", "sparse"])
@pytest.mark.parametrize("name", ["deepseek", "of x", "mistral"])
def test_the_loss_is_the_divergence_from_the_mean_of_heads(name, is_sparse):
    options = {"sinks": True, "softcap": 2.0} if name == "of x" else {}
    layer, x = choosing(name, **options), tokens(2, T)
    if options:
        nn.init.normal_(layer.sinks)
    for parameter in layer.indexer.parameters():
        parameter.data *= 0.5
    chosen = layer.choose(x) if is_sparse else None
    ours, theirs = layer.index_loss(x, selected=chosen), plain_loss(layer, x, chosen)
    close(ours, theirs)
    weights = list(layer.indexer.parameters())
    for found, expected in zip(
        torch.autograd.grad(ours, weights), torch.autograd.grad(theirs, weights), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    cu_seqlens = torch.tensor([0, T, 2 * T], dtype=torch.int32)
    lists = None if chosen is None else chosen._replace(indices=chosen.indices.flatten(0, 1))
    close(layer.index_loss(x.flatten(0, 1), selected=lists, cu_seqlens=cu_seqlens), ours)


def test_the_loss_ignores_dropout_and_learns():
    layer, x = choosing("of x", dropout_p=0.5).train(), tokens(2, T)
    close(layer.index_loss(x), layer.eval().index_loss(x))
    optimizer = torch.optim.Adam(layer.indexer.parameters(), 0.02)
    before = layer.index_loss(x)
    for _ in range(40):
        optimizer.zero_grad()
        layer.index_loss(x).backward()
        optimizer.step()
    assert layer.index_loss(x) < 0.5 * before


def test_dropout_applies_to_selected_keys():
    layer, x = choosing("of x", dropout_p=0.5), tokens(2, T)
    assert not torch.equal(layer.train()(x), layer.eval()(x))


@pytest.mark.parametrize("name", ["deepseek", "minimax", "qwen"])
def test_compiled_steps_choose_as_eager_ones(name):
    torch._dynamo.reset()
    layer, x = choosing(name), tokens(2, T)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(run(x), layer(x))
    cache = cache_for(Stack(layer))
    cache.admit(2)
    outs = []
    for part in x.split([20, *[1] * (T - 20)], 1):
        with torch.no_grad(), cache.step(part.shape[1]) as kv:
            outs.append(run(part, kv=kv[0]))
    close(torch.cat(outs, 1), layer(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", INDEXERS)
def test_statistics_and_explanations_are_those_of_the_choice(name):
    layer, x = choosing(name), tokens(2, T)
    plain, chosen, rows = without_branch(layer, name), layer.choose(x), torch.tensor([5, 36])
    expected = plain.weights(x, over="none", rows=rows, mask=chosen.mask)
    close(layer.weights(x, over="none", rows=rows), expected)
    close(plain.weights(x, over="none", rows=rows, selected=chosen), expected)
    close(layer.maxima(x), plain.maxima(x, selected=chosen))
    assert f"{chosen.indices.shape[-1]} " in str(explain(layer, x))


@pytest.mark.parametrize("name", INDEXERS)
def test_weights_are_saved_and_reset(name):
    layer, x = choosing(name), tokens(2, T)
    other = make(name, INDEXERS[name])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    other.reset_parameters()
    assert not torch.equal(other.indexer.q_proj.weight, layer.indexer.q_proj.weight)
    assert "indexer.k_norm.weight" in layer.state_dict()
    assert layer.kv_layout.planes["index"] == (1, 8, torch.float64)
    assert "index" not in make(name).kv_layout.planes


def test_index_keys_may_be_stored_in_one_byte():
    layer, x = choosing("deepseek", dtype=torch.float32), tokens(2, T, dtype=torch.float32)
    assert layer.kv_layout.index_dtype is None
    layouts = [replace(layer.kv_layout, index_dtype=torch.float8_e4m3fn)]
    cache = KVCache.paged(layouts, max_sequences=2, max_length=48, pages=24, page_size=4)
    cache.admit(2)
    out, found = steps(layer, x, cache, (20, 1, 1, 15))
    assert found[-1].indices is not None
    assert out.isfinite().all()
    cached, whole = keys_of(found[-1], T), keys_of(layer.choose(x), T)[:, 22:]
    assert (cached & whole).sum() > 0.8 * whole.sum()


WIDE = {"hidden_size": HIDDEN, "num_heads": 16, "mask": CAUSAL, "device": "cuda", "dtype": torch.bfloat16}
ON_GPU = {
    "latent": lambda: MultiHeadLatentAttention(
        **WIDE,
        q_lora_rank=32,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        rope=Rope(32, interleaved=True),
        select=Indexer(heads=8, head_dim=64, top=32, source="latent", rope=Rope(32)),
    ),
    "grouped": lambda: GroupedQueryAttention(
        **WIDE,
        num_kv_heads=2,
        head_dim=64,
        rope=Rope(64),
        select=replace(INDEXERS["minimax"], head_dim=64, block_size=16, rope=Rope(64)),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
@torch.no_grad()
def test_a_captured_step_chooses_as_each_later_one(name):
    """Also as sequences grow, past what was dense when the graph was captured."""
    torch.manual_seed(0)
    layer, graph, given = ON_GPU[name](), torch.cuda.CUDAGraph(), tokens(2, 1, dtype=torch.bfloat16).cuda()
    caches = [cache_for(Stack(layer), 16, length=256, device="cuda") for _ in range(2)]
    for cache in caches:
        cache.admit(2)
    for step in range(90):
        if step == 40:
            prompt = tokens(2, 100, seed=99, dtype=torch.bfloat16).cuda()
            for cache in caches:
                with cache.step(100) as kv:
                    layer(prompt, kv=kv[0])
        given.copy_(tokens(2, 1, seed=step, dtype=torch.bfloat16))
        with caches[0].step(1) as kv:
            expected = layer(given, kv=kv[0])
        with caches[1].step(1, replay=step > 2) as kv:
            if step < 2:
                out = layer(given, kv=kv[0])
            elif step == 2:
                with torch.cuda.graph(graph):
                    out = layer(given, kv=kv[0])
            if step >= 2:
                graph.replay()
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
