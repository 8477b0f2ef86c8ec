"""The ranks that share the keys of a cache: what they send each other of queries and of attention to
parts.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:  # importing it takes longer than importing this package
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class RankExchange(Protocol):
    """How the ranks of a call send each other queries, and what they found of them."""

    def queries(self, q: Tensor, kv_heads: int) -> Tensor:
        """The queries ``[..., h, d]`` of all ranks, by KV heads, and of each KV head by ranks."""
        ...

    def merged(self, out: Tensor, lse: Tensor, kv_heads: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The attention of this rank's queries to the keys of all ranks, from that of :meth:`queries` to its
        own keys.

        ``out`` is ``[b, s, h, e]`` with ``lse`` ``[b, h, s]``, or packed ``[t, h, e]`` with ``[h, t]``. The
        result is computed in the dtype of ``lse``, its output rounded to ``dtype``, and has the same bits on
        all ranks with these queries.
        """
        ...


class PeerMemory(Protocol):
    """Memory of GPUs into which each of the ranks may write."""

    def exchange(self, q: Tensor, value_dim: int, *, have_own_heads: bool) -> RankExchange | None:
        """What carries these queries, and results of so many channels; None where they are too many."""
        ...


def check_mesh(mesh: "DeviceMesh", example: str) -> None:
    """Refuse what is no mesh of one dimension, such as that of this name.

    Raises:
        TypeError: it is no DeviceMesh.
        ValueError: it has more dimensions than one.
    """
    if not hasattr(mesh, "ndim") or isinstance(mesh, Tensor):  # a process group, or the number of ranks
        made = "a DeviceMesh, as init_device_mesh() or DeviceMesh.from_group() makes"
        raise TypeError(f"mesh: expected {made}, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, as of mesh[{example!r}], got {mesh.ndim}")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a one-dimensional ``mesh`` that share a cache; this one is number ``rank`` of ``count``.

    Token ``j`` of a sequence is with rank ``j % count``. ``have_own_heads`` says that each rank has query
    heads of its own, all of which read the same KV heads; else all ranks have the same queries. ``memory`` is
    there on GPUs that reach each other's.
    """

    mesh: "DeviceMesh"
    group: "ProcessGroup"
    rank: int
    count: int
    have_own_heads: bool = False
    memory: PeerMemory | None = None

    @classmethod
    def of(cls, mesh: "DeviceMesh") -> "Ranks":
        """Return the ranks of a mesh; raise as :func:`check_mesh`."""
        check_mesh(mesh, "tp")
        return cls(mesh, mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def with_own_heads(self) -> "Ranks":
        """The same ranks, each with query heads of its own."""
        return replace(self, have_own_heads=True)

    def held(self, tokens: int) -> int:
        """How many of the first so many tokens of a sequence this rank has.

        >>> [Ranks(None, None, rank=1, count=2).held(n) for n in range(5)]
        [0, 0, 1, 1, 2]
        """
        return (tokens + self.count - 1 - self.rank) // self.count

    def exchange(self, q: Tensor, value_dim: int) -> RankExchange:
        """What carries queries ``[..., h, d]``, and results of so many channels: the same on every rank."""
        if self.memory is not None:
            found = self.memory.exchange(q, value_dim, have_own_heads=self.have_own_heads)
            if found is not None:
                return found
        return Collectives(self.group, self.count, self.have_own_heads)


class Collectives(NamedTuple):
    """An :class:`Exchange` by collectives of torch.distributed, on any device."""

    group: "ProcessGroup"
    count: int
    have_own_heads: bool

    def __str__(self) -> str:
        return "by collectives"

    def queries(self, q: Tensor, kv_heads: int) -> Tensor:
        """As :meth:`Exchange.queries` says."""
        if not self.have_own_heads:
            return q
        grouped = q.unflatten(-2, (kv_heads, -1)).contiguous()
        return self._gathered(grouped).movedim(0, -3).flatten(-4, -2)

    def merged(self, out: Tensor, lse: Tensor, kv_heads: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As :meth:`Exchange.merged` says. An output and its LSE travel as one tensor."""
        width, beside = out.shape[-1], lse.transpose(-1, -2).contiguous()[..., None]
        sent = torch.cat((out, beside.view(out.dtype)), -1)
        if self.have_own_heads:
            of_ranks = sent.unflatten(-2, (kv_heads, self.count, -1)).movedim(-3, 0)
            parts = self._exchanged(of_ranks.contiguous()).flatten(-3, -2)
        else:
            parts = self._gathered(sent)
        outs, lses = parts[..., :width], parts[..., width:].contiguous().view(lse.dtype)
        total = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - total.masked_fill(total == -torch.inf, 0))
        return (weights * outs).sum(0).to(dtype), total.squeeze(-1).transpose(-1, -2)

    def _gathered(self, x: Tensor) -> Tensor:
        """x of every rank, ``[ranks, ...]``."""
        import torch.distributed as dist

        out = x.new_empty(self.count, *x.shape)
        gather = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )  # the name before torch 2.13
        gather(out.flatten(0, 1), x, group=self.group)
        return out

    def _exchanged(self, x: Tensor) -> Tensor:
        """From x ``[ranks, ...]``, whose ``r``-th part is for rank ``r``: what every rank has for this
        one.
        """
        import torch.distributed as dist

        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self.group)
        return out
