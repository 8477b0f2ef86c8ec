"""What a layout says it stores, and what it refuses."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from attnlib import CAUSAL, FULL, KVCache, KVLayout, KVView, Mask, sliding
from attnlib.masks.ready_made import attention_sinks


def test_grouped_planes():
    layout = KVLayout.grouped(2, 64, 32, dtype=torch.bfloat16)
    assert layout.planes == {"k": (2, 64, torch.bfloat16), "v": (2, 32, torch.bfloat16)}
    assert layout.token_bytes == 2 * (64 + 32) * 2
    assert KVLayout.grouped(2, 64) == KVLayout.grouped(2, 64, 64)


def test_latent_planes_have_no_value():
    layout = KVLayout.latent(512, 64, dtype=torch.bfloat16)
    assert layout.planes == {"k": (1, 512, torch.bfloat16), "k_rope": (1, 64, torch.bfloat16)}
    assert set(KVLayout.latent(512, 0).planes) == {"k"}


@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn])
def test_stored_bytes_get_scales_and_leave_the_rotary_key_alone(store):
    grouped = KVLayout.grouped(2, 64, dtype=torch.float16, storage_dtype=store).planes
    assert grouped["k"] == grouped["v"] == (2, 64, store)
    assert grouped["k_scale"] == grouped["v_scale"] == (2, 0, torch.float32)
    latent = KVLayout.latent(512, 64, dtype=torch.float16, storage_dtype=store).planes
    assert latent == {
        "k": (1, 512, store),
        "k_rope": (1, 64, torch.float16),
        "k_scale": (1, 0, torch.float32),
    }


@pytest.mark.parametrize("store", [None, torch.int8])
def test_index_keys_have_a_plane_whatever_keys_are_stored_in(store):
    options = {"index_dim": 128, "dtype": torch.bfloat16, "storage_dtype": store}
    plain = KVLayout.latent(512, 64, **options)
    assert plain.planes["index"] == (1, 128, torch.bfloat16)
    assert "index_scale" not in plain.planes
    small = KVLayout.grouped(4, 128, **options, index_heads=4, index_dtype=torch.float8_e4m3fn)
    assert small.planes["index"] == (4, 128, torch.float8_e4m3fn)
    assert small.planes["index_scale"] == (4, 0, torch.float32)
    assert small.token_bytes - replace(small, index_dim=0, index_heads=1, index_dtype=None).token_bytes == 528
    assert set(replace(plain, index_dim=0).planes) == set(plain.planes) - {"index"}


def test_a_mask_may_reach_as_far_back_as_the_window():
    windowed = KVLayout.grouped(2, 64, window=4)
    for mask in (sliding(4), sliding(4).shift(2), Mask(left=-3)):
        windowed.check_reach(mask)
    KVLayout.grouped(2, 64).check_reach(FULL)
    for mask, reach in (
        (sliding(5), "4 keys"),
        (CAUSAL, "without bound"),
        (Mask(right=0, prefix=1), "without bound"),
    ):
        with pytest.raises(
            ValueError, match=f"mask: it reaches back {reach}, and the cache keeps a window of 4"
        ):
            windowed.check_reach(mask)


def test_a_mask_may_show_as_many_first_keys_as_are_kept():
    keeping = KVLayout.grouped(2, 64, window=4, first_tokens=3)
    for mask in (sliding(4), attention_sinks(3, 4), attention_sinks(2, 3), CAUSAL & attention_sinks(3, 4)):
        keeping.check_reach(mask)
    with pytest.raises(
        ValueError, match="mask: it shows the first 4 keys, and the cache keeps 3 of them; make its la"
    ):
        keeping.check_reach(attention_sinks(4, 4))
    for mask, reach in ((attention_sinks(3, 5), "4 keys"), (attention_sinks(1, 1) | CAUSAL, "without bound")):
        with pytest.raises(
            ValueError, match=f"mask: it reaches back {reach}, and the cache keeps a window of 4"
        ):
            keeping.check_reach(mask)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: KVLayout.grouped(0, 64), ValueError, "heads: expected at least 1, got 0"),
        (lambda: KVLayout.grouped(2, 0), ValueError, "dim: expected at least 1, got 0"),
        (lambda: KVLayout.grouped(1, 0, index_dim=16), ValueError, "dim: expected at least 1, got 0"),
        (lambda: KVLayout.grouped(2, 64, 0), ValueError, "value_dim: expected at least 1, got 0"),
        (lambda: KVLayout.latent(512, -1), ValueError, "rope_dim: expected at least 0, got -1"),
        (lambda: KVLayout.grouped(2, 64, window=0), ValueError, "window: expected at least 1, got 0"),
        (
            lambda: KVLayout.grouped(2, 64, first_tokens=4),
            ValueError,
            "first_tokens: expected 0 without a window",
        ),
        (
            lambda: KVLayout.latent(64, 0, window=4, first_tokens=-1),
            ValueError,
            "first_tokens: expected at least 0, got -1",
        ),
        (lambda: KVLayout.grouped(2, 64, dtype=torch.int8), TypeError, "dtype: expected fp16"),
        (lambda: KVLayout.grouped(2, 64, dtype=torch.float8_e4m3fn), TypeError, "dtype: expected fp16"),
        (
            lambda: KVLayout.grouped(2, 64, storage_dtype=torch.float16),
            TypeError,
            "storage_dtype: expected None",
        ),
        (lambda: KVLayout.grouped(2, 8, index_dim=-1), ValueError, "index_dim: expected at least 0, got -1"),
        (lambda: KVLayout.latent(8, 0, index_dim=4.0), TypeError, "index_dim: expected an int, got 4.0"),
        (
            lambda: KVLayout.grouped(2, 8, index_dim=4, index_heads=0),
            ValueError,
            "index_heads: expected at least 1, got 0",
        ),
        (
            lambda: KVLayout.grouped(2, 8, index_heads=2),
            ValueError,
            "index_dim: expected at least 1 with index_heads=2 and index_dtype=None, got 0",
        ),
        (
            lambda: KVLayout.latent(8, 4, index_dtype=torch.float8_e4m3fn),
            ValueError,
            "index_dim: expected at least 1 with",
        ),
        (
            lambda: KVLayout.latent(8, 4, index_dim=4, index_dtype=torch.int8),
            TypeError,
            r"index_dtype: expected None \(the layout's dtype\) or torch.float8_e4m3fn, got torch.int8",
        ),
        (
            lambda: KVLayout.grouped(2, 8, index_dim=4, index_dtype="fp8"),
            TypeError,
            "index_dtype: expected None",
        ),
    ],
)
def test_wrong_layouts_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def a_view(layout: KVLayout) -> KVView:
    """Three sequences over five pages of four tokens."""
    planes = {
        name: torch.zeros(5, 4, heads, *((width,) if width else ()), dtype=dtype)
        for name, (heads, width, dtype) in layout.planes.items()
    }
    if layout.is_latent:
        planes |= {"v": planes["k"]} | ({"v_scale": planes["k_scale"]} if layout.storage_dtype else {})
    return KVView(layout, 4, **planes, table=ints(3, 2), starts=ints(3), lengths=ints(3))


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


GROUPED, LATENT = KVLayout.grouped(2, 8, 4), KVLayout.latent(8, 4, storage_dtype=torch.int8)
INDEXED = KVLayout.latent(8, 4, index_dim=6, index_heads=2, index_dtype=torch.float8_e4m3fn)
K_SHAPE = r"k: expected \[pages, page_size, g, width\] = \[5, 4, 2, 8\] like the layout, got \(5, 4, 2, 16\)"


@pytest.mark.parametrize(
    ("layout", "changes", "error", "message"),
    [
        (
            GROUPED,
            {"table": ints(3, 2).long()},
            TypeError,
            r"table: expected an int32 tensor, got .*; cast .*int\(\)",
        ),
        (GROUPED, {"table": ints(2, 2)}, ValueError, r"table: expected \[3, 2\], a row for each"),
        (GROUPED, {"table": ints(2, 3).mT}, ValueError, "table: expected a contiguous last dimension"),
        (GROUPED, {"starts": ints(1)}, ValueError, r"starts: expected \[3\]"),
        (GROUPED, {"starts": ints(6)[::2]}, ValueError, "starts: expected a contiguous last dimension"),
        (
            GROUPED,
            {"starts": torch.zeros(3)},
            TypeError,
            "starts: expected an int32 tensor, got torch.float32",
        ),
        (GROUPED, {"lengths": ints(3, 1)}, ValueError, r"lengths: expected \[3\]"),
        (GROUPED, {"lengths": [0, 0, 0]}, TypeError, "k, lengths, table: expected tensors"),
        (GROUPED, {"cu_seqlens_q": ints(3)}, ValueError, r"cu_seqlens_q: expected \[4\]"),
        (GROUPED, {"page_size": 8}, ValueError, r"k: expected .* = \[5, 8, 2, 8\]"),
        (GROUPED, {"k": torch.zeros(5, 4, 2, 16)}, ValueError, K_SHAPE),
        (
            GROUPED,
            {"k": torch.zeros(5, 4, 2, 16)[..., ::2]},
            ValueError,
            "k: expected a contiguous last dimension",
        ),
        (
            GROUPED,
            {"k": torch.zeros(5, 4, 2, 8).half()},
            TypeError,
            "k: expected a torch.float32 tensor like the",
        ),
        (GROUPED, {"k": torch.zeros(())}, ValueError, "k: expected"),
        (GROUPED, {"v": torch.zeros(6, 4, 2, 4)}, ValueError, "v: expected"),
        (GROUPED, {"v": torch.zeros(5, 4, 2, 4, device="meta")}, ValueError, "v: expected device cpu like k"),
        (GROUPED, {"v": None}, TypeError, "v: expected a torch.float32 tensor like the layout, got NoneType"),
        (GROUPED, {"k_rope": torch.zeros(5, 4, 2, 4)}, ValueError, "k_rope: expected None"),
        (GROUPED, {"k_scale": torch.zeros(5, 4, 2)}, ValueError, "k_scale: expected None"),
        (LATENT, {"v": torch.zeros(5, 4, 1, 8, dtype=torch.int8)}, ValueError, "v: expected k itself"),
        (LATENT, {"v_scale": torch.zeros(5, 4, 1)}, ValueError, "v: expected k itself, and its scale"),
        (LATENT, {"k_rope": None}, TypeError, "k_rope: expected a torch.float32 tensor"),
        (LATENT, {"index": torch.zeros(5, 4, 1, 6)}, ValueError, "index: expected None, since the layout st"),
        (INDEXED, {"index": None}, TypeError, "index: expected a torch.float8_e4m3fn tensor"),
        (INDEXED, {"index": torch.zeros(5, 4, 2, 6)}, TypeError, "index: expected a torch.float8_e4m3fn te"),
        (INDEXED, {"index_scale": torch.zeros(5, 4, 1)}, ValueError, r"index_scale: .* = \[5, 4, 2\]"),
    ],
)
def test_views_that_no_kernel_could_read_are_refused(layout, changes, error, message):
    with pytest.raises(error, match=message):
        replace(a_view(layout), **changes)


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("in_pages", [True, False])
def test_index_keys_are_gathered_by_storage_index(in_pages, stored):
    """From planes of any strides; what is outside a sequence is never read: NaN, and pages that are none."""
    layout = KVLayout.grouped(1, 2, index_dim=3, index_heads=2, index_dtype=stored, dtype=torch.float16)
    keys = torch.randint(-8, 9, (5, 4, 2, 3)) if in_pages else torch.randint(-8, 9, (5, 2, 4, 3)).mT
    keys = keys.half() if in_pages else torch.randint(-8, 9, (5, 2, 4, 3)).half().transpose(1, 2)
    view = a_view(layout)
    table, starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in TABLE)
    scale = torch.rand(5, 4, 2) + 0.5
    expected = torch.zeros(3, 12, 2, 3, dtype=torch.float16)
    hidden = torch.ones(5, 4, dtype=torch.bool)
    for row in range(3):
        for j in range(starts[row], lengths[row]):
            at = int(table[row, j // 4]), j % 4
            hidden[at] = False
            factor = 1 if stored is None else scale[at][:, None]
            expected[row, j] = (keys[at].float() * factor).half()
    index = keys.masked_fill(hidden[..., None, None], torch.nan)
    planes = {"index": index if stored is None else index.to(stored)}
    if stored is not None:
        planes["index_scale"] = scale.masked_fill(hidden[..., None], torch.nan)
    view = replace(view, **planes, table=table, starts=starts, lengths=lengths)
    assert torch.equal(view.index_keys(), expected)
    assert view.index_keys().is_contiguous()
    for stop in (0, 1, 7, 12, 100):
        assert torch.equal(view.index_keys(stop), expected[:, :stop])


# The page table, starts and lengths of three sequences; entries outside of them are no pages.
TABLE = [[4, 0, -1], [99, 2, -7], [1, -1, 99]], [1, 5, 0], [8, 7, 0]


def test_index_keys_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="index_keys: expected a layout with index_dim > 0, got one without"):
        a_view(GROUPED).index_keys()
    for stop, error, message in ((-1, ValueError, "at least 0, got -1"), (2.0, TypeError, "an int, got 2.0")):
        with pytest.raises(error, match=f"stop: expected {message}"):
            a_view(INDEXED).index_keys(stop)


def test_planes_may_lie_in_any_order():
    view = a_view(GROUPED)
    heads_first = torch.zeros(5, 2, 4, 8).transpose(1, 2)
    narrow = torch.zeros(5, 4, 2, 16)[..., :8]
    for changes in ({"k": heads_first}, {"k": narrow}, {"table": ints(3, 7)[:, :2]}):
        assert replace(view, **changes).lengths is view.lengths


@pytest.mark.parametrize(
    "make", [partial(KVCache.paged, pages=4, page_size=4), partial(KVCache.contiguous, max_length=8)]
)
@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn])
def test_a_cache_stores_what_its_layouts_leave_open(make, store):
    own, other = KVLayout.grouped(2, 8), KVLayout.latent(16, 4, window=5, storage_dtype=store)
    cache = make([own, other], max_sequences=1, storage_dtype=store)
    assert cache.layouts == (replace(own, storage_dtype=store), other)
    (indexed,) = make([replace(own, index_dim=4)], max_sequences=1, storage_dtype=store)._layers
    assert (indexed.planes["k"].dtype, indexed.planes["index"].dtype) == (store, torch.float32)
    assert [layer.planes["k"].dtype for layer in cache._layers] == [store, store]
    assert cache.nbytes == make([replace(own, storage_dtype=store), other], max_sequences=1).nbytes
    assert make([own, other], max_sequences=1).layouts == (own, other)


@pytest.mark.parametrize(
    "make", [partial(KVCache.paged, pages=4, page_size=4), partial(KVCache.contiguous, max_length=8)]
)
def test_a_layout_of_another_store_is_refused(make):
    layouts = [KVLayout.grouped(2, 8), KVLayout.grouped(2, 8, storage_dtype=torch.int8)]
    with pytest.raises(
        ValueError,
        match=r"storage_dtype: expected torch.int8 like layouts\[1\].storage_dtype, got torch.float8",
    ):
        make(layouts, max_sequences=1, storage_dtype=torch.float8_e4m3fn)
    for wrong in (torch.bfloat16, "int8"):
        with pytest.raises(TypeError, match=f"storage_dtype: expected None, torch.int8 or .* got {wrong}"):
            make(layouts, max_sequences=1, storage_dtype=wrong)
