"""Cache operations on the device: write tokens, copy pages, and schedule the sequences of a step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..call.cache import Key, Write
from ..fp8 import E4M3
from ..internal.checks import are_checks_on, check_slots
from ..kv import KVLayout, KVView
from ..rope.rope import Angles
from .select import CALL_CACHE, storing

if TYPE_CHECKING:  # importing torch.distributed takes longer than importing attnlib
    from torch.distributed import ProcessGroup


def write_cache(
    kv: KVView,
    k: Tensor,
    v: Tensor | None,
    slots: Tensor,
    *,
    angles: Angles | None = None,
    index: Tensor | None = None,
    key: Key | None = None,
) -> None:
    """Write the keys and values of tokens to a cache in place; ``angles`` rotate the keys first.

    ``slots`` int64 has ``page * page_size + offset`` for each token; a token with -1 is skipped. Grouped
    storage takes k ``[b, s, g, d]`` or packed ``[t, g, d]``, and v ``[..., g, e]``. Latent storage takes the
    latent ``[..., r]`` as k, and the rotary key ``[..., p]`` or None as v, which ``angles`` then rotate.
    ``index`` has the index keys ``[..., index_heads, index_dim]`` if the layout stores them; a second launch
    writes them. Values are quantized if the layout stores int8 or fp8. If ``key`` is given,
    :func:`cached_write` later returns a faster function that repeats the write. The key must identify
    everything that affects the write except the slots.

    Raises:
        ValueError: with ``ATTNLIB_CHECK=1``, a slot is outside the cache, or two tokens share a slot.
    """
    checks = are_checks_on(slots)
    if checks:
        check_slots(slots, kv.k.shape[0] * kv.page_size)
    backend = storing(kv.layout.dtype, kv.k.device)
    write = backend.write_cache(kv, k, v, slots, angles)
    if index is not None:
        write = _with_index(write, backend.write_index(kv, index, slots))
    if key is not None and not checks:
        CALL_CACHE.add(
            kv, ("write", id(slots), key), write
        )  # the cached write keeps the slots alive, so their id stays valid


def write_index(kv: KVView, index: Tensor, slots: Tensor) -> None:
    """Write only the index keys ``[..., index_heads, index_dim]`` of tokens to a cache in place."""
    storing(kv.layout.dtype, kv.k.device).write_index(kv, index, slots)


def cached_write(kv: KVView, slots: Tensor, key: Key) -> Write | None:
    """Return the cached write for this key and these slots of a view, or None if there is none."""
    return CALL_CACHE.find(kv, ("write", id(slots), key))


def _with_index(write: Write | None, write_index: Write | None) -> Write | None:
    """Return a cached write of keys, values and index keys, or None if one of the two cannot be cached."""
    if write is None or write_index is None:
        return None

    def write_all(k: Tensor, v: Tensor | None, angles: Angles | None, index: Tensor) -> None:
        write(k, v, angles)
        write_index(index, None, None)

    return write_all


def new_schedule(
    layout: KVLayout, sequences: int, device: torch.device, *, limit: int = 0, split_size: int = 0
) -> Tensor | None:
    """Return a buffer for the split schedule of views with up to ``sequences`` sequences.

    Return None if the device uses no schedules. With a ``split_size``, sequences have at most ``limit``
    tokens.
    """
    options = {"limit": limit, "split_size": split_size}
    return storing(layout.dtype, device).new_schedule(layout.heads, sequences, device, **options)


def update_schedule(
    schedule: Tensor, starts: Tensor, lengths: Tensor, *, limit: int, reach: int | None, split_size: int = 0
) -> None:
    """Divide sequences of at most ``limit`` tokens into splits, on the device and in place.

    If a window hides older tokens, only the last ``reach`` tokens count. ``split_size`` fixes the size of
    every split.
    """
    options = {"limit": limit, "reach": reach, "split_size": split_size}
    storing(torch.float32, schedule.device).update_schedule(schedule, starts, lengths, **options)


def peer_memory(group: "ProcessGroup", device: torch.device) -> object | None:
    """Return memory that all ranks of a group can write into, or None if their devices do not allow it.

    Every rank of the group must call this function.
    """
    return storing(torch.float32, device).peer_memory(group, device)


def copy_pages(kv: KVView, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy pages ``(from, to)`` within a cache. No page may be both the source and the target of a copy."""
    source, target = torch.tensor(pairs, dtype=torch.int64, device=kv.k.device).unbind(1)
    for name in kv.layout.planes:
        plane = getattr(kv, name)
        plane[target] = plane[source]


class StoredKeys(NamedTuple):
    """The visible keys of a view's sequences, one sequence after another.

    Attributes:
        k: keys ``[t, g, d]`` in the layout's dtype; over latents, ``[latent | rope]`` with ``g = 1``.
        sequence, position: int64 ``[t]``, the sequence and the storage index of each key.
        starts: int32 ``[b]``, the storage index of each sequence's first visible key.
        offsets: int32 ``[b + 1]``, the rows at which sequences start.
        longest: the largest length of a sequence, with the keys before its start.
    """

    k: Tensor
    sequence: Tensor
    position: Tensor
    starts: Tensor
    offsets: Tensor
    longest: int


def stored_keys(kv: KVView) -> StoredKeys:
    """Gather the visible keys of a view, and dequantise them; waits for the device to read their number."""
    starts, device = torch.minimum(kv.starts.clamp(min=0), kv.lengths), kv.k.device
    counts = kv.lengths - starts
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    # One copy reads both numbers. The added 0 is the longest length without sequences.
    total, longest = torch.stack((offsets[-1], torch.cat((kv.lengths, offsets[:1])).max())).tolist()
    sequence = torch.repeat_interleave(counts.long(), output_size=total)
    position = torch.arange(total, device=device) + (starts - offsets[:-1])[sequence]
    page, slot = kv.table[sequence, position // kv.page_size].long(), position % kv.page_size

    def take(x: Tensor) -> Tensor:
        if x.dtype == E4M3:  # torch 2.11 cannot index fp8 on a CPU
            return take(x.view(torch.uint8)).view(E4M3)
        return x[page, slot]

    def read(plane: Tensor, scale: Tensor | None) -> Tensor:
        return (
            take(plane)
            if scale is None
            else (take(plane).float() * take(scale)[..., None]).to(kv.layout.dtype)
        )

    k = read(kv.k, kv.k_scale)
    k = k if kv.k_rope is None else torch.cat((k, read(kv.k_rope, None)), -1)
    return StoredKeys(k, sequence, position, starts, offsets, longest)
