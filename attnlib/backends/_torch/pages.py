"""Writing to and attending over a paged cache in plain torch; a contiguous one has a page for each sequence."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...call import Dropout
from ..operators import CachedArguments
from .batches import Batch, Keys, batch_of, neighbours, origins
from .tiles import KEYS

OF_ZEROS = 2.0**-40  # the scale of nothing but zeros, less than others, so that it never is the largest that counts


def quantise(x: Tensor, store: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` ``[..., g, d]`` in one byte a value, and its fp32 scale ``[..., g]`` per token and head."""
    x = x.float()
    limit = 127.0 if store == torch.int8 else torch.finfo(store).max
    scale = x.abs().amax(-1) / limit
    scale = torch.where(scale == 0, OF_ZEROS, scale)
    scaled = x / scale[..., None]
    return (scaled.round() if store == torch.int8 else scaled).to(store), scale


def store(plane: Tensor, new: Tensor, slots: Tensor, kept: Tensor | None) -> None:
    """Write one token a slot into ``plane`` ``[pages, page_size, ...]``; ``kept`` marks slots that are not skipped."""
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


class Stored(NamedTuple):
    """The planes of a cache, and the dtype to read them in."""

    k: Tensor
    v: Tensor
    k_tail: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    dtype: torch.dtype

    @property
    def is_readable(self) -> bool:
        """Whether K and V are there as they are stored, and need not be made."""
        return self.k_tail is self.k_scale is None

    def read(self, pages: list[int], first: int, sequences: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K, with its tail, and V of tokens ``[start, stop)``; ``pages`` begin with page ``first`` of a sequence.

        On one page these are views, and neighbouring sequences are neighbouring pages.
        """
        size = self.k.shape[1]
        pages = pages[start // size - first : (stop - 1) // size - first + 1]
        tokens, row = slice(start % size, start % size + stop - start), pages[0]
        gathered = None if len(pages) == 1 else torch.tensor(pages, device=self.k.device)

        def plane(x: Tensor, scale: Tensor | None = None) -> Tensor:
            if gathered is None:
                found = x[row + sequences.start : row + sequences.stop, tokens]
            else:  # five times as fast as x[gathered]
                found = _bytes(x).index_select(0, gathered).view(x.dtype).flatten(0, 1)[None, tokens]
            return found if scale is None else (found.float() * plane(scale)[..., None]).to(self.dtype)

        k = plane(self.k, self.k_scale)
        v = k if self.v is self.k else plane(self.v, self.v_scale)
        return (k if self.k_tail is None else torch.cat((k, plane(self.k_tail)), -1)), v


def batches(a: CachedArguments) -> Iterator[Batch]:
    """The batches of a step: one a sequence, or neighbours of equal bounds in neighbouring rows of a contiguous cache.

    Raises:
        ValueError: a length beyond the table, or a page outside the cache.
    """
    stored = Stored(a.k, a.value_plane, a.k_tail, a.k_scale, a.k_scale if a.v is None else a.v_scale, a.q.dtype)
    (size, heads), columns = a.k.shape[1:3], a.table.shape[1]
    starts, lengths = [max(0, start) for start in a.starts.tolist()], a.lengths.tolist()
    longest = max(lengths, default=0)
    if longest > columns * size:
        raise ValueError(f"lengths: expected at most {columns * size} tokens like the table, got {longest}")
    table = a.table[:, : -(-longest // size)].tolist()
    offsets = None if a.cu_seqlens_q is None else a.cu_seqlens_q.tolist()
    # Neighbours in a contiguous cache, which has one column, lie in one piece: their rows are as far apart as they are.
    together = columns == 1 and offsets is None and longest > 0
    distances = [row - n for n, (row,) in enumerate(table)] if together else range(len(lengths))
    each = list(zip(distances, starts, lengths, origins(a.origin, len(lengths)), strict=True))
    for n, m in neighbours(each):
        _, start, stop, origin = each[n]
        pages = table[n][start // size : -(-stop // size)]
        if start < stop and (min(pages) < 0 or max(pages) + m - n > a.k.shape[0]):
            found = f"{min(pages)} to {max(pages) + m - n - 1} in sequence {n}"
            raise ValueError(f"table: expected pages in [0, {a.k.shape[0]}), got {found}")
        # Small pages are gathered as many as a tile has room for; a large one is read in place.
        span = KEYS // size * size if size <= KEYS else size
        at_once = start // span == (stop - 1) // span and (stored.is_readable or stop - start <= KEYS)
        read = partial(stored.read, pages, start // size)
        keys = Keys(read, start, stop, heads, stored.v.shape[-1], span, at_once)
        index = () if m - n == len(lengths) else (slice(n, m),)
        if offsets is not None:
            index = (None, slice(offsets[n], offsets[n + 1]))
        yield batch_of(a, index, keys, n, stop, origin, Dropout())
