"""Cache arithmetic: how many bytes a KVCache allocates, and how many tokens fit into a memory budget."""

from bisect import bisect_left
from collections.abc import Sequence

from ..internal.signatures import kind
from ..kv import KVLayout


@kind
def cache_bytes(
    layouts: Sequence[KVLayout], lengths: Sequence[int], *, page_size: int, rollback: int = 0, ranks: int = 1
) -> int:
    """Return how many bytes sequences of the given ``lengths`` take in a cache, in whole pages.

    ``layouts`` has one layout per layer. A layer with a window keeps only the pages that its next query can
    see, or a query ``rollback`` tokens earlier, and the pages of its first ``first_tokens`` tokens. For a
    contiguous cache, pass ``page_size=max_length``. Sequences that share pages take less.

    If ``ranks`` ranks share a cache, the result is for one rank, where a page has space for ``page_size``
    tokens. Layers without a window are sharded by token; every rank stores all of the windowed layers.

    >>> cache_bytes([KVLayout.latent(512, 64, dtype=torch.bfloat16)], [1000], page_size=64)
    1179648
    """
    if page_size < 1 or rollback < 0 or ranks < 1 or min(lengths, default=0) < 0:
        raise ValueError(
            "cache_bytes: expected page_size >= 1, rollback >= 0, ranks >= 1 and lengths >= 0, got page_size="
            f"{page_size}, rollback={rollback}, ranks={ranks} and a shortest length of "
            f"{min(lengths, default=0)}"
        )
    return sum(
        _pages(layout, length, page_size, rollback, ranks) * page_size * layout.token_bytes
        for layout in layouts
        for length in lengths
    )


@kind
def largest_batch(
    layouts: Sequence[KVLayout], memory: int, *, context: int, page_size: int, ranks: int = 1
) -> int:
    """Return how many sequences can grow to ``context`` tokens, token by token, in ``memory`` bytes.

    While a windowed cache grows, it may need one page more than at the end, since a step allocates a new page
    before it frees an old one. If ``ranks`` ranks share a cache, ``memory`` is the memory of one rank.

    >>> layout = KVLayout.latent(512, 64, dtype=torch.bfloat16)
    >>> largest_batch([layout], 2**20, context=100, page_size=64)
    7
    """
    if context < 1:
        raise ValueError(f"context: expected at least 1 token, got {context}")
    return max(0, memory) // _peak(layouts, -(-context // page_size), page_size, ranks)


@kind
def longest_context(
    layouts: Sequence[KVLayout], memory: int, *, batch: int, page_size: int, ranks: int = 1
) -> int | None:
    """Return the length to which ``batch`` sequences can grow in ``memory`` bytes, in tokens of whole pages.

    None means that there is no limit, which is possible only if every layer has a window. This is the inverse
    of :func:`largest_batch`. If ``ranks`` ranks share a cache, ``memory`` is the memory of one rank.

    >>> layout = KVLayout.latent(512, 64, dtype=torch.bfloat16)
    >>> longest_context([layout], 2**20, batch=2, page_size=64)
    448
    """
    if batch < 1:
        raise ValueError(f"batch: expected at least 1 sequence, got {batch}")

    def fits(pages: int) -> bool:
        return batch * _peak(layouts, pages, page_size, ranks) <= memory

    windows = [layout.window for layout in layouts]
    first = max((-(-layout.first_tokens // page_size) for layout in layouts), default=0)
    if None not in windows and fits(max(windows, default=0) // page_size + 2 + first):
        return None  # every window has freed a page by now, so no layer's cache grows further
    too_many = 1
    while fits(too_many):
        too_many *= 2
    first_too_many = bisect_left(range(too_many), True, lo=1, key=lambda pages: not fits(pages))
    return (first_too_many - 1) * page_size


def _peak(layouts: Sequence[KVLayout], pages: int, page_size: int, ranks: int) -> int:
    """Return the peak number of bytes that one sequence takes while it grows to ``pages`` pages.

    The peak is in the step that starts the last page. Until that step ends, the cache keeps all keys that the
    previous token could see, as if one token might be rolled back.
    """
    return cache_bytes(layouts, [(pages - 1) * page_size + 1], page_size=page_size, rollback=1, ranks=ranks)


def _pages(layout: KVLayout, length: int, page_size: int, rollback: int, ranks: int) -> int:
    if layout.window is None:
        return -(-length // (page_size * ranks))
    kept_from = max(0, length - layout.window + 1 - rollback)
    dropped = kept_from // page_size
    return -(-length // page_size) - dropped + min(dropped, -(-layout.first_tokens // page_size))
