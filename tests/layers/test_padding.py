"""``attention_mask`` of layers: NaN in padding changes nothing, and outputs are those without padding."""

import pytest
import torch
from torch import nn

import attnlib.layers.padding
from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    MultiHeadLatentAttention,
    Rope,
    masks,
    packing,
    sliding,
)

SIDES = {
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 1, 0], [1, 1, 0, 1, 1]],
    "nothing": [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "whole": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
}


def gqa(mask=CAUSAL, **options):
    return GroupedQueryAttention(32, 4, num_kv_heads=2, mask=mask, rope=Rope(8), **options).double()


def mla(mask=CAUSAL):
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    rope = Rope(4, interleaved=True)
    return MultiHeadLatentAttention(32, 4, q_lora_rank=None, mask=mask, rope=rope, **sizes).double()


def tokens(*shape):
    return torch.randn(*shape, 32, dtype=torch.float64)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("make", [gqa, mla, lambda: gqa(FULL), lambda: gqa(sliding(3))])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_what_is_hidden_changes_no_token(make, side, dtype):
    """A token's output is that of attention with the same mask as a mask by function; padding may be NaN."""
    layer, x = make(), tokens(2, 5)
    there = torch.tensor(SIDES[side]).to(dtype)
    expected = layer(x, mask=masks.mask_tensor(there.bool()[:, None, None]))
    out = layer(x, attention_mask=there)
    torch.testing.assert_close(out[there.bool()], expected[there.bool()])
    if side in ("left", "right"):
        poisoned = torch.where(there.bool()[..., None], x, torch.nan)
        torch.testing.assert_close(layer(poisoned, attention_mask=there)[there.bool()], out[there.bool()])
    short = there[0].bool()
    if short.any():
        alone = layer(x[:1, short], positions=torch.arange(5)[short], mask=None)
        if make is not mla and layer.mask in (CAUSAL, FULL):
            torch.testing.assert_close(out[0, short], alone[0])


def test_bounds_without_holes_and_a_mask_with_them(monkeypatch):
    """Right and left padding become bounds, holes a mask, and a mask that hides nothing is dropped."""
    seen = []
    real = attnlib.layers.padding.without_padding

    def spied(x, given):
        seen.append(real(x, given))
        return seen[-1]

    monkeypatch.setattr("attnlib.layers.selecting.without_padding", spied)
    layer, x = gqa(), tokens(2, 5)
    for rows in SIDES.values():
        layer(x, attention_mask=torch.tensor(rows).bool())
    assert [given.key_starts is not None for given in seen] == [True, True, False, True, False]
    assert [given.mask is not None for given in seen] == [False, False, True, False, False]
    assert all(given.attention_mask is None for given in seen)
    starts, ends = packing.bounds_of(torch.tensor(SIDES["left"]))
    assert torch.equal(seen[1].key_starts, starts)
    assert torch.equal(seen[1].key_ends, ends)


def test_the_padding_of_a_context():
    layer = GroupedQueryAttention(32, 4, mask=FULL, rope=None).double()
    x, context, there = tokens(2, 3), tokens(2, 5), torch.tensor(SIDES["right"]).bool()
    out = layer(x, context=context, attention_mask=there)
    torch.testing.assert_close(out[:1], layer(x[:1], context=context[:1, :3]))
    torch.testing.assert_close(out[1:], layer(x[1:], context=context[1:]))


def test_a_mask_of_the_call_hides_more():
    layer, x, there = gqa(FULL), tokens(2, 5), torch.tensor(SIDES["holes"]).bool()
    both = layer(x, mask=sliding(2), attention_mask=there)
    expected = layer(x, mask=sliding(2) & masks.mask_tensor(there[:, None, None]))
    torch.testing.assert_close(both, expected)


@pytest.mark.parametrize("side", ["left", "right", "holes", "whole"])
def test_compiled_as_one_graph_for_every_padding(side):
    """The graph reads nothing on the host, so one graph serves every padding."""
    layer, x = gqa(), tokens(2, 5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    there = torch.tensor(SIDES[side]).bool()
    torch.testing.assert_close(
        compiled(x, attention_mask=there)[there], layer(x, attention_mask=there)[there]
    )


def test_replaces_the_padding_mask_of_torch():
    """The same outputs as nn.MultiheadAttention, whose mask is True for padding."""
    theirs = nn.MultiheadAttention(32, 4, batch_first=True, bias=False).double()
    ours = GroupedQueryAttention(32, 4, mask=FULL).double()
    q, k, v = theirs.in_proj_weight.detach().chunk(3)
    ours.load_state_dict(
        {
            "q_proj.weight": q,
            "k_proj.weight": k,
            "v_proj.weight": v,
            "o_proj.weight": theirs.out_proj.weight.detach(),
        }
    )
    x, padding = tokens(2, 5), ~torch.tensor(SIDES["right"]).bool()
    expected = theirs(x, x, x, key_padding_mask=padding)[0]
    torch.testing.assert_close(ours(x, attention_mask=~padding)[~padding], expected[~padding])


def test_gradients_do_not_flow_into_padding():
    layer, x = gqa(), tokens(2, 5).requires_grad_()
    there = torch.tensor(SIDES["right"]).bool()
    layer(x, attention_mask=there)[there].sum().backward()
    assert torch.equal(x.grad[~there], torch.zeros(2, 32, dtype=torch.float64))


WRONG = {
    "kv": (lambda kv: {"kv": kv}, ValueError, r"expected None with kv=; pass left_padding= of cache.admit"),
    "packed": (
        lambda kv: {"x": tokens(5), "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)},
        ValueError,
        "expected None with cu_seqlens=; pass nothing; packed sequences have no padding",
    ),
    "bounds": (
        lambda kv: {"key_ends": torch.tensor([3, 5], dtype=torch.int32)},
        ValueError,
        "expected None with key_starts= or key_ends=; pass one of them",
    ),
    "floats": (
        lambda kv: {"attention_mask": torch.zeros(2, 5)},
        TypeError,
        r"expected bools, True for tokens, got torch.float32; .*bias_tensor",
    ),
    "another length": (
        lambda kv: {"attention_mask": torch.ones(2, 4).bool()},
        ValueError,
        r"expected \[b=2, t=5\], got \(2, 4\)",
    ),
    "four dimensions": (
        lambda kv: {"attention_mask": torch.ones(2, 1, 5, 5).bool()},
        ValueError,
        r"expected .* got \(2, 1, 5, 5\); for a mask of each query use mask=attnlib\.masks\.mask_tensor",
    ),
    "a list": (
        lambda kv: {"attention_mask": SIDES["left"]},
        TypeError,
        "expected a tensor, got list",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_elsewhere_with_the_remedy(name):
    arguments, error, message = WRONG[name]
    layer, there = gqa(), torch.tensor(SIDES["right"]).bool()
    cache = KVCache.paged([layer.kv_layout_as(torch.float64)], pages=4, page_size=4, max_sequences=2)
    cache.admit(2)
    with cache.step(5, replay=True) as (kv,):
        given = {"x": tokens(2, 5), "attention_mask": there} | arguments(kv)
        with pytest.raises(error, match=f"attention_mask: {message}"):
            layer(given.pop("x"), **given)
