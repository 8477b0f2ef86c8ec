"""Parameters, layouts, FLOPs and traffic of a shape are those of its layer; ranks of tensor parallelism add
up.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from size_helpers import grouped_shapes, latent_shapes, make_layer, shapes, stores
from torch.utils.flop_counter import FlopCounterMode

from attnlib import KVCache, Mask
from attnlib.layers.mla import cheaper_form
from attnlib.sizes import (
    MODELS,
    GroupedShape,
    LatentShape,
    Model,
    decode_bytes,
    decode_flops,
    prefill_flops,
    variants,
)

lengths = st.integers(1, 12)


def seen(shape, i):
    """The keys that query i of a prompt sees."""
    return slice(0 if shape.window is None else max(0, i - shape.window + 1), i + 1)


def counted(call):
    """What a call returns, and the FLOPs of its matrix products by torch's own count."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = call()
    return out, counter.get_total_flops()


def weighted(scores, values):
    """``[h, t]`` scores and ``[h, t, e]`` values to ``[h, e]``."""
    return torch.bmm(torch.softmax(scores, -1)[:, None], values)[:, 0]


def grouped(layer, shape, x, cached, query):
    """Rows of ``layer(x)``, one query at a time over the keys it sees; keys before ``query`` come from the
    cache.
    """
    k, v = (torch.cat(pair) for pair in zip(cached, layer.key_value(x[query:]), strict=True))
    q = layer.query(x[query:], None)
    group = shape.num_heads // shape.num_kv_heads
    rows = []
    for i in range(query, len(x)):
        keys, values = (z[seen(shape, i)].repeat_interleave(group, 1).transpose(0, 1) for z in (k, v))
        scores = torch.bmm(keys, q[i - query, :, :, None])[..., 0] * layer.scale
        rows.append(weighted(scores, values))
    return output(layer, x[query:], rows)


def output(layer, x, rows):
    """The projection of the rows of all queries ``[h, e]``, gated if the layer has a gate."""
    out = torch.stack(rows)
    return layer.o_proj((layer.gate.apply(out, layer.g_proj(x)) if layer.gate else out).flatten(1))


def expanded(layer, shape, x):
    """MLA with the keys and values of each head made from the latents."""
    q = torch.cat(layer.query(x, None), -1)
    k, v = layer.expand(*layer.latent(x, None))
    rows = []
    for i in range(len(x)):
        keys, values = (z[seen(shape, i)].transpose(0, 1) for z in (k, v))
        rows.append(weighted(torch.bmm(keys, q[i, :, :, None])[..., 0] * layer.scale, values))
    return output(layer, x, rows)


def absorbed(layer, shape, x, cached, query):
    """MLA over the latents themselves; those before ``query`` come from the cache."""
    latent, k_rope = layer.latent(x[query:], None)
    latent = torch.cat((cached[0], latent))
    k = latent if k_rope is None else torch.cat((latent, torch.cat((cached[1], k_rope))), -1)
    q_nope, q_rope = layer.query(x[query:], None)
    k_up, v_up = layer._up_projections()
    rows = []
    for i in range(query, len(x)):
        q = torch.cat(
            (torch.bmm(q_nope[i - query, :, None], k_up)[:, 0], q_rope[i - query]), -1
        )  # [h, r + p]
        weights = torch.softmax(q @ k[seen(shape, i)].T * layer.scale, -1)
        rows.append(torch.bmm(v_up, (weights @ latent[seen(shape, i)])[..., None])[..., 0])
    return output(layer, x[query:], rows)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_parameters_and_layouts_are_those_of_the_layers(model):
    for variant in variants(model):
        layers = {shape: make_layer(shape) for shape in variant.layers}
        real = sum(sum(x.numel() for x in layers[shape].parameters()) for shape in variant.layers)
        assert variant.parameters == real
        assert variant.layouts(dtype=torch.bfloat16) == [
            layers[shape].kv_layout for shape in variant.layers if shape.own_keys
        ]


@given(shape=shapes)
def test_parameters_of_any_shape(shape):
    layer = make_layer(shape)
    assert shape.parameters == sum(x.numel() for x in layer.parameters())
    assert shape.layout(dtype=torch.bfloat16) == layer.kv_layout
    assert shape.weights == sum(x.numel() for x in layer.parameters() if x.ndim == 2)


@given(shape=shapes)
def test_a_layer_without_keys_has_no_parameters_for_them(shape):
    layer, shape = make_layer(replace(shape, own_keys=False)), replace(shape, own_keys=False)
    assert shape.parameters == sum(x.numel() for x in layer.parameters())
    assert shape.weights == sum(x.numel() for x in layer.parameters() if x.ndim == 2)
    assert Model("reads", (shape,)).layouts(dtype=torch.bfloat16) == []


@given(shape=grouped_shapes(), length=lengths)
@settings(max_examples=40)
def test_flops_of_grouped_attention(shape, length):
    layer = make_layer(shape, device="cpu", dtype=torch.float64)
    if layer.sinks is not None:
        layer.sinks = None  # no product of matrices, and not in the eager form here
    x = torch.randn(length, shape.hidden_size, dtype=torch.float64)
    at_zero = layer.rope and layer.rope.angles(
        torch.zeros(length, dtype=torch.long)
    )  # where nothing is rotated
    expected = layer(x[None], angles=at_zero)[0].detach()
    nothing = torch.empty(2, 0, shape.num_kv_heads, shape.head_dim, dtype=torch.float64)
    out, flops = counted(lambda: grouped(layer, shape, x, nothing, 0))
    torch.testing.assert_close(out, expected)
    assert prefill_flops(shape, length) == flops
    before = [z.detach() for z in layer.key_value(x[:-1])]
    out, flops = counted(lambda: grouped(layer, shape, x, before, length - 1))
    torch.testing.assert_close(out, expected[-1:])
    assert decode_flops(shape, length) == flops


@given(shape=latent_shapes(), length=lengths)
@settings(max_examples=40)
def test_flops_of_latent_attention(shape, length):
    layer = make_layer(shape, device="cpu", dtype=torch.float64)
    x = torch.randn(length, shape.hidden_size, dtype=torch.float64)
    at_zero = layer.rope and layer.rope.angles(
        torch.zeros(length, dtype=torch.long)
    )  # where nothing is rotated
    expected = layer(x[None], angles=at_zero)[0].detach()
    nothing = [torch.empty(0, n, dtype=torch.float64) for n in (shape.kv_lora_rank, shape.qk_rope_head_dim)]
    forms = {
        "expanded": counted(lambda: expanded(layer, shape, x)),
        "absorbed": counted(lambda: absorbed(layer, shape, x, nothing, 0)),
    }
    for out, _ in forms.values():
        torch.testing.assert_close(out, expected)
    sizes = {"rank": shape.kv_lora_rank, "nope": shape.qk_nope_head_dim, "rope": shape.qk_rope_head_dim}
    chosen = cheaper_form(length, length, **sizes, value=shape.v_head_dim)
    assert prefill_flops(shape, length) == forms[chosen][1]
    before = [z if z is None else z.detach() for z in layer.latent(x[:-1], None)]
    out, flops = counted(lambda: absorbed(layer, shape, x, before, length - 1))
    torch.testing.assert_close(out, expected[-1:])
    assert decode_flops(shape, length) == flops


@given(shape=shapes, context=lengths, batch=st.integers(1, 3), store=stores)
def test_a_step_reads_the_weights_and_every_visible_slot(shape, context, batch, store):
    layer = make_layer(shape, dtype=torch.float16)
    layout = shape.layout(dtype=torch.float16, storage_dtype=store)
    [stored] = KVCache.paged([layout], pages=1, page_size=1, max_sequences=1, device="meta")._layers
    slot = sum(plane[0, 0].nbytes for plane in stored.planes.values())
    mask: Mask = layer.mask
    visible = int(mask.visible(torch.tensor(context - 1), torch.arange(context)).sum())
    weights = sum(x.nbytes for x in layer.parameters())
    read = decode_bytes(shape, context, batch=batch, dtype=torch.float16, storage_dtype=store)
    assert read == weights + batch * visible * slot


@given(heads=st.integers(1, 4), group=st.integers(1, 4), ranks=st.integers(1, 4), store=stores)
def test_ranks_share_kv_heads_or_copy_the_last(heads, group, ranks, store):
    shape = GroupedShape(hidden_size=8, num_heads=heads * group, num_kv_heads=heads, head_dim=4)
    stored = {"dtype": torch.bfloat16, "storage_dtype": store}
    if shape.num_heads % ranks or (heads % ranks and ranks % heads):
        with pytest.raises(ValueError, match="ranks: expected"):
            shape.shard(ranks)
        return
    rank = shape.shard(ranks)
    total = ranks * rank.layout(**stored).token_bytes
    assert total == shape.layout(**stored).token_bytes * max(1, ranks // heads)
    assert rank.num_heads * ranks == shape.num_heads
    if heads % ranks == 0:
        assert ranks * rank.weights == shape.weights


def test_every_rank_holds_all_of_a_latent():
    shape = LatentShape(
        hidden_size=64,
        num_heads=8,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    )
    rank = shape.shard(4)
    assert rank.num_heads == 2
    assert rank.layout(dtype=torch.bfloat16) == shape.layout(dtype=torch.bfloat16)
    copied = 64 * 16 + 64 * (24 + 4)  # the two down-projections
    assert 4 * (rank.weights - copied) == shape.weights - copied


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 0}, "num_heads: expected at least 1, got 0"),
        ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads=4, got 3"),
        ({"selected": 0}, "selected: expected at least 1, got 0"),
        ({"window": 0}, "window: expected at least 1, got 0"),
    ],
)
def test_impossible_shapes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        GroupedShape(**{"hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2} | sizes)


def test_impossible_latents_are_refused():
    sizes = {"hidden_size": 8, "num_heads": 2, "kv_lora_rank": 4, "qk_nope_head_dim": 2, "v_head_dim": 2}
    with pytest.raises(ValueError, match="q_lora_rank: expected at least 1, got 0"):
        LatentShape(**sizes, q_lora_rank=0, qk_rope_head_dim=0)
    with pytest.raises(ValueError, match="qk_rope_head_dim: expected at least 0, got -1"):
        LatentShape(**sizes, q_lora_rank=None, qk_rope_head_dim=-1)


@given(shape=shapes, selected=st.integers(1, 40), length=st.integers(1, 60))
def test_selected_keys_are_a_window_without_its_cache(shape, selected, length):
    """Prompts and steps take what a window of as many keys takes; every token stays stored."""
    shape = replace(shape, window=None)
    chooses, slides = replace(shape, selected=selected), replace(shape, window=selected)
    assert decode_flops(chooses, length) == decode_flops(slides, length)
    read = {"batch": 3, "dtype": torch.bfloat16}
    assert decode_bytes(chooses, length, **read) == decode_bytes(slides, length, **read)
    assert chooses.layout(dtype=torch.bfloat16) == shape.layout(dtype=torch.bfloat16)
    pairs = sum(min(i + 1, selected) for i in range(length))
    assert prefill_flops(chooses, length) == 2 * (length * shape.weights + pairs * chooses.prompt_pair)
    with pytest.raises(ValueError, match=r"^ranks: expected 1 for a layer whose queries select keys, got 2$"):
        decode_flops(chooses, length, ranks=2)
