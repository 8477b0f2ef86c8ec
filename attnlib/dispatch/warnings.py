"""Warnings for calls that run, and most likely compute something else than they were meant to."""

import sys
import warnings
from types import FrameType

import torch

from ..call.call import Call
from ..internal.checks import is_strided
from ..masks.band import FULL, AnyMask

HEADS = 256  # more than any model has
FEW = 4  # queries; a step that decodes fewer has more heads than queries by right
INSIDE = "attnlib."


class LayoutWarning(UserWarning):
    """Numbers that most likely lie in another order than the call takes them for.

    Tensors in SDPA's ``[b, h, s, d]`` where a function takes ``[b, s, h, d]``, or a rope whose pairs are not
    those that DeepSeek's layers rotate.
    """


def hinted(call: Call) -> Call:
    """Return the call; warn once a call site if its shapes are most likely SDPA's ``[b, h, s, d]``.

    Three shapes say so: more heads than any model has; fewer keys than queries under a mask that hides keys
    by their distance; and as many heads and keys in k as heads and queries in q, at least twice as many heads
    as queries. The last is SDPA's layout without groups. Grouped calls in the right order have fewer heads in
    k, so they never look like it.

    For the public functions; callers within the package know their layouts. Silent under torch.compile.
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
        "d], give q.transpose(1, 2), k and v alike, or call attnlib.compat.sdpa.scaled_dot_product_attention",
        sys._getframe(3),  # beyond the public function, and what explains its arguments
    )
    return call


def warn_once(text: str, caller: FrameType) -> None:
    """Raise a :class:`LayoutWarning` at the line that ``caller`` is at: once for that line, whatever the text
    says.

    Nothing is said to callers within the package.
    """
    module = caller.f_globals.get("__name__", "")
    if module.startswith(INSIDE):
        return
    # Where Python keeps which warnings a module has shown, by (text, category, line). It keeps none of those
    # that a filter ignores, always shows or makes an error.
    shown = caller.f_globals.setdefault("__warningregistry__", {})
    if any(isinstance(key, tuple) and key[1:] == (LayoutWarning, caller.f_lineno) for key in shown):
        return
    where = caller.f_code.co_filename, caller.f_lineno
    warnings.warn_explicit(text, LayoutWarning, *where, module=module, registry=shown)


def _is_bounded(mask: object) -> bool:
    """Whether a mask hides keys by their distance."""
    return isinstance(mask, AnyMask) and mask.band != FULL
