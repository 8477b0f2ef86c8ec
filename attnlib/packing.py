"""From what people have to what calls take."""

import torch
from torch import Tensor

from .checks import is_strided, refuse_tensor


def bounds_of(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """``key_starts`` and ``key_ends``, int32 ``[b]``, of a mask ``[b, t]`` that is not 0 where there are tokens.

    They are the first of these and what follows the last, found on the mask's device; 0 and 0 where there are none.
    What lies between counts as tokens, so a mask with holes says more than its bounds.

    Raises:
        TypeError: ``attention_mask`` is no tensor.
        ValueError: it is not ``[b, t]``.

    >>> bounds_of(torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]))
    (tensor([1, 0, 0], dtype=torch.int32), tensor([3, 4, 0], dtype=torch.int32))
    """
    if not is_strided(attention_mask):
        refuse_tensor("attention_mask", attention_mask)
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask: expected [b, t], got {tuple(attention_mask.shape)}")
    there, t = attention_mask != 0, attention_mask.shape[1]
    at = torch.arange(t, device=there.device, dtype=torch.int32)
    if not t:
        nothing = there.sum(1, dtype=torch.int32)
        return nothing, nothing
    ends = torch.where(there, at + 1, 0).amax(1)
    return torch.minimum(torch.where(there, at, t).amin(1), ends).int(), ends.int()


def from_position_ids(position_ids: Tensor) -> tuple[Tensor, int]:
    """``cu_seqlens`` int32 ``[n + 1]`` and the longest length of what rows of ``position_ids`` ``[b, s]`` hold.

    A sequence begins where a row does, and where a position is not one more than that before. x ``[b, s, m]`` goes with
    them as ``x.flatten(0, 1)``; ``[s]`` is one row. The longest length is read from the device.

    Raises:
        TypeError: they are no integer tensor.
        ValueError: they are not ``[b, s]`` or ``[s]``.

    >>> from_position_ids(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]))
    (tensor([ 0,  3,  5,  7, 10], dtype=torch.int32), 3)
    """
    if not is_strided(position_ids):
        refuse_tensor("position_ids", position_ids)
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise TypeError(f"position_ids: expected integers, got {position_ids.dtype}")
    if position_ids.dim() not in (1, 2):
        raise ValueError(f"position_ids: expected [b, s] or [s], got {tuple(position_ids.shape)}")
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[..., 1:] = position_ids.diff(dim=-1) != 1
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat((starts, starts.new_tensor([position_ids.numel()]))).int()
    return cu_seqlens, int(cu_seqlens.diff().max()) if len(starts) else 0
