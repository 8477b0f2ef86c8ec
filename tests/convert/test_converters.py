"""A converter of checkpoint layers against the same conversion of layers, and what its errors say."""

import itertools

import pytest
import torch
from convert_helpers import grouped as layer_of
from convert_helpers import heads_of, state_copy, tokens, with_kv

from attnlib import Rope
from attnlib.convert import Calibration, CheckpointError, RequestError, mha_to_gqa
from attnlib.convert.checkpoint.layer import LayerShape
from attnlib.convert.heads.converter import ERRORS, grouped

ROPE = {"half": {}, "partial": {"partial_rotary_factor": 0.5}}


def config_of(layer, **fields):
    shape = {
        "hidden_size": layer.hidden_size,
        "num_attention_heads": layer.num_heads,
        "head_dim": layer.head_dim,
    }
    return {"model_type": "llama", "num_key_value_heads": layer.num_kv_heads} | shape | fields


def shape_of(layer, index=0):
    return LayerShape(index, layer.hidden_size, layer.num_heads, layer.num_kv_heads, layer.head_dim)


def converted(layer, kv_heads, config=None, **options):
    return grouped(config or config_of(layer), kv_heads, **options)(state_copy(layer), shape_of(layer))


@pytest.mark.parametrize(
    ("merge", "align"),
    [
        *itertools.product(["mean", "first", "energy"], ["none", "values", "all"]),
        (None, None),
        ("principal-values", None),
    ],
)
@pytest.mark.parametrize("grouping", ["neighbours", "similar", None])
@pytest.mark.parametrize(
    ("size", "bias", "dtype"), [((6, 1), True, torch.float32), ((4, 2), False, torch.bfloat16)]
)
def test_it_converts_as_mha_to_gqa_does(merge, align, grouping, size, bias, dtype):
    layer, text = layer_of(size, bias=bias, dtype=dtype), Calibration.of([tokens(70)])
    options = {"merge": merge, "align": align, "grouping": grouping}
    new = converted(layer, 2, calibrations=lambda index: text, **options)
    wanted = mha_to_gqa(layer, 2, calibration=text, **options).state_dict()
    assert new.weights.keys() == wanted.keys()
    assert all(torch.equal(new.weights[name], wanted[name]) for name in wanted)
    assert all(new.weights[name].dtype == dtype for name in wanted)
    assert new.config == {"num_key_value_heads": 2}


@pytest.mark.parametrize("align", ["none", "values", "all"])
def test_without_text_weights_alone_decide(align):
    layer = layer_of((6, 1), dtype=torch.float32)
    new = converted(layer, 3, merge="energy", align=align, grouping="similar")
    wanted = mha_to_gqa(layer, 3, merge="energy", align=align, grouping="similar").state_dict()
    assert all(torch.equal(new.weights[name], wanted[name]) for name in wanted)


def test_each_layer_has_its_own_calibration():
    layer, texts = layer_of((4, 1)), [Calibration.of([tokens(40, seed=n)]) for n in range(2)]
    convert_layer = grouped(config_of(layer), 1, merge="energy", calibrations=texts.__getitem__)
    for index, text in enumerate(texts):
        new = convert_layer(state_copy(layer), shape_of(layer, index)).weights
        assert new["k_proj.weight"].equal(
            mha_to_gqa(layer, 1, merge="energy", calibration=text).k_proj.weight
        )


@pytest.mark.parametrize("merge", ["principal", "principal-values", "mean"])
def test_errors_are_what_scores_and_outputs_miss(merge):
    layer, x = layer_of((4, 2), rope="none", bias=True, output_bias=False), tokens(50)
    options = {"merge": merge, "grouping": "neighbours"}
    new = converted(
        layer, 2, config_of(layer, model_type="bert"), calibrations=lambda _: Calibration.of([x]), **options
    )

    def heads(weights, name):
        rows = (x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]).unflatten(-1, (-1, layer.head_dim))
        return rows.repeat_interleave(layer.num_heads // rows.shape[1], 1)

    def scores(weights):
        return torch.einsum("thd,shd->hts", heads(weights, "q_proj"), heads(weights, "k_proj"))

    def outputs(weights):
        o = weights["o_proj.weight"].unflatten(1, (-1, layer.head_dim))
        return torch.einsum("mhd,thd->htm", o, heads(weights, "v_proj"))

    old = state_copy(layer)
    missed = scores(old) - scores(new.weights)
    assert new.errors["key_error"] == pytest.approx(float(missed.norm() / scores(old).norm()), rel=1e-6)
    missed = outputs(old) - outputs(new.weights)
    assert new.errors["value_error"] == pytest.approx(float(missed.norm() / outputs(old).norm()), rel=1e-6)
    assert new.errors["query_rounding"] == new.errors["output_rounding"] == 0
    assert tuple(new.errors) == ERRORS


def turned_copies(dtype):
    """Two KV heads, the second of which is the first in other coordinates."""
    layer = layer_of((2, 1), dtype=torch.float64)
    heads = heads_of(layer)
    phase = torch.polar(torch.ones(4).double(), torch.arange(1, 5).double())
    pairs = heads.pairs(heads.k[:1]) * phase[:, None]
    turned = torch.cat((pairs.real, pairs.imag), 1)
    order = torch.randperm(layer.head_dim)
    return with_kv(
        layer, k=torch.cat((heads.k[:1], turned)), v=torch.cat((heads.v[:1], heads.v[:1, order]))
    ).to(dtype)


def test_aligned_heads_lose_their_rounding_only():
    exact = converted(turned_copies(torch.float64), 1, align="all")
    assert max(exact.errors.values()) < 1e-12
    single = converted(turned_copies(torch.float32), 1, align="all").errors
    assert 1e-9 < single["query_rounding"] < 1e-7
    assert max(single.values()) < 1e-6
    half = converted(turned_copies(torch.bfloat16), 1, align="all").errors
    assert 1e-4 < half["query_rounding"] < 1e-2
    assert converted(turned_copies(torch.bfloat16), 1).errors["key_error"] > 0.1


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert"])
def test_as_many_heads_as_there_are_is_a_copy(model_type):
    layer = layer_of((4, 2))
    names = {"n_embd": layer.hidden_size, "n_head": layer.num_heads} if model_type == "gpt2" else {}
    weights = state_copy(layer)
    config = config_of(layer, model_type=model_type, **names)
    new = grouped(config, 4, merge="energy", align="all", grouping="similar")(weights, shape_of(layer))
    assert all(new.weights[name] is weights[name] for name in weights)
    assert new.config == {}
    assert set(new.errors.values()) == {0.0}


def test_gpt2_and_bert_have_no_rope():
    layer = layer_of((4, 1), rope="none")
    new = converted(layer, 2, config_of(layer, model_type="bert"), align="all")
    wanted = mha_to_gqa(layer, 2, align="all").state_dict()
    assert all(torch.equal(new.weights[name], wanted[name]) for name in wanted)


def test_gains_pass_what_they_can_and_forbid_the_rest():
    layer = layer_of((4, 1), qk_norm=True, dtype=torch.float32)
    layer.k_norm.weight.data[3] = 2.0
    new = converted(layer, 2, align="values")
    assert new.weights["k_norm.weight"].equal(layer.k_norm.weight)
    with pytest.raises(
        RequestError, match=r'layer 0: align: .*weights that differ within a rotated pair.*"values"'
    ):
        converted(layer, 2, align="all")


@pytest.mark.parametrize("kv_heads", [0, -2, 3, 5, 8, 12])
def test_a_number_of_heads_that_does_not_divide(kv_heads):
    with pytest.raises(RequestError, match=rf"num_kv_heads: expected .*got {kv_heads}") as error:
        grouped(config_of(layer_of((4, 2))), kv_heads)
    assert kv_heads < 1 or "4 KV heads" in str(error.value)


@pytest.mark.parametrize("kv_heads", [2.0, True, "2", None])
def test_a_number_of_heads_that_is_none(kv_heads):
    with pytest.raises(RequestError, match="num_kv_heads"):
        grouped(config_of(layer_of((4, 2))), kv_heads)


@pytest.mark.parametrize(
    ("option", "value"), [("merge", "learned"), ("merge", "median"), ("align", "keys"), ("grouping", 2)]
)
def test_an_unknown_option(option, value):
    with pytest.raises(RequestError, match=f"{option}: expected one of .*got {value!r}"):
        grouped(config_of(layer_of((4, 2))), 2, **{option: value})


def test_keys_of_a_partial_rope_are_not_turned_for_loaders_disagree():
    layer = layer_of((4, 1), rope="partial")
    config = config_of(layer, partial_rotary_factor=0.5)
    assert layer.rope == Rope(4)
    with pytest.raises(RequestError, match=r'loaders disagree about a partial_rotary_factor.*align="values"'):
        grouped(config, 2, align="all")
    new = converted(layer, 2, config, align="values")
    assert new.weights["v_proj.weight"].equal(mha_to_gqa(layer, 2, align="values").v_proj.weight)


def test_weights_that_are_not_finite_cannot_be_merged():
    layer = layer_of((4, 1))
    layer.v_proj.weight.data[3, 3] = torch.nan
    with pytest.raises(CheckpointError, match=r"layer 0: v_proj\.weight: expected finite"):
        converted(layer, 2)
    assert converted(layer, 4).weights["v_proj.weight"].isnan().any()


def test_weights_of_eight_bits_are_merged_as_numbers():
    layer = layer_of((4, 1), dtype=torch.float32)
    weights = {name: value.to(torch.float8_e4m3fn) for name, value in state_copy(layer).items()}
    new = grouped(config_of(layer), 2)(weights, shape_of(layer)).weights
    mean = weights["k_proj.weight"].float().unflatten(0, (2, 2, -1)).mean(1).flatten(0, 1)
    assert new["k_proj.weight"].dtype == torch.float8_e4m3fn
    assert new["k_proj.weight"].float().equal(mean.to(torch.float8_e4m3fn).float())
