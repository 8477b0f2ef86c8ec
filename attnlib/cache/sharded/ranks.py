"""The ranks that share a cache, and how they exchange queries and partial attention results."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ...internal.meshes import check_mesh

if TYPE_CHECKING:  # importing torch.distributed takes longer than importing attnlib
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class RankExchange(Protocol):
    """An exchange of queries and partial results between ranks; ``explain`` prints its ``str``."""

    def queries(self, q: Tensor, kv_heads: int) -> Tensor:
        """Return the queries ``[..., h, d]`` of all ranks, ordered by KV head, then by rank."""
        ...

    def merged(self, out: Tensor, lse: Tensor, kv_heads: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Merge the attention of all ranks to their own keys, and return it for this rank's queries.

        ``out`` and ``lse`` are the attention of :meth:`queries` to the keys of this rank: ``[b, s, h, e]``
        and ``[b, h, s]``, or packed ``[t, h, e]`` and ``[h, t]``. The merge runs in the dtype of ``lse``, and
        the output is rounded to ``dtype``. All ranks that have a query get the same bits for it.
        """
        ...


class PeerMemory(Protocol):
    """GPU memory that all ranks may write into."""

    def exchange(self, q: Tensor, value_dim: int, *, have_own_heads: bool) -> RankExchange | None:
        """Return an exchange for these queries and ``value_dim`` output channels; None if not possible."""
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ``count`` ranks of a one-dimensional ``mesh`` that share a cache; this process is ``rank``.

    Token ``j`` of a sequence lives on rank ``j % count``. With ``have_own_heads``, ranks have different query
    heads, which all read the same KV heads; otherwise all ranks have the same queries. ``memory`` is set if
    the GPUs can write into each other's memory.
    """

    mesh: "DeviceMesh"
    group: "ProcessGroup"
    rank: int
    count: int
    have_own_heads: bool = False
    memory: PeerMemory | None = None

    @classmethod
    def of(cls, mesh: "DeviceMesh") -> "Ranks":
        """Return the ranks of a mesh; raise the errors of :func:`check_mesh` if it is unsuitable."""
        check_mesh(mesh, "tp")
        return cls(mesh, mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def with_own_heads(self) -> "Ranks":
        """Return the same ranks for calls in which each rank has different query heads."""
        return replace(self, have_own_heads=True)

    def local_tokens(self, tokens: int) -> int:
        """Return how many of the first ``tokens`` tokens of a sequence this rank stores.

        >>> [Ranks(None, None, rank=1, count=2).local_tokens(n) for n in range(5)]
        [0, 0, 1, 1, 2]
        """
        return (tokens + self.count - 1 - self.rank) // self.count

    def exchange(self, q: Tensor, value_dim: int) -> RankExchange:
        """Return the exchange for queries ``[..., h, d]`` and ``value_dim`` output channels.

        Every rank gets the same kind of exchange for the same shapes.
        """
        if self.memory is not None:
            found = self.memory.exchange(q, value_dim, have_own_heads=self.have_own_heads)
            if found is not None:
                return found
        return Collectives(self.group, self.count, self.have_own_heads)


class Collectives(NamedTuple):
    """A :class:`RankExchange` that uses torch.distributed collectives and runs on any device."""

    group: "ProcessGroup"
    count: int
    have_own_heads: bool

    def __str__(self) -> str:
        return "by collectives"

    def queries(self, q: Tensor, kv_heads: int) -> Tensor:
        """Gather the queries as :meth:`RankExchange.queries` does."""
        if not self.have_own_heads:
            return q
        grouped = q.unflatten(-2, (kv_heads, -1)).contiguous()
        return self._gathered(grouped).movedim(0, -3).flatten(-4, -2)

    def merged(self, out: Tensor, lse: Tensor, kv_heads: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Merge as :meth:`RankExchange.merged` does. An output and its LSE travel as one tensor."""
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
        """Return ``x`` of every rank, ``[ranks, ...]``."""
        import torch.distributed as dist

        out = x.new_empty(self.count, *x.shape)
        # torch 2.13 renamed this function.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out.flatten(0, 1), x, group=self.group)
        return out

    def _exchanged(self, x: Tensor) -> Tensor:
        """Send ``x[r]`` to rank ``r``, and return what every rank sent to this one, ``[ranks, ...]``."""
        import torch.distributed as dist

        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self.group)
        return out


class Rehearsal(NamedTuple):
    """A :class:`RankExchange` for ``explain``: right shapes, wrong values, no communication."""

    count: int
    have_own_heads: bool

    def queries(self, q: Tensor, kv_heads: int) -> Tensor:
        """Repeat this rank's queries in place of other ranks' queries, if ranks have different heads."""
        return q.repeat_interleave(self.count if self.have_own_heads else 1, -2)

    def merged(self, out: Tensor, lse: Tensor, kv_heads: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a slice with as many heads as this rank has, instead of a merged result."""
        heads = out.shape[-2] // (self.count if self.have_own_heads else 1)
        return out[..., :heads, :].to(dtype), lse[..., :heads, :]
