"""Validate the arguments of a cache: page counts by window class, and the options for reading it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..internal.checks import check_count
from ..internal.signatures import kind
from ..kv import STORES, KVLayout
from .pages import Window
from .routes import RouteOption
from .sequences import Sequences, tokens_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ReadOptions(NamedTuple):
    """The options of a cache that decide how attention reads it.

    A ``split_size`` above 0 fixes the size of every split, so that results are bit-identical in any batch. A
    ``route`` (shared prefixes, or sharding over ranks) changes how layers without a window are read.
    """

    split_size: int = 0
    route: RouteOption | None = None

    @property
    def shards(self) -> int:
        """Return the number of ranks that share the tokens of each page, in layers without a window."""
        return 1 if self.route is None else self.route.shards


def check_options(
    layouts: Sequence[KVLayout],
    *,
    shared_prefixes: int = 0,
    batch_invariant: bool = False,
    mesh: "DeviceMesh | None" = None,
) -> None:
    """Raise an error if options exclude each other, or no layer can be sharded over ``mesh``."""
    check_count("shared_prefixes", shared_prefixes)
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant: expected a bool, got {type(batch_invariant).__name__}")
    if shared_prefixes and batch_invariant:
        raise ValueError(
            "batch_invariant: expected no shared_prefixes with it, since those depend on the batch"
        )
    if mesh is None:
        return
    for name, given in {"shared_prefixes": shared_prefixes, "batch_invariant": batch_invariant}.items():
        if given:
            raise ValueError(f"mesh: expected no {name} with it, got {given}; leave one of them out")
    windows = _windows(layouts)
    if None not in windows:
        raise ValueError(
            f"mesh: expected a layout without a window, whose tokens ranks can share, got windows {windows}; "
            "make the cache without mesh="
        )
    for n, layout in enumerate(layouts):
        if layout.index_dim and layout.window is None:
            raise NotImplementedError(
                f"mesh: expected layouts without index keys, since no rank could choose among the tokens of "
                f"others, got index_dim={layout.index_dim} in layouts[{n}]; make the cache without mesh="
            )


def stored_as(layouts: Sequence[KVLayout], storage_dtype: torch.dtype | None) -> tuple[KVLayout, ...]:
    """Return the layouts, with this storage dtype for those that have none.

    Raises:
        TypeError: ``storage_dtype`` is not None, int8 or float8_e4m3fn.
        ValueError: a layout has another storage dtype.
    """
    _windows(layouts)  # raises for objects that are not layouts
    if storage_dtype is None:
        return tuple(layouts)
    if not isinstance(storage_dtype, torch.dtype) or storage_dtype not in STORES:
        raise TypeError(
            f"storage_dtype: expected None, torch.int8 or torch.float8_e4m3fn, got {storage_dtype}"
        )
    for index, layout in enumerate(layouts):
        if layout.storage_dtype not in (None, storage_dtype):
            own = f"{layout.storage_dtype} like layouts[{index}].storage_dtype"
            raise ValueError(f"storage_dtype: expected {own}, got {storage_dtype}; leave one of them out")
    return tuple(replace(layout, storage_dtype=storage_dtype) for layout in layouts)


def contiguous_sequences(layouts: Sequence[KVLayout], max_sequences: int, max_length: int) -> Sequences:
    """Return the object that keeps track of the sequences and pages of a contiguous cache."""
    check_count("max_sequences", max_sequences, least=1)
    check_count("max_length", max_length, least=1)
    rows = pages_by_window(max_sequences, layouts)
    return Sequences(rows, max_length, max_sequences=max_sequences, max_length=max_length)


def paged_sequences(
    layouts: Sequence[KVLayout],
    pages: int | Mapping[Window, int],
    page_size: int,
    *,
    max_sequences: int,
    max_length: int | None,
    rollback: int,
    shards: int,
) -> Sequences:
    """Return the object that keeps track of the sequences and pages of a paged cache."""
    counts = pages_by_window(pages, layouts)
    check_count("page_size", page_size, least=1)
    check_count("max_sequences", max_sequences, least=1)
    if max_length is None:
        max_length = max(n * tokens_of(window, page_size, shards) for window, n in counts.items())
    check_count("max_length", max_length, least=1)
    check_count("rollback", rollback)
    options = {"max_sequences": max_sequences, "max_length": max_length, "rollback": rollback}
    return Sequences(counts, page_size, **options, shards=shards)


def pages_by_window(pages: int | Mapping[Window, int], layouts: Sequence[KVLayout]) -> dict[Window, int]:
    """Return the page count of each window class; every class has its own page allocator."""
    windows = _windows(layouts)
    counts = dict(pages) if isinstance(pages, Mapping) else dict.fromkeys(windows, pages)
    if set(counts) != set(windows):
        raise ValueError(f"pages: expected a count for each window of {windows}, got {counts}")
    for count in counts.values():
        check_count("pages", count, least=1)
    return counts


@kind
def pages_for(
    layouts: Sequence[KVLayout],
    lengths: Sequence[int],
    *,
    page_size: int = 64,
    max_step_tokens: int | None = None,
    rollback: int = 0,
    ranks: int = 1,
) -> dict[Window, int]:
    """Return the pages that sequences of these ``lengths`` need, as the ``pages=`` of :meth:`KVCache.paged`.

    A layer with a window retains the keys within the window and, during a step, the keys of all new tokens.
    A sequence gets at most ``max_step_tokens`` tokens per step. None means that a prompt arrives in one step,
    which needs as many pages as without a window. If all layers have windows, pass ``max_length=`` to the
    cache as well; otherwise the page count limits the length of a sequence. ``ranks`` is the number of ranks
    of the cache's ``mesh``; the result counts the pages of each rank.

    >>> layouts = [KVLayout.grouped(2, 8), KVLayout.grouped(2, 8, window=16)]
    >>> KVCache.pages_for(layouts, [100, 50], page_size=16)
    {None: 11, 16: 11}
    >>> KVCache.pages_for(layouts, [100, 50], page_size=16, max_step_tokens=16)
    {None: 11, 16: 6}

    Raises:
        ValueError, TypeError: a count is not an int of at least 1 (0 for a length or ``rollback``).
    """
    check_count("page_size", page_size, least=1)
    check_count("rollback", rollback)
    check_count("ranks", ranks, least=1)
    if max_step_tokens is not None:
        check_count("max_step_tokens", max_step_tokens, least=1)
    for length in lengths:
        check_count("lengths", length)
    found = dict.fromkeys(_windows(layouts), 0)
    for window in found:
        reach, first = window if isinstance(window, tuple) else (window, 0)
        for length in lengths:
            pages = -(-length // tokens_of(window, page_size, ranks))
            if reach is not None and max_step_tokens is not None:
                # The oldest key may be the last of its page, and the newest one the first of its page.
                tokens = reach - 1 + rollback + min(max_step_tokens, length) + 2 * (page_size - 1)
                pages = min(pages, tokens // page_size + -(-first // page_size))
            found[window] += pages
    return {window: max(1, count) for window, count in found.items()}


def _windows(layouts: Sequence[KVLayout]) -> list[Window]:
    """Return the distinct window classes of the layouts, in order."""
    if not isinstance(layouts, Sequence):
        raise TypeError(
            f"layouts: expected a sequence of KVLayouts, one for each layer, got {type(layouts).__name__}"
        )
    for layout in layouts:
        if not isinstance(layout, KVLayout):
            remedy = "; pass its kv_layout" if hasattr(layout, "kv_layout") else ""
            raise TypeError(
                f"layouts: expected one KVLayout for each layer, got {type(layout).__name__}{remedy}"
            )
    if not layouts:
        raise ValueError("layouts: expected one KVLayout for each layer, got none")
    return list(dict.fromkeys(layout.window_class for layout in layouts))
