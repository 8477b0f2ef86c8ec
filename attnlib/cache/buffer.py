"""What every step tells the device: numbers that the host sends, and schedules that the device makes of them."""

from array import array

import torch
from torch import Tensor

from ..kv import KVLayout
from ..storage import new_schedule, update_schedule

MAX_PINNED = 1 << 14  # numbers of each kind that are sent without waiting
MAX_SPLITS = 16  # of the longest sequence, at most
MIN_SPLIT_SIZE = 1024  # tokens of a split_size


class Sending:
    """``with sending:`` around all copies of an update: to a GPU they are not waited for until the next update.

    Raises:
        RuntimeError: while a CUDA graph is captured, since every replay would send the same again.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def __enter__(self):
        if self._sent is not None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("step: it cannot be entered while a CUDA graph is captured; capture what is in it")
            self._sent.synchronize()

    def __exit__(self, *error):
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))


class Buffer:
    """Integers that the host writes and the device reads, at one address for life. On a CPU they are the same memory.

    To a GPU they go from pinned memory, which only the next update overwrites; many go from pageable memory, and wait.
    """

    def __init__(self, typecode: str, size: int, device: torch.device):
        self._host = array(typecode, bytes(array(typecode).itemsize * size))
        self._source = torch.frombuffer(self._host, dtype={"i": torch.int32, "q": torch.int64}[typecode])
        self.tensor = self._source if device.type == "cpu" else self._source.to(device)
        self._pinned = torch.empty_like(self._source[:MAX_PINNED], pin_memory=True) if device.type == "cuda" else None

    def show(self, values: array) -> Tensor:
        """Put ``values`` at the front, and return that."""
        n = len(values)
        self._host[:n] = values
        shown = self.tensor[:n]
        if self.tensor is not self._source and n:
            source, pinned = self._source[:n], self._pinned is not None and n <= MAX_PINNED
            if pinned:
                source = self._pinned[:n].copy_(source)
            shown.copy_(source, non_blocking=pinned)
        return shown


def split_size_of(capacity: int) -> int:
    """Tokens of the splits that batch-invariant attention adds up, of sequences of at most ``capacity`` tokens."""
    return max(MIN_SPLIT_SIZE, (1 << (capacity - 1).bit_length()) // MAX_SPLITS)


class Schedules:
    """The schedules of up to ``rows`` sequences of at most ``limit`` tokens, by KV heads, where their device has a use
    for any; by splits of a ``split_size``, if that is not 0."""

    def __init__(self, rows: int, limit: int, split_size: int, device: torch.device):
        self._rows, self._limit, self._split_size, self._device = rows, limit, split_size, device
        self._of: dict[int, Tensor] = {}

    def add(self, layout: KVLayout) -> None:
        """Keep one for this layout too."""
        if layout.heads not in self._of:
            made = new_schedule(layout, self._rows, self._device, limit=self._limit, split_size=self._split_size)
            if made is not None:
                self._of[layout.heads] = made

    def get(self, heads: int) -> Tensor | None:
        """The schedule of layers of so many KV heads."""
        return self._of.get(heads)

    def update(self, starts: Tensor, lengths: Tensor, *, reach: int | None = None) -> None:
        """Share out sequences of these starts and lengths, of which the last ``reach`` count."""
        for schedule in self._of.values() if len(lengths) else ():
            options = {"limit": self._limit, "reach": reach, "split_size": self._split_size}
            update_schedule(schedule, starts, lengths, **options)
