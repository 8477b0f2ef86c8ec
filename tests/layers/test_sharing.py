"""Layers share the rotary angles of a call: computed once for each rope, with the same outputs."""

import pytest
import torch

from attnlib import (
    CAUSAL,
    GroupedQueryAttention,
    KVCache,
    Rope,
    shared_angles,
)


def test_layers_share_the_angles_of_a_call():
    """Once for each rope: the same outputs, dense, packed and over a cache; and compiled as one graph."""
    ropes = (Rope(8), None, Rope(8, theta=500.0), Rope(8))
    stack = [GroupedQueryAttention(32, 4, mask=CAUSAL, rope=rope).requires_grad_(False) for rope in ropes]
    found = shared_angles(stack, torch.randn(2, 5, 32))
    assert found[0] is found[3] is not found[2]
    assert found[1] is None

    def run(x, shares, kvs=(None,) * 4, cu_seqlens=None):
        shared = shared_angles(stack, x, kv=kvs[0], cu_seqlens=cu_seqlens) if shares else (None,) * 4
        for layer, kv, angles in zip(stack, kvs, shared, strict=True):
            x = x + layer(x, kv=kv, angles=angles, cu_seqlens=cu_seqlens)
        return x

    x, cu = torch.randn(2, 5, 32), torch.tensor([0, 3, 10], dtype=torch.int32)
    torch.testing.assert_close(run(x, True), run(x, False))
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(x, True), run(x, False))
    rows = x.flatten(0, 1)
    torch.testing.assert_close(run(rows, True, cu_seqlens=cu), run(rows, False, cu_seqlens=cu))
    cache = KVCache.paged([layer.kv_layout for layer in stack], pages=9, page_size=4, max_sequences=2)
    cache.admit(2)
    for part in x.split((4, 1), 1):
        with cache.step(part.shape[1]) as kvs:
            out = run(part, True, kvs)
    torch.testing.assert_close(out, run(x, False)[:, 4:])
    for layers in (stack[0], [1], None):
        with pytest.raises(TypeError, match="layers: expected a sequence of attention layers"):
            shared_angles(layers, x)
