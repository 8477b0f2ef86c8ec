"""The torch backend and the caches on a CUDA device: right, and never silently slow."""

import warnings

import pytest
import torch
from probing import forgotten

from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    MultiHeadLatentAttention,
    Rope,
    SlowPathWarning,
    attention,
    attention_with_lse,
    cached_attention,
    explain,
    sliding,
    varlen_attention,
)
from attnlib.backends._torch import efficient, fused
from attnlib.backends._triton.launching import direct, launch
from attnlib.call.spec import arch_of
from attnlib.dispatch.select import CALL_CACHE
from attnlib.internal import probes
from attnlib.masks.ready_made import attention_sinks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SLOW = pytest.mark.filterwarnings("ignore::attnlib.SlowPathWarning")


def test_the_automatic_choice_is_never_silently_slow():
    q = torch.randn(1, 5, 2, 8, device="cuda")
    assert explain(attention, q, q, q, mask=CAUSAL).chosen == "triton"
    attention(q, q, q, mask=CAUSAL, backend="strict")
    wide = torch.randn(1, 5, 2, 600, device="cuda", requires_grad=True)
    attention(q.requires_grad_(), q, q, mask=CAUSAL, backend="strict")
    for options, way in (({}, "torch's memory-efficient attention"), ({"softcap": 9.0}, "tile by tile")):
        with pytest.warns(SlowPathWarning, match=way):
            attention(wide, wide, wide, mask=CAUSAL, **options)
    with pytest.raises(NotImplementedError, match="strict"):
        attention(wide, wide, wide, mask=CAUSAL, backend="strict")


@SLOW
@pytest.mark.parametrize("dtype", efficient.DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize(("s", "t", "mask"), [(130, 130, CAUSAL), (65, 130, CAUSAL), (130, 65, FULL)])
@pytest.mark.parametrize(("d", "e"), [(640, 640), (592, 64)])
def test_memory_efficient_attention(s, t, mask, heads, dtype, d, e, monkeypatch):
    """torch's operators pass their trial here, and are about as precise as tiles."""
    (h, g), arch = heads, arch_of(torch.device("cuda"))
    assert fused.failures("cuda", dtype, arch) == []
    shapes = (2, s, h, d), (2, t, g, d), (2, t, g, e)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes)
    dout = torch.randn(2, s, h, e, device="cuda", dtype=dtype)

    def solve(dtype: torch.dtype, backend: str | None) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out, lse = attention_with_lse(*leaves, mask=mask, backend=backend)
        return out, lse, *torch.autograd.grad(out, leaves, dout.to(dtype))

    ours, golden = solve(dtype, None), solve(torch.float64, "torch")
    monkeypatch.setattr(fused, "causality", lambda batch: None)
    for x, tiled, exact in zip(ours, solve(dtype, "torch"), golden, strict=True):
        errors = [(y.double() - exact).abs().max() for y in (x, tiled)]
        assert errors[0] <= 3 * errors[1] + torch.finfo(dtype).eps * exact.abs().max()


def test_every_fast_path_is_on():
    """And each trial runs on this GPU, with a descriptor too where there are dedicated kernels."""
    q = torch.randn(1, 5, 2, 64, device="cuda", dtype=torch.bfloat16)
    with forgotten():
        assert "fast paths: on" in str(explain(attention, q, q, q, mask=CAUSAL))
        assert probes.ANSWERS[direct.DIRECT] == direct.Direct(plain=True, described=True)
        assert probes.ANSWERS[direct.STREAMS].current_device is not torch.cuda.current_device


def test_nothing_is_tried_while_a_graph_is_captured():
    q, graph = torch.randn(1, 65, 2, 64, device="cuda", dtype=torch.bfloat16), torch.cuda.CUDAGraph()
    right = attention(q, q, q, mask=CAUSAL)
    with forgotten():
        with torch.cuda.graph(graph):
            out = attention(q, q, q, mask=CAUSAL)
            assert not {direct.DIRECT, direct.STREAMS} & {*probes.ANSWERS}
        graph.replay()
        assert torch.equal(out, right)
        attention(q[:, :33], q[:, :33], q[:, :33], mask=CAUSAL)
        assert {direct.DIRECT, direct.STREAMS} <= {*probes.ANSWERS}


def _wrong_launcher(*given):
    raise TypeError("Triton's launcher takes other arguments")


def test_results_are_the_same_whatever_trial_fails(monkeypatch):
    """A launcher that takes other arguments, and private functions that name another device or stream."""
    q = torch.randn(2, 130, 4, 64, device="cuda", dtype=torch.bfloat16)
    right = attention(q, q, q, mask=CAUSAL)
    of_torch = direct.PUBLIC
    changes = (
        (launch, "starting", _wrong_launcher, "direct launches"),
        (direct, "_private_streams", lambda: of_torch._replace(current_device=lambda: 7), direct.STREAMS),
        (
            direct,
            "_private_streams",
            lambda: of_torch._replace(current_stream=lambda device: 1 << 40),
            direct.STREAMS,
        ),
        (direct, "_private_streams", _wrong_launcher, direct.STREAMS),
    )
    for owner, name, wrong, failure in changes:
        with forgotten(), monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            CALL_CACHE.clear()
            launch.plan_cache.cache_clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results = [attention(q, q, q, mask=CAUSAL) for _ in range(3)]
            assert all(torch.equal(x, right) for x in results)
            assert f"fast path off: {failure}: " in str(explain(attention, q, q, q, mask=CAUSAL))
            hopper = torch.cuda.get_device_capability() == (9, 0)
            assert [x.category for x in caught] == [SlowPathWarning] * hopper
    CALL_CACHE.clear()
    launch.plan_cache.cache_clear()


@SLOW
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(70)])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"dropout_p": 0.3}], ids=str)
def test_equals_the_cpu_forward_and_backward(mask, options):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 130, heads, 32, dtype=torch.float64) for heads in (6, 2, 2)]
    seed = torch.tensor([7]) if options.get("dropout_p") else None
    results = []
    for device in ("cpu", "cuda"):
        q, k, v = (x.to(device).requires_grad_() for x in tensors)
        slopes = torch.linspace(0.1, 1, 6, dtype=torch.float64).to(device).requires_grad_()
        moved = None if seed is None else seed.to(device)
        out, lse = attention_with_lse(q, k, v, mask=mask, alibi_slopes=slopes, dropout_seed=moved, **options)
        grads = torch.autograd.grad((out * out).sum() + lse.sin().sum(), (q, k, v, slopes))
        results.append([x.cpu() for x in (out, lse, *grads)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


@SLOW
def test_packed_equals_the_cpu():
    q, k = torch.randn(9, 4, 16), torch.randn(9, 2, 16)
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    here = varlen_attention(q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets, mask=CAUSAL)
    q, k, offsets = q.cuda(), k.cuda(), offsets.cuda()
    there = varlen_attention(q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets, mask=CAUSAL)
    torch.testing.assert_close(there.cpu(), here)


def _layer(name: str) -> torch.nn.Module:
    if name == "gqa":
        return GroupedQueryAttention(
            64, 8, num_kv_heads=2, mask=sliding(9), rope=Rope(8), dtype=torch.float64
        )
    sizes = {
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    return MultiHeadLatentAttention(
        64, 4, mask=CAUSAL, rope=Rope(4, interleaved=True), dtype=torch.float64, **sizes
    )


@SLOW
@torch.no_grad()
@pytest.mark.parametrize("name", ["gqa", "mla"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_decoding_equals_the_prompt(name, contiguous):
    torch.manual_seed(0)
    layer = _layer(name).cuda()
    x = torch.randn(2, 41, 64, dtype=torch.float64, device="cuda")
    if contiguous:
        cache = KVCache.contiguous([layer.kv_layout], max_sequences=3, max_length=64, device="cuda")
    else:
        cache = KVCache.paged([layer.kv_layout], pages=32, page_size=4, max_sequences=3, device="cuda")
    first, second = cache.admit(2)
    with cache.step({second: 20, first: 30}) as (kv,):
        packed = layer(torch.cat((x[1, :20], x[0, :30])), kv=kv)
    (fork,) = cache.fork(first)
    for t in range(30, 41):
        with cache.step({first: 1, fork: 1, second: 1}) as (kv,):
            out = layer(torch.stack((x[0, t], -x[0, t], x[1, t - 10])), kv=kv)
        torch.testing.assert_close(out[0], layer(x[:1, : t + 1])[0, t])
        torch.testing.assert_close(out[2], layer(x[1:, : t - 9])[0, t - 10])
    torch.testing.assert_close(packed[20:], layer(x[:1, :30])[0])


@torch.no_grad()
@pytest.mark.parametrize("heads", [(2, 8), (2, 2)])
@pytest.mark.parametrize("order", [1, -1])
def test_layouts_of_a_window_and_other_first_tokens_are_scheduled_each_for_itself(heads, order):
    """Each attends with a schedule of its own allocator, as the CPU does without one."""
    masks = [sliding(128), attention_sinks(16, 128)][::order]
    layouts = [
        KVLayout.grouped(n, 64, **dict(zip(("window", "first_tokens"), mask.kept, strict=True)))
        for n, mask in zip(heads[::order], masks, strict=True)
    ]
    sizes = {"pages": 64, "page_size": 16, "max_sequences": 2, "max_length": 512}
    caches = {device: KVCache.paged(layouts, device=device, **sizes) for device in ("cpu", "cuda")}
    for cache in caches.values():
        cache.admit(2)
    for tokens in (300, 1, 1, 1):
        results = {device: [] for device in caches}
        keys = [torch.randn(2, 2, tokens, layout.heads, 64) for layout in layouts]
        queries = torch.randn(2, tokens, 16, 64)
        for device, cache in caches.items():
            with cache.step(tokens) as layers:
                for layer, kv, mask in zip(layers, keys, masks, strict=True):
                    view = layer.append(*kv.to(device))
                    assert (view.schedule is not None) == (device == "cuda")
                    results[device].append(cached_attention(queries.to(device), view, mask=mask).cpu())
        for here, there in zip(*results.values(), strict=True):
            torch.testing.assert_close(there, here)
    first, second = (x.schedules for x in caches["cuda"]._buffers.windows)
    assert {*first._of} == {layouts[0].heads}
    assert {*second._of} == {layouts[1].heads}
