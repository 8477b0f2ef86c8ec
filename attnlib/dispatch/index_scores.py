"""The kernel that computes the scores of an index branch, if the device has one."""

from collections.abc import Callable

from torch import Tensor

from ..backends import _triton


def kernel(queries: Tensor, keys: Tensor) -> Callable[..., Tensor] | None:
    """Return the Triton operator for index queries ``[b, s, HI, dI]`` and keys ``[b, t, dI]``, or None.

    Keys may also be those of all pages in a cache, ``[pages, page, dI]``. The operator takes queries, keys,
    weights, the numbers of the first keys that queries do not see any more, and that sequences see at all
    (or None), the page table and the scales of keys in a cache (or None), the scale of scores, whether
    products pass a relu, whether heads stay apart, of how many keys it returns the largest score, and the
    number of keys.
    """
    return None if _triton.against_index_scores(queries, keys) else _triton.index_scores


def pooled(queries: Tensor, size: int) -> int:
    """Return ``size`` if the operator can pool scores of blocks of ``size`` keys, and otherwise 1."""
    return size if _triton.can_pool(queries, size) else 1
