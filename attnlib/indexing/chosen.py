"""The choice of an index branch: the keys that each query of an attention call may see."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..masks.band import FULL, AnyMask
from ..masks.selection import selected


class Chosen(NamedTuple):
    """The keys, or blocks of ``block_size`` keys, that each query may see.

    ``indices`` int32 ``[b, s, c, n]``, or packed ``[t, c, n]``, are lists as :func:`attnlib.masks.selected`
    takes them. None means all keys: attention is then dense.
    """

    indices: Tensor | None
    block_size: int = 1

    @property
    def mask(self) -> AnyMask:
        """The mask that hides all keys but the chosen ones."""
        return FULL if self.indices is None else selected(self.indices, self.block_size)


def keys_of(blocks: Tensor, size: int) -> Tensor:
    """Return the keys of blocks ``[..., n]``, ``[..., n * size]``; -1 for those of block -1."""
    keys = blocks[..., None] * size + torch.arange(size, dtype=blocks.dtype, device=blocks.device)
    return torch.where(blocks[..., None] >= 0, keys, -1).flatten(-2)
