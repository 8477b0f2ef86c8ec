"""What torch's transforms make of attention has its gradients: mapped, exported, traced and compiled
calls.
"""

from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    KVView,
    MultiHeadLatentAttention,
    Rope,
    attention_with_lse,
    cached_attention,
    varlen_attention_with_lse,
)

OFFSETS = torch.tensor([0, 4, 17], dtype=torch.int32)
CALLS = {
    "fused": partial(attention_with_lse, mask=FULL),
    "fused, causal": partial(attention_with_lse, mask=CAUSAL),
    "tiles": partial(attention_with_lse, mask=CAUSAL, softcap=2.0),
    "dropout": partial(attention_with_lse, mask=CAUSAL, dropout_p=0.3, dropout_seed=torch.tensor([7])),
    "bounds": partial(attention_with_lse, mask=FULL, key_ends=torch.tensor([11, 17], dtype=torch.int32)),
    "packed": partial(varlen_attention_with_lse, mask=CAUSAL, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS),
}
SINKS = torch.linspace(-1, 1, 4)


def leaves(call: str, copies: int = 3) -> list[torch.Tensor]:
    """q, k and v of so many calls."""
    batch = () if call == "packed" else (2,)
    return [torch.randn(copies, *batch, 17, heads, 8, requires_grad=True) for heads in (4, 2, 2)]


def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Of both results, with gradients that differ everywhere."""
    return (out * out).sum() + (lse.masked_fill(lse.isinf(), 0) * torch.linspace(0, 1, lse.shape[-1])).sum()


def same(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=("plain", "sinks"))
@pytest.mark.parametrize("call", CALLS)
def test_vmap_keeps_gradients(call, sinks):
    solve, tensors = partial(CALLS[call], sinks=sinks), leaves(call)
    mapped = torch.vmap(solve)(*tensors)
    looped = [torch.stack(x) for x in zip(*(solve(*(x[n] for x in tensors)) for n in range(3)), strict=True)]
    same(mapped, tuple(looped))
    same(torch.autograd.grad(loss(*mapped), tensors), torch.autograd.grad(loss(*looped), tensors))


def test_vmap_over_some_tensors_and_other_dimensions():
    q, k, v = (x.detach() for x in leaves("fused"))
    slopes = torch.rand(3, 4)
    ways = (
        ((0, None, None), (q, k[0], v[0])),
        ((None, 1, 1), (q[0], k.movedim(0, 1), v.movedim(0, 1))),
        ((3, 3, 3), tuple(x.movedim(0, 3) for x in (q, k, v))),
    )
    for dims, given in ways:
        tensors = [x.clone().requires_grad_() for x in given]
        mapped = torch.vmap(CALLS["tiles"], dims)(*tensors)
        each = [
            [x if dim is None else x.select(dim, n) for x, dim in zip(tensors, dims, strict=True)]
            for n in range(3)
        ]
        looped = [torch.stack(x) for x in zip(*(CALLS["tiles"](*x) for x in each), strict=True)]
        same(torch.autograd.grad(loss(*mapped), tensors), torch.autograd.grad(loss(*looped), tensors))
    mapped = torch.vmap(
        lambda slopes: attention_with_lse(q[0], k[0], v[0], mask=CAUSAL, alibi_slopes=slopes)
    )(slopes)
    looped = [attention_with_lse(q[0], k[0], v[0], mask=CAUSAL, alibi_slopes=x) for x in slopes]
    same(mapped, tuple(torch.stack(x) for x in zip(*looped, strict=True)))


@pytest.mark.parametrize("call", ["fused", "tiles", "packed"])
def test_gradients_may_be_mapped(call):
    tensors = [x[0].detach().requires_grad_() for x in leaves(call)]
    out, _ = CALLS[call](*tensors)
    douts = torch.randn(5, *out.shape)
    many = torch.autograd.grad(out, tensors, douts, is_grads_batched=True, retain_graph=True)
    one = zip(*(torch.autograd.grad(out, tensors, dout, retain_graph=True) for dout in douts), strict=True)
    same(many, tuple(map(torch.stack, one)))
    with pytest.raises(RuntimeError, match="setup_context"):  # torch's own refusal
        torch.func.grad(lambda q: CALLS[call](q, *tensors[1:])[0].sum())(tensors[0])


@pytest.mark.parametrize("call", CALLS)
def test_a_traced_graph_keeps_gradients(call):
    tensors = [x[0].detach().requires_grad_() for x in leaves(call)]
    graph = make_fx(CALLS[call])(*(x.detach() for x in tensors))
    ours, theirs = (torch.autograd.grad(loss(*solve(*tensors)), tensors) for solve in (graph, CALLS[call]))
    same(ours, theirs)


def layers() -> dict[str, torch.nn.Module]:
    sizes = {
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    return {
        "gqa": GroupedQueryAttention(
            32, 4, num_kv_heads=2, mask=CAUSAL, rope=Rope(8), sinks=True, qk_norm=True
        ),
        "mha": GroupedQueryAttention(32, 4, mask=FULL, alibi=True),
        "mla": MultiHeadLatentAttention(32, 4, mask=CAUSAL, rope=Rope(4, interleaved=True), **sizes),
    }


@pytest.mark.parametrize("kind", ["gqa", "mha", "mla"])
def test_an_exported_layer_trains(kind):
    layer, x = layers()[kind], torch.randn(2, 17, 32)
    exported = torch.export.export(layer, (x,)).module()
    layer(x).square().sum().backward()
    exported(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for name, parameter in exported.named_parameters():
        assert expected[name].any(), name
        same(parameter.grad, expected[name])


@pytest.mark.parametrize("call", ["fused", "tiles"])
def test_one_tensor_as_keys_and_values_compiles(call):
    solve = CALLS[call]

    def run(q, k):
        return loss(*solve(q, k, k))

    q, k, _ = (x[0].detach().requires_grad_() for x in leaves(call))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    same(torch.autograd.grad(compiled(q, k), (q, k)), torch.autograd.grad(run(q, k), (q, k)))


def test_a_traced_cached_call_refuses_gradients():
    cache = KVCache.paged([KVLayout.grouped(2, 8)], pages=4, page_size=4, max_sequences=2)
    cache.admit(2)
    with cache.step(3) as (kv,):
        view = kv.append(torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8))
    q = torch.randn(2, 3, 4, 8)
    graph = make_fx(lambda q: cached_attention(q, view, mask=CAUSAL))(q)
    out = graph(q.requires_grad_())
    with pytest.raises(RuntimeError, match="cached attention has no backward"):
        out.sum().backward()


class Decoding(torch.nn.Module):
    """One token over what a cache stores, of tensors alone."""

    def __init__(self, layer: GroupedQueryAttention, page_size: int):
        super().__init__()
        self.layer, self.page_size = layer, page_size

    def forward(self, x, k, v, table, starts, lengths):
        view = KVView(self.layer.kv_layout, self.page_size, k, v, table, starts, lengths)
        return cached_attention(self.layer.query(x), view, mask=CAUSAL)


@torch.no_grad()
def test_a_decoding_step_is_exported_once():
    """And read again as the cache grows, whose tensors stay where they are."""
    layer = GroupedQueryAttention(32, 4, num_kv_heads=2, mask=CAUSAL)
    cache = KVCache.paged([layer.kv_layout], pages=10, page_size=4, max_sequences=2)
    cache.admit(2)
    with cache.step(6) as (kv,):
        layer(torch.randn(2, 6, 32), kv=kv)
    exported, step = None, Decoding(layer, 4)
    for _ in range(3):
        x = torch.randn(2, 1, 32)
        with cache.step(1) as (kv,):
            expected = layer(x, kv=kv)
            view = kv.view()
            given = (x, view.k, view.v, view.table, view.starts, view.lengths)
            exported = exported or torch.export.export(step, given).module()
            torch.testing.assert_close(layer.o_proj(exported(*given).flatten(-2)), expected)
