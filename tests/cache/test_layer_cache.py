"""What append accepts, casts, records and refuses; what a compiled layer sees of a step."""

import copy
import pickle

import pytest
import torch
from cache_model import LAYERS, Twin, append_all
from torch._dynamo.testing import CompileCounterWithBackend

from attnlib import KVCache, KVLayout, Rope
from attnlib.backends._torch.pages import quantise

GROUPED = KVLayout.grouped(2, 4, 3)
LATENT = KVLayout.latent(4, 2)
INDEXED = KVLayout.grouped(2, 4, 3, index_dim=5, index_heads=2)
INDEXED_LATENT = KVLayout.latent(4, 2, index_dim=5, index_heads=2, index_dtype=torch.float8_e4m3fn)


def cache_of(*layouts, **sizes) -> KVCache:
    return KVCache.paged(layouts, **{"pages": 16, "page_size": 4, "max_sequences": 4, **sizes})


def appending(cache: KVCache, *tensors, tokens=3, **given) -> None:
    """One step of the first layer alone."""
    with cache.step(tokens) as layers:
        layers[0].append(*tensors, **given)


def kv(*shape: int, dtype=torch.float32, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape, 2, 4, dtype=dtype, **options), torch.randn(
        *shape, 2, 3, dtype=dtype, **options
    )


@pytest.mark.parametrize(
    ("layout", "packed", "shapes", "message"),
    [
        (
            GROUPED,
            False,
            [(2, 3, 2, 5), (2, 3, 2, 3)],
            r"k: expected \[b=2, s=3, g=2, d=4\] in this step, got \(2, 3, 2, 5\)",
        ),
        (GROUPED, False, [(2, 3, 1, 4), (2, 3, 1, 3)], "k: expected"),
        (GROUPED, False, [(2, 3, 2, 4), (2, 3, 2, 4)], r"v: expected \[b=2, s=3, g=2, e=3\] in this step"),
        (GROUPED, False, [(6, 2, 4), (6, 2, 3)], r"k: expected \[b=2, s=3"),
        (GROUPED, False, [(3, 2, 2, 4), (3, 2, 2, 3)], "k: expected"),
        (GROUPED, True, [(2, 3, 2, 4), (2, 3, 2, 3)], r"k: expected \[t=6, g=2, d=4\] in this step"),
        (GROUPED, True, [(5, 2, 4), (5, 2, 3)], "k: expected"),
        (LATENT, False, [(2, 3, 5), (2, 3, 2)], r"latent: expected \[b=2, s=3, r=4\] in this step"),
        (LATENT, False, [(2, 3, 1, 4), (2, 3, 1, 2)], "latent: expected"),
        (LATENT, True, [(6, 4), (6, 3)], r"k_rope: expected \[t=6, p=2\] in this step"),
        (LATENT, True, [(6, 4)], r"k_rope: expected the shared rotary key \[..., p=2\], got None"),
        (
            KVLayout.latent(4, 0),
            True,
            [(6, 4), (6, 2)],
            "k_rope: expected None, since the layout has rope_dim=0",
        ),
    ],
)
def test_shapes_are_checked_against_the_step_and_the_layout(layout, packed, shapes, message):
    cache = cache_of(layout)
    handles = cache.admit(2)
    with pytest.raises(ValueError, match=message):
        appending(
            cache,
            *(torch.randn(shape) for shape in shapes),
            tokens=dict.fromkeys(handles, 3) if packed else 3,
        )
    assert cache.used_bytes == 0


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            None,
            ValueError,
            r"index: expected the index keys \[..., index_heads=2, index_dim=5\] .*, got None",
        ),
        ((1, 3, 5), ValueError, r"index: expected \[b=1, s=3, index_heads=2, index_dim=5\] in this step"),
        ((1, 3, 1, 5), ValueError, r"index: expected .* got \(1, 3, 1, 5\)"),
        ((1, 2, 2, 5), ValueError, r"index: expected .* got \(1, 2, 2, 5\)"),
        (
            torch.zeros(1, 3, 2, 5).double(),
            TypeError,
            "index: expected torch.float32 like the cache",
        ),
        (torch.zeros(1, 3, 2, 5, device="meta"), ValueError, "index: expected device cpu like the cache"),
        (torch.zeros(1, 3, 2, 5, requires_grad=True), NotImplementedError, "index: a cache has no backward"),
        ([0.0], TypeError, "index: expected a tensor, got list"),
    ],
)
@pytest.mark.parametrize("layout", [INDEXED, INDEXED_LATENT], ids=["grouped", "latent"])
def test_index_keys_are_checked_against_the_step_and_the_layout(layout, given, error, message, warm):
    """Also after steps whose write is repeated without checks; nothing is stored of a refused step."""
    cache = cache_of(layout)
    cache.admit()
    tensors = (torch.randn(1, 3, 4), torch.randn(1, 3, 2)) if layout.is_latent else kv(1, 3)
    for _ in range(3 if warm else 0):
        appending(cache, *tensors, index=torch.randn(1, 3, 2, 5))
    before = cache.used_bytes
    given = torch.randn(given) if isinstance(given, tuple) else given
    with pytest.raises(error, match=message):
        appending(cache, *tensors, index=given)
    assert cache.used_bytes == before


@pytest.mark.parametrize("index", [torch.zeros(1, 3, 2, 5), 3])
def test_a_layout_without_index_keys_refuses_them(index):
    cache = cache_of(GROUPED)
    cache.admit()
    appending(cache, *kv(1, 3))
    with pytest.raises(ValueError, match=r"index: expected None, got .*; make the layout with index_dim="):
        appending(cache, *kv(1, 3), index=index)


def test_grouped_storage_needs_a_value():
    cache = cache_of(GROUPED)
    cache.admit()
    with pytest.raises(TypeError, match="v: expected a tensor, got NoneType"):
        appending(cache, kv(1, 3)[0])


def test_dtype_must_be_the_layouts():
    cache = cache_of(GROUPED)
    cache.admit()
    for dtype in (torch.float16, torch.float64, torch.int64):
        with pytest.raises(
            TypeError, match=r"k: expected torch.float32 like the cache, got .*; cast it, or make"
        ):
            appending(cache, *(x.to(dtype) for x in kv(1, 3)))
    assert cache.used_bytes == 0


def test_autocast_casts_to_the_layouts_dtype():
    cache = cache_of(GROUPED)
    cache.admit()
    k, v = kv(1, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        appending(cache, k, v.double())
        with pytest.raises(TypeError, match=r"got torch\.int64"):
            appending(cache, k.long(), v)
    with cache.read(1) as (layer,):
        assert torch.equal(layer.view().k[0, :3], k[0].float())
        assert torch.equal(layer.view().v[0, :3], v[0].float())


def test_index_keys_of_a_step_are_known_before_it_stores_them():
    """Dense, packed and with left padding; a second look finds the same keys."""
    cache = cache_of(INDEXED)
    handles = cache.admit(2, left_padding=[0, 2])
    for step in (5, {handles[0]: 1, handles[1]: 4}, 1):
        shape = (2, step) if isinstance(step, int) else (5,)
        index = torch.randn(*shape, 2, 5)
        with cache.step(step) as layers:
            before = layers[0].planes["index"].clone()
            ahead = layers[0].index_keys(index), layers[0].index_keys(index, 17)
            assert torch.equal(layers[0].planes["index"].nan_to_num(), before.nan_to_num())
            assert layers[0].capacity == layers[0].step_view.table.shape[1] * 4
            view = layers[0].append(*kv(*shape), index=index)
            assert torch.equal(ahead[0], view.index_keys())
            assert torch.equal(ahead[1], view.index_keys(17))
            assert torch.equal(layers[0].index_keys(index), ahead[0])
            assert layers[0].info.padded
    assert layers[0].capacity == 0
    with pytest.raises(RuntimeError, match="only within"):
        layers[0].index_keys(index)
    cache.release(handles[1])
    with cache.step(1) as layers:
        layers[0].append(*kv(1, 1), index=torch.randn(1, 1, 2, 5))
        assert not layers[0].info.padded


def test_autocast_casts_index_keys_too():
    cache = cache_of(INDEXED)
    cache.admit()
    index = torch.randn(1, 3, 2, 5, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        appending(cache, *kv(1, 3), index=index)
    with cache.read(1) as (layer,):
        assert torch.equal(layer.view().index_keys(3), index.float())


def test_rotating_keys_leaves_index_keys_alone():
    cache = cache_of(INDEXED)
    cache.admit()
    index = torch.randn(1, 3, 2, 5)
    appending(cache, *kv(1, 3), angles=Rope(4).angles(torch.arange(3)[None]), index=index)
    with cache.read(1) as (layer,):
        assert torch.equal(layer.view().index_keys(3), index)


def test_another_device_is_refused():
    cache = cache_of(GROUPED)
    cache.admit()
    with pytest.raises(ValueError, match="v: expected device cpu like the cache, got meta"):
        appending(cache, kv(1, 3)[0], kv(1, 3)[1].to("meta"))


@pytest.mark.parametrize("which", [0, 1])
def test_no_gradient_is_silently_cut(which):
    cache = cache_of(GROUPED)
    cache.admit()
    tensors = kv(1, 3)
    tensors[which].requires_grad_()
    with pytest.raises(
        NotImplementedError, match=r"a cache has no backward; wrap the call in torch.no_grad\(\)"
    ):
        appending(cache, *tensors)
    with torch.no_grad():
        appending(cache, *tensors)


def test_no_gradient_also_means_none_through_autocasts_copy():
    cache = cache_of(KVLayout.grouped(2, 4, 3, dtype=torch.float16))
    cache.admit()
    with torch.autocast("cpu", torch.float16), pytest.raises(NotImplementedError, match="no backward"):
        appending(cache, *kv(1, 3, requires_grad=True))


def test_append_only_within_a_step():
    cache = cache_of(GROUPED)
    (handle,) = cache.admit()
    with cache.step(3) as layers:
        (layer,) = layers
        layer.append(*kv(1, 3))
    for call in (lambda: layer.append(*kv(1, 3)), layer.view):
        with pytest.raises(RuntimeError, match="only within"):
            call()
    with cache.read({handle: 3}), pytest.raises(RuntimeError, match=r"a read\(\) stores nothing"):
        layer.append(*kv(3))
    assert cache.length(handle) == 3


def test_appending_again_overwrites_the_same_slots():
    cache = cache_of(GROUPED)
    (handle,) = cache.admit()
    first, second = kv(1, 5), kv(1, 5)
    with cache.step(5) as (layer,):
        layer.append(*first)
        view = layer.append(*second)
        assert torch.equal(view.k[view.table[0, :2]].flatten(0, 1)[:5], second[0][0])
    assert cache.length(handle) == 5


def test_another_rotary_convention_is_refused():
    cache = cache_of(GROUPED)
    cache.admit()
    half, interleaved = (Rope(4, interleaved=on).angles(torch.arange(3)[None]) for on in (False, True))
    narrow = Rope(2).angles(torch.arange(3)[None])
    appending(cache, *kv(1, 3), angles=half)
    for other in (interleaved, narrow, None):
        with pytest.raises(RuntimeError, match="stores keys rotated as 'half:4'"):
            appending(cache, *kv(1, 3), angles=other)
    appending(cache, *kv(1, 3), angles=half)
    with cache.read(1) as (layer,):
        assert layer.view().rope == "half:4"


def test_unrotated_is_a_convention_too():
    cache = cache_of(GROUPED)
    cache.admit()
    appending(cache, *kv(1, 3))
    with cache.read(1) as (layer,):
        assert layer.view().rope is None
    with pytest.raises(RuntimeError, match="stores keys rotated as 'as given'"):
        appending(cache, *kv(1, 3), angles=Rope(4).angles(torch.arange(3)[None]))


def test_a_failed_step_records_no_convention():
    cache = cache_of(GROUPED)
    cache.admit()
    half, interleaved = (Rope(4, interleaved=on).angles(torch.arange(3)[None]) for on in (False, True))
    with (
        pytest.raises(RuntimeError, match="rotated as 'half:4', got 'interleaved:4'"),
        cache.step(3) as (layer,),
    ):
        [layer.append(*kv(1, 3), angles=angles) for angles in (half, interleaved)]
    appending(cache, *kv(1, 3), angles=interleaved)


@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("latent", [False, True])
def test_quantised_planes_hold_bytes_and_scales(store, latent):
    cache = cache_of(
        KVLayout.latent(4, 2, storage_dtype=store)
        if latent
        else KVLayout.grouped(2, 4, 3, storage_dtype=store)
    )
    (handle,) = cache.admit()
    k, v = (torch.randn(1, 3, 4), torch.randn(1, 3, 2)) if latent else kv(1, 3)
    appending(cache, k, v)
    (child,) = cache.fork(handle)
    appending(cache, k[0, :1], v[0, :1], tokens={child: 1})  # copies the page, scales too
    with cache.read({handle: 1, child: 1}) as (layer,):
        view = layer.view()
        assert view.table[0, 0] != view.table[1, 0]
        for page in view.table[:, 0].tolist():
            expected, scale = quantise(k[0].unsqueeze(1) if latent else k[0], store)
            assert view.k.dtype == store
            assert torch.equal(view.k[page, :3].view(torch.uint8), expected.view(torch.uint8))
            assert torch.equal(view.k_scale[page, :3], scale)
            if latent:
                assert view.v is view.k
                assert view.v_scale is view.k_scale
                assert torch.equal(view.k_rope[page, :3, 0], v[0])
            else:
                assert torch.equal(view.v_scale[page, :3], quantise(v[0], store)[1])


@pytest.mark.parametrize("layout", [GROUPED, INDEXED], ids=["keys", "index keys"])
def test_a_fully_compiled_layer_is_compiled_once_for_decoding(layout):
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph.forward

    def attend(layer, k, v, index=None):
        index = None if layer.layout.index_dim == 0 else k.new_ones(*k.shape[:2], 2, 5)
        view = layer.append(k, v, angles=rope.angles(layer.positions), index=index)
        total = view.k.sum() + view.lengths.sum() + (1 if layer.prefill else 0)
        return total if index is None else total + view.index_keys().sum()

    rope, cache = Rope(4), cache_of(layout, layout, pages=64)
    cache.admit(2)
    with cache.step(20) as layers:
        for layer in layers:
            attend(layer, *kv(2, 20))
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for _ in range(9):  # over two page boundaries
        with cache.step(1) as layers:
            for layer in layers:
                compiled(layer, *kv(2, 1))
    assert len(frames) == 1
    with pytest.raises(RuntimeError, match=r"layers \[1\] of 2 did not append"), cache.step(1) as layers:
        compiled(layers[0], *kv(2, 1))
    torch._dynamo.reset()


@pytest.mark.parametrize("layout", [INDEXED, INDEXED_LATENT], ids=["grouped", "latent"])
def test_prompts_of_any_length_are_compiled_once_with_their_index_keys(layout):
    def gathered(layer, k, v, index):
        return layer.append(k, v, index=index).index_keys(k.shape[1])

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gathered, backend=counter, fullgraph=True, dynamic=True)
    cache, counts = cache_of(layout), []
    cache.admit(2)
    for n in (7, 9, 6, 8):
        k, v = (torch.randn(2, n, 4), torch.randn(2, n, 2)) if layout.is_latent else kv(2, n)
        index = torch.randn(2, n, 2, 5)
        with cache.step(n) as (layer,):
            ours = compiled(layer, k, v, index)
            assert torch.equal(ours, gathered(layer, k, v, index))
            assert ours[:, :n].any()
        counts.append(counter.frame_count)
    assert counts[1] == counts[-1]  # the first append records the convention
    torch._dynamo.reset()


def test_inference_mode_may_come_and_go():
    with torch.inference_mode():
        twin = Twin(cache_of(*LAYERS))
        first, second = twin.admit(2)
        twin.step(3)
    twin.step(3)
    with torch.inference_mode():
        twin.step({second: 5, first: 1})
        twin.check()
    twin.step({second: 5, first: 1})
    twin.fork(first)
    twin.step(1)
    twin.check()


def test_no_tokens_are_a_step_too():
    twin = Twin(cache_of(*LAYERS))
    twin.step(0)
    twin.step(4)
    twin.step({})
    (handle,) = twin.admit()
    twin.step(0)
    twin.step({handle: 0})
    twin.check()
    with twin.cache.step({}) as layers:
        append_all(layers, torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize(
    ("slot", "words"), [(64, "less than 64, .*, got 64"), (-2, "got -2"), (1, "one of them twice")]
)
def test_checks_find_slots_that_do_not_exist(monkeypatch, slot, words):
    """Without them such slots are the writer's to contain; -1 is always skipped."""
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    cache = cache_of(GROUPED)
    cache.admit()
    with cache.step(3) as (layer,):
        layer._slots[:] = -1
        layer.append(*kv(1, 3))
        layer._slots[1:] = torch.tensor([1, slot])
        with pytest.raises(ValueError, match=f"slots: expected .*{words}"):
            layer.append(*kv(1, 3))


def test_copies_and_pickles_are_refused():
    cache = cache_of(GROUPED)
    with cache.step(0) as (layer,):
        pass
    for thing in (cache, layer):
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                attempt(thing)
