"""Keys and values in storage: read them for attention, and write them to the pages of a cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...fp8 import E4M3, OF_ZEROS

KEYS = 512  # keys per tile, at most
Index = tuple[slice | None, ...]


class Keys(NamedTuple):
    """The keys ``[start, stop)`` of a batch and their values, where they are stored; no others are read.

    Attributes:
        k, v, k_tail, k_scale, v_scale: planes and scales ``[pages, page_size, g, *]``, as in a KVView. Plain
            tensors have a page for each sequence.
        dtype: the dtype in which scaled values are read.
        pages: the pages of a sequence, from the page of ``start`` on. If there is only one, the other
            sequences of the batch are on the pages after it.
        index: the position of the keys in the call's k and v, if those are plain tensors.
    """

    k: Tensor
    v: Tensor
    k_tail: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    dtype: torch.dtype
    pages: list[int]
    start: int
    stop: int
    index: Index = ()

    @property
    def span(self) -> int:
        """The granularity of reads, none of which crosses a multiple of it.

        It is one large page, or as many small pages as fit in a tile.
        """
        size = self.k.shape[1]
        return KEYS // size * size if 0 < size <= KEYS else size

    @property
    def at_once(self) -> bool:
        """True if one read returns all keys: they are contiguous in storage, or few enough for a tile."""
        if len(self.pages) == 1:
            return self.k_tail is self.k_scale is None or self.stop - self.start <= KEYS
        return self.start // self.span == (self.stop - 1) // self.span

    def read(self, sequences: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return K ``[n, g, t, d]``, including its tail, and V for the tokens ``[start, stop)``.

        Both are views if they are on one page and need neither a scale nor a tail.
        """
        n, t, (count, size, *_) = sequences.stop - sequences.start, stop - start, self.k.shape
        if n == count and t == size and self.k_tail is self.k_scale is None:
            # Fast path for two whole tensors: 3 us less.
            return self.k.transpose(1, 2), self.v.transpose(1, 2)
        skipped = start // size - self.start // size
        pages = self.pages[skipped : skipped + (start % size + t - 1) // size + 1]
        gathered = None if len(pages) == 1 else torch.tensor(pages, device=self.k.device)
        tokens, row = slice(start % size, start % size + t), pages[0] + sequences.start

        def take(x: Tensor) -> Tensor:
            if gathered is not None:  # five times as fast as x[gathered]
                return _bytes(x).index_select(0, gathered).view(x.dtype).flatten(0, 1)[None, tokens]
            return x[row : row + n, tokens]

        def plane(x: Tensor, scale: Tensor | None) -> Tensor:
            return take(x) if scale is None else (take(x).float() * take(scale)[..., None]).to(self.dtype)

        k = plane(self.k, self.k_scale)
        v = k if self.v is self.k else plane(self.v, self.v_scale)
        k = k if self.k_tail is None else torch.cat((k, take(self.k_tail)), -1)
        return k.transpose(1, 2), v.transpose(1, 2)


def quantise(x: Tensor, store: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` ``[..., g, d]`` to int8 or fp8; return it with its fp32 scales ``[..., g]``.

    Each token and head has its own scale.
    """
    x = x.float()
    limit = 127.0 if store == torch.int8 else torch.finfo(store).max
    scale = x.abs().amax(-1) / limit
    # The scale of a zero vector is below all others, so it is never the largest if another one counts.
    scale = torch.where(scale == 0, OF_ZEROS, scale)
    scaled = x / scale[..., None]
    return (scaled.round() if store == torch.int8 else scaled).to(store), scale


def store(plane: Tensor, new: Tensor, slots: Tensor, valid: Tensor | None) -> None:
    """Write one token per slot into ``plane`` ``[pages, page_size, ...]``.

    ``valid`` marks the slots to write; None means all.
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
    """Return fp8 values as bytes, since torch 2.11 cannot index fp8 on a CPU; other dtypes as they are."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x
