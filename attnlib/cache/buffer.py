"""Device buffers that the host updates at every step, and split schedules that the device computes."""

from array import array

import torch
from torch import Tensor

from ..dispatch.storage import new_schedule, update_schedule
from ..kv import KVLayout

MAX_PINNED = 1 << 14  # integers; more are copied from pageable memory, and the host waits
MAX_SPLITS = 16  # the longest sequence is divided into at most this many splits
MIN_SPLIT_SIZE = 1024  # in tokens


class Sending:
    """A context for the copies of one update; entering it waits until a GPU has finished the previous ones.

    Raises:
        RuntimeError: a CUDA graph is being captured; every replay would send the same numbers again.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def __enter__(self) -> None:
        if self._sent is not None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "step: it cannot be entered while a CUDA graph is captured; capture what is in it"
                )
            self._sent.synchronize()

    def __exit__(self, *error: object) -> None:
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))


class Buffer:
    """A buffer of integers that the host writes and the device reads, at a fixed address.

    On a CPU, host and device share the memory. Up to ``MAX_PINNED`` integers reach a GPU through pinned
    memory without waiting; more are copied from pageable memory, which waits.
    """

    def __init__(self, typecode: str, size: int, device: torch.device):
        self._host = array(typecode, bytes(array(typecode).itemsize * size))
        self._source = torch.frombuffer(self._host, dtype={"i": torch.int32, "q": torch.int64}[typecode])
        self.tensor: Tensor = self._source if device.type == "cpu" else self._source.to(device)
        self._pinned = (
            torch.empty_like(self._source[:MAX_PINNED], pin_memory=True) if device.type == "cuda" else None
        )

    def show(self, values: "array[int]") -> Tensor:
        """Write ``values`` to the front of the buffer, and return that slice on the device."""
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
    """Return the fixed split size of batch-invariant attention for sequences of up to ``capacity`` tokens."""
    return max(MIN_SPLIT_SIZE, (1 << (capacity - 1).bit_length()) // MAX_SPLITS)


class Schedules:
    """The split schedules of up to ``rows`` sequences of at most ``limit`` tokens, one per KV-head count.

    A CPU needs no schedules. A ``split_size`` above 0 fixes the size of every split.
    """

    def __init__(self, rows: int, limit: int, split_size: int, device: torch.device):
        self._rows, self._limit, self._split_size, self._device = rows, limit, split_size, device
        self._of: dict[int, Tensor] = {}

    def add(self, layout: KVLayout) -> None:
        """Add a split schedule for layers of this layout, unless there is one for their KV-head count."""
        if layout.heads not in self._of:
            made = new_schedule(
                layout, self._rows, self._device, limit=self._limit, split_size=self._split_size
            )
            if made is not None:
                self._of[layout.heads] = made

    def get(self, heads: int) -> Tensor | None:
        """Return the schedule for layers of this KV-head count, or None."""
        return self._of.get(heads)

    def update(self, starts: Tensor, lengths: Tensor, *, reach: int | None = None) -> None:
        """Divide sequences into splits; ``reach`` limits this to the last ``reach`` tokens of each."""
        for schedule in self._of.values() if len(lengths) else ():
            options = {"limit": self._limit, "reach": reach, "split_size": self._split_size}
            update_schedule(schedule, starts, lengths, **options)
