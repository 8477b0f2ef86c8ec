"""The kernel that computes the scores of an index branch, if the device has one."""

from collections.abc import Callable

from torch import Tensor

from ..backends import _triton


def kernel(queries: Tensor, keys: Tensor) -> Callable[..., Tensor] | None:
    """Return the Triton operator for index queries ``[b, s, HI, dI]`` and keys ``[b, t, dI]``, or None.

    The operator takes queries, keys, weights, the number of keys that each query sees, the scale of scores,
    and whether products pass a relu and heads are summed up. Without it, torch computes the same scores.
    """
    return None if _triton.against_index_scores(queries, keys) else _triton.index_scores
