"""Laws of the page ledger and of the book of ledgers, without any tensor."""

import ast
from pathlib import Path

import pytest
from cache_model import check_ledger, ledger_state
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import CacheFullError, KVLayout
from attnlib.cache import book, pages
from attnlib.cache.book import Book
from attnlib.cache.pages import Handle, PageLedger
from attnlib.sizes import cache_bytes

laws = settings(deadline=None, max_examples=60)
sizes = st.sampled_from([1, 2, 4, 8])
windows = st.none() | st.integers(1, 9)
growth = st.lists(st.integers(0, 9), max_size=5)


def ledger_of(*lengths: int, total: int = 64, page_size: int = 4, **kept) -> tuple[PageLedger, list[Handle]]:
    ledger = PageLedger(total, page_size, **kept)
    handles = [Handle() for _ in lengths]
    for handle, length in zip(handles, lengths, strict=True):
        ledger.admit(handle)
        ledger.commit(ledger.reserve({handle: length}))
    return ledger, handles


@given(lengths=growth, more=st.data(), page_size=sizes, window=windows)
@laws
def test_restore_is_the_inverse_of_reserve(lengths, more, page_size, window):
    ledger, handles = ledger_of(*lengths, page_size=page_size, window=window)
    for handle in handles[:2]:
        ledger.fork(handle, Handle())
    before = ledger_state(ledger)
    tokens = {handle: more.draw(st.integers(0, 9)) for handle in ledger.handles}
    try:
        plan = ledger.reserve(tokens)
    except CacheFullError:
        assert ledger_state(ledger) == before
        return
    freed = ledger.restore(plan)
    assert ledger_state(ledger) == before
    assert list(freed) == [grant.page for grant in plan.grants]


@given(lengths=growth, more=st.data(), page_size=sizes, window=windows)
@laws
def test_slots_of_a_step_are_new_distinct_and_owned(lengths, more, page_size, window):
    ledger, handles = ledger_of(*lengths, page_size=page_size, window=window, total=128)
    for handle in handles[:2]:
        ledger.fork(handle, Handle())
    written = {
        (page, j % page_size)
        for handle in ledger.handles
        for j in range(ledger.holding(handle).dropped * page_size, ledger.holding(handle).length)
        for page in [ledger.holding(handle).pages[j // page_size - ledger.holding(handle).dropped]]
    }
    tokens = {handle: more.draw(st.integers(0, 9)) for handle in ledger.handles}
    plan = ledger.reserve(tokens)
    slots = ledger.slots(tokens)
    ledger.commit(plan)
    assert len(slots) == len(set(slots)) == sum(tokens.values())
    assert not {divmod(slot, page_size) for slot in slots} & written
    check_ledger(ledger)


@given(chunks=st.lists(st.integers(0, 7), max_size=8), page_size=sizes, window=windows, rollback=st.integers(0, 5))
@laws
def test_pages_are_those_that_sizes_counts(chunks, page_size, window, rollback):
    ledger, (handle,) = ledger_of(0, page_size=page_size, window=window, rollback=rollback)
    layout = KVLayout.grouped(1, 1, window=window)
    for n in chunks:
        ledger.commit(ledger.reserve({handle: n}))
        length = ledger.holding(handle).length
        expected = cache_bytes([layout], [length], page_size=page_size, rollback=rollback)
        assert ledger.used * page_size * layout.token_bytes == expected
    assert length == sum(chunks) if chunks else ledger.used == 0


@given(length=st.integers(0, 30), window=st.integers(1, 9), rollback=st.integers(0, 5), page_size=sizes)
@laws
def test_rollback_tokens_stay_reachable_behind_a_window(length, window, rollback, page_size):
    ledger, (handle,) = ledger_of(length, page_size=page_size, window=window, rollback=rollback)
    holding = ledger.holding(handle)
    ledger.truncate(handle, max(0, length - rollback))
    assert holding.start <= max(0, holding.length - window + 1)
    check_ledger(ledger)


def test_truncate_past_what_a_window_kept_is_refused_and_changes_nothing():
    ledger, (handle,) = ledger_of(17, page_size=4, window=5)  # the next query sees 13 to 17, so pages 0 to 2 are gone
    before = ledger_state(ledger)
    with pytest.raises(RuntimeError, match="truncated to 16 at least, got 15; construct the cache with a larger roll"):
        ledger.truncate(handle, 15)
    assert ledger_state(ledger) == before
    ledger.truncate(handle, 16)
    assert ledger.holding(handle).start == 12


def test_only_the_first_of_two_writers_to_a_shared_page_copies_it():
    ledger, (parent,) = ledger_of(6, total=8)
    child, idle = Handle(), Handle()
    ledger.fork(parent, child)
    shared = ledger.holding(parent).pages[-1]
    plan = ledger.reserve({parent: 1, child: 1})
    assert plan.copies == [(shared, ledger.holding(parent).pages[-1])]
    assert ledger.holding(child).pages[-1] == shared
    ledger.restore(plan)
    ledger.fork(parent, idle)  # a third owner that does not write keeps the old page
    plan = ledger.reserve({parent: 1, child: 1})
    assert [source for source, _ in plan.copies] == [shared, shared]
    assert ledger.holding(idle).pages[-1] == shared
    ledger.commit(plan)
    check_ledger(ledger)


def test_a_full_last_page_is_shared_without_a_copy():
    ledger, (parent,) = ledger_of(8, total=8)
    child = Handle()
    ledger.fork(parent, child)
    assert ledger.reserve({parent: 1, child: 1}).copies == []


def test_copies_count_in_the_reservation():
    ledger, (parent,) = ledger_of(6, total=3)
    child = Handle()
    ledger.fork(parent, child)
    before = ledger_state(ledger)
    with pytest.raises(CacheFullError) as error:
        ledger.reserve({parent: 3, child: 1})  # a copy and a new page, and 1 is free
    assert str(error.value) == (
        "the step needs 2 pages and 1 is free (page_size=4); release() a sequence or make the cache larger"
    )
    assert ledger_state(ledger) == before
    assert len(ledger.reserve({parent: 2, child: 2}).grants) == 1


def test_fork_release_and_append_leave_no_page_behind():
    ledger, (parent,) = ledger_of(10, total=8)
    child = Handle()
    ledger.fork(parent, child)
    assert ledger.release(parent) == []
    ledger.commit(ledger.reserve({child: 3}))
    assert len(ledger.release(child)) == 4
    assert ledger.used == 0
    check_ledger(ledger)


def test_a_ledger_refuses_handles_it_does_not_hold():
    ledger, (handle,) = ledger_of(3)
    ledger.release(handle)
    for call in (ledger.holding, ledger.release, lambda h: ledger.fork(h, Handle()), lambda h: ledger.truncate(h, 0)):
        before = ledger_state(ledger)
        with pytest.raises(ValueError, match="not a live sequence"):
            call(handle)
        with pytest.raises(TypeError, match="expected a Handle"):
            call("first")
        assert ledger_state(ledger) == before


def test_a_book_reserves_in_all_ledgers_or_in_none():
    ledgers = Book({None: 8, 4: 1}, 4, max_sequences=2, max_length=32)  # only the second lacks pages
    first, _ = ledgers.admit([0, 0])
    before = [ledger_state(ledger) for ledger in ledgers.ledgers.values()]
    with pytest.raises(CacheFullError, match=r"needs 2 pages and 1 is free \(page_size=4, window=4\)"):
        ledgers.reserve(ledgers.request({first: 5}))
    assert [ledger_state(ledger) for ledger in ledgers.ledgers.values()] == before


def test_the_ledgers_are_plain_python():
    for module in (pages, book):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))
        assert imported <= {"array", "collections.abc", "dataclasses", "typing", "checks", "pages"}
