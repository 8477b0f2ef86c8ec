"""Helpers for padding masks, bool ``[b, t]``: where tokens begin and end, and if there are gaps."""

import torch
from torch import Tensor


def edges_of(there: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each row's tokens begin and end (exclusive), both int32 ``[b]``; 0 for an empty row."""
    t = there.shape[1]
    if not t:
        nothing = there.sum(1, dtype=torch.int32)
        return nothing, nothing
    at = torch.arange(t, device=there.device, dtype=torch.int32)
    ends = torch.where(there, at + 1, 0).amax(1)
    return torch.minimum(torch.where(there, at, t).amin(1), ends).int(), ends.int()


def are_holed(there: Tensor) -> Tensor:
    """Return bool ``[b]``: True for rows with padding between two tokens."""
    begins = (there[:, 1:] & ~there[:, :-1]).sum(1) + there[:, :1].sum(1)
    return begins > 1
