"""Warnings for calls that run but probably compute something else than the caller meant."""

import sys
import warnings
from types import FrameType

import torch

from ..call.call import Call
from ..internal.checks import is_strided
from ..masks.band import FULL, AnyMask

HEADS = 256  # assume that no model has more heads
FEW = 4  # calls with fewer queries are probably decoding steps, in which heads outnumber queries
INSIDE = "attnlib."


class LayoutWarning(UserWarning):
    """A warning that the numbers in a tensor are probably in another order than the call expects.

    Examples are tensors in SDPA's ``[b, h, s, d]`` for a function that takes ``[b, s, h, d]``, and a rope
    that rotates other pairs than DeepSeek's layers do.
    """


def warn_of_layout(call: Call) -> Call:
    """Return the call; warn once per call site if its shapes are probably SDPA's ``[b, h, s, d]``.

    Each of three signs leads to a warning: more heads than any model has; fewer keys than queries under a
    mask that hides keys by distance; or equal head and token counts in q and k, with at least twice as many
    heads as queries. A grouped call in the right order never shows the last sign, since k has fewer heads.

    Only the public functions call this. There is no warning under torch.compile.
    """
    q, k = call.q, call.k
    if not (is_strided(q) and is_strided(k)) or q.dim() != 4 or k.dim() != 4:
        return call
    _, s, h, _ = q.shape
    _, t, g, _ = k.shape
    if torch.compiler.is_compiling():
        return call
    if h > HEADS:
        found = f"{h} heads"
    elif h >= 2 * s and s >= FEW and (t, g) == (s, h):
        found = f"{h} heads and {s} tokens"
    elif t < s and _is_bounded(call.mask):
        found = f"{s} queries for {t} keys, of which the first see none"
    else:
        return call
    warn_once(
        f"q: expected [b, s, h, d], got {tuple(q.shape)}, which says {found}; if these are SDPA's [b, h, s, "
        "d], pass q.transpose(1, 2), also for k and v, or call "
        "attnlib.compat.sdpa.scaled_dot_product_attention",
        sys._getframe(3),  # skips the public function and the wrapper that explains its arguments
    )
    return call


def warn_once(text: str, caller: FrameType) -> None:
    """Issue a :class:`LayoutWarning` at the current line of ``caller``, once for each line.

    Callers within the package get no warning.
    """
    module = caller.f_globals.get("__name__", "")
    if module.startswith(INSIDE):
        return
    # In this registry Python records the warnings that a module has shown, by (text, category, line), except
    # those that a filter ignores, always shows or turns into errors.
    shown = caller.f_globals.setdefault("__warningregistry__", {})
    if any(isinstance(key, tuple) and key[1:] == (LayoutWarning, caller.f_lineno) for key in shown):
        return
    where = caller.f_code.co_filename, caller.f_lineno
    warnings.warn_explicit(text, LayoutWarning, *where, module=module, registry=shown)


def _is_bounded(mask: object) -> bool:
    """True if a mask hides keys by their distance from the query."""
    return isinstance(mask, AnyMask) and mask.band != FULL
