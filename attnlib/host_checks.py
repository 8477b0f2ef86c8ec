"""With ``ATTNLIB_CHECK=1``: numbers on the device, which kernels take as they are and contain, read on the host."""

import os

import torch
from torch import Tensor

from .kv import KVView


def is_asked_for(x: Tensor) -> bool:
    """Whether ``ATTNLIB_CHECK=1`` is set, and ``x`` can be read: it is no compiler's, and no CUDA graph is captured."""
    if os.environ.get("ATTNLIB_CHECK") != "1" or torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing()) and not x.is_meta


def check_slots(slots: Tensor, capacity: int) -> None:
    """Raise ValueError unless each slot is -1, or is one of ``capacity`` and comes once."""
    written = [slot for slot in slots.flatten().tolist() if slot != -1]
    for slot in written:
        if not 0 <= slot < capacity:
            raise ValueError(f"slots: expected -1 or less than {capacity}, the tokens of the cache, got {slot}")
    if len(set(written)) < len(written):
        raise ValueError("slots: expected each slot once, got one of them twice")


def check_view(kv: KVView, queries: int) -> None:
    """Raise ValueError unless lengths and starts fit the table, the pages of visible tokens the planes, and the offsets
    the ``queries`` of a packed call."""
    size, pages, capacity = kv.page_size, kv.k.shape[0], kv.table.shape[1] * kv.page_size
    table = kv.table.tolist()
    for row, (start, length) in enumerate(zip(kv.starts.tolist(), kv.lengths.tolist(), strict=True)):
        if not 0 <= length <= capacity:
            raise ValueError(f"lengths[{row}]: expected 0 to {capacity}, for which the table has room, got {length}")
        if start < 0:
            raise ValueError(f"starts[{row}]: expected 0 or more, got {start}")
        for index in range(start // size, -(-length // size)):
            if not 0 <= table[row][index] < pages:
                page = table[row][index]
                raise ValueError(f"table[{row}, {index}]: expected one of {pages} pages, got {page}")
    if kv.cu_seqlens_q is not None:
        offsets = kv.cu_seqlens_q.tolist()
        if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > queries:
            raise ValueError(f"cu_seqlens_q: expected offsets from 0 that grow to {queries} at most, got {offsets}")
