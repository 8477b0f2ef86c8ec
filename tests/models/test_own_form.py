"""config.json of attnlib's own form: what is written is read again, and what nobody writes is refused by
name.
"""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlib.models.own_form import (
    BranchForm,
    GroupedForm,
    LatentForm,
    base_of,
    is_own,
    layers_of,
    own_config,
    plain_form,
)

LATENT = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_pairs": [1, 1],
    "norm_eps": 2.0**100,
    "bias": True,
    "query_bias": False,
    "q_lora_rank": None,
}
BRANCH = {"heads": 4, "head_dim": 8, "top": 16, "rope_pairs": [0, 2], "block_size": 1}
sizes = st.integers(1, 2**24)
branches = st.builds(
    BranchForm,
    heads=sizes,
    head_dim=st.integers(18, 2**24),
    top=sizes,
    rope_pairs=st.lists(st.integers(0, 999), max_size=9).map(tuple),
    block_size=sizes,
)
grouped = st.builds(GroupedForm, num_key_value_heads=sizes, select=st.none() | branches)


@st.composite
def latents(draw):
    pairs = draw(st.lists(st.integers(0, 999), max_size=9))
    return LatentForm(
        kv_lora_rank=draw(sizes),
        qk_nope_head_dim=draw(sizes),
        qk_rope_head_dim=2 * len(pairs),
        v_head_dim=draw(sizes),
        rope_pairs=tuple(pairs),
        norm_eps=draw(st.floats(min_value=1e-9, max_value=2.0**120)),
        bias=draw(st.booleans()),
        query_bias=draw(st.booleans()),
        q_lora_rank=draw(st.none() | sizes),
        select=draw(st.none() | branches),
    )


@given(st.lists(grouped | latents(), min_size=1, max_size=5))
def test_what_is_written_is_read_again(layers):
    said = json.loads(json.dumps(own_config({"model_type": "llama", "hidden_size": 8}, layers)))
    assert is_own(said)
    assert not is_own(base_of(said))
    assert base_of(said) == {"model_type": "llama", "hidden_size": 8}
    assert layers_of(said) == tuple(layers)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_lora_rank", 0),
        ("kv_lora_rank", 2**24 + 1),
        ("kv_lora_rank", 8.0),
        ("kv_lora_rank", True),
        ("qk_nope_head_dim", 0),
        ("v_head_dim", None),
        ("qk_rope_head_dim", 6),
        ("rope_pairs", [1]),
        ("rope_pairs", [1, -1]),
        ("rope_pairs", [1, 1.0]),
        ("rope_pairs", [1, 2**24]),
        ("rope_pairs", "11"),
        ("norm_eps", 0.0),
        ("norm_eps", math.inf),
        ("norm_eps", math.nan),
        ("norm_eps", "1e-6"),
        ("bias", 1),
        ("query_bias", None),
        ("q_lora_rank", 0),
        ("q_lora_rank", True),
        ("q_lora_rank", 8.0),
        ("q_lora_rank", 2**24 + 1),
        ("auto_map", "evil.py"),
    ],
)
def test_a_latent_layer_that_is_none_is_refused_by_name(name, value):
    layers_of({"layers": [LATENT]})
    with pytest.raises(ValueError, match=rf"^layers: layer 1: .*{name}"):
        layers_of({"layers": [LATENT, LATENT | {name: value}]})


OPTIONAL = ("bias", "query_bias", "q_lora_rank")


@pytest.mark.parametrize("name", [name for name in LATENT if name not in (*OPTIONAL, "kv_lora_rank")])
def test_a_latent_layer_that_lacks_something_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"^layers: layer 0: .*{name}"):
        layers_of({"layers": [{key: value for key, value in LATENT.items() if key != name}]})


def test_layers_without_a_branch_are_written_as_ever():
    assert plain_form(GroupedForm(num_key_value_heads=2)) == {"num_key_value_heads": 2}
    assert plain_form(layers_of({"layers": [LATENT]})[0]).keys() == LATENT.keys() | {"qk_norm"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heads", 0),
        ("head_dim", 2**24 + 1),
        ("head_dim", 2),  # of two rotary pairs
        ("top", 1.0),
        ("top", None),
        ("block_size", True),
        ("rope_pairs", [0, -1]),
        ("rope_pairs", "01"),
        ("pool", "mean"),
    ],
)
@pytest.mark.parametrize("layer", [{"num_key_value_heads": 2}, LATENT])
def test_a_branch_that_is_none_is_refused_by_name(layer, name, value):
    layers_of({"layers": [layer | {"select": BRANCH}]})
    with pytest.raises(ValueError, match=rf"^layers: layer 0: select: .*{name}"):
        layers_of({"layers": [layer | {"select": BRANCH | {name: value}}]})


@pytest.mark.parametrize("value", [None, [], 4, {"top": 4}])
def test_a_branch_is_an_object_with_all_sizes(value):
    with pytest.raises(ValueError, match=r"^layers: layer 0: select: "):
        layers_of({"layers": [{"num_key_value_heads": 2, "select": value}]})


@pytest.mark.parametrize("value", [0, -1, 2**24 + 1, 1.0, "2", None, True])
def test_a_number_of_heads_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"^layers: layer 0: num_key_value_heads: expected 1 to 16777216"):
        layers_of({"layers": [{"num_key_value_heads": value}]})


@pytest.mark.parametrize("layers", [None, [], {}, "2", [2], [[]], [{"heads": 2}]])
def test_layers_that_are_none_are_refused(layers):
    with pytest.raises(ValueError, match=r"^layers: "):
        layers_of({"layers": layers})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"base": {}}, "^version: expected 1, got None"),
        ({"version": 2, "base": {}}, "^version: expected 1, got 2; install a newer attnlib"),
        ({"version": 1}, "^base: expected the config of another model, got None"),
        ({"version": 1, "base": []}, "^base: "),
        ({"version": 1, "base": {"model_type": "attnlib"}}, "^base: "),
    ],
)
def test_a_base_that_is_none_is_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        base_of(config)
