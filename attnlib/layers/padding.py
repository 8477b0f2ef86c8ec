"""A layer's ``attention_mask``: the keys that are tokens rather than padding, as bounds or as a mask."""

import torch
from torch import Tensor

from ..internal.checks import is_recorded, is_strided, refuse_tensor
from ..internal.padding import are_holed, edges_of
from ..masks.function import MaskFunction
from ..masks.ready_made import mask_tensor
from .inputs import Inputs


def without_padding(x: Tensor, given: Inputs) -> Inputs:
    """Replace ``attention_mask`` by ``key_starts`` and ``key_ends``, or by a mask if it has holes.

    The host reads two flags from the device: is anything padded, and does the padding have holes? Under
    torch.compile and in CUDA graphs nothing is read, and the result is always a mask.

    Raises:
        TypeError: the mask is not a tensor of bools or integers.
        ValueError: the mask has another shape than the keys, or another argument already bounds the keys.
    """
    if given.attention_mask is None:
        return given
    _check(x, given)
    starts, ends, tokens = bounds_or_mask(given.attention_mask != 0)
    given = given._replace(attention_mask=None)
    if tokens is not None:
        return given._replace(mask=tokens if given.mask is None else given.mask & tokens)
    return given if starts is None else given._replace(key_starts=starts, key_ends=ends)


def bounds_or_mask(there: Tensor) -> tuple[Tensor | None, Tensor | None, MaskFunction | None]:
    """Return the bounds of the tokens ``there``, bool ``[b, t]``, or None twice and a mask.

    All three are None if nothing is padded. The host reads two flags; see :func:`without_padding`.
    """
    if is_readable(there):
        is_whole, has_holes = torch.stack((there.all(), are_holed(there).any())).tolist()
        if is_whole:
            return None, None, None
        if not has_holes:
            return *edges_of(there), None
    return None, None, mask_tensor(there[:, None, None])


def is_readable(x: Tensor) -> bool:
    """True if the host can read ``x``: not under torch.compile, in a CUDA graph or on the meta device."""
    return type(x) is Tensor and not (is_recorded(x) or x.is_meta)


def _check(x: Tensor, given: Inputs) -> None:
    padding, context = given.attention_mask, given.context
    for name, is_given, instead in (
        ("kv=", given.kv is not None, "left_padding= of cache.admit(); a cache knows where sequences end"),
        ("a view of a cache", given.view is not None, "nothing; a cache knows where sequences end"),
        ("cu_seqlens=", given.cu_seqlens is not None, "nothing; packed sequences have no padding"),
        ("key_starts= or key_ends=", given.key_starts is not given.key_ends, "one of them"),
        ("key_starts= and key_ends=", given.key_starts is not None, "one of them"),
    ):
        if is_given:
            raise ValueError(f"attention_mask: expected None with {name}; pass {instead}")
    if not is_strided(padding):
        refuse_tensor("attention_mask", padding)
    if padding.is_floating_point() or padding.is_complex():
        raise TypeError(
            f"attention_mask: expected bools, True for tokens, got {padding.dtype}; a float mask is a "
            "score: pass score=attnlib.scores.bias_tensor(bias) to the layer's constructor"
        )
    of, ranks = x if context is None else context, given.context_parallel
    tokens = of.shape[-2] * (1 if ranks is None else ranks.mesh.size())
    if padding.shape != (of.shape[0], tokens) or of.dim() != 3:
        shown = "; for a mask of each query use mask=attnlib.masks.mask_tensor(shown)"
        remedy = shown if padding.dim() > 2 else ""
        raise ValueError(
            f"attention_mask: expected [b={of.shape[0]}, t={tokens}], got {tuple(padding.shape)}{remedy}"
        )
