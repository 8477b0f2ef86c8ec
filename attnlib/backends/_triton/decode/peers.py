"""Direct exchange between the GPUs of one host: ranks write queries and results into each other's memory.

All calls over a cache share two buffers, one for queries and one for results. Each call has two barriers: one
after the ranks write queries, and one after they write results. No other locks are needed:

- A rank writes queries only after it has merged the results of the previous call. The other ranks have then
  passed the previous barrier for results, so they no longer read the previous queries.
- A rank writes results only after the barrier for queries. Every rank has then merged the results of the
  previous call, so nobody reads the old results.
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
from ..launching.launch import Launch, cached_plan

if TYPE_CHECKING:  # importing it takes longer than importing this package
    from torch.distributed import ProcessGroup

# Size of the buffer for queries, and of the buffer for results, in bytes. Larger exchanges use NCCL, whose
# start-up time hardly matters for them.
HALF = 32 << 20
# Milliseconds that a rank waits for other ranks before its kernel fails, the same as NCCL's default.
TIMEOUT = 600_000
QUERIES = LaunchConfig(0, 4096, 1, 4)
VALUES = 4096  # each program of a kernel sends or merges about this many values
BOOT = Path("/proc/sys/kernel/random/boot_id")


class PeerBuffers(NamedTuple):
    """The exchange buffer of this process (``rank``), and the addresses of all ranks' buffers.

    ``addresses`` is int64 ``[2, count]``: the first row is for queries, the second for results. ``handle`` is
    torch's handle of the symmetric memory. Its barrier makes the current stream wait for all ranks.
    """

    buffer: Tensor
    addresses: Tensor
    handle: object
    rank: int
    count: int

    def exchange(self, q: Tensor, value_dim: int, *, have_own_heads: bool) -> "PeerExchange | None":
        """Return an exchange for the queries ``q`` and their results, or None if NCCL must be used.

        This is so if the tensors do not fit in a buffer, have more than 4 bytes per value or are on another
        device, or if a compiler or profiler observes the call.
        """
        widest = max(q.shape[-1], value_dim + 4)  # an output is sent with its LSE of 4 bytes
        is_taken = self.count * q.shape[:-1].numel() * widest * q.itemsize <= self.buffer.numel() // 2
        if not is_taken or q.itemsize > 4 or q.device != self.buffer.device or are_watched(q, q, q):
            return None
        return PeerExchange(self, have_own_heads)

    def wait(self) -> None:
        """Make the current stream wait until all ranks reach this barrier."""
        self.handle.barrier(channel=0, timeout_ms=TIMEOUT)


class PeerExchange(NamedTuple):
    """An :class:`attnlib.cache.sharded.ranks.RankExchange` in which ranks write into each other's memory."""

    memory: PeerBuffers
    have_own_heads: bool

    def __str__(self) -> str:
        return "by writing into each other's memory"

    def queries(self, q: Tensor, kv_heads: int) -> Tensor:
        """Send queries to all ranks; return those of all ranks in a buffer that the next call overwrites."""
        memory, (*lead, heads, d) = self.memory, q.shape
        if self.have_own_heads:
            width, lines = heads // kv_heads * d, q.shape[:-2].numel() * kv_heads
            launch = _sending_queries(q.device, memory.rank, memory.count, lines, width, q.dtype)
            launch.on({"q": q.contiguous(), "addresses": memory.addresses[0]})
            q = _part(memory.buffer, 0, (*lead, heads * memory.count, d), q.dtype)
        memory.wait()
        return q

    def merged(self, out: Tensor, lse: Tensor, kv_heads: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Merge every rank's results; see :meth:`attnlib.cache.sharded.ranks.RankExchange.merged`."""
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
    """The sizes that determine how ranks exchange results.

    Attributes:
        rank, count: the number of this rank, and the number of all ranks.
        lines: the results that each rank receives from every rank, one per token and head.
        heads: the query heads whose results a rank receives.
        all_heads: the query heads of all ranks together.
        group: the query heads of one rank that share a KV head.
        s, e: the queries per sequence (if packed, of all sequences), and the channels of an output.
        have_own_heads: True if the query heads are sharded over the ranks.
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
        """Return the bytes of all ranks' results, rounded up to 16; the LSEs begin behind them."""
        return -(-self.count * self.lines * self.e * dtype.itemsize // 16) * 16


def _part(buffer: Tensor, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor that is a view into a byte buffer from byte ``first`` on."""
    return buffer[first : first + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


@cached_plan
def _sending_queries(
    device: torch.device, rank: int, count: int, lines: int, width: int, dtype: torch.dtype
) -> Launch:
    from ..kernels.peers import send_queries

    early, programs = arch_of(device) == 90, count * lines * -(-width // QUERIES.block_n)
    arguments = {"lines": lines, "rank": rank, "RANKS": count, "WIDTH": width, "EARLY": early}
    return Launch(send_queries, programs, arguments, QUERIES, early=early)


@cached_plan
def _exchanging(
    device: torch.device, x: _Sizes, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Launch, Launch]:
    """Return two launches: one sends results to all ranks, the other merges those received."""
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
    """Return exchange buffers for a group; None unless all its GPUs can write into each other's memory.

    All ranks of the group must call this function together.
    """
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
    """True if all ranks run on one host, each on its own GPU, and these GPUs can access each other.

    All ranks of the group must call this function together, and all get the same answer.
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
    """Return a number that identifies this host: a hash of its name and boot id."""
    boot = BOOT.read_text() if BOOT.exists() else ""
    return int.from_bytes(hashlib.blake2b(f"{socket.gethostname()} {boot}".encode(), digest_size=7).digest())
