"""The kernel that computes the scores of an index branch, if the device has one."""

from collections.abc import Callable

from torch import Tensor

from ..backends import _triton


def kernel(queries: Tensor, keys: Tensor) -> Callable[..., Tensor] | None:
    """Return the Triton operator for index queries ``[b, s, HI, dI]`` and keys ``[b, t, dI]``, or None.

    The operator takes queries, keys, weights, the number of keys that each query sees, the scale of scores,
    whether products pass a relu, whether heads stay apart, and of how many keys it returns the largest score.
    """
    return None if _triton.against_index_scores(queries, keys) else _triton.index_scores


def pooled(keys: Tensor, size: int) -> int:
    """Return ``size`` if the operator can pool blocks of so many keys ``[b, t, dI]``, and otherwise 1."""
    return size if _triton.can_pool(keys, size) else 1
