"""Read stored keys and values for attention, and write new ones to the pages of a cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...fp8 import E4M3, OF_ZEROS

KEYS = 512  # a tile has at most this many keys
Index = tuple[slice | None, ...]


class Keys(NamedTuple):
    """The keys and values ``[start, stop)`` of a batch, in the tensors that store them.

    Attributes:
        k, v, k_rope, k_scale, v_scale: the stored keys and values with their scales, as in a KVView:
            ``[pages, page_size, g, *]``. If they are not in a cache, each sequence counts as one page.
        dtype: the dtype to which stored values are converted after scaling.
        pages: the pages of the first sequence, beginning with the page of ``start``. If it has one page, the
            other sequences of the batch are on the next pages.
        index: the position of the keys in k and v of the call, if they are not in a cache.
    """

    k: Tensor
    v: Tensor
    k_rope: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    dtype: torch.dtype
    pages: list[int]
    start: int
    stop: int
    index: Index = ()

    @property
    def span(self) -> int:
        """The size in tokens of the sections of a sequence; no read may cross their borders.

        It is the size of a large page, or of as many small pages as fit in a tile.
        """
        size = self.k.shape[1]
        return KEYS // size * size if 0 < size <= KEYS else size

    @property
    def at_once(self) -> bool:
        """True if a single read returns all keys: they are contiguous in memory, or few enough for a tile."""
        if len(self.pages) == 1:
            return self.k_rope is self.k_scale is None or self.stop - self.start <= KEYS
        return self.start // self.span == (self.stop - 1) // self.span

    def read(self, sequences: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return K ``[n, g, t, d]``, including its rotary tail, and V for the tokens ``[start, stop)``.

        Both are views, not copies, if the tokens are on one page and need neither scaling nor a tail.
        """
        n, t, (count, size, *_) = sequences.stop - sequences.start, stop - start, self.k.shape
        if n == count and t == size and self.k_rope is self.k_scale is None:
            # To read whole tensors without indexing them saves 3 us.
            return self.k.transpose(1, 2), self.v.transpose(1, 2)
        skipped = start // size - self.start // size
        pages = self.pages[skipped : skipped + (start % size + t - 1) // size + 1]
        gathered = None if len(pages) == 1 else torch.tensor(pages, device=self.k.device)
        tokens, row = slice(start % size, start % size + t), pages[0] + sequences.start

        def take(x: Tensor) -> Tensor:
            if gathered is not None:  # index_select is five times as fast as x[gathered]
                return _bytes(x).index_select(0, gathered).view(x.dtype).flatten(0, 1)[None, tokens]
            return x[row : row + n, tokens]

        def plane(x: Tensor, scale: Tensor | None) -> Tensor:
            return take(x) if scale is None else (take(x).float() * take(scale)[..., None]).to(self.dtype)

        k = plane(self.k, self.k_scale)
        v = k if self.v is self.k else plane(self.v, self.v_scale)
        k = k if self.k_rope is None else torch.cat((k, take(self.k_rope)), -1)
        return k.transpose(1, 2), v.transpose(1, 2)


def quantise(x: Tensor, store: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` ``[..., g, d]`` to int8 or fp8; return it with its fp32 scales ``[..., g]``.

    Each token and head has its own scale.
    """
    x = x.float()
    limit = 127.0 if store == torch.int8 else torch.finfo(store).max
    scale = x.abs().amax(-1) / limit
    # A zero vector gets a scale below all others, so it never determines a maximum of several scales.
    scale = torch.where(scale == 0, OF_ZEROS, scale)
    scaled = x / scale[..., None]
    return (scaled.round() if store == torch.int8 else scaled).to(store), scale


def store(plane: Tensor, new: Tensor, slots: Tensor, valid: Tensor | None) -> None:
    """Write one new token into each slot of ``plane``, a cache tensor ``[pages, page_size, ...]``.

    ``valid`` is True for the slots to write; None means all.
    """
    new = new.reshape(slots.shape[0], *plane.shape[2:])
    if valid is not None:
        new, slots = new[valid], slots[valid]
    plane, new = _bytes(plane), _bytes(new)
    if plane.is_contiguous():
        plane.view(-1, *plane.shape[2:]).index_copy_(0, slots, new)
    else:
        plane[slots // plane.shape[1], slots % plane.shape[1]] = new


def _bytes(x: Tensor) -> Tensor:
    """View fp8 as bytes, since torch 2.11 cannot index fp8 on a CPU; return other dtypes unchanged."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x
