"""Lists of selected keys, and the dense boolean mask that they mean, made entry by entry."""

import torch
from torch import Tensor

from attnlib import CAUSAL, FULL, Mask, MaskFunction, masks, sliding

# Query heads, KV heads, lists, entries, and the size of blocks: smaller than a tile, a tile and larger ones;
# no power of two; tokens; one list for all heads or one for each; and more heads than a tile has rows.
FORMS = [
    (8, 2, 2, 5, 32),
    (8, 2, 2, 5, 64),
    (4, 2, 2, 3, 128),
    (4, 1, 1, 40, 1),
    (4, 4, 1, 6, 4),
    (6, 2, 6, 4, 16),
    (20, 1, 1, 3, 100),
]
BANDS = {
    "causal": CAUSAL,
    "full": FULL,
    "sliding": sliding(40),
    "prefix": Mask(right=0, prefix=9),
    "hollow": Mask(left=60, right=-5),
    "function": CAUSAL & masks.dilated(2),
}


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


def made(form, dtype: torch.dtype, s: int = 7, t: int = 150, d: int = 16, e: int = 16):
    """q, k, v and lists of two sequences, on the CPU."""
    h, g, c, n, size = form
    torch.manual_seed(0)
    tensors = (
        torch.randn(2, x, heads, width).to(dtype) for x, heads, width in ((s, h, d), (t, g, d), (t, g, e))
    )
    return *tensors, lists(2, s, c, n, -(-t // size)), size
