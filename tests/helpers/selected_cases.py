"""Lists of selected keys, and the dense boolean mask that they mean, made entry by entry."""

import torch
from torch import Tensor

from attnlib import CAUSAL, Mask, MaskFunction, masks


def lists(b: int, s: int, c: int, n: int, blocks: int, *, seed: int = 0) -> Tensor:
    """Random lists ``[b, s, c, n]`` with repeats, -1, numbers of blocks that do not exist, and empty rows."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, blocks + 2, (b, s, c, n), generator=generator, dtype=torch.int32)
    indices[torch.rand(b, s, c, generator=generator) < 0.1] = -1
    return indices


def by_entries(indices: Tensor, block_size: int, heads: int, keys: int) -> Tensor:
    """Bool ``[b, h, s, t]``, True where a list has the block of a key."""
    b, s, c, _ = indices.shape
    shown = torch.zeros(b, heads, s, keys, dtype=torch.bool)
    group = heads // c
    for at in (indices >= 0).nonzero().tolist():
        start = int(indices[tuple(at)]) * block_size
        sequence, query, head, _ = at
        shown[sequence, head * group : (head + 1) * group, query, start : start + block_size] = True
    return shown


def as_tensor(
    indices: Tensor, block_size: int, heads: int, keys: int, band: Mask | MaskFunction = CAUSAL
) -> MaskFunction:
    """The same mask as ``band & masks.selected(indices, block_size)``, by a dense tensor."""
    return band & masks.mask_tensor(by_entries(indices, block_size, heads, keys))
