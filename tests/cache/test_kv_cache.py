"""Steps as transactions, and what a cache does when something goes wrong."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from cache_model import (
    PLAIN,
    Abort,
    append_all,
    both,
    contiguous,
    paged,
    planes,
    refused,
    state,
    stored,
)

from attnlib import CacheFullError, KVCache, KVLayout
from attnlib.cache import layer_cache, layers
from attnlib.cache.pages import SequenceHandle


def test_a_window_in_a_contiguous_cache_keeps_its_row():
    twin = contiguous()
    (handle,) = twin.admit()
    twin.step(12)
    twin.truncate(handle, 1)
    twin.step(2)
    twin.check()


@pytest.mark.parametrize("error", [Abort, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("where", ["buffers", "copy", "write", "between", "exit", "closed early"])
@both
def test_a_failure_anywhere_undoes_the_step_on_host_and_device(make, where, error):
    twin = make()
    first, second = twin.admit(2)
    twin.step({first: 5, second: 3})
    if make is paged:
        twin.fork(first)
    (third,) = twin.fork(first)
    tokens = {third: 4, first: 2, second: 1}
    before = state(twin.cache)
    views = []

    def fail(*_, **__):
        raise error

    def body():
        _, numbers = twin.draw(tokens)
        with twin.cache.step(tokens) as layers:
            views.extend(layer._view for layer in layers)
            assert views[0].lengths.tolist() == [9, 7, 4]
            append_all(layers[:2] if where in ("between", "exit") else layers, numbers)
            if where in ("between", "closed early"):
                fail()

    breaks = {"copy": (layers, "copy_pages"), "write": (layer_cache, "write_cache")}
    broken = mock.patch.object(*breaks[where], fail) if where in breaks else nullcontext()
    if where == "buffers":  # once: undoing the step updates them too
        update = twin.cache._buffers.windows[-1].update
        broken = mock.patch.object(
            update.__self__, "update", mock.Mock(side_effect=[error, mock.DEFAULT], wraps=update)
        )
    expected = RuntimeError if where == "exit" else error
    with broken, pytest.raises(expected, match=r"layers \[2, 3\] of 4 did not" if where == "exit" else None):
        body()
    assert state(twin.cache) == before
    for i, view in enumerate(views):  # the buffers themselves are back, without another step or read
        for row, handle in enumerate(tokens):
            stored(view, row, i, twin.model[handle])
    twin.check()
    twin.step(tokens)
    twin.step(1)
    twin.check()


def test_a_step_that_is_never_left_is_undone():
    twin = paged()
    (handle,) = twin.admit()
    step = twin.cache.step({handle: 3})
    step.__enter__()
    del step
    assert twin.cache.length(handle) == twin.cache.used_bytes == 0
    twin.step(3)
    twin.check()


@both
def test_nothing_else_is_done_inside_a_step_or_a_read(make):
    twin = make()
    first, second = twin.admit(2)
    twin.step(3)
    cache = twin.cache
    calls = {
        "step": lambda: cache.step(1).__enter__(),
        "read": lambda: cache.read(1).__enter__(),
        "admit": cache.admit,
        "fork": lambda: cache.fork(first),
        "truncate": lambda: cache.truncate(first, 1),
        "release": lambda: cache.release(second),
    }
    for what, block in (("step", cache.step), ("read", cache.read)):
        with block({}):
            for name, call in calls.items():
                before = state(cache)
                with pytest.raises(RuntimeError, match=f"{name}: not inside a {what}"):
                    call()
                assert state(cache) == before
    twin.step(1)
    twin.check()


@pytest.mark.parametrize("method", ["step", "read"])
@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (True, TypeError, "tokens: expected an int, got True"),
        (-1, ValueError, "tokens: expected at least 0, got -1"),
        (1.0, TypeError, "tokens: expected an int or a mapping of handles to ints, got float"),
        (None, TypeError, "got NoneType"),
        ([1, 1], TypeError, "got list"),
        (lambda live, dead, other: {live: True}, TypeError, "tokens: expected an int, got True"),
        (lambda live, dead, other: {live: -1}, ValueError, "tokens: expected at least 0, got -1"),
        (lambda live, dead, other: {live: 1, dead: 1}, ValueError, "not a live sequence of this cache"),
        (lambda live, dead, other: {live: 1, other: 1}, ValueError, "not a live sequence of this cache"),
        (
            lambda live, dead, other: {live: 1, SequenceHandle(): 1},
            ValueError,
            "not a live sequence of this cache",
        ),
        (lambda live, dead, other: {0: 1}, TypeError, "handle: expected a SequenceHandle"),
        (lambda live, dead, other: {live: 2**31}, (ValueError, CacheFullError), "int32|max_length"),
    ],
)
def test_wrong_tokens_are_refused(method, tokens, error, message):
    twin, foreign = paged(), paged()
    live, dead = twin.admit(2)
    twin.release(dead)
    twin.step(3)
    if callable(tokens):
        tokens = tokens(live, dead, foreign.admit()[0])
    refused(twin, error, lambda: getattr(twin.cache, method)(tokens).__enter__(), message)


@pytest.mark.parametrize("call", ["fork", "truncate", "release", "length"])
def test_released_and_foreign_handles_are_refused(call):
    twin, foreign = paged(), paged()
    live, dead = twin.admit(2)
    twin.step(3)
    twin.release(dead)
    arguments = (1,) if call == "truncate" else ()
    for handle in (dead, foreign.admit()[0]):
        refused(
            twin,
            ValueError,
            lambda handle=handle: getattr(twin.cache, call)(handle, *arguments),
            "not a live",
        )
    refused(twin, TypeError, lambda: getattr(twin.cache, call)(3, *arguments), "expected a SequenceHandle")
    if call == "release":
        refused(twin, ValueError, lambda: twin.cache.release(live, dead), "not a live")
        refused(twin, ValueError, lambda: twin.cache.release(live, live), "each sequence once")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((-1,), ValueError), ((True,), TypeError), ((4,), ValueError), ((1.0,), TypeError)],
)
def test_wrong_lengths_are_refused(arguments, error):
    twin = paged()
    (handle,) = twin.admit()
    twin.step(3)
    refused(twin, error, lambda: twin.cache.truncate(handle, *arguments), "length: expected")


def test_truncating_past_a_window_in_one_layer_changes_no_layer():
    twin = paged(PLAIN, KVLayout.grouped(1, 2, window=3))
    (handle,) = twin.admit()
    twin.step(9)
    refused(
        twin,
        RuntimeError,
        lambda: twin.truncate(handle, 5),
        r"truncated to 6 at least, got 5; .* larger rollback=",
    )
    kept = paged(PLAIN, KVLayout.grouped(1, 2, window=3), rollback=4)
    (handle,) = kept.admit()
    kept.step(9)
    kept.truncate(handle, 5)
    kept.step(2)
    kept.check()


def test_a_page_too_few_is_noticed_before_anything_is_written():
    twin = paged(PLAIN, pages=4)
    first, second = twin.admit(2)
    twin.step({first: 6, second: 4})
    message = (
        r"the step needs 2 pages and 1 is free \(page_size=4\); "
        r"release\(\) a sequence or make the cache larger"
    )
    refused(twin, CacheFullError, lambda: twin.step({first: 1, second: 5}), message)
    twin.step({first: 2, second: 4})
    refused(twin, CacheFullError, lambda: twin.step(1), "needs 2 pages and 0 are free")
    twin.release(first)
    twin.step(1)
    twin.check()


def test_two_windows_of_which_only_the_second_lacks_pages():
    twin = paged(PLAIN, KVLayout.grouped(1, 2, window=4), pages={None: 16, 4: 2})
    first, _ = twin.admit(2)
    twin.step({first: 4})
    refused(
        twin,
        CacheFullError,
        lambda: twin.step({first: 5}),
        r"needs 2 pages and 1 is free \(page_size=4, window=4\)",
    )
    for _ in range(12):  # steps that stay within the window's pages go on for ever
        twin.step({first: 1})
    twin.check()


@both
def test_one_token_too_many_for_a_sequence(make):
    twin = make(max_length=12)
    first, second = twin.admit(2)
    twin.step({first: 11, second: 2})
    refused(
        twin,
        CacheFullError,
        lambda: twin.step(2),
        "sequence 0 of the step would hold 13 tokens, expected at most max",
    )
    twin.step(1)
    refused(
        twin,
        CacheFullError,
        lambda: twin.step({second: 1, first: 1}),
        "sequence 1 of the step would hold 13 tokens",
    )
    twin.step({second: 9})
    twin.check()


@both
def test_a_sequence_too_many(make):
    twin = make()
    handles = twin.admit(3)
    twin.step(2)
    message = "2 new sequences are asked for and 1 of max_sequences=4 is free"
    refused(twin, CacheFullError, lambda: twin.admit(2), message)
    refused(twin, CacheFullError, lambda: twin.fork(handles[0], 2), message)
    twin.fork(handles[0])
    refused(twin, CacheFullError, twin.admit, "0 of max_sequences=4 are free")
    twin.step(1)
    twin.check()


@both
def test_a_fork_shares_until_it_writes(make):
    twin = make()
    (parent,) = twin.admit()
    twin.step(6)
    held = twin.cache.used_bytes
    (child,) = twin.fork(parent)
    assert twin.cache.used_bytes == held
    before = planes(twin)
    twin.check()
    assert all(map(torch.equal, planes(twin), before))
    twin.step({child: 1})
    assert twin.cache.used_bytes > held
    twin.release(parent)
    twin.step({child: 1})
    twin.check()
    twin.release(child)
    assert twin.cache.used_bytes == 0


@pytest.mark.parametrize("origin", [[0, 0, 2], [2, 1, 0], [1, 1, 1], [0, 1, 2]])
@both
def test_beam_search_reorders_by_fork_and_release(make, origin):
    twin = make(max_sequences=6)
    (prompt,) = twin.admit()
    twin.step(5)
    beams = [prompt, *twin.fork(prompt, 2)]
    for _ in range(3):
        expected = [list(twin.model[beams[i]]) for i in origin]
        chosen = [twin.fork(beams[i])[0] for i in origin]
        twin.release(*beams)
        beams = chosen
        assert [twin.model[beam] for beam in beams] == expected
        twin.check()
        twin.step(2)
    twin.check()


def test_pages_freed_by_one_sequence_serve_another():
    twin = paged(PLAIN, pages=3)
    for _ in range(5):
        (handle,) = twin.admit()
        twin.step(12)
        twin.check()
        twin.truncate(handle, 5)
        twin.step(7)
        twin.check()
        twin.release(handle)


@pytest.mark.parametrize("store", [None, torch.int8, torch.float8_e4m3fn])
def test_check_mode_poisons_what_is_free(monkeypatch, store):
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    layouts = [
        KVLayout.grouped(2, 3, storage_dtype=store),
        KVLayout.latent(4, 2, window=3, storage_dtype=store),
    ]
    cache = KVCache.paged(layouts, pages=8, page_size=2, max_sequences=3)

    def poisoned() -> list[list[int]]:
        return [
            [page for page in range(8) if all(is_poison(plane[page]) for plane in layer.planes.values())]
            for layer in cache._layers
        ]

    def free() -> list[list[int]]:
        return [sorted(cache._sequences.allocators[layout.window]._free) for layout in layouts]

    assert poisoned() == free() == [list(range(8))] * 2
    first, second = cache.admit(2)
    with cache.step(5) as layers:
        append_all(layers, torch.arange(10).view(2, 5))
    assert poisoned() == free()
    assert len(free()[0]) == 2
    assert len(free()[1]) == 4  # the window dropped a page of each
    cache.fork(first)
    cache.truncate(second, 4)
    assert poisoned() == free()
    with pytest.raises(Abort), cache.step({first: 3}) as layers:
        fail_after_append(layers)
    assert poisoned() == free()
    cache.release(first, second)
    assert poisoned() == free()


def fail_after_append(layers):
    append_all(layers, torch.arange(3))
    raise Abort


def is_poison(page: torch.Tensor) -> bool:
    return bool((page == -128).all() if page.dtype == torch.int8 else page.float().isnan().all())


def test_nothing_is_filled_without_check_mode(monkeypatch):
    monkeypatch.delenv("ATTNLIB_CHECK", raising=False)
    twin = paged(PLAIN)
    (handle,) = twin.admit()
    twin.step(5)
    before = planes(twin)
    twin.release(handle)
    assert all(map(torch.equal, planes(twin), before))


@both
@pytest.mark.parametrize("lengths", [(3, 1), (1, 3), (2, 2), (3, 0), (1, 2, 3), (3, 2, 1)])
def test_a_failed_step_leaves_what_forks_share(make, lengths):
    """Forks of one sequence, cut to these lengths, all write into the page that they share; then again, for
    good.
    """
    twin = make(PLAIN)
    (first,) = twin.admit()
    twin.step(3)
    family = [first, *twin.fork(first, len(lengths) - 1)]
    for handle, length in zip(family, lengths, strict=True):
        twin.truncate(handle, length)
    for tokens in (1, dict.fromkeys(family, 1), dict.fromkeys(reversed(family), 2)):
        with pytest.raises(Abort):
            twin.step(tokens, fail_after=1)
        twin.check()
    twin.step(1)
    twin.check()


@pytest.mark.parametrize("rollback", [0, 4])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_read_finds_what_its_queries_see_or_is_refused(page_size, rollback):
    """The last 11 tokens of a window of 3: with ``rollback`` so many of them can be queries again."""
    twin = paged(PLAIN, KVLayout.grouped(1, 2, window=3), page_size=page_size, rollback=rollback)
    (handle,) = twin.admit()
    twin.step(11)
    kept = twin.cache._sequences.allocators[3].holding(handle).start
    for n in range(12):
        if 11 - n - 2 >= kept:
            twin.read(n)
        elif n:
            message = rf"its last {11 - kept - 2} tokens can be queries again, got {n}; .* larger rollback="
            refused(twin, RuntimeError, lambda n=n: twin.read({handle: n}), message)
    assert 11 - kept - 2 >= rollback


def test_a_read_sets_counts_and_changes_nothing():
    twin = paged()
    first, second = twin.admit(2)
    twin.step({first: 5, second: 2})
    before = state(twin.cache)
    with twin.cache.read({second: 40, first: 7}) as layers:  # more queries than keys: lengths are not theirs
        view = layers[0].view()
        assert view.cu_seqlens_q.tolist() == [0, 40, 47]
        assert view.lengths.tolist() == [2, 5]
        assert layers[0].positions is None
        assert layers[0].prefill
        assert layers[0].history == 8
    assert state(twin.cache) == before
    with pytest.raises(Abort), twin.cache.read(1):
        raise Abort
    twin.step(1)
    twin.check()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": -1}, ValueError, "n: expected at least 0"),
        ({"n": True}, TypeError, "n: expected an int"),
        ({"n": 2, "left_padding": [1]}, ValueError, "left_padding: expected 2 counts"),
        ({"n": 1, "left_padding": [-1]}, ValueError, "left_padding: expected at least 0"),
        (
            {"n": 2, "left_padding": [0, 65]},
            ValueError,
            "left_padding: expected at most max_length=64, got 65",
        ),
    ],
)
def test_wrong_admissions_are_refused(arguments, error, message):
    twin = paged()
    refused(twin, error, lambda: twin.cache.admit(**arguments), message)
    assert twin.cache._sequences.handles == []
