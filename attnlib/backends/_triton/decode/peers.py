"""Ranks of one host write queries and results into each other's memory, by kernels of their own.

Two buffers suffice for all calls of a cache, one after the other. A rank writes queries when it has joined
the results of the call before, and others have read their last queries before they said that their results
are there. Results are written when all have said that their queries are there, and so have joined the results
of the call before.
"""

import hashlib
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ....call.spec import arch_of
from ....internal.watched import are_watched
from ..launching.config import LaunchConfig, power_of_two
from ..launching.launch import Launch, remembered

if TYPE_CHECKING:  # importing it takes longer than importing this package
    from torch.distributed import ProcessGroup

# Bytes for queries, and as many for results: of larger steps, NCCL's start counts for nothing.
HALF = 32 << 20
TIMEOUT = (
    600_000  # milliseconds that a rank waits for the others, as NCCL does by default; then its kernel fails
)
QUERIES = LaunchConfig(0, 4096, 1, 4)
VALUES = 4096  # of a program that sends or joins results
BOOT = Path("/proc/sys/kernel/random/boot_id")


class PeerBuffers(NamedTuple):
    """A buffer of this rank, of which every rank knows the ``addresses``, int64 ``[2, count]``: of queries,
    of results.

    ``handle`` is torch's; its barrier waits on the current stream until all ranks have come to it.
    """

    buffer: Tensor
    addresses: Tensor
    handle: object
    rank: int
    count: int

    def exchange(self, q: Tensor, value_dim: int, *, have_own_heads: bool) -> "PeerExchange | None":
        """What carries these queries and their results; None where they are too many, or a compiler follows
        them.
        """
        widest = max(q.shape[-1], value_dim + 4)  # beside an output is its LSE
        is_taken = self.count * q.shape[:-1].numel() * widest * q.itemsize <= self.buffer.numel() // 2
        if not is_taken or q.itemsize > 4 or q.device != self.buffer.device or are_watched(q, q, q):
            return None
        return PeerExchange(self, have_own_heads)

    def wait(self) -> None:
        """Let the current stream wait for all ranks."""
        self.handle.barrier(channel=0, timeout_ms=TIMEOUT)


class PeerExchange(NamedTuple):
    """An :class:`attnlib.cache.sharded.ranks.RankExchange` by memory that ranks write into."""

    memory: PeerBuffers
    have_own_heads: bool

    def __str__(self) -> str:
        return "by writing into each other's memory"

    def queries(self, q: Tensor, kv_heads: int) -> Tensor:
        """Return the queries of all ranks, in memory of this rank that the next call overwrites."""
        memory, (*lead, heads, d) = self.memory, q.shape
        if self.have_own_heads:
            width, lines = heads // kv_heads * d, q.shape[:-2].numel() * kv_heads
            launch = _sending_queries(q.device, memory.rank, memory.count, lines, width, q.dtype)
            launch.on({"q": q.contiguous(), "addresses": memory.addresses[0]})
            q = _part(memory.buffer, 0, (*lead, heads * memory.count, d), q.dtype)
        memory.wait()
        return q

    def merged(self, out: Tensor, lse: Tensor, kv_heads: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As :meth:`attnlib.cache.sharded.ranks.RankExchange.merged` says."""
        memory, (*lead, all_heads, e), s = self.memory, out.shape, lse.shape[-1]
        heads = all_heads // memory.count if self.have_own_heads else all_heads
        lines, dtypes = out.shape[:-2].numel() * heads, (out.dtype, dtype)
        sizes = _Sizes(
            memory.rank, memory.count, lines, heads, all_heads, heads // kv_heads, s, e, self.have_own_heads
        )
        send, join = _exchanging(out.device, sizes, dtypes)
        send.on({"out": out.contiguous(), "lse": lse.contiguous(), "addresses": memory.addresses[1]})
        memory.wait()
        half = memory.buffer.numel() // 2
        parts = _part(memory.buffer, half, (memory.count, lines, e), out.dtype)
        part_lse = _part(memory.buffer, half + sizes.bytes(out.dtype), (memory.count, lines), lse.dtype)
        merged, merged_lse = (
            out.new_empty(*lead, heads, e, dtype=dtype),
            lse.new_empty(*lse.shape[:-2], heads, s),
        )
        join.on({"part": parts, "part_lse": part_lse, "out": merged, "lse": merged_lse})
        return merged, merged_lse


class _Sizes(NamedTuple):
    """What decides how results are sent: of ``all_heads`` of a token to ``heads`` of each rank, so many to a
    group.
    """

    rank: int
    count: int
    lines: int
    heads: int
    all_heads: int
    group: int
    s: int
    e: int
    have_own_heads: bool

    def bytes(self, dtype: torch.dtype) -> int:
        """Those of all ranks' results, behind which their LSEs begin."""
        return -(-self.count * self.lines * self.e * dtype.itemsize // 16) * 16


def _part(buffer: Tensor, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in a buffer of bytes, from this byte on."""
    return buffer[first : first + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


@remembered
def _sending_queries(
    device: torch.device, rank: int, count: int, lines: int, width: int, dtype: torch.dtype
) -> Launch:
    from ..kernels.peers import send_queries

    early, programs = arch_of(device) == 90, count * lines * -(-width // QUERIES.block_n)
    arguments = {"lines": lines, "rank": rank, "RANKS": count, "WIDTH": width, "EARLY": early}
    return Launch(send_queries, programs, arguments, QUERIES, early=early)


@remembered
def _exchanging(
    device: torch.device, x: _Sizes, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Launch, Launch]:
    """The launches that send results, and that join them in another dtype."""
    from ..kernels.peers import join_results, send_results

    main, early = power_of_two(x.e), arch_of(device) == 90
    tiles = LaunchConfig(max(1, VALUES // main), 0, 1, 4)
    arguments = {
        "lse_at": x.bytes(dtypes[0]), "lines": x.lines, "rank": x.rank, "heads": x.heads,
        "all_heads": x.all_heads, "group": x.group, "s": x.s, "RANKS": x.count, "OWN": x.have_own_heads,
        "E": x.e, "E_MAIN": main, "EARLY": early,
    }  # fmt: skip
    programs = -(-x.lines // tiles.block_m)
    send = Launch(send_results, programs * x.count, arguments, tiles, early=early)
    return send, Launch(join_results, programs, arguments, tiles)


def peer_memory(group: "ProcessGroup", device: torch.device) -> PeerBuffers | None:
    """Memory of the ranks of a group, which all ask for it; None unless all their GPUs reach each other."""
    if device.type != "cuda" or group.size() == 1 or not _are_near(group, device):
        return None
    import torch.distributed._symmetric_memory as symmetric

    with torch.cuda.device(device):
        buffer = symmetric.empty(2 * HALF, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(buffer, group.group_name)
    starts = torch.tensor(handle.buffer_ptrs, dtype=torch.int64)
    addresses = torch.stack((starts, starts + HALF)).to(device)
    return PeerBuffers(buffer, addresses, handle, group.rank(), group.size())


def _are_near(group: "ProcessGroup", device: torch.device) -> bool:
    """Whether all ranks are of one host, on GPUs of their own that reach each other: every rank says the
    same.
    """
    import torch.distributed as dist

    if "nccl" not in dist.get_backend(group):
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    every = [torch.empty(2, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(every, torch.tensor([_host(), index], device=device), group=group)
    hosts, devices = torch.stack(every).T.tolist()
    is_alone = len({*devices}) < len(devices) or len({*hosts}) > 1
    reaches = partial(torch.cuda.can_device_access_peer, index)
    is_near = not is_alone and all(other == index or reaches(other) for other in devices)
    agreed = torch.tensor(int(is_near), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    return bool(agreed)


def _host() -> int:
    """A number that ranks of this host have, and of no other."""
    boot = BOOT.read_text() if BOOT.exists() else ""
    return int.from_bytes(hashlib.blake2b(f"{socket.gethostname()} {boot}".encode(), digest_size=7).digest())
