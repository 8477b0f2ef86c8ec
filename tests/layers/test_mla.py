"""Latent attention: its two forms are one function, and the weights that they read are never stale."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_helpers import (
    ABSORBED,
    DEEPSEEK_V3,
    EXPANDED,
    HIDDEN,
    SIZES,
    Stack,
    alone,
    assert_twice_as_good,
    cache_for,
    calls,
    close,
    feed,
    feed_dense,
    gradients,
    latent,
    tokens,
)
from torch import nn

from attnlib import CAUSAL, FULL, KVCache, sliding
from attnlib.layers.mla import cheaper_form


def both(**options):
    """The same weights in the expanded and in the absorbed form."""
    expanded, absorbed = latent("expanded", **options), latent("absorbed", **options)
    absorbed.load_state_dict(expanded.state_dict())
    return expanded, absorbed


OPTIONS = {
    "direct-q": {},
    "q-lora": {"q_lora_rank": 10},
    "no-rope-channels": {"qk_rope_head_dim": 0},
    "bias": {"q_lora_rank": 10, "bias": True},
    "window": {"mask": sliding(3)},
    "wide-values": {"v_head_dim": 14},
}


# The two forms are one function (P10)


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("case", OPTIONS)
def test_forms_agree_in_outputs_and_all_gradients(case, layout):
    expanded, absorbed = both(**OPTIONS[case])
    packing = {"cu_seqlens": torch.tensor([0, 1, 1, 9], dtype=torch.int32)} if layout == "packed" else {}
    x = tokens(9) if packing else tokens(2, 9)
    ours, theirs = (
        gradients(layer, x, lambda x, run=layer: run(x, **packing)) for layer in (absorbed, expanded)
    )
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_forms_agree_over_a_context():
    expanded, absorbed = both(rope=False, mask=FULL)
    x, context = tokens(2, 4), tokens(2, 7, seed=1)
    outs = []
    for layer in (expanded, absorbed):
        memory = context.clone().requires_grad_()
        out = gradients(layer, x, lambda x, run=layer, memory=memory: run(x, context=memory))
        outs.append(out | {"context": memory.grad})
    for name, value in outs[0].items():
        torch.testing.assert_close(outs[1][name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("case", ["q-lora", "no-rope-channels"])
def test_gradcheck(case, form):
    layer = latent(form, **OPTIONS[case])
    assert torch.autograd.gradcheck(layer, tokens(1, 3).requires_grad_())


def eager(layer, x):
    """Causal attention over expanded keys by the textbook, in the layer's own dtype."""
    q_nope, q_rope = layer.query(x, layer.rope.angles(torch.arange(x.shape[1])))
    latent, k_rope = layer.latent(x, layer.rope.angles(torch.arange(x.shape[1])))
    k, v = layer.expand(latent, k_rope)
    scores = torch.einsum("bshd,bthd->bhst", torch.cat((q_nope, q_rope), -1), k) * layer.scale
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return layer.o_proj(torch.einsum("bhst,bthe->bshe", weights, v).flatten(-2))


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms_are_as_exact_as_eager_attention(dtype, form):
    torch.manual_seed(3)
    layer = latent(form, q_lora_rank=10).to(dtype)
    x = tokens(2, 33, dtype=dtype)
    wide = copy.deepcopy(layer).double()
    truth = gradients(wide, x.double(), lambda x: eager(wide, x))
    theirs = gradients(layer, x, lambda x: eager(layer, x))
    ours = gradients(layer, x, layer)
    assert_twice_as_good({"out": ours["out"]}, {"out": theirs["out"]}, {"out": truth["out"]})
    assert_twice_as_good(ours, theirs, truth, factor=3)


# Which form runs


@pytest.mark.parametrize(("form", "width"), [("expanded", EXPANDED), ("absorbed", ABSORBED)])
def test_a_forced_form_runs_everywhere(form, width):
    layer = latent(form)
    model = Stack(layer)
    cache = cache_for(model)
    one, two = cache.admit(2)
    with calls() as seen:
        layer(tokens(2, 5))
        layer(tokens(5), cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32))
        feed(model, cache, {one: tokens(20), two: tokens(3)})  # a fresh prompt
        feed(model, cache, {one: tokens(18)})  # a prompt with history
        feed_dense(model, cache, tokens(2, 1))
    stored = "cached_attention" if form == "absorbed" else "varlen_attention_with_lse"
    assert [name for name, _ in seen] == ["attention", "varlen_attention", "varlen_attention", stored, stored]
    assert {shape[-1] for _, shape in seen} == {width}


def test_auto_takes_the_form_of_the_cost_rule():
    layer = latent("auto", kv_lora_rank=64, qk_nope_head_dim=16, v_head_dim=16)
    model = Stack(layer)
    cache = cache_for(model)
    cache.admit(2)
    with calls() as seen:
        layer(tokens(1, 40))  # 2 * 64 channels a score, against 2 * 16
        feed_dense(model, cache, tokens(2, 20))  # a fresh prompt
        feed_dense(model, cache, tokens(2, 1))  # a token each
    small = latent("auto", kv_lora_rank=4, qk_nope_head_dim=16, v_head_dim=16)
    with calls() as also_seen:
        small(tokens(1, 40))
    assert [shape[-1] for _, shape in seen] == [20, 20, 68]
    assert [shape[-1] for _, shape in also_seen] == [8]


sizes = st.integers(1, 600)
ranks = st.fixed_dictionaries({"rank": sizes, "nope": sizes, "rope": st.integers(0, 128), "value": sizes})


@given(ranks, st.integers(1, 5000), st.integers(1, 5000))
def test_the_cost_rule_counts_multiplications(ranks, queries, keys):
    rank, nope, rope, value = (ranks[name] for name in ("rank", "nope", "rope", "value"))
    pairs = queries * keys
    expanded = keys * rank * nope + keys * rank * value + pairs * (nope + rope) + pairs * value
    absorbed = queries * nope * rank + pairs * (rank + rope) + pairs * rank + queries * rank * value
    cheaper = "absorbed" if absorbed < expanded else "expanded"
    assert cheaper_form(queries, keys, **ranks) == cheaper


@given(st.integers(1, 2**20), st.integers(1, 16))
def test_decoding_with_deepseek_sizes_is_absorbed(history, queries):
    assert cheaper_form(queries, history + 64 * queries, **DEEPSEEK_V3) == "absorbed"


@given(st.integers(1, 2**20))
def test_a_fresh_prompt_with_deepseek_sizes_is_expanded(n):
    assert cheaper_form(n, n, **DEEPSEEK_V3) == "expanded"


@given(st.integers(1, 10_000), st.integers(1, 10_000), sizes, sizes, st.integers(0, 128))
def test_a_small_rank_is_absorbed(queries, more, nope, value, rope):
    rank = max(1, (nope + value - 1) // 2)
    if 2 * rank < nope + value:
        assert (
            cheaper_form(queries, queries + more, rank=rank, nope=nope, rope=rope, value=value) == "absorbed"
        )


@given(ranks, st.integers(2, 5000), st.integers(1, 5000))
def test_fewer_queries_never_turn_absorbed_into_expanded(ranks, queries, keys):
    if cheaper_form(queries, keys, **ranks) == "absorbed":
        assert cheaper_form(queries - 1, keys, **ranks) == "absorbed"


# Storage, and slices of heads


def test_a_token_stores_the_latent_and_one_rotary_key():
    layer = latent(dtype=torch.bfloat16)
    cache = KVCache.contiguous([layer.kv_layout], max_sequences=1, max_length=1)
    assert cache.nbytes == 2 * (SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"])


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_slices_of_heads_add_up(form):
    """Tensor parallelism by hand: two ranks with two heads each."""
    layer, x = latent(form, q_lora_rank=10), tokens(2, 5)
    parts = [copy.deepcopy(layer) for _ in range(2)]
    for part, heads in zip(parts, (slice(0, 2), slice(2, 4)), strict=True):
        for name in ("q_b_proj", "kv_b_proj"):
            rows = getattr(part, name)
            rows.weight = nn.Parameter(rows.weight.unflatten(0, (4, -1))[heads].flatten(0, 1).detach())
        columns = part.o_proj.weight.unflatten(1, (4, -1))[:, heads].flatten(1, 2)
        part.o_proj.weight = nn.Parameter(columns.detach())
    close(sum(part(x) for part in parts), layer(x))
    cached = []
    for part in parts:
        cache = cache_for(Stack(part))
        cache.admit(2)
        cached.append(torch.cat([feed_dense(part_stack(part), cache, chunk) for chunk in x.split(2, 1)], 1))
    close(sum(cached), layer(x))


def part_stack(layer):
    """A model of one layer without the residual."""
    return lambda x, kv: layer(x, kv=kv[0])


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**16))
def test_the_two_forms_read_one_cache_alike(length, seed):
    expanded, absorbed = both(mask=CAUSAL)
    x = tokens(1, length + 1, seed=seed)
    cache = cache_for(Stack(expanded), 4)
    first, *_ = cache.admit(1)
    outs = []
    for write, read in itertools.product((expanded, absorbed), repeat=2):
        cache.truncate(first, 0)
        feed_dense(Stack(write), cache, x[:, :length])
        outs.append(feed_dense(Stack(read), cache, x[:, length:])[0])
    for out in outs:
        close(out, alone(Stack(expanded), x[0])[length:])
    assert out.shape[-1] == HIDDEN
