"""Cache bytes as plain arithmetic, equal to what the real cache allocates."""

from collections.abc import Sequence

from .cache.layout import KVLayout


def cache_bytes(layouts: Sequence[KVLayout], lengths: Sequence[int], *, page_size: int, rollback: int = 0) -> int:
    """Bytes that sequences of these ``lengths`` take in a cache of ``layouts``, in whole pages.

    A windowed layout keeps only the pages that its next query, or one ``rollback`` tokens earlier, can see.
    A contiguous cache is the case ``page_size=max_length``.
    """
    raise NotImplementedError
