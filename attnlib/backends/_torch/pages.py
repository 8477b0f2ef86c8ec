"""Keys and values where they are stored: reading them for attention, and writing to a cache's pages."""

from typing import NamedTuple

import torch
from torch import Tensor

KEYS = 512  # of a tile, at most
OF_ZEROS = (
    2.0**-40
)  # the scale of nothing but zeros, less than others, so that it never is the largest that counts
Index = tuple[slice | None, ...]


class Keys(NamedTuple):
    """The keys ``[start, stop)`` of a batch, and their values, where they are stored; no others are read.

    Planes and scales are ``[pages, page_size, g, *]``, as in a KVView; keys in tensors have a page for each
    sequence. ``pages`` are those of a sequence, from the one of ``start`` on. Where it is one alone, the
    other sequences of the batch are on the pages after it. What is scaled is read in ``dtype``. Keys in
    tensors are at ``index`` in the call's k and v.
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
        """Reads cross no multiple of this: as many small pages as a tile has room for, or one large page."""
        size = self.k.shape[1]
        return KEYS // size * size if 0 < size <= KEYS else size

    @property
    def at_once(self) -> bool:
        """Whether one read gives all keys: they are there in one piece, or few enough for a tile."""
        if len(self.pages) == 1:
            return self.k_tail is self.k_scale is None or self.stop - self.start <= KEYS
        return self.start // self.span == (self.stop - 1) // self.span

    def read(self, sequences: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K ``[n, g, t, d]``, with its tail, and V of tokens ``[start, stop)``; on one page these are
        views.
        """
        n, t, (count, size, *_) = sequences.stop - sequences.start, stop - start, self.k.shape
        if n == count and t == size and self.k_tail is self.k_scale is None:
            # All of two tensors, 3 us sooner.
            return self.k.transpose(1, 2), self.v.transpose(1, 2)
        skipped = start // size - self.start // size
        pages = self.pages[skipped : skipped + (start % size + t - 1) // size + 1]
        gathered = None if len(pages) == 1 else torch.tensor(pages, device=self.k.device)
        tokens, row = slice(start % size, start % size + t), pages[0] + sequences.start

        def found(x: Tensor) -> Tensor:
            if gathered is not None:  # five times as fast as x[gathered]
                return _bytes(x).index_select(0, gathered).view(x.dtype).flatten(0, 1)[None, tokens]
            return x[row : row + n, tokens]

        def plane(x: Tensor, scale: Tensor | None) -> Tensor:
            return found(x) if scale is None else (found(x).float() * found(scale)[..., None]).to(self.dtype)

        k = plane(self.k, self.k_scale)
        v = k if self.v is self.k else plane(self.v, self.v_scale)
        k = k if self.k_tail is None else torch.cat((k, found(self.k_tail)), -1)
        return k.transpose(1, 2), v.transpose(1, 2)


def quantise(x: Tensor, store: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` ``[..., g, d]`` in one byte a value, and its fp32 scale ``[..., g]`` per token and head."""
    x = x.float()
    limit = 127.0 if store == torch.int8 else torch.finfo(store).max
    scale = x.abs().amax(-1) / limit
    scale = torch.where(scale == 0, OF_ZEROS, scale)
    scaled = x / scale[..., None]
    return (scaled.round() if store == torch.int8 else scaled).to(store), scale


def store(plane: Tensor, new: Tensor, slots: Tensor, kept: Tensor | None) -> None:
    """Write one token a slot into ``plane`` ``[pages, page_size, ...]``; ``kept`` marks slots that are not
    skipped.
    """
    new = new.reshape(slots.shape[0], *plane.shape[2:])
    if kept is not None:
        new, slots = new[kept], slots[kept]
    plane, new = _bytes(plane), _bytes(new)
    if plane.is_contiguous():
        plane.view(-1, *plane.shape[2:]).index_copy_(0, slots, new)
    else:
        plane[slots // plane.shape[1], slots % plane.shape[1]] = new


def _bytes(x: Tensor) -> Tensor:
    """fp8 as bytes: torch 2.11 cannot index it on a CPU."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
