"""The mask of keys that a list selects for each query, and the expansion of such lists."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..internal.checks import are_checks_on, check_count, is_strided, refuse_tensor
from ..internal.signatures import kind
from .band import FULL
from .function import EVERYWHERE, MaskFunction, Selection


@kind
def selected(indices: Tensor, block_size: int = 1) -> MaskFunction:
    """Return the mask that shows each query the keys, or blocks of keys, in its own list.

    ``indices`` int32 is ``[b, s, c, n]``, or ``[t, c, n]`` for packed queries: ``c`` lists of up to ``n``
    block numbers for each query. One list serves all heads, ``g`` lists one KV head each, and ``h`` lists one
    query head each. Key ``j`` is visible to a query if ``j // block_size`` is in its list. Combine the mask
    with a band, such as ``CAUSAL``, and with mask functions by ``&``; a key must be visible to all of them.

    Blocks start at key 0 of a sequence, also of a packed one. Over a cache, entries count storage indices, so
    that left padding counts, and keys that the cache has dropped cannot be selected. -1 is no entry and may
    stand anywhere. Entries whose keys do not exist, or that the band hides, select nothing. An entry that
    occurs twice counts once.

    Gradients flow to q, k, v, sinks and other options, but not to the lists. ``|`` and ``~`` are refused, as
    are context parallelism and batch-invariant caches. Tensor parallelism shards ``g`` or ``h`` lists with
    the heads. The Triton backend supports gradients and caches, but neither dropout nor fp8 inputs; the torch
    and reference backends compute such calls. DeepSeek Sparse Attention selects tokens for all heads
    (DeepSeek-AI, 2025, arXiv 2512.02556), Native Sparse Attention blocks for each KV head (Yuan et al., 2025,
    arXiv 2502.11089), and MoBA blocks for each query head (Lu et al., 2025, arXiv 2502.13189).

    Raises:
        TypeError: ``indices`` is not an int32 tensor, or ``block_size`` is not an int.
        ValueError: ``indices`` has other dimensions, or ``block_size`` is below 1. With ``ATTNLIB_CHECK=1``,
            also if an entry is below -1, or occurs twice in a list.

    >>> q, k = torch.randn(1, 128, 8, 64), torch.randn(1, 128, 2, 64)
    >>> blocks = torch.randint(8, (1, 128, 2, 3), dtype=torch.int32)
    >>> attention(q, k, k, mask=CAUSAL & selected(blocks, 16)).shape
    torch.Size([1, 128, 8, 64])
    """
    if not is_strided(indices):
        refuse_tensor("indices", indices)
    if indices.dtype != torch.int32:
        raise TypeError(f"indices: expected torch.int32, got {indices.dtype}; cast it with .int()")
    if indices.dim() not in (3, 4):
        raise ValueError(f"indices: expected [b, s, c, n] or packed [t, c, n], got {tuple(indices.shape)}")
    check_count("block_size", block_size, least=1)
    if are_checks_on(indices):
        _check_entries(indices)
    return MaskFunction(FULL, EVERYWHERE, (), selection=Selection(indices, block_size))


class ShownBlocks(NamedTuple):
    """The blocks that lists show to some queries: bool ``[n, c, s, blocks]``, from block ``first`` on."""

    shown: Tensor
    first: int
    block_size: int

    @classmethod
    def of(cls, selection: Selection, start: int, stop: int) -> "ShownBlocks":
        """Expand lists ``[n, s, c, m]`` for the blocks that hold the keys ``[start, stop)``."""
        first = start // selection.block_size
        count = max(0, (stop - 1) // selection.block_size - first + 1)
        at = selection.indices.long() - first
        at = torch.where((at >= 0) & (at < count), at, count)  # one more column takes all other entries
        shown = torch.zeros(*at.shape[:-1], count + 1, dtype=torch.bool, device=at.device)
        shown = shown.scatter_(-1, at, True)[..., :count].transpose(1, 2)
        return cls(shown, first, selection.block_size)

    def keys(self, j: Tensor, heads: int) -> Tensor:
        """Return True where lists show the keys ``j`` to the query heads: ``[n, h or 1, s, t]``.

        ``j`` is ``[t]``, or ``[n, s, t]`` if every query has keys of its own.
        """
        at, lists = j // self.block_size - self.first, self.shown.shape[1]
        if at.dim() == 1:
            seen = self.shown.index_select(-1, at)
        else:
            seen = self.shown.gather(-1, at[:, None].expand(-1, lists, -1, -1))
        return seen if lists in (1, heads) else seen.repeat_interleave(heads // lists, 1)


def _check_entries(indices: Tensor) -> None:
    """Raise ValueError if an entry is below -1, or occurs twice in a list."""
    in_order = indices.sort(-1).values
    if in_order.numel() and (least := int(in_order.min())) < -1:
        raise ValueError(f"indices: expected block numbers, or -1 for no entry, got {least}")
    twice = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)
    if twice.any():
        entry = int(in_order[..., 1:][twice][0])
        raise ValueError(
            f"indices: expected each block at most once in a list, got block {entry} twice; replace the copy "
            "with -1"
        )
