"""Decoding on a GPU: captured steps, calls that repeat, sizes beyond int32, and very long sequences."""

from dataclasses import replace

import pytest
import torch
from decode_helpers import Sizes, assert_right, store
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED
from torch import Tensor

from attnlib import CAUSAL, FULL, KVCache, KVLayout, KVView, cached_attention, sliding
from attnlib import cached_attention_with_lse as attend
from attnlib.dispatch.select import CALL_CACHE

if INTERPRETED:
    pytest.skip("needs a GPU", allow_module_level=True)

GROUPED = KVLayout.grouped(2, 64, dtype=torch.bfloat16)
LATENT = KVLayout.latent(512, 64, dtype=torch.bfloat16)
MODELS = {
    "grouped": (GROUPED, GROUPED),
    "windowed": (replace(GROUPED, window=33), GROUPED),
    "latent": (LATENT, LATENT),
    "fewer bits": (
        replace(GROUPED, storage_dtype=torch.float8_e4m3fn),
        replace(LATENT, storage_dtype=torch.int8),
    ),
}


class Twin:
    """Two caches that hold the same, and layers that attend over them."""

    def __init__(self, layouts, page_size: int | None):
        sizes = {"max_sequences": 4, "max_length": 3000, "device": DEVICE}
        paged = {} if page_size is None else {"pages": 4 * 3000 // page_size + 4, "page_size": page_size}
        make = KVCache.contiguous if page_size is None else KVCache.paged
        self.caches = [make(layouts, **sizes, **paged) for _ in range(2)]
        self.layouts = layouts

    def each(self, call, handles=(None, None)) -> list:
        return [call(*pair) for pair in zip(self.caches, handles, strict=True)]

    def tensors(self, *shape: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """New queries, keys and values, or latents and rotary keys, for each layer."""
        made = []
        for x in self.layouts:
            widths = ((8, x.dim + x.rope_dim), (x.dim,), (x.rope_dim,))
            if not x.is_latent:
                widths = ((8, x.dim), (x.heads, x.dim), (x.heads, x.value_dim))
            made.append(tuple(torch.randn(*shape, *width, dtype=x.dtype, device=DEVICE) for width in widths))
        return made

    def prompt(self, handles, counts) -> None:
        tensors = self.tensors(sum(counts))
        for cache, mine in zip(self.caches, zip(*handles, strict=True), strict=True):
            with cache.step(dict(zip(mine, counts, strict=True))) as layers:
                run(layers, tensors)


def run(layers, tensors) -> list[Tensor]:
    """Every layer appends and attends, with queries that depend on what the last one gave."""
    outs = []
    for layer, (q, k, v) in zip(layers, tensors, strict=True):
        mask = CAUSAL if layer.layout.window is None else sliding(layer.layout.window)
        if outs:
            q = q + outs[-1].mean(-1, keepdim=True)
        outs.append(cached_attention(q, layer.append(k, v), mask=mask, backend="triton"))
    return outs


@pytest.mark.parametrize("page_size", [16, 64, None])
@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_a_captured_step_decodes_every_later_one(model, page_size):
    """Lengths, pages, forks and new sequences that came after the capture; as many sequences as then."""
    twin = Twin(MODELS[model], page_size)
    first, second = (twin.each(lambda cache, _: cache.admit()[0]) for _ in range(2))
    twin.prompt([first, second], [300, 15])
    tensors, graph = twin.tensors(2, 1), torch.cuda.CUDAGraph()
    eager, cache = twin.caches
    for step in range(24):
        if step == 8:
            twin.prompt([first], [1000])
        elif step == 12 and model != "windowed":  # which has dropped what that would need
            twin.each(lambda cache, handle: cache.truncate(handle, 700), first)
        elif step == 16:
            twin.each(lambda cache, handle: cache.release(handle), second)
            second = twin.each(lambda cache, handle: cache.fork(handle)[0], first)
        for x in (x for layer in tensors for x in layer):
            x.normal_()
        with eager.step(1) as layers:
            expected = run(layers, tensors)
        with cache.step(1, replay=step > 2) as layers:
            if step < 2:
                outs = run(layers, tensors)
            elif step == 2:
                with torch.cuda.graph(graph):
                    outs = run(layers, tensors)
            if step >= 2:
                graph.replay()
        assert all(out.isfinite().all() for out in outs)
        assert_same_bits(*zip(outs, expected, strict=True))


@pytest.mark.parametrize(
    "layout", [GROUPED, LATENT, replace(GROUPED, storage_dtype=torch.int8)], ids=("grouped", "latent", "int8")
)
@torch.no_grad()
def test_a_call_that_repeats_follows_its_view(layout):
    """The same bits as a first call, at every length; and what differs is another call."""
    twin = Twin((layout,), 64)
    handles = [twin.each(lambda cache, _: cache.admit()[0]) for _ in range(3)]
    twin.prompt(handles, [600, 1, 130])
    cache, views = twin.caches[0], []
    for _ in range(20):
        ((q, k, v),) = twin.tensors(3, 1)
        with cache.step(1) as (kv,):
            view = kv.append(k, v)
            first = attend(q, replace(view), mask=CAUSAL)
            assert_same_bits(*zip(attend(q, view, mask=CAUSAL), first, strict=True))
            assert CALL_CACHE.count(view) == 2  # the call and the write
        views.append(view)
    assert all(view is views[0] for view in views)
    others = ({"mask": sliding(9)}, {"scale": 0.5}, {"softcap": 3.0}, {"backend": "triton"})
    for n, other in enumerate(others):
        given = {"mask": CAUSAL, **other}
        expected = attend(q, replace(view), **given)
        for _ in range(2):
            assert_same_bits(*zip(attend(q, view, **given), expected, strict=True))
        assert CALL_CACHE.count(view) == 3 + n
    apart = torch.stack((q, q), -2).flatten(2, 3)[:, :, ::2]  # heads that lie elsewhere
    assert_same_bits(*zip(attend(apart, view, mask=CAUSAL), attend(q, view, mask=CAUSAL), strict=True))
    shifted = torch.cat((q.flatten()[:1], q.flatten()))[1:].view(q.shape)  # at an odd address
    rounding = {"rtol": 2e-2, "atol": 2e-3}  # of other tiles
    torch.testing.assert_close(attend(shifted, view, mask=CAUSAL), attend(q, view, mask=CAUSAL), **rounding)
    sinks = torch.randn(8, device=DEVICE)
    known = CALL_CACHE.count(view)
    assert not attend(q, view, mask=CAUSAL, sinks=sinks)[1].equal(first[1])
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="no backward"):
        attend(q.requires_grad_(), view, mask=CAUSAL, backend="triton")
    assert CALL_CACHE.count(view) == known


@pytest.mark.parametrize("counts", [1, 3, (1, 40, 0, 1, 5)], ids=str)
@pytest.mark.parametrize("layout", [GROUPED, LATENT], ids=("grouped", "latent"))
def test_calls_repeat_to_the_bit(layout, counts):
    call = store(layout, Sizes((5000, 300, 0, 64, 2000), page_size=64)).call(counts, 16).scheduled()
    first = call.solve()
    for _ in range(50):
        assert_same_bits(*zip(call.solve(), first, strict=True))


def test_128_heads_over_one_latent():
    assert_right(store(LATENT, Sizes((700, 129, 0), page_size=64)).call(1, 128))


def test_ten_thousand_sequences_of_one_token():
    """Faults 60, 75: one key gives its value, to the bit."""
    n, layout = 10_000, KVLayout.grouped(1, 16, dtype=torch.float16)
    q, k, v = (torch.randn(n, 1, 1, 16, dtype=torch.float16, device=DEVICE) for _ in range(3))
    count = torch.arange(n, dtype=torch.int32, device=DEVICE)
    one = torch.ones_like(count)
    view = KVView(layout, 1, k, v, table=count[:, None], starts=one - 1, lengths=one)
    assert_same_bits((cached_attention(q, view, mask=CAUSAL), v))


@pytest.mark.parametrize("page_size", [64, None])
def test_a_very_long_sequence_has_hundreds_of_splits(page_size):
    layout = replace(GROUPED, heads=1)
    call = store(layout, Sizes((131077,), page_size=page_size)).call(1, 4).scheduled()
    assert int(call.stored.view.schedule[0, 0, 0, 5]) > 200
    assert_right(call)


def far(layout: KVLayout, pages: int, size: int) -> dict[str, Tensor]:
    """Planes of more than 2**31 elements, with nothing in them."""
    free, _ = torch.cuda.mem_get_info()
    planes = layout.planes.items()
    if free < 1.2 * sum(
        pages * size * heads * max(1, width) * dtype.itemsize for _, (heads, width, dtype) in planes
    ):
        pytest.skip("needs more memory")
    assert pages * size * layout.heads * layout.dim > 2**31
    torch.use_deterministic_algorithms(False)  # filling them would take longer than all else
    return {
        name: torch.empty(pages, size, heads, *((width,) if width else ()), dtype=dtype, device=DEVICE)
        for name, (heads, width, dtype) in planes
    }


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize(
    "layout", [GROUPED, LATENT, replace(LATENT, storage_dtype=torch.int8)], ids=("grouped", "latent", "int8")
)
def test_pages_beyond_int32(layout, queries):
    """The same bits as in a small cache."""
    call = store(layout, Sizes((300, 64), page_size=64)).call(queries, 8)
    view, pages = call.stored.view, 2**31 // (64 * layout.heads * layout.dim) + 100
    first, planes = pages - len(view.k), far(layout, pages, 64)
    for name, plane in planes.items():
        plane[first:].view(torch.uint8).copy_(getattr(view, name).view(torch.uint8))
    used = (view.table >= 0) & (view.table < len(view.k))
    table = torch.where(used, view.table + first, view.table)
    planes["v"] = planes.get("v", planes["k"])
    planes |= {"v_scale": planes["k_scale"]} if layout.is_latent and layout.storage_dtype else {}
    assert int(table[used].min()) * 64 * layout.heads * layout.dim > 2**31
    assert_same_bits(*zip(call.over(table=table, **planes).solve(), call.solve(), strict=True))


def test_a_row_beyond_int32():
    """Of a contiguous cache, whose last tokens lie more than 2**31 elements after its first ones."""
    layout, length = replace(GROUPED, heads=1), 2**31 // 64 + 200
    call = store(layout, Sizes((150,), page_size=None)).call(40, 4, FULL)
    view, planes = call.stored.view, far(layout, 1, length)
    page = int(view.table[0, 0])
    for name, plane in planes.items():
        plane[0, -150:] = getattr(view, name)[page, :150]
    bounds = [torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (length - 150, length)]
    there = call.over(
        page_size=length, table=torch.zeros_like(view.table), starts=bounds[0], lengths=bounds[1], **planes
    )
    (out, lse), (far_out, far_lse) = call.solve(), there.solve()
    torch.testing.assert_close(far_out, out, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(far_lse, lse)


@torch.no_grad()
def test_a_compiled_step_gives_the_same_bits():
    """Inductor's, over both kinds of layer."""
    twin = Twin((GROUPED, LATENT), 16)
    handles = [twin.each(lambda cache, _: cache.admit()[0]) for _ in range(2)]
    twin.prompt(handles, [300, 15])

    def decode(layers, tensors):
        return [
            cached_attention(q, kv.append(k, v), mask=CAUSAL)
            for kv, (q, k, v) in zip(layers, tensors, strict=True)
        ]

    compiled = torch.compile(decode, fullgraph=True)
    for _ in range(3):
        tensors = twin.tensors(2, 1)
        results = []
        for cache, call in zip(twin.caches, (compiled, decode), strict=True):
            with cache.step(1) as layers:
                results.append(call(layers, tensors))
        assert_same_bits(*zip(*results, strict=True))
    torch._dynamo.reset()
