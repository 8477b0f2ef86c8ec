"""The page counts of a cache that takes a given memory."""

from collections.abc import Sequence

from ..internal.checks import check_count
from ..internal.units import parse_bytes
from ..kv import KVLayout
from .options import pages_for
from .pages import Window


def check_pages_or_memory(pages: object, memory: object, max_step_tokens: object) -> None:
    """Raise ValueError unless either ``pages`` or ``memory`` is given, and a step limit only with memory."""
    if (pages is None) == (memory is None):
        raise ValueError("pages: expected either a page count or memory=, such as memory='40GiB'")
    if memory is None and max_step_tokens is not None:
        raise ValueError("max_step_tokens: expected None with pages=; KVCache.pages_for takes it")


def pages_in(
    memory: int | str,
    layouts: Sequence[KVLayout],
    *,
    page_size: int,
    max_sequences: int,
    max_length: int | None,
    max_step_tokens: int | None,
    rollback: int,
    ranks: int,
) -> dict[Window, int]:
    """Return the most pages of each window class whose keys and values fit into ``memory``.

    The cache holds ``max_sequences`` sequences of equal length, as long as the memory allows, up to
    ``max_length``. Layers without a window also get the pages that are left over.

    Raises:
        TypeError, ValueError: ``memory`` is not a size, or it cannot store a page for each sequence.
    """
    if isinstance(memory, str):
        try:
            given = parse_bytes(memory)
        except ValueError as error:
            raise ValueError(f"memory: {error}") from None
    else:
        check_count("memory", memory, least=1)
        given = memory
    cost = dict.fromkeys((layout.window_class for layout in layouts), 0)
    for layout in layouts:
        cost[layout.window_class] += layout.token_bytes * page_size

    def counts(length: int) -> dict[Window, int]:
        options = {"max_step_tokens": max_step_tokens, "rollback": rollback, "ranks": ranks}
        per_sequence = pages_for(layouts, [length], page_size=page_size, **options)
        return {window: max_sequences * count for window, count in per_sequence.items()}

    def size(pages: dict[Window, int]) -> int:
        return sum(cost[window] * count for window, count in pages.items())

    if (least := size(counts(1))) > given:
        raise ValueError(
            f"memory: expected at least {least:,} bytes, for a page of each of {max_sequences} sequences, "
            f"got {given:,}; use fewer sequences or smaller pages"
        )
    longest = given // min(cost.values()) * page_size * ranks if max_length is None else max_length
    fits, too_long = 1, longest + 1
    while too_long - fits > 1:
        length = (fits + too_long) // 2
        fits, too_long = (length, too_long) if size(counts(length)) <= given else (fits, length)
    found = counts(fits)
    if None in found and max_length is None:
        found[None] += (given - size(found)) // cost[None]
    return found
