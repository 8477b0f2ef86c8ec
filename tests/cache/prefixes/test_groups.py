"""Neighbours in a step that share first pages form a group, as long as that saves reads."""

from unittest import mock

import pytest
from prefix_cases import SIZE

from attnlib.cache.pages import Holding
from attnlib.cache.prefixes import groups
from attnlib.cache.prefixes.groups import PrefixGroup, prefix_groups


def holdings(*pages: str) -> list[Holding]:
    """A letter is a page."""
    return [Holding(0, 0, len(x) * SIZE, pages=list(map(ord, x))) for x in pages]


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ([], []),
        (["abc"], [(1, 0)]),
        (["abx", "aby", "ab"], [(3, 2)]),
        (
            ["abcx", "abcy", "az"],
            [(2, 3), (1, 0)],
        ),  # a third row would share one page in place of three
        (["abx", "aby", "abz", "az"], [(3, 2), (1, 0)]),
        (["abx", "aby", "az"], [(3, 1)]),
        (
            ["x", "y", "abp", "abq", "z", "cu", "cv"],
            [(2, 0), (2, 2), (1, 0), (2, 1)],
        ),
        (["abp", "z", "abq"], [(3, 0)]),  # not neighbours
        (["", "", "a"], [(3, 0)]),
    ],
)
def test_groups_of_neighbours(pages, expected):
    given = holdings(*pages)
    assert prefix_groups(given, [len(x.pages) for x in given], SIZE) == expected


def test_short_prefixes_and_unfinished_pages_make_no_group():
    given = holdings("abc", "abd", "abe")
    for full_pages in ([3, 1, 3], [1, 3, 3]):
        assert prefix_groups(given, full_pages, SIZE) == [PrefixGroup(3, 1)]
    assert prefix_groups(given, [3, 0, -2], SIZE) == [PrefixGroup(3, 0)]
    with mock.patch.object(groups, "SHARED_TOKENS", 2 * SIZE + 1):
        assert prefix_groups(given, [3, 3, 3], SIZE) == [PrefixGroup(3, 0)]
