"""Masks as attnlib makes them for transformers, against transformers' own."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.models.doge import modeling_doge as modeling_doge  # which hands no window to attention
from transformers.models.mistral import modeling_mistral as modeling_mistral  # which does

from attnlib.integrations.transformers.attention import attention_forward
from attnlib.integrations.transformers.masks import attention_mask

CAUSAL, DECODER = SimpleNamespace(is_causal=True), CONFIG_MAPPING["mistral"]()


def of(sizes, function=causal_mask_function, padding=None, config=DECODER, **options):
    """The mask of so many queries after so many tokens over so many keys."""
    queries, past, keys = sizes
    options = {"config": config, "device": "cpu", "allow_is_causal_skip": True, **options}
    return attention_mask(2, queries, keys, past, 0, function, padding, **options)


def padding(*rows: str) -> torch.Tensor:
    return torch.tensor([[x == "1" for x in row] for row in rows])


def test_what_flags_say_needs_no_mask():
    assert of((5, 0, 5)) is of((3, 2, 5)) is of((1, 4, 5)) is None
    assert of((5, 0, 5), padding=padding("11111", "11111")) is None
    assert of((5, 0, 5), sliding_window_causal_mask_function(3), local_size=3) is None
    assert of((5, 0, 7), bidirectional_mask_function, allow_is_bidirectional_skip=True) is None


def test_padding_stays_what_it_is():
    for rows in (("00111", "11111"), ("11100", "11111"), ("00000", "01110")):
        for function in (
            causal_mask_function,
            sliding_window_causal_mask_function(3),
            bidirectional_mask_function,
        ):
            mask = of((5, 0, 5), function, padding(*rows), allow_is_bidirectional_skip=True)
            assert torch.equal(mask, padding(*rows))


def test_holes_are_a_mask_of_pairs():
    assert of((5, 0, 5), padding=padding("01011", "11111")).shape == (2, 1, 5, 5)
    assert of((1, 4, 5), padding=padding("01011", "11111")).shape == (2, 1, 1, 5)


def test_a_window_that_attention_would_not_be_told_of_is_a_mask_of_pairs():
    function = sliding_window_causal_mask_function(3)
    for config in (CONFIG_MAPPING["doge"](), None):
        assert of((5, 0, 5), function, config=config).shape == (2, 1, 5, 5)
    assert of((5, 0, 5), chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))).shape == (
        2,
        1,
        5,
        5,
    )


def test_the_room_of_a_static_cache_is_left_out():
    assert of((5, 0, 9)).shape == (2, 5)
    assert torch.equal(of((1, 4, 9)), padding("11111", "11111"))
    assert of((5, 0, 9), padding=padding("11111", "11111")).shape == (2, 5)


@st.composite
def calls(draw):
    """Sizes, padding, and a kind of mask."""
    past, queries = draw(st.integers(0, 6)), draw(st.integers(1, 7))
    room, offset = draw(st.sampled_from([0, 0, 3])), 0
    kind = draw(st.sampled_from(["causal", "window", "chunks", "both ways", "packed"]))
    if kind in ("both ways", "packed"):
        past, room = 0, 0
    if kind == "window" and not room and draw(st.booleans()):
        offset = draw(st.integers(0, past))  # keys that a cache has dropped
    length = past + queries
    rows = st.lists(st.booleans(), min_size=length, max_size=length)
    there = draw(st.none() | st.lists(rows, min_size=2, max_size=2)) if kind != "packed" else None
    return kind, past, queries, length + room - offset, offset, there, draw(st.integers(1, 4))


@given(call=calls(), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=200)
@torch.no_grad()
def test_attention_with_our_mask_is_sdpa_with_theirs(call, seed):
    """In rows that see a key; and the same where transformers hands the mask back in as padding."""
    kind, past, queries, keys, offset, there, size = call
    torch.manual_seed(seed)
    there = None if there is None else torch.tensor(there)
    module, function, options = CAUSAL, causal_mask_function, {"allow_is_causal_skip": True}
    if kind == "window":
        function, options["local_size"] = sliding_window_causal_mask_function(size), size
    elif kind == "chunks":
        function, options["local_size"] = (
            chunked_causal_mask_function(size, torch.zeros(2, dtype=torch.int64)),
            size,
        )
    elif kind == "both ways":
        module, function = SimpleNamespace(is_causal=False), bidirectional_mask_function
        options = {"allow_is_bidirectional_skip": True}
    elif kind == "packed":
        numbers = torch.randint(0, 3, (2, queries)).sort(1).values
        positions = torch.arange(queries) - (numbers[:, :, None] > numbers[:, None]).sum(-1)
        function = and_masks(
            packed_sequence_mask_function(numbers),
            remap_positions_for_packed_sequence(causal_mask_function, positions),
        )
        options["allow_is_causal_skip"] = False
    sizes = (2, queries, keys, past, offset, function)
    q, k, v = torch.randn(2, 4, queries, 8), *torch.randn(2, 2, 2, keys, 8).unbind(0)
    exact = sdpa_mask(*sizes, there, allow_is_causal_skip=False)
    made = attention_mask(*sizes, there, config=DECODER, device="cpu", **options)
    handed = {"sliding_window": size} if kind == "window" else {}
    sees = exact.any(-1)[:, 0]
    theirs, _ = sdpa_attention_forward(
        SimpleNamespace(is_causal=False, num_key_value_groups=2), q, k, v, exact
    )
    ours, _ = attention_forward(module, q, k, v, made, **handed)
    torch.testing.assert_close(ours[sees], theirs[sees])
    if made is not None and made.dim() == 2 and made.dtype == torch.bool and kind != "both ways":
        again = attention_mask(*sizes, made, config=DECODER, device="cpu", **options)
        ours, _ = attention_forward(module, q, k, v, again, **handed)
        torch.testing.assert_close(ours[sees], theirs[sees])


@pytest.mark.parametrize("name", ["cache", "block_table", "head_mask"])
def test_what_is_not_there_is_refused(name):
    q = torch.randn(1, 2, 3, 8)
    attention_forward(CAUSAL, q, q, q, None, **{name: None})
    with pytest.raises(
        NotImplementedError, match=f'{name}: attn_implementation="attnlib" does not support it'
    ):
        attention_forward(CAUSAL, q, q, q, None, **{name: True})
    attention_forward(CAUSAL, q, q, q, None, anything="else")


def test_a_cache_that_the_model_has_read_is_ignored():
    """Kosmos-2 hands it to its image encoder, too."""
    q = torch.randn(1, 2, 3, 8)
    found, expected = (
        attention_forward(CAUSAL, q, q, q, None, **x)[0] for x in ({"cache": DynamicCache()}, {})
    )
    assert torch.equal(found, expected)
