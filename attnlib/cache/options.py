"""What a cache is made with, checked: how many pages each window gets, and how attention reads them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..checks import check_count
from ..kv import KVLayout
from .buffer import split_size_of
from .pages import Window


class ReadOptions(NamedTuple):
    """How attention reads a cache.

    It reads the shared prefixes of up to ``max_prefix_groups`` groups of neighbours once for each group. A
    ``split_size`` above 0 fixes the size of every split, so that bits do not depend on the batch.
    """

    max_prefix_groups: int
    split_size: int


def read_options(shared_prefixes: int, batch_invariant: bool, max_length: int) -> ReadOptions:
    """The read options of a cache with these arguments."""
    check_count("shared_prefixes", shared_prefixes)
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant: expected a bool, got {type(batch_invariant).__name__}")
    if shared_prefixes and batch_invariant:
        raise ValueError("batch_invariant: expected no shared_prefixes with it, since those depend on the batch")
    return ReadOptions(shared_prefixes, split_size_of(max_length) if batch_invariant else 0)


def pages_by_window(pages: int | Mapping[Window, int], layouts: Sequence[KVLayout]) -> dict[Window, int]:
    """How many pages the layers of each window get; every window has a page allocator of its own."""
    windows = _windows(layouts)
    counts = dict(pages) if isinstance(pages, Mapping) else dict.fromkeys(windows, pages)
    if set(counts) != set(windows):
        raise ValueError(f"pages: expected a count for each window of {windows}, got {counts}")
    for count in counts.values():
        check_count("pages", count, least=1)
    return counts


def _windows(layouts: Sequence[KVLayout]) -> list[Window]:
    """The distinct windows of the layouts, in their order."""
    if not isinstance(layouts, Sequence):
        raise TypeError(f"layouts: expected a sequence of KVLayouts, one for each layer, got {type(layouts).__name__}")
    for layout in layouts:
        if not isinstance(layout, KVLayout):
            raise TypeError(f"layouts: expected one KVLayout for each layer, got {type(layout).__name__}")
    if not layouts:
        raise ValueError("layouts: expected one KVLayout for each layer, got none")
    return list(dict.fromkeys(layout.window_class for layout in layouts))
