"""The cache writer: the bits of torch's writer on a CPU, in the right places and nowhere else."""

from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from compiled.builds import pairwise
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from attnlib import KVCache, KVLayout, KVView, Rope, rotate
from attnlib.backends import _torch
from attnlib.backends._torch.pages import quantise
from attnlib.backends._triton.decode import writes as triton_writes
from attnlib.cache import layer_cache
from attnlib.dispatch.storage import write_cache
from attnlib.fp8 import E4M3
from attnlib.kv import PLANES
from attnlib.rope.rope import Angles

WRITE = torch.ops.attnlib.triton_write
PAGES, SIZE = 5, 4
# The interpreter truncates to bf16 where torch rounds.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
STORES = (None, torch.int8, torch.float8_e4m3fn)
FACTORS = {
    "dtype": DTYPES,
    "widths": ((59, 80), (96, 33), (192, 128), (16, 576)),
    "heads": (1, 3),
    "turned": (0.0, 0.5, 1.0),
    "interleaved": (False, True),
    "order": ("pages", "heads", "apart"),
    "step": ("dense", "row", "packed"),
    "fused": (False, True),
}
INDEX_FACTORS = {
    **{name: FACTORS[name] for name in ("dtype", "heads", "turned", "interleaved", "order", "step", "fused")},
    "index_dim": (128, 59),
    "index_heads": (1, 3),
    "whole_rows": (True, False),
}
# A garbage slot is skipped as -1 is, and the last two tokens are written to the first and the last slot.
SLOTS = (7, -1, PAGES * SIZE, 3, 2**40, -(2**63), 12, 9, 0, PAGES * SIZE - 1)


def view_of(layout: KVLayout, order: str = "pages", device: str = "cpu") -> KVView:
    """Poisoned planes, in the order of pages or of heads, or with gaps."""
    planes = {}
    for name, (heads, width, dtype) in layout.planes.items():
        shape = (PAGES, heads, SIZE) if order == "heads" else (PAGES, SIZE, heads)
        gap = 16 if order == "apart" else 0
        plane = torch.empty(*shape, *((width + gap,) if width else ()), dtype=dtype, device=device)
        plane.view(torch.uint8).fill_(0x7F)  # NaN, or 127
        plane = plane[..., :width] if width else plane
        planes[name] = plane.transpose(1, 2) if order == "heads" else plane
    if layout.is_latent:
        planes |= {"v": planes["k"]} | ({"v_scale": planes["k_scale"]} if layout.storage_dtype else {})
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    return KVView(layout, SIZE, **planes, table=nothing[None], starts=nothing, lengths=nothing)


def assert_equal_views(ours: KVView, expected: KVView) -> None:
    for name in PLANES:
        x, y = getattr(ours, name), getattr(expected, name)
        if x is not None:
            assert_same_bits((x.float().cpu(), y.float()))


def to_device(x):
    """A tensor in its own strides, or angles."""
    if isinstance(x, Angles):
        return Angles(x.cos.to(DEVICE), x.sin.to(DEVICE), x.interleaved)
    return (
        None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)
    )


def assert_written(
    layout: KVLayout,
    k: Tensor,
    v: Tensor | None,
    angles: Angles | None,
    order: str = "pages",
    index: Tensor | None = None,
) -> None:
    """Both writers leave the same planes, the untouched parts included."""
    slots = torch.tensor(SLOTS)
    ours, expected = view_of(layout, order, DEVICE), view_of(layout, order)
    kept = torch.where((slots >= 0) & (slots < PAGES * SIZE), slots, -1)
    _torch.write_cache(expected, k, v, kept, angles)
    if index is not None:
        _torch.write_index(expected, index, kept)
    write_cache(ours, *map(to_device, (k, v, slots)), angles=to_device(angles), index=to_device(index))
    assert_equal_views(ours, expected)


def tokens_of(step: str) -> tuple[int, ...]:
    return (10,) if step == "packed" else (2, 5)


def new_tokens(case: SimpleNamespace, latent: bool) -> tuple[Tensor, Tensor]:
    """K and V, or the latent and the rotary key: views of one projection, or tensors of their own."""
    d, e = case.widths
    heads = 1 if latent else case.heads
    lead = tokens_of(case.step)
    fused = torch.randn(*lead, heads * (d + e), dtype=case.dtype)
    k, v = fused.split((heads * d, heads * e), -1)
    if not case.fused:
        k, v = k.contiguous(), v.contiguous()
    return (k, v) if latent else (k.unflatten(-1, (heads, d)), v.unflatten(-1, (heads, e)))


def angles_for(case: SimpleNamespace, width: int) -> Angles | None:
    pairs = int(case.turned * width) // 2
    shape = {"dense": (2, 5), "row": (5,), "packed": (10,)}[case.step]
    return (
        Rope(2 * pairs, interleaved=case.interleaved).angles(torch.randint(0, 9000, shape)) if pairs else None
    )


@pytest.mark.parametrize("store", STORES, ids=str)
def test_the_same_bits_as_torch_and_nothing_else(store):
    for latent, chosen in product((False, True), pairwise(FACTORS)):
        case = SimpleNamespace(**chosen)
        d, e = case.widths
        if latent:
            layout = KVLayout.latent(d, e, dtype=case.dtype, storage_dtype=store)
        else:
            layout = KVLayout.grouped(case.heads, d, e, dtype=case.dtype, storage_dtype=store)
        assert_written(layout, *new_tokens(case, latent), angles_for(case, e if latent else d), case.order)


@pytest.mark.parametrize("store", STORES[1:], ids=str)
def test_rounding_and_rows_that_are_not_finite(store):
    """Every kind of fp8 number and halfway between; rows of zeros, of NaN, of infinity, and of the least
    numbers.
    """
    steps = torch.arange(-500, 501) / 500
    rows = torch.stack([steps.sign() * steps.abs() ** power * 448 for power in range(1, 9)])
    bits = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = torch.cat((bits, (bits[1:] + bits[:-1]) / 2, torch.full((748,), 448.0)))
    rows = torch.cat((rows, exact[None], -exact[None]))
    assert_written(KVLayout.grouped(1, 1001, storage_dtype=store), rows[:, None], rows.flip(1)[:, None], None)
    special = torch.randn(10, 1, 64)
    special[[0, 3, 6]] = 0
    special[7, 0, 5] = torch.nan
    special[8, 0, 6] = -torch.inf
    special[9] *= 1e-37
    slots = torch.arange(10)
    layout = KVLayout.grouped(1, 64, storage_dtype=store)
    ours, expected = view_of(layout, device=DEVICE), view_of(layout)
    _torch.write_cache(expected, special, special, slots, None)
    with pytest.warns(RuntimeWarning, match="invalid value") if INTERPRETED else torch.no_grad():  # numpy's
        triton_writes.write_cache(ours, *map(to_device, (special, special, slots)), None)
    scale, wanted = ours.k_scale.cpu().flatten()[:10], expected.k_scale.flatten()[:10]
    assert_same_bits((scale, wanted))
    assert scale[[0, 3, 6]].eq(2.0**-40).all()
    values, right = (
        x.k.flatten(0, 2)[:10].float().cpu() * y[:, None] for x, y in ((ours, scale), (expected, wanted))
    )
    broken = ~scale.isfinite()
    assert_same_bits((values[~broken], right[~broken]))
    assert not values[broken].isfinite().any()  # as a byte, what is no number depends on the processor


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("store", STORES, ids=str)
def test_index_keys_have_the_bits_of_torch_in_their_own_plane(store, stored):
    """Whatever keys and values are stored in, in planes and tokens of any order; keys are written as ever."""
    for latent, chosen in product((False, True), pairwise(INDEX_FACTORS)):
        case = SimpleNamespace(**chosen, widths=(24, 16))
        options = {"dtype": case.dtype, "storage_dtype": store, "index_dtype": stored}
        options |= {"index_dim": case.index_dim, "index_heads": case.index_heads}
        layout = (
            KVLayout.latent(24, 16, **options) if latent else KVLayout.grouped(case.heads, 24, 16, **options)
        )
        k, v = new_tokens(case, latent)
        index = torch.randn(*tokens_of(case.step), case.index_dim, case.index_heads, dtype=case.dtype).mT
        index = index.contiguous() if case.whole_rows else index
        assert_written(layout, k, v, angles_for(case, 16 if latent else 24), case.order, index)


def arguments(latent: bool, store: torch.dtype | None) -> tuple:
    """Arguments of attnlib::triton_write."""
    angles = to_device(Rope(6).angles(torch.arange(5)))
    layout = (
        KVLayout.latent(24, 6, storage_dtype=store)
        if latent
        else KVLayout.grouped(2, 24, 16, storage_dtype=store)
    )
    view = view_of(layout, device=DEVICE)
    planes = (
        (view.k, view.k_rope, view.k_scale, None) if latent else (view.k, view.v, view.k_scale, view.v_scale)
    )
    new = [
        torch.randn(2, 5, *(() if latent else (2,)), width, device=DEVICE)
        for width in (24, 6 if latent else 16)
    ]
    return (*planes, *new, angles.cos, angles.sin, torch.tensor(SLOTS, device=DEVICE), False, latent)


def test_the_operator_is_what_it_says():
    for latent in (False, True):
        torch.library.opcheck(WRITE.default, arguments(latent, None))
        torch.library.opcheck(WRITE.default, arguments(latent, torch.int8))


@pytest.mark.parametrize("narrow", ["a head too few", "a channel too few", "a token too few"])
def test_tokens_that_are_not_those_of_planes_and_slots_are_refused(narrow):
    k, v, k_scale, v_scale, new_k, new_v, *rest = arguments(False, None)
    if narrow == "a token too few":
        new_k, new_v = new_k[:, :-1], new_v[:, :-1]
    else:
        new_k = new_k[:, :, :-1] if narrow == "a head too few" else new_k[..., :-1]
    before = k.clone()
    with pytest.raises(ValueError, match=r"k, v: expected \(2, \d, \d, \d+\) for 10 slots, got"):
        WRITE(k, v, k_scale, v_scale, new_k, new_v, *rest)
    assert_same_bits((k, before))


class Calls(TorchDispatchMode):
    """Counts the writes that torch's dispatcher sees."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func is WRITE.default
        return func(*args, **(kwargs or {}))


def cache_of(*layouts: KVLayout) -> KVCache:
    cache = KVCache.paged(layouts, pages=64, page_size=4, max_sequences=2, device=DEVICE)
    cache.admit(2)
    return cache


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


@torch.no_grad()
def test_what_was_appended_before_is_written_at_once_and_all_else_is_checked():
    cache, rope = cache_of(KVLayout.grouped(2, 8)), Rope(8)

    def append(kv, k, v, rope=rope):
        angles = None if rope is None else rope.angles(kv.positions)
        view = kv.append(k, v, angles=angles)
        stored = (plane[kv._slots // 4, kv._slots % 4] for plane in (view.k, view.v))
        assert_same_bits(*zip(stored, (rotate(k, angles).flatten(0, 1), v.flatten(0, 1)), strict=True))

    with mock.patch.object(layer_cache, "write_cache", wraps=write_cache) as checked:
        for count in (1, 2, 2, 2):  # the first append records the convention
            with cache.step(3) as (kv,):
                append(kv, random(2, 3, 2, 8), random(2, 3, 2, 8))
            assert checked.call_count == count
        with cache.step(3) as (kv,):
            k, v = random(2, 3, 2, 8), random(2, 3, 2, 8)
            for count in (3, 4):  # rows in pieces are copied each time
                append(kv, random(2, 3, 8, 2).mT, v)
                assert checked.call_count == count
            with Calls() as calls:
                append(kv, k, v)
            assert calls.seen == 1
            assert checked.call_count == 4
            for wrong in (k[:1], k.double(), k.to("meta")):
                with pytest.raises((ValueError, TypeError), match="k: expected"):
                    kv.append(wrong, v, angles=rope.angles(kv.positions))
            with torch.enable_grad(), pytest.raises(NotImplementedError, match="no backward"):
                kv.append(k, v.clone().requires_grad_(), angles=rope.angles(kv.positions))
            for other in (None, Rope(8, interleaved=True)):
                with pytest.raises(RuntimeError, match="stores keys rotated as 'half:8'"):
                    append(kv, k, v, other)
            row = torch.arange(4, device=DEVICE)
            kv.append(k, v, angles=rope.angles(row[:3]))
            with pytest.raises(ValueError, match="angles: expected"):
                kv.append(k, v, angles=rope.angles(row))
            append(kv, k, v)
    with pytest.raises(RuntimeError, match="only within"):
        kv.append(k, v)


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn], ids=str)
@torch.no_grad()
def test_index_keys_are_written_at_once_with_the_keys(stored):
    cache = cache_of(KVLayout.latent(16, 4, index_dim=12, index_heads=2, index_dtype=stored))

    def append(kv, index):
        latent = random(2, 3, 16)
        view = kv.append(latent, random(2, 3, 4), index=index)
        assert_same_bits((view.k[kv._slots // 4, kv._slots % 4, 0], latent.flatten(0, 1)))
        whole = index.cpu().flatten(0, 1)
        if stored is not None:
            kept, scale = quantise(whole, stored)
            whole = kept.float() * scale[..., None]
        length = int(view.lengths[0])
        assert_same_bits((view.index_keys(length)[:, -3:].flatten(0, 1).cpu(), whole))

    with mock.patch.object(layer_cache, "write_cache", wraps=write_cache) as checked:
        for count in (1, 2, 2, 2):  # the first append records the convention
            with cache.step(3) as (kv,):
                append(kv, random(2, 3, 2, 12))
            assert checked.call_count == count
        with cache.step(3) as (kv,):
            append(kv, random(2, 3, 12, 2).mT)  # rows in pieces are copied
            assert checked.call_count == 3
            with Calls() as calls:
                append(kv, random(2, 3, 2, 12))
            assert calls.seen == 2
            assert checked.call_count == 3


@torch.no_grad()
def test_a_compiled_append_is_one_graph():
    layouts = (
        KVLayout.grouped(2, 8, storage_dtype=torch.int8, index_dim=8),
        KVLayout.latent(16, 4, index_dim=8, index_dtype=torch.float8_e4m3fn),
    )
    compiled, eager = cache_of(*layouts), cache_of(*layouts)
    counter = CompileCounterWithBackend("aot_eager")

    def append(layers, k, v, latent, k_rope, index):
        angles = Rope(4).angles(layers[0].positions)
        views = (
            layers[0].append(k, v, angles=angles, index=index),
            layers[1].append(latent, k_rope, angles=angles, index=index),
        )
        return [view.k.float().nan_to_num().sum() + view.index_keys(8).sum() for view in views]

    run = torch.compile(append, backend=counter, fullgraph=True)
    for _ in range(6):  # over a page boundary
        tensors = [random(2, 1, *shape) for shape in ((2, 8), (2, 8), (16,), (4,), (1, 8))]
        with compiled.step(1) as layers:
            run(layers, *tensors)
        with eager.step(1) as layers:
            append(layers, *tensors)
    assert counter.frame_count <= 2  # the first recorded the convention
    torch._dynamo.reset()
    with compiled.read(1) as ours, eager.read(1) as expected:
        for x, y in zip(ours, expected, strict=True):
            for name, plane in x.planes.items():
                used = [z[:4].float() for z in (plane, y.planes[name])]
                assert_same_bits(used)


@pytest.mark.parametrize("index", [{}, {"index_dim": 128}, {"index_dim": 128, "index_dtype": E4M3}], ids=str)
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA graph")
@torch.no_grad()
def test_a_captured_append_goes_where_each_step_says(index):
    layout = KVLayout.grouped(2, 64, dtype=torch.bfloat16, storage_dtype=torch.float8_e4m3fn, **index)
    cache, eager = cache_of(layout), cache_of(layout)
    k, v = random(2, 1, 2, 64, dtype=torch.bfloat16), random(2, 1, 2, 64, dtype=torch.bfloat16)
    new_index = random(2, 1, 1, 128, dtype=torch.bfloat16) if index else None
    rope, graph = Rope(64), torch.cuda.CUDAGraph()

    def append(kv):
        view = kv.append(k, v, angles=rope.angles(kv.positions), index=new_index)
        return view, view.index_keys(12) if index else None

    for step in range(11):
        for x in (k, v, new_index) if index else (k, v):
            x.normal_()
        with eager.step(1) as (kv,):
            expected, expected_keys = append(kv)
        with cache.step(1, replay=step > 2) as (kv,):
            if step < 2:
                view, index_keys = append(kv)
            elif step == 2:
                with torch.cuda.graph(graph):
                    view, index_keys = append(kv)
            if step >= 2:
                graph.replay()
        torch.cuda.synchronize()
        for name in layout.planes:
            used = [getattr(x, name)[x.table[:, : step // 4 + 1].long()].float() for x in (view, expected)]
            assert_same_bits([x.flatten(1, 2)[:, : step + 1] for x in used])
        if index:
            assert_same_bits((index_keys, expected_keys))


@pytest.mark.skipif(INTERPRETED, reason="the default suite writes there from a CPU")
def test_a_page_whose_offset_is_more_than_int32():
    torch.use_deterministic_algorithms(False)  # filling 4 GiB would touch them
    storage = torch.empty(2**31 + 4096, dtype=torch.float16, device=DEVICE)
    pool, new = storage.as_strided((3, 4, 1, 8), (2**30, 8, 8, 1)), random(4, 1, 8, dtype=torch.float16)
    nothing = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    view = KVView(KVLayout.grouped(1, 8, dtype=torch.float16), 4, pool, pool, nothing[None], nothing, nothing)
    for page in (2, 0):
        write_cache(view, new + page, new + page, page * 4 + torch.arange(4, device=DEVICE))
        assert_same_bits((pool[page], new + page))


@pytest.mark.skipif(INTERPRETED, reason="needs a device that is behind")
@torch.no_grad()
def test_steps_may_be_ahead_of_the_device():
    """What a step shows is not overwritten by the next ones before the device has seen it."""
    layout, seen, expected = KVLayout.grouped(2, 8), [], []
    cache, here = cache_of(layout), KVCache.paged([layout], pages=64, page_size=4, max_sequences=2)
    here.admit(2)
    k = random(2, 1, 2, 8)
    near = k.cpu()
    for _ in range(40):
        torch.cuda._sleep(5_000_000)
        for one, notes in ((cache, seen), (here, expected)):
            with one.step(1) as (kv,):
                new = near if one is here else k
                view = kv.append(new, new)
                notes.append([x.clone() for x in (kv.positions, kv._slots, view.lengths, view.table)])
    for ours, wanted in zip(seen, expected, strict=True):
        assert_same_bits(*zip((x.cpu() for x in ours), wanted, strict=True))
