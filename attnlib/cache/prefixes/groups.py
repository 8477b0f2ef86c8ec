"""Find neighbouring sequences of a step that share their first pages. Plain Python."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from ..pages import Holding

SHARED_TOKENS = 1024  # shorter prefixes make no group; a guess, not measured on a GPU yet


class PrefixGroup(NamedTuple):
    """A run of ``rows`` neighbouring sequences in a step that all share their first ``pages`` pages."""

    rows: int
    pages: int


def prefix_groups(
    holdings: Sequence[Holding], full_pages: Sequence[int], page_size: int
) -> list[PrefixGroup]:
    """Divide the sequences of a step into runs of neighbours that share first pages, or that share none.

    No window may have dropped pages. Sequence ``i`` shares at most its first ``full_pages[i]`` pages. The
    next sequence joins a group unless the group would then save fewer page reads.
    """
    found: list[PrefixGroup] = []
    for row, holding in enumerate(holdings):
        if found:
            rows, pages = found[-1]
            common = min(pages, full_pages[row], common_pages(holdings[row - 1], holding))
            if common * page_size >= SHARED_TOKENS and rows * common >= (rows - 1) * pages:
                found[-1] = PrefixGroup(rows + 1, common)
                continue
        found.append(PrefixGroup(1, full_pages[row]))
    groups: list[PrefixGroup] = []
    for rows, pages in found:
        if rows == 1:
            before = groups.pop().rows if groups and groups[-1].pages == 0 else 0
            groups.append(PrefixGroup(before + 1, 0))
        else:
            groups.append(PrefixGroup(rows, pages))
    return groups


def common_pages(a: Holding, b: Holding) -> int:
    """Return how many pages two sequences share, counted from their first pages.

    Copy-on-write replaces only last pages, so shared pages are always the first ones.
    """
    shorter = min(len(a.pages), len(b.pages))
    return bisect_left(range(shorter), True, key=lambda i: a.pages[i] != b.pages[i])
