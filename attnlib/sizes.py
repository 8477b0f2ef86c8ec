"""Cache bytes as plain arithmetic, equal to what the real cache allocates."""

from collections.abc import Sequence

from .cache.layout import KVLayout


def cache_bytes(layouts: Sequence[KVLayout], lengths: Sequence[int], *, page_size: int, rollback: int = 0) -> int:
    """Bytes that sequences of these ``lengths`` take in a cache of ``layouts``, in whole pages.

    A windowed layout keeps only the pages that its next query, or one ``rollback`` tokens earlier, can see.
    A contiguous cache is the case ``page_size=max_length``. Sequences that share pages take less.

    >>> cache_bytes([KVLayout.latent(512, 64, dtype=torch.bfloat16)], [1000], page_size=64)
    1179648
    """
    if page_size < 1 or rollback < 0 or min(lengths, default=0) < 0:
        raise ValueError(
            "cache_bytes: expected page_size >= 1, rollback >= 0 and lengths >= 0, "
            f"got page_size={page_size}, rollback={rollback} and a shortest length of {min(lengths, default=0)}"
        )
    return sum(
        _pages(layout.window, length, page_size, rollback) * page_size * layout.token_bytes
        for layout in layouts
        for length in lengths
    )


def _pages(window: int | None, length: int, page_size: int, rollback: int) -> int:
    kept_from = 0 if window is None else max(0, length - window + 1 - rollback)
    return -(-length // page_size) - kept_from // page_size
