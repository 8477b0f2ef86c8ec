"""A sequence goes to a file and comes back with the same bits, or not at all."""

import json
import os
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from attnlib import (
    CAUSAL,
    CacheFullError,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    Rope,
    cached_attention,
    sliding,
)
from attnlib.masks.ready_made import attention_sinks

LAYOUTS = {
    "grouped": [KVLayout.grouped(2, 8), KVLayout.grouped(1, 4, 6)],
    "latent": [KVLayout.latent(8, 4), KVLayout.latent(8, 0)],
    "windows": [
        KVLayout.grouped(2, 8),
        KVLayout.grouped(1, 8, window=6),
        KVLayout.grouped(1, 8, window=5, first_tokens=3),
    ],
    "int8": [
        KVLayout.grouped(2, 8, storage_dtype=torch.int8, dtype=torch.bfloat16),
        KVLayout.latent(8, 4, storage_dtype=torch.int8),
    ],
    "index": [
        KVLayout.grouped(2, 8, index_dim=6, index_heads=2),
        KVLayout.latent(8, 4, window=6, index_dim=3, index_dtype=torch.float8_e4m3fn, dtype=torch.float16),
    ],
    "fp8": [KVLayout.grouped(2, 8, storage_dtype=torch.float8_e4m3fn, dtype=torch.float16)],
}


def made(layouts, page_size=4, pages=40, rows=4, **options) -> KVCache:
    return KVCache.paged(layouts, pages=pages, page_size=page_size, max_sequences=rows, **options)


def append(cache: KVCache, n: int, rows: int) -> None:
    with cache.step(n) as layers:
        for layer in layers:
            x = layer.layout
            lead, dtype, index = (rows, n), x.dtype, None
            if x.index_dim:
                index = torch.randn(*lead, x.index_heads, x.index_dim, dtype=dtype)
            if x.is_latent:
                tail = torch.randn(*lead, x.rope_dim, dtype=dtype) if x.rope_dim else None
                layer.append(torch.randn(*lead, x.dim, dtype=dtype), tail, index=index)
            else:
                layer.append(
                    *(torch.randn(*lead, x.heads, width, dtype=dtype) for width in (x.dim, x.value_dim)),
                    index=index,
                )


def filled(layouts, **options) -> tuple[KVCache, list]:
    cache = made(layouts, **options)
    handles = cache.admit(2)
    for n in (5, 9, 1):
        append(cache, n, 2)
    return cache, handles


def told(path) -> dict:
    with safe_open(path, "pt") as file:
        return {name: json.loads(x) for name, x in file.metadata().items()}


def same(one, other) -> None:
    """Two files say the same, bit for bit."""
    assert told(one) == told(other)
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x.view(torch.uint8), theirs[name].view(torch.uint8)) for name, x in ours.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_loaded_is_what_was_saved(name, tmp_path):
    """In a cache of other sequences, whose pages lie elsewhere."""
    cache, (first, second) = filled(LAYOUTS[name])
    cache.save(second, tmp_path / "second")
    other, _ = filled(LAYOUTS[name])
    before = [plane.clone() for layer in other._layers for plane in layer.planes.values()]
    used = [x.used for x in other._sequences.allocators.values()]
    loaded = other.load(tmp_path / "second")
    assert other.length(loaded) == 15
    other.save(loaded, tmp_path / "again")
    same(tmp_path / "second", tmp_path / "again")
    other.release(loaded)
    assert [x.used for x in other._sequences.allocators.values()] == used
    assert len(before) == sum(len(layer.planes) for layer in other._layers)
    assert load_file(tmp_path / "again").keys() == {
        f"{n}.{plane.replace('k_rope', 'k_tail')}"
        for n, layout in enumerate(LAYOUTS[name])
        for plane in ("numbers", *layout.planes)
    }
    cache.save(first, tmp_path / "first")
    assert not torch.equal(*(load_file(tmp_path / x)["0.k"].view(torch.uint8) for x in ("first", "second")))


@torch.no_grad()
def test_a_model_goes_on_as_if_it_had_never_stopped(tmp_path):
    """A prompt that was padded on the left is saved without its padding."""
    torch.manual_seed(0)
    options = {"num_heads": 4, "num_kv_heads": 2, "rope": Rope(8)}
    layers = [GroupedQueryAttention(32, mask=mask, **options) for mask in (CAUSAL, sliding(5))]
    layouts = [layer.kv_layout for layer in layers]

    def run(cache, x):
        with cache.step(x.shape[1]) as kvs:
            for layer, kv in zip(layers, kvs, strict=True):
                x = x + layer(x, kv=kv)
        return x

    prompt, token = torch.randn(1, 11, 32), torch.randn(1, 1, 32)
    cache, padded, third = made(layouts), made(layouts), made(layouts, page_size=2)
    (handle,), (shifted,) = cache.admit(), padded.admit(left_padding=[4])
    run(cache, prompt)
    run(padded, torch.cat((torch.full((1, 4, 32), 9.0), prompt), 1))
    cache.save(handle, tmp_path / "prompt")
    padded.save(shifted, tmp_path / "padded")
    third.load(tmp_path / "prompt")
    expected = run(cache, token)
    torch.testing.assert_close(run(third, token), expected)
    assert told(tmp_path / "padded")["length"] == 11
    fourth = made(layouts)
    fourth.load(tmp_path / "padded")
    torch.testing.assert_close(run(fourth, token), expected)


def test_nothing_of_others_is_saved(tmp_path):
    """Neither what follows in a page, nor what another sequence had there."""
    layout = [KVLayout.grouped(1, 4)]
    cache = made(layout)
    (first,) = cache.admit()
    with cache.step(8) as (kv,):
        kv.append(torch.full((1, 8, 1, 4), 7.0), torch.full((1, 8, 1, 4), 7.0))
    cache.release(first)
    (second,) = cache.admit()
    with cache.step(5) as (kv,):
        kv.append(torch.ones(1, 5, 1, 4), torch.ones(1, 5, 1, 4))
    cache.save(second, tmp_path / "x")
    assert all(
        (x == 1).all() and x.shape[0] == 5 for n, x in load_file(tmp_path / "x").items() if "numbers" not in n
    )


def test_an_empty_sequence(tmp_path):
    cache = made(LAYOUTS["grouped"])
    (handle,) = cache.admit()
    cache.save(handle, tmp_path / "x")
    assert cache.length(cache.load(tmp_path / "x")) == 0


@given(
    window=st.integers(1, 9),
    first_tokens=st.sampled_from([0, 0, 3]),
    rollback=st.integers(0, 9),
    padding=st.integers(0, 6),
    length=st.integers(1, 40),
    cut=st.integers(0, 12),
    page_sizes=st.tuples(st.sampled_from([1, 4, 7]), st.sampled_from([1, 4, 7])),
)
@settings(max_examples=60, deadline=None)
@torch.no_grad()
def test_whatever_is_saved_is_loaded(
    tmp_path_factory, window, first_tokens, rollback, padding, length, cut, page_sizes
):
    """Cut back, padded on the left, or into pages of another size: it goes on as it would have in its own
    cache.
    """
    if first_tokens:
        padding, page_sizes = 0, page_sizes[:1] * 2  # pages of other first tokens do not fit each other
    path = tmp_path_factory.getbasetemp() / "cut"
    layouts = [
        KVLayout.grouped(1, 4, window=window, first_tokens=first_tokens, index_dim=2),
        KVLayout.grouped(1, 4, index_dim=2, index_dtype=torch.float8_e4m3fn),
    ]
    one, other = (made(layouts, size, 120, rollback=rollback) for size in page_sizes)
    (handle,) = one.admit(left_padding=[padding])
    for _ in range(padding + length):  # one by one, so that the window drops what it can
        append(one, 1, 1)
    one.truncate(handle, max(padding, least(one, handle), padding + length - cut))
    one.save(handle, path)
    loaded = other.load(path)
    masks = attention_sinks(first_tokens, window) if first_tokens else sliding(window), CAUSAL
    q, new, index = torch.randn(1, 1, 1, 4), torch.randn(2, 1, 1, 1, 4), torch.randn(1, 1, 1, 2)

    def next_row(cache):
        with cache.step(1) as layers:
            views = [kv.append(*new, index=index) for kv in layers]
            rows = [cached_attention(q, view, mask=mask) for view, mask in zip(views, masks, strict=True)]
            return rows, [seen_index(view) for view in views]

    torch.testing.assert_close(next_row(other), next_row(one), rtol=0, atol=1e-6)
    back = min(rollback, other.length(loaded) - max(least(other, loaded), least(one, handle) - padding, 0))
    for cache, of in ((one, handle), (other, loaded)):  # as far back as both still have what is seen there
        cache.truncate(of, cache.length(of) - max(back, 0))
    torch.testing.assert_close(next_row(other), next_row(one), rtol=0, atol=1e-6)


def seen_index(view) -> torch.Tensor:
    """The index keys of the only sequence that its last query can see."""
    first, length, start = view.layout.first_tokens, int(view.lengths), int(view.starts)
    keys = view.index_keys(length)[0]
    behind = max(start, length - (view.layout.window or length))
    return torch.cat((keys[: min(first, behind)], keys[behind:]))


def least(cache, handle) -> int:
    """The shortest length to which a sequence can be cut back."""
    return max(x.shortest(handle) for x in cache._sequences.allocators.values() if x.window)


def test_a_loaded_sequence_is_not_cut_back_to_tokens_that_its_file_had_not(tmp_path):
    layouts = [KVLayout.grouped(1, 4, window=6)]
    cache = made(layouts, rollback=8)
    (handle,) = cache.admit()
    for _ in range(8):
        append(cache, 5, 1)
    cache.truncate(handle, 33)
    cache.save(handle, tmp_path / "x")
    other = made(layouts, rollback=8)
    loaded = other.load(tmp_path / "x")
    assert told(tmp_path / "x")["rollback"] == 8
    assert load_file(tmp_path / "x")["0.numbers"].tolist() == [*range(24, 33)]
    other.save(*other.fork(loaded), tmp_path / "again")
    same(tmp_path / "x", tmp_path / "again")
    for where, of in ((cache, handle), (other, loaded)):
        with pytest.raises(RuntimeError, match="can be truncated to 29 at least, got 28"):
            where.truncate(of, 28)
        where.truncate(of, 29)


def test_a_folder_that_is_not_there_is_an_oserror(tmp_path):
    cache, (handle, _) = filled(LAYOUTS["grouped"])
    with pytest.raises(
        FileNotFoundError, match=r"No such file or directory to write x into; make it first: .*nowhere"
    ):
        cache.save(handle, tmp_path / "nowhere" / "x")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        cache.save(handle, tmp_path / "file" / "x")
    with pytest.raises(IsADirectoryError):
        cache.save(handle, tmp_path)


def test_what_safetensors_cannot_write_is_an_oserror(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    cache, (handle, _) = filled(LAYOUTS["grouped"])
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"x: expected a file that can be written, got .*No space left"):
        cache.save(handle, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def refused(cache, path, error, match):
    """Nothing of it stays."""
    rows, used = len(cache._sequences.handles), cache.used_bytes
    with pytest.raises(error, match=match):
        cache.load(path)
    assert (len(cache._sequences.handles), cache.used_bytes) == (rows, used)


def test_what_does_not_fit_is_refused(tmp_path):
    cache, (handle, _) = filled(LAYOUTS["windows"])
    path = tmp_path / "x"
    cache.save(handle, path)
    refused(made(LAYOUTS["grouped"]), path, ValueError, "expected layouts like this cache's")
    indexed = [replace(layout, index_dim=4) for layout in LAYOUTS["windows"]]
    refused(made(indexed), path, ValueError, "expected layouts like this cache's, .*'index_dim': 4")
    refused(made(LAYOUTS["windows"], pages=2), path, CacheFullError, "make the cache with a larger one")
    refused(made(LAYOUTS["windows"], rollback=9), path, ValueError, "layer 1 of this cache keeps more than")
    full = made(LAYOUTS["windows"], rows=1)
    full.admit()
    refused(full, path, CacheFullError, "max_sequences=1")
    refused(cache, tmp_path / "nowhere", FileNotFoundError, "nowhere")
    rotated = made([KVLayout.grouped(2, 8)])
    layer = GroupedQueryAttention(32, num_heads=4, num_kv_heads=2, mask=CAUSAL, rope=Rope(8))
    rotated.admit()
    with torch.no_grad(), rotated.step(3) as (kv,):
        layer(torch.randn(1, 3, 32), kv=kv)
    plain, (other, _) = filled([KVLayout.grouped(2, 8)])
    plain.save(other, path)
    refused(rotated, path, RuntimeError, "rotary convention")
    with plain.step(1) as (kv,):
        for call in (lambda: plain.save(other, path), lambda: plain.load(path)):
            with pytest.raises(RuntimeError, match="not inside a step"):
                call()
        kv.append(torch.zeros(2, 1, 2, 8), torch.zeros(2, 1, 2, 8))


CHANGES = {
    "no metadata": (lambda said, tensors: said.clear(), "expected a file that cache.save"),
    "another format": (
        lambda said, tensors: said.update(format='"attnlib sequence 2"'),
        "format 'attnlib sequence 2'",
    ),
    "no JSON": (lambda said, tensors: said.update(length="{"), "expected a file that cache.save"),
    "deep layouts": (
        lambda said, tensors: said.update(layouts="[" * 100_000 + "]" * 100_000),
        "x: expected a file that",
    ),
    "5000 digits": (
        lambda said, tensors: said.update(length="9" * 5000),
        "x: expected a file that cache.save",
    ),
    "a long length": (lambda said, tensors: said.update(length=str(2**40)), "its length and conventions"),
    "a short length": (lambda said, tensors: said.update(length="3"), "expected tokens of a sequence of 3"),
    "few conventions": (
        lambda said, tensors: said.update(conventions="[null]"),
        "expected one for each layer",
    ),
    "a missing plane": (lambda said, tensors: tensors.pop("1.v"), r"1\.v: expected .* got none"),
    "a wide plane": (lambda said, tensors: tensors.update({"0.k": torch.zeros(15, 2, 9)}), r"0\.k: expected"),
    "another dtype": (
        lambda said, tensors: tensors.update({"0.k": tensors["0.k"].half()}),
        r"0\.k: expected",
    ),
    "no numbers": (lambda said, tensors: tensors.pop("0.numbers"), "expected int32 numbers"),
    "another rollback": (lambda said, tensors: said.update(rollback='"8"'), "rollback: expected a count"),
    "turned numbers": (
        lambda said, tensors: tensors["0.numbers"].copy_(tensors["0.numbers"].flip(0)),
        "in order",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_is_not_ours_is_refused(name, tmp_path):
    cache, (handle, _) = filled(LAYOUTS["grouped"])
    cache.save(handle, path := tmp_path / "x")
    with safe_open(path, "pt") as file:
        said = file.metadata()
    tensors, (change, match) = load_file(path), CHANGES[name]
    change(said, tensors)
    save_file(tensors, path, said or None)
    refused(cache, path, ValueError, match)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    cache, _ = filled(LAYOUTS["grouped"])
    refused(
        cache, tmp_path, IsADirectoryError, re.escape(f"{tmp_path}: expected a file that cache.save() wrote")
    )
    os.mkfifo(path := tmp_path / "pipe")
    refused(
        cache,
        path,
        ValueError,
        re.escape(f"{path}: expected a file that cache.save() wrote, got something else"),
    )


def test_half_a_file_is_refused_and_never_written(tmp_path, monkeypatch):
    cache, (handle, _) = filled(LAYOUTS["grouped"])
    cache.save(handle, path := tmp_path / "x")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    refused(cache, path, ValueError, re.escape(f"{path}: expected a file that cache.save() wrote"))

    def fails(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    path.write_bytes(whole)
    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        cache.save(handle, path)
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("most", [None, 1, 7])
@pytest.mark.parametrize("window", [None, 1, 6, 33])
def test_as_many_pages_as_are_said_are_enough(window, most, page_size):
    """And for what has no window, or comes at once, one less is not."""
    layouts, lengths = [KVLayout.grouped(1, 4, window=window)], (50, 3, 0)
    pages = KVCache.pages_for(layouts, lengths, page_size=page_size, max_step_tokens=most)

    def fill(pages):
        cache = made(layouts, page_size, pages, max_length=50)
        left = dict(zip(cache.admit(3), lengths, strict=True))
        while any(left.values()):
            step = {handle: min(n, most or n) for handle, n in left.items() if n}
            with cache.step(step) as (kv,):
                kv.append(*torch.zeros(2, sum(step.values()), 1, 4))
            left = {handle: n - step.get(handle, 0) for handle, n in left.items()}

    fill(pages)
    if window is None or most is None:
        with pytest.raises(CacheFullError):
            fill({of: n - 1 for of, n in pages.items()})


def test_a_file_with_the_names_of_before_loads(tmp_path):
    """Files still say ``store``, ``tail``, ``keep_first`` and ``k_tail``."""
    layout = KVLayout.latent(8, 4, window=6, first_tokens=2, storage_dtype=torch.int8)
    file = {
        "0.numbers": torch.arange(3, dtype=torch.int32),
        "0.k": torch.randint(-127, 128, (3, 1, 8), dtype=torch.int8),
        "0.k_tail": torch.randn(3, 1, 4),
        "0.k_scale": torch.rand(3, 1),
    }
    fields = {
        "heads": 1, "dim": 8, "value_dim": 8, "tail": 4, "is_latent": True, "window": 6,
        "dtype": "torch.float32", "store": "torch.int8", "keep_first": 2,
    }  # fmt: skip
    metadata = {
        "format": "attnlib sequence 1", "length": 3, "rollback": 0,
        "layouts": [fields], "conventions": [None],
    }  # fmt: skip
    save_file(file, tmp_path / "old", {name: json.dumps(x) for name, x in metadata.items()})
    cache = KVCache.paged([layout], pages=4, page_size=4, max_sequences=1)
    sequence = cache.load(tmp_path / "old")
    cache.save(sequence, tmp_path / "new")
    with safe_open(tmp_path / "new", "pt") as new:
        assert {name: json.loads(x) for name, x in new.metadata().items()} == metadata
        assert {*new.keys()} == {*file}
        assert all(torch.equal(new.get_tensor(name), x) for name, x in file.items())
