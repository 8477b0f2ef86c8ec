"""The tables of prefix groups follow every change of the sequences, at fixed addresses."""

from dataclasses import replace
from unittest import mock

import pytest
from prefix_cases import GROUPED, Pair, forked, make

from attnlib.cache.prefixes import buffers
from attnlib.cache.prefixes.groups import prefix_groups


def test_more_groups_than_are_asked_for():
    pair = forked(prefixes=2, n=1)
    for _ in range(2):
        pair.admit(1)
        pair.run({len(pair.live) - 1: 5})
        pair.fork(len(pair.live) - 1)
    (view,) = pair.run({0: 1, 1: 1, 3: 2, 2: 2, 5: 1, 4: 1})
    shared, own = view.route.shared, view.route.own
    assert shared.lengths.tolist() == [6, 4]
    assert shared.cu_seqlens_q.tolist() == [0, 2, 6]
    assert own.starts.tolist() == [6, 6, 4, 4, 0, 0]
    (view,) = pair.run({0: 1, 2: 2, 1: 1})
    assert view.route.shared.lengths.tolist() == [0, 0]
    assert view.route.own.starts.tolist() == [0, 0, 0]


def test_what_is_truncated_is_not_shared_when_it_has_grown_again():
    """By steps of the same sequences and sizes, which look for groups no more while all keep what they
    share.
    """
    pair = forked(n=1)
    (view,) = pair.run(5)
    assert view.route.shared.lengths.tolist() == [6]
    pair.truncate(0, 3)
    for _ in range(2):
        pair.run(5)
        assert view.route.shared.lengths.tolist() == [2]
        assert view.route.own.starts.tolist() == [2, 2]


def test_other_sequences_of_the_same_sizes_are_other_groups():
    pair = forked(n=1)
    pair.admit(1)
    pair.run({2: 9})
    pair.fork(2)
    for rows, shared in (((0, 1), 6), ((2, 3), 8), ((0, 2), 0), ((1, 0), 6)):
        (view,) = pair.run(dict.fromkeys(rows, 1))
        assert view.route.shared.lengths.tolist() == [shared]


def test_children_share_when_their_parent_is_gone():
    pair = forked(n=2)
    pair.run(1)
    pair.release(0)
    (view,) = pair.run(1)
    assert view.route.shared.lengths.tolist() == [6]
    assert view.route.shared.cu_seqlens_q.tolist() == [0, 2]


def test_left_padding_stays_hidden():
    pair = Pair(1, (GROUPED,))
    pair.admit(1, padding=3)
    pair.run(7)
    pair.fork(0)
    (view,) = pair.run(1)
    shared, own = view.route.shared, view.route.own
    assert shared.starts.tolist() == [3]
    assert shared.lengths.tolist() == [6]
    assert own.starts.tolist() == [6, 6]
    long = Pair(1, (GROUPED,))
    long.admit(1, padding=5)
    long.run(4)
    long.fork(0)
    (view,) = long.run(4)
    assert view.route.own.starts.tolist() == [5, 5]


def test_queries_of_a_read_are_not_after_all_tokens():
    """What is shared ends before the first of them, so that it is seen whole whatever the mask."""
    pair = forked(length=6, n=1)
    for queries, shared in ((1, 4), (2, 4), (3, 2), (6, 0), (9, 0), (1, 4)):
        (view,) = pair.run(queries, reading=True)
        assert view.route.shared.lengths.tolist() == [shared]
    (view,) = pair.run(1)
    assert view.route.shared.lengths.tolist() == [6]


def test_decoding_looks_for_groups_once():
    pair = forked()
    with mock.patch.object(buffers, "prefix_groups", wraps=prefix_groups) as found:
        for _ in range(5):
            pair.run(1, calls={})
        assert found.call_count == 1
        pair.truncate(0, 6)  # no less than it shares
        pair.run(1, calls={})
        assert found.call_count == 1
        pair.release(1)
        pair.run(1, calls={})
        assert found.call_count == 2


def test_views_and_their_memory_stay():
    """So that a captured graph finds every later run in them."""
    pair = forked(prefixes=2)
    addresses, views = set(), []
    for _ in range(3):
        views += pair.run(1)
        pair.release(0)
        pair.fork(1)
        shared, own = views[-1].route.shared, views[-1].route.own
        buffers = [x for part in (shared, own) for x in (part.table, part.starts, part.lengths)]
        addresses.add(tuple(x.data_ptr() for x in (*buffers, shared.cu_seqlens_q)))
    assert all(view is views[0] for view in views)
    assert len(addresses) == 1


def test_who_does_not_ask_gets_one_view():
    with make(0).step(0) as (kv,):
        assert kv._view.route is None
    layouts = (GROUPED, replace(GROUPED, window=5))
    with make(2, layouts).step(0) as layers:
        assert [layer._view.route is None for layer in layers] == [False, True]
        assert replace(layers[0]._view).route is None
    with pytest.raises(ValueError, match="shared_prefixes: expected at least 0, got -1"):
        make(-1)
