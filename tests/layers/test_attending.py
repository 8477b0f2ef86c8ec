"""A layer's attention with some of its heads here: which head is the first, and when nobody knows."""

import pytest
import torch
from torch import nn

from attnlib import (
    CAUSAL,
    GroupedQueryAttention,
    mask_mod,
    scores,
)
from attnlib.layers.attending import attention_call
from attnlib.layers.inputs import Inputs
from attnlib.layers.tensor_parallel import ALL_HEADS, Share
from attnlib.scores import Score

HIDDEN, HEADS, TOKENS = 32, 4, 9


def grouped(num_kv_heads: int, *, num_heads: int = HEADS, **options) -> GroupedQueryAttention:
    options = {"mask": CAUSAL, "head_dim": 16} | options
    return GroupedQueryAttention(HIDDEN, num_heads, num_kv_heads=num_kv_heads, **options)


def functions() -> dict:
    """A score and a mask that ask which head it is; one reads weights, the other a table."""
    shown = torch.randint(0, 3, (HEADS, 2 * TOKENS)).int()
    masked = mask_mod(lambda b, h, i, j, shown: (shown[h, j] != 0) | (i == j), shown)
    return {"score": scores.distance_bias(nn.Parameter(torch.randn(HEADS, 5))), "mask": CAUSAL & masked}


def share(first: int) -> Share:
    return Share(first, 2, HEADS, None, (True,))


def test_a_call_says_which_head_is_the_first_where_somebody_counts():
    """Kernels of a known chip take calls that begin at head 0 alone."""
    by_key = mask_mod(lambda b, h, i, j: j % 3 != 0).block_mask(1, 2, 9, 9, device="cpu")
    by_head = mask_mod(lambda b, h, i, j: j % 3 != h).block_mask(1, HEADS, 9, 9, device="cpu")
    layer, of = grouped(2), Score(1.0)

    def asked(**options):
        return attention_call(layer, of, Inputs(**options), 2, share(2))

    assert asked().head == asked(mask=by_key).head == 0
    assert asked(mask=by_key).mask.tiles is not None
    assert asked(mask=by_head).head == 2
    assert asked(mask=by_head).mask.tiles is None  # they were of all heads
    assert attention_call(layer, of, Inputs(mask=by_head), 2, share(0)).mask.tiles is None
    assert attention_call(layer, of, Inputs(mask=by_head), HEADS, ALL_HEADS).mask.tiles is not None
    layer.dropout_p = 0.5
    assert asked().head == 2
    assert layer.eval() is layer
    assert asked().head == 0


def test_functions_of_heads_that_nobody_knows_are_refused():
    layer = grouped(2, **functions())
    for name in ("q_proj", "k_proj", "v_proj"):  # as loading half of the rows by hand would
        whole = getattr(layer, name)
        setattr(layer, name, nn.Linear(HIDDEN, whole.out_features // 2, bias=False))
    with pytest.raises(
        ValueError, match=r"q_proj: expected all 4 heads, or .* the mask or the score reads .* got 2 heads"
    ):
        layer(torch.randn(1, TOKENS, HIDDEN))
