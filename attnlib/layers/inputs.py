"""What every layer does with its inputs: check them, and find the rotary angles."""

import torch
from torch import Tensor

from ..cache.kv_cache import LayerCache
from ..cache.layout import KVView
from ..mask import Mask
from ..rope import Angles, DynamicNTK, Rope


def check(
    x: Tensor,
    hidden_size: int,
    *,
    context: Tensor | KVView | None,
    kv: LayerCache | None,
    cu_seqlens: Tensor | None,
    rope: Rope | None,
) -> None:
    """Raise ValueError where a layer's inputs contradict each other."""
    if x.dim() not in (2, 3) or x.shape[-1] != hidden_size:
        raise ValueError(f"x: expected [b, s, m={hidden_size}] or packed [t, m={hidden_size}], got {tuple(x.shape)}")
    if kv is not None and (context is not None or cu_seqlens is not None):
        raise ValueError("kv: it excludes context= and cu_seqlens=; a cache step knows its own sequences")
    if cu_seqlens is not None and (x.dim() != 2 or context is not None):
        raise ValueError(
            "cu_seqlens: expected packed x [t, m] and no context; store a packed context with append_context"
        )
    if x.dim() == 2 and cu_seqlens is None and kv is None and not isinstance(context, KVView):
        raise ValueError(f"x: packed [t, m] needs cu_seqlens= or a packed cache step, got {tuple(x.shape)} alone")
    if context is not None and rope is not None:
        raise ValueError("context: positions of x and of a context are unrelated; make cross-attention with rope=None")
    if isinstance(context, Tensor) and (context.dim() != 3 or context.shape[-1] != hidden_size):
        raise ValueError(f"context: expected [b, t, m={hidden_size}], got {tuple(context.shape)}")


def angles_of(
    rope: Rope | None, positions: Tensor | Angles | None, x: Tensor, kv: LayerCache | None, cu_seqlens: Tensor | None
) -> Angles | None:
    """The angles of x's tokens: the given ones, or those of the given or the natural positions; None without rope.

    Raises:
        ValueError: dynamic NTK in a cache, or with positions of unknown length.
        RuntimeError: ``kv`` is not in a step.
    """
    if rope is None or isinstance(positions, Angles):
        return positions if rope is not None else None
    if isinstance(rope.scaling, DynamicNTK):
        if kv is not None:
            raise ValueError(
                "rope: dynamic NTK turns stored keys as the sequence grows; use another scaling with a cache"
            )
        if positions is not None or cu_seqlens is not None:
            raise ValueError("positions: dynamic NTK needs a length; pass rope.angles(positions, length=...) instead")
        return rope.angles(torch.arange(x.shape[1], device=x.device), length=x.shape[1])
    if positions is None:
        positions = _natural_positions(x, kv, cu_seqlens)
    return rope.angles(positions)


def _natural_positions(x: Tensor, kv: LayerCache | None, cu_seqlens: Tensor | None) -> Tensor:
    if kv is not None:
        if kv.positions is None:
            raise RuntimeError("kv: takes tokens only within `with cache.step(...) as layers`; pass kv=layers[i] there")
        return kv.positions
    tokens = torch.arange(x.shape[-2], device=x.device)
    if cu_seqlens is None:
        return tokens
    sequence = torch.bucketize(tokens, cu_seqlens[1:], right=True)
    return tokens - cu_seqlens[sequence]


def window_of(mask: Mask) -> int | None:
    """How many keys back, the query's own included, a cache must keep for this mask; None for all."""
    return None if mask.left is None or mask.left < 0 else mask.left + 1


def scaled_head(q: Tensor, rotated: int, gain: float) -> Tensor:
    """q with its first ``rotated`` channels times ``gain``: YaRN's temperature where a head is rotated in part."""
    return q if gain == 1 else torch.cat((q[..., :rotated] * gain, q[..., rotated:]), -1)
