"""Laws of the page allocator and of the sequences over several of them, without any tensor."""

import ast
from pathlib import Path

import pytest
from cache_model import allocator_state, check_allocator
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import CacheFullError, KVLayout
from attnlib.cache import pages, sequences
from attnlib.cache.pages import PageAllocator, SequenceHandle
from attnlib.sizes import cache_bytes

laws = settings(deadline=None, max_examples=60)
sizes = st.sampled_from([1, 2, 4, 8])
windows = st.none() | st.integers(1, 9)
growth = st.lists(st.integers(0, 9), max_size=5)


def allocator_of(
    *lengths: int, total: int = 64, page_size: int = 4, **kept
) -> tuple[PageAllocator, list[SequenceHandle]]:
    allocator = PageAllocator(total, page_size, **kept)
    handles = [SequenceHandle() for _ in lengths]
    for handle, length in zip(handles, lengths, strict=True):
        allocator.admit(handle)
        allocator.commit(allocator.reserve({handle: length}))
    return allocator, handles


@given(lengths=growth, more=st.data(), page_size=sizes, window=windows)
@laws
def test_restore_is_the_inverse_of_reserve(lengths, more, page_size, window):
    allocator, handles = allocator_of(*lengths, page_size=page_size, window=window)
    for handle in handles[:2]:
        allocator.fork(handle, SequenceHandle())
    before = allocator_state(allocator)
    tokens = {handle: more.draw(st.integers(0, 9)) for handle in allocator.handles}
    try:
        plan = allocator.reserve(tokens)
    except CacheFullError:
        assert allocator_state(allocator) == before
        return
    freed = allocator.restore(plan)
    assert allocator_state(allocator) == before
    assert list(freed) == [grant.page for grant in plan.grants]


@given(lengths=growth, more=st.data(), page_size=sizes, window=windows)
@laws
def test_slots_of_a_step_are_new_distinct_and_owned(lengths, more, page_size, window):
    allocator, handles = allocator_of(*lengths, page_size=page_size, window=window, total=128)
    for handle in handles[:2]:
        allocator.fork(handle, SequenceHandle())
    written = {
        (page, j % page_size)
        for handle in allocator.handles
        for j in range(allocator.holding(handle).dropped * page_size, allocator.holding(handle).length)
        for page in [allocator.holding(handle).pages[j // page_size - allocator.holding(handle).dropped]]
    }
    tokens = {handle: more.draw(st.integers(0, 9)) for handle in allocator.handles}
    plan = allocator.reserve(tokens)
    slots = allocator.slots(tokens)
    allocator.commit(plan)
    assert len(slots) == len(set(slots)) == sum(tokens.values())
    assert not {divmod(slot, page_size) for slot in slots} & written
    check_allocator(allocator)


@given(
    chunks=st.lists(st.integers(0, 7), max_size=8),
    page_size=sizes,
    window=windows,
    first=st.integers(0, 9),
    rollback=st.integers(0, 5),
)
@laws
def test_pages_are_those_that_sizes_counts(chunks, page_size, window, first, rollback):
    kept = {"window": window, "first_tokens": 0 if window is None else first}
    allocator, (handle,) = allocator_of(0, page_size=page_size, **kept, rollback=rollback)
    layout = KVLayout.grouped(1, 1, **kept)
    for n in chunks:
        allocator.commit(allocator.reserve({handle: n}))
        length = allocator.holding(handle).length
        expected = cache_bytes([layout], [length], page_size=page_size, rollback=rollback)
        assert allocator.used * page_size * layout.token_bytes == expected
    assert length == sum(chunks) if chunks else allocator.used == 0


@given(length=st.integers(0, 30), window=st.integers(1, 9), rollback=st.integers(0, 5), page_size=sizes)
@laws
def test_rollback_tokens_stay_reachable_behind_a_window(length, window, rollback, page_size):
    allocator, (handle,) = allocator_of(length, page_size=page_size, window=window, rollback=rollback)
    holding = allocator.holding(handle)
    allocator.truncate(handle, max(0, length - rollback))
    assert holding.start <= max(0, holding.length - window + 1)
    check_allocator(allocator)


def test_truncate_past_what_a_window_kept_is_refused_and_changes_nothing():
    allocator, (handle,) = allocator_of(
        17, page_size=4, window=5
    )  # the next query sees 13 on: pages 0 to 2 are gone
    before = allocator_state(allocator)
    with pytest.raises(
        RuntimeError, match="truncated to 16 at least, got 15; construct the cache with a larger roll"
    ):
        allocator.truncate(handle, 15)
    assert allocator_state(allocator) == before
    allocator.truncate(handle, 16)
    assert allocator.holding(handle).start == 12


def test_only_the_first_of_two_writers_to_a_shared_page_copies_it():
    allocator, (parent,) = allocator_of(6, total=8)
    child, idle = SequenceHandle(), SequenceHandle()
    allocator.fork(parent, child)
    shared = allocator.holding(parent).pages[-1]
    plan = allocator.reserve({parent: 1, child: 1})
    assert plan.copies == [(shared, allocator.holding(parent).pages[-1])]
    assert allocator.holding(child).pages[-1] == shared
    allocator.restore(plan)
    allocator.fork(parent, idle)  # a third owner that does not write keeps the old page
    plan = allocator.reserve({parent: 1, child: 1})
    assert [source for source, _ in plan.copies] == [shared, shared]
    assert allocator.holding(idle).pages[-1] == shared
    allocator.commit(plan)
    check_allocator(allocator)


def test_a_full_last_page_is_shared_without_a_copy():
    allocator, (parent,) = allocator_of(8, total=8)
    child = SequenceHandle()
    allocator.fork(parent, child)
    assert allocator.reserve({parent: 1, child: 1}).copies == []


def test_copies_count_in_the_reservation():
    allocator, (parent,) = allocator_of(6, total=3)
    child = SequenceHandle()
    allocator.fork(parent, child)
    before = allocator_state(allocator)
    with pytest.raises(CacheFullError) as error:
        allocator.reserve({parent: 3, child: 1})  # a copy and a new page, and 1 is free
    assert str(error.value) == (
        "the step needs 2 pages and 1 is free (page_size=4); release() a sequence or make the cache larger"
    )
    assert allocator_state(allocator) == before
    assert len(allocator.reserve({parent: 2, child: 2}).grants) == 1


def test_fork_release_and_append_leave_no_page_behind():
    allocator, (parent,) = allocator_of(10, total=8)
    child = SequenceHandle()
    allocator.fork(parent, child)
    assert allocator.release(parent) == []
    allocator.commit(allocator.reserve({child: 3}))
    assert len(allocator.release(child)) == 4
    assert allocator.used == 0
    check_allocator(allocator)


def test_an_allocator_refuses_handles_it_does_not_hold():
    allocator, (handle,) = allocator_of(3)
    allocator.release(handle)
    for call in (
        allocator.holding,
        allocator.release,
        lambda h: allocator.fork(h, SequenceHandle()),
        lambda h: allocator.truncate(h, 0),
    ):
        before = allocator_state(allocator)
        with pytest.raises(ValueError, match="not a live sequence"):
            call(handle)
        with pytest.raises(TypeError, match="expected a SequenceHandle"):
            call("first")
        assert allocator_state(allocator) == before


def test_the_allocators_are_plain_python():
    for module in (pages, sequences):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))
        assert imported <= {
            "array",
            "collections.abc",
            "dataclasses",
            "itertools",
            "typing",
            "internal.checks",
            "pages",
            "internal.signatures",
        }
