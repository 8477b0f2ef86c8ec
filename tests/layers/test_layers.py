"""Laws that every kind of layer keeps: packing, positions, contexts, dropout, construction, casts and
training.
"""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_helpers import (
    BOTH,
    HIDDEN,
    KINDS,
    Stack,
    alone,
    cache_for,
    close,
    feed_dense,
    gradients,
    make,
    stack,
    tokens,
)
from torch.utils.checkpoint import checkpoint

from attnlib import CAUSAL, FULL, GroupedQueryAttention, Mask, Rope, attention, masks, rotate, sliding

# Inputs


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 2**16))
def test_packed_is_padded_is_per_sequence(kind, lengths, seed):
    model = stack(kind, (CAUSAL, sliding(3)))
    x = tokens(sum(lengths), seed=seed)
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = alone_packed(model, x, offsets)
    padded = torch.full((len(lengths), max(lengths), HIDDEN), 7.0, dtype=x.dtype)
    for row, part in zip(padded, x.split(lengths), strict=True):
        row[: len(part)] = part  # and others behind it, which causal attention never sees
    with torch.no_grad():
        padded = model(padded)
    for n, (part, out) in enumerate(zip(x.split(lengths), packed.split(lengths), strict=True)):
        close(out, alone(model, part))
        close(padded[n, : len(part)], out)


def alone_packed(model, x, offsets):
    with torch.no_grad():
        return model(x, cu_seqlens=offsets)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_gradients_are_the_sum_over_sequences(kind):
    layer, x = make(kind), tokens(7)
    offsets = torch.tensor([0, 4, 7], dtype=torch.int32)
    packed = gradients(layer, x, lambda x: layer(x, cu_seqlens=offsets))
    split = gradients(layer, x, lambda x: torch.cat([layer(part[None])[0] for part in x.split([4, 3])]))
    for name in packed:
        torch.testing.assert_close(packed[name], split[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [None, 4])
def test_cross_attention_reads_a_stored_context(kind, page_size):
    layer = make(kind, rope=False, mask=FULL)
    contexts, x = [tokens(7, seed=1), tokens(3, seed=2)], tokens(2, 4)
    cache = cache_for(Stack(layer), page_size)
    handles = cache.admit(2)
    with torch.no_grad():
        with cache.step(dict(zip(handles, (7, 3), strict=True))) as (kv,):
            layer.append_context(torch.cat(contexts), kv)
        with cache.read(4) as (kv,):
            dense = layer(x, context=kv.view())
        with cache.read({handles[1]: 1, handles[0]: 4}) as (kv,):
            packed = layer(torch.cat((x[1, :1], x[0])), context=kv.view())
    for n, context in enumerate(contexts):
        close(dense[n], alone(layer, x[n], context=context[None]))
    close(packed, torch.cat((dense[1, :1], dense[0])))
    assert [cache.length(handle) for handle in handles] == [7, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_of_keys_hide_padding(kind):
    """On either side, with its positions, in outputs and gradients."""
    layer, lengths, left = make(kind), (5, 9, 1), (4, 0, 3)
    starts, ends = (
        torch.tensor(left).int(),
        torch.tensor([n + m for n, m in zip(lengths, left, strict=True)]).int(),
    )
    x = tokens(3, 9)
    positions = torch.arange(9) - starts[:, None]
    out = layer(x, key_starts=starts, key_ends=ends, positions=positions)
    weights = tokens(3, 9, seed=1)
    alone_outs = [layer(x[n : n + 1, a:b])[0] for n, (a, b) in enumerate(zip(starts, ends, strict=True))]
    for n, (a, b) in enumerate(zip(starts, ends, strict=True)):
        close(out[n, a:b], alone_outs[n])
    padded = sum(
        (out[n, a:b] * weights[n, a:b]).sum() for n, (a, b) in enumerate(zip(starts, ends, strict=True))
    )
    apart = sum(
        (alone_outs[n] * weights[n, a:b]).sum() for n, (a, b) in enumerate(zip(starts, ends, strict=True))
    )
    for ours, theirs in zip(
        *(torch.autograd.grad(y, list(layer.parameters())) for y in (padded, apart)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_of_several_lengths_are_packed_or_bounded(kind):
    layer, x, lengths = make(kind, rope=False, mask=FULL), tokens(3, 4), (7, 0, 3)
    contexts = [tokens(n, seed=n) for n in lengths]
    padded = torch.full((3, 7, HIDDEN), 9.0, dtype=x.dtype)
    for row, context in zip(padded, contexts, strict=True):
        row[: len(context)] = context
    ends, queries = torch.tensor(lengths).int(), torch.tensor([0, 4, 8, 12]).int()
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    bounded = layer(x, context=padded, key_ends=ends)
    packed = layer(
        x.flatten(0, 1), context=torch.cat(contexts), cu_seqlens=queries, cu_seqlens_context=offsets
    )
    close(packed.view(3, 4, HIDDEN), bounded)
    for n in (0, 2):
        close(bounded[n], alone(layer, x[n], context=contexts[n][None]))


@pytest.mark.parametrize("kind", KINDS)
def test_cross_attention_depends_on_the_set_of_keys_only(kind):
    layer, x, context = make(kind, rope=False, mask=FULL), tokens(2, 4), tokens(2, 6, seed=1)
    out = layer(x, context=context)
    close(layer(x, context=context.flip(1)), out)
    close(layer(x, context=x), layer(x))
    close(layer(x, context=context[:, :1]), layer(x, context=context[:, :1].expand(-1, 6, -1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mask", "fewest"), [(CAUSAL, 6), (Mask(left=2, right=1), 5), (Mask(right=0, prefix=1), 1)], ids=str
)
def test_a_mask_aligns_the_last_query_with_the_last_token_of_a_context(kind, mask, fewest):
    """With fewer keys, the first query would see none, and return the bias of the output."""
    layer, x, context = make(kind, rope=False, mask=mask), tokens(2, 6), tokens(2, 8, seed=1)
    full = copy.deepcopy(layer)
    full.mask = FULL
    shown = mask.visible(torch.arange(2, 8)[:, None], torch.arange(8))[None, None]
    close(layer(x, context=context), full(x, context=context, mask=masks.mask_tensor(shown)))
    layer(x, context=context[:, :fewest])
    layer(x, context=context[:, :0])  # which no mask shows
    for run, name in ((layer, "the layer"), (partial(full, mask=mask), "mask=")) if fewest > 1 else ():
        expected = rf"context: expected more .* 6 .* of {name} aligns .* got {fewest - 1}, .* mask=FULL"
        with pytest.raises(ValueError, match=expected):
            run(x, context=context[:, : fewest - 1])


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_in_training_only(kind):
    layer, x = make(kind, dropout_p=0.5), tokens(2, 20)
    plain = make(kind)
    plain.load_state_dict(layer.state_dict())
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(layer(x))
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])
    assert not torch.allclose(outs[0], plain(x))
    cache = cache_for(Stack(layer))
    cache.admit(2)
    close(feed_dense(Stack(layer), cache, x), (x + plain(x)).detach())  # a cached step is never training
    assert torch.equal(layer.eval()(x), plain(x))


EXTRAS = {
    "gqa": {"sinks": True, "alibi": True, "qk_norm": True, "bias": True},
    "mla-auto": {"q_lora_rank": 10},
}


def state(layer):
    """Parameters and buffers, those that state_dict leaves out included."""
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


@pytest.mark.parametrize("kind", EXTRAS)
def test_reset_after_to_empty_is_a_new_layer(kind):
    options = EXTRAS[kind] | {"dtype": torch.float32}
    empty = make(kind, device="meta", **options)
    assert all(value.is_meta for value in state(empty).values())
    layer = empty.to_empty(device="cpu")
    for value in state(layer).values():
        value.data.fill_(torch.nan)
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    fresh = state(make(kind, **options))
    assert fresh.keys() == state(layer).keys()
    assert all(torch.equal(value, fresh[name]) for name, value in state(layer).items())
    assert layer(tokens(1, 3, dtype=torch.float32)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_on_meta_only_shapes_are_computed(kind):
    """Fault 29."""
    layer, x = make(kind, device="meta"), tokens(2, 5).to("meta").requires_grad_()
    out = layer(x)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.is_meta
    assert layer(x[0], cu_seqlens=torch.zeros(3, dtype=torch.int32, device="meta")).shape == (5, HIDDEN)


NAMES = {
    "mha": ({}, "q_proj.weight k_proj.weight v_proj.weight o_proj.weight"),
    "gqa": (
        EXTRAS["gqa"] | {"output_bias": False},
        "q_proj.weight q_proj.bias k_proj.weight k_proj.bias v_proj.weight v_proj.bias o_proj.weight "
        "q_norm.weight k_norm.weight sinks",
    ),
    "mqa": (
        {"output_bias": True},
        "q_proj.weight k_proj.weight v_proj.weight o_proj.weight o_proj.bias",
    ),
    "mla-auto": (
        EXTRAS["mla-auto"] | {"bias": True},
        "q_a_proj.weight q_a_proj.bias q_a_layernorm.weight q_b_proj.weight kv_a_proj_with_mqa.weight "
        "kv_a_proj_with_mqa.bias kv_a_layernorm.weight kv_b_proj.weight o_proj.weight o_proj.bias",
    ),
    "mla-absorbed": (
        {},
        "q_proj.weight kv_a_proj_with_mqa.weight kv_a_layernorm.weight kv_b_proj.weight o_proj.weight",
    ),
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_state_dict_has_the_names_of_transformers_and_no_buffers(kind):
    options, names = NAMES[kind]
    assert set(make(kind, **options).state_dict()) == set(names.split())


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_shares_nothing(kind):
    layer, x = make(kind), tokens(2, 5)
    out, twin = layer(x), copy.deepcopy(layer)
    assert torch.equal(twin(x), out)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(layer(x), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", EXTRAS)
def test_a_cast_layer_is_one_made_in_that_dtype(kind, dtype):
    made = make(kind, **EXTRAS[kind], dtype=dtype)
    cast = make(kind, **EXTRAS[kind], dtype=torch.float32).to(dtype)
    cast.load_state_dict(made.state_dict())
    x = tokens(2, 5, dtype=dtype)
    assert torch.equal(cast(x), made(x))
    assert cast(x).dtype == cast.kv_layout.dtype == dtype


@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)  # torch's RMSNorm, once
@pytest.mark.parametrize("kind", KINDS)
def test_a_train_step_under_autocast(kind):
    layer, x = make(kind, dtype=torch.float32), tokens(2, 33, dtype=torch.float32)
    truth = gradients(layer, x, layer)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    ours = gradients(layer, x, run)
    assert ours["out"].dtype == torch.bfloat16
    for name, exact in truth.items():
        if name != "out":
            assert ours[name].dtype == torch.float32
        # Every projection and the attention round to 8 bits once, and these errors add up.
        assert (ours[name].float() - exact).norm() <= 16 * 2**-9 * exact.norm(), name


# Training


@pytest.mark.parametrize("kind", BOTH)
def test_training_after_inference_mode(kind):
    """Fault 32: nothing made in inference mode stays behind, in the layer or in the cache."""
    layer, x = make(kind), tokens(1, 5)
    model = Stack(layer)
    expected = gradients(layer, x, layer)
    with torch.inference_mode():
        cache = cache_for(model)
        cache.admit()
        layer(x)
        first = feed_dense(model, cache, x[:, :3])
    trained = gradients(layer, x, layer)
    assert all(torch.equal(trained[name], expected[name]) for name in expected)
    close(torch.cat((first, feed_dense(model, cache, x[:, 3:])), 1), model(x).detach())


@pytest.mark.parametrize("kind", BOTH)
def test_checkpointing_repeats_its_dropout(kind):
    layer, x = make(kind, dropout_p=0.4), tokens(2, 9)
    results = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(3)
        results.append(gradients(layer, x, run))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    torch.manual_seed(4)
    assert not torch.equal(gradients(layer, x, layer)["x"], results[0]["x"])


@pytest.mark.parametrize("kind", BOTH)
def test_one_trained_weight_gets_the_gradient_it_gets_among_all(kind):
    """Fault 33."""
    layer, x = make(kind), tokens(1, 5)
    expected = gradients(layer, x, layer)
    for name, parameter in layer.named_parameters():
        layer.requires_grad_(False)
        parameter.requires_grad_()
        layer.zero_grad()
        generator = torch.Generator().manual_seed(1)
        layer(x).backward(torch.randn(x.shape, generator=generator, dtype=torch.float64))
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_nothing_gives_nothing(kind, shape):
    layer = make(kind, mask=sliding(3))
    results = gradients(layer, tokens(*shape), layer)
    assert results["out"].shape == (*shape, HIDDEN)
    assert all(not value.any() for name, value in results.items())


@pytest.mark.parametrize("width", [3, 11])
def test_values_of_another_width_than_keys(width):
    """Dense against attention itself, and step by step over a cache that stores no more than they have."""
    sizes = {"num_kv_heads": 2, "head_dim": 6, "v_head_dim": width}
    layer = GroupedQueryAttention(HIDDEN, 4, **sizes, mask=CAUSAL, rope=Rope(6), dtype=torch.float64)
    x = tokens(2, 9)
    angles = layer.rope.angles(torch.arange(9))
    q, k = (rotate(p(x).unflatten(-1, (-1, layer.head_dim)), angles) for p in (layer.q_proj, layer.k_proj))
    v = layer.v_proj(x).unflatten(-1, (-1, width))
    out = layer.o_proj(attention(q, k, v, mask=CAUSAL, scale=layer.scale).flatten(-2))
    close(layer(x), out)
    assert layer.kv_layout.value_dim == width
    model = Stack(layer)
    cache = cache_for(model)
    cache.admit(2)
    with torch.no_grad():
        close(torch.cat([feed_dense(model, cache, part) for part in x.split((5, 1, 3), 1)], 1), model(x))
