"""A warning for calls that run, and most likely say something else than they were meant to."""

import warnings

import torch

from .call import Call
from .checks import is_strided
from .mask import FULL, AnyMask

HEADS = 256  # more than any model has


class LayoutWarning(UserWarning):
    """The shapes of a call are more likely ``[b, h, s, d]``, as SDPA takes them, than ``[b, s, h, d]``."""


def hinted(call: Call) -> Call:
    """The call, with a :class:`LayoutWarning` where it has more heads than models have, or hides keys and has too few.

    For the public functions, not for those who know their layouts; and not under torch.compile.
    """
    q, k = call.q, call.k
    if not (is_strided(q) and is_strided(k)) or q.dim() != 4 or k.dim() != 4:
        return call
    _, s, h, _ = q.shape
    if torch.compiler.is_compiling() or not (h > HEADS or (k.shape[1] < s and _is_bounded(call.mask))):
        return call
    many = f"{h} heads" if h > HEADS else f"{s} queries for {k.shape[1]} keys, of which the first see none"
    warnings.warn(
        f"q: expected [b, s, h, d], got {tuple(q.shape)}, which says {many}; if these are SDPA's [b, h, s, d], give "
        "q.transpose(1, 2), k and v alike, or call attnlib.compat.sdpa.scaled_dot_product_attention",
        LayoutWarning,
        stacklevel=4,  # beyond the door, and what explains its arguments
    )
    return call


def _is_bounded(mask: object) -> bool:
    """Whether a mask hides keys by their distance."""
    return isinstance(mask, AnyMask) and mask.band != FULL
