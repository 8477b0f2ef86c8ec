"""Token sharding: which tokens of a sequence each rank has, and how to join them again.

Zigzag order splits a sequence into ``2 n`` chunks for ``n`` ranks, and rank ``r`` gets the chunks ``r`` and
``2 n - 1 - r``. Under a causal mask early queries see few keys and late queries see many, so this gives every
rank the same amount of work. Without zigzag there are ``n`` chunks, and rank ``r`` gets chunk ``r``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..internal.meshes import check_mesh
from ..internal.signatures import kind
from .exchange import gathered, summed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TokenRange(NamedTuple):
    """The tokens ``[start, end)`` of a whole sequence, or of a whole pack."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.end - self.start


@dataclass(frozen=True)
class Sharing:
    """The ranks of a one-dimensional mesh that share a sequence, and how its tokens are ordered on them."""

    mesh: "DeviceMesh"
    zigzag: bool

    @property
    def ranks(self) -> int:
        """The number of ranks that share a sequence."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """The number of this rank within the mesh."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks that share a sequence."""
        return self.mesh.get_group()

    def ranges(self, rank: int, tokens: int) -> list[TokenRange]:
        """Return the token ranges that a rank holds, as positions in the whole sequence, in storage order.

        ``tokens`` is the number of tokens on each rank.
        """
        starts = starts_of(rank, self.ranks, tokens * self.ranks, zigzag=self.zigzag)
        return [TokenRange(start, start + tokens // len(starts)) for start in starts]


@kind
def shard(x: Tensor, mesh: "DeviceMesh", *, dim: int = 1, zigzag: bool = True) -> Tensor:
    """Return this rank's tokens of x; every rank must pass the whole tensor, with tokens in ``dim``.

    If you pass position ids, shard them in the same way.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: the tokens cannot be divided evenly.
    """
    check_mesh(mesh, "cp")
    own = _chunks(x.movedim(dim, 0), mesh.size(), zigzag=zigzag)[mesh.get_local_rank()]
    return torch.cat(own).movedim(0, dim)


@kind
def unshard(x: Tensor, mesh: "DeviceMesh", *, dim: int = 1, zigzag: bool = True) -> Tensor:
    """Return the tokens of all ranks in their original order, on every rank.

    The backward sums the gradients of all ranks into each shard.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: the number of tokens is odd in zigzag order; :func:`shard` never gives such a shard.
    """
    check_mesh(mesh, "cp")
    return _Whole.apply(x.movedim(dim, 0), mesh.get_group(), zigzag).movedim(0, dim)


class _Whole(torch.autograd.Function):
    """The autograd function of :func:`unshard`, for tensors with tokens in the first dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, zigzag: bool) -> Tensor:
        ctx.group, ctx.zigzag = group, zigzag
        return joined(gathered(x, group), zigzag=zigzag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return summed(sharded(grad, ctx.group.size(), zigzag=ctx.zigzag), ctx.group), None, None


def sharded(x: Tensor, ranks: int, *, zigzag: bool) -> Tensor:
    """Split a whole sequence ``[tokens, ...]`` into shards ``[ranks, tokens of a rank, ...]``."""
    return torch.cat(sum(_chunks(x, ranks, zigzag=zigzag), ())).unflatten(0, (ranks, -1))


def joined(parts: Tensor, *, zigzag: bool) -> Tensor:
    """Join shards ``[ranks, tokens of a rank, ...]`` into a whole sequence ``[tokens, ...]``."""
    if not zigzag:
        return parts.flatten(0, 1)
    if parts.shape[1] % 2:
        raise ValueError(
            f"x: expected two equal chunks of tokens in zigzag order, got {parts.shape[1]} tokens"
        )
    early, late = parts.chunk(2, 1)
    return torch.cat((*early.unbind(), *late.unbind()[::-1]))


def _chunks(x: Tensor, ranks: int, *, zigzag: bool) -> list[tuple[Tensor, ...]]:
    """Split a sequence ``[tokens, ...]`` into chunks, and return a tuple of chunks for each rank."""
    count = 2 * ranks if zigzag else ranks
    if x.shape[0] % count:
        raise ValueError(
            f"x: expected tokens in {count} equal chunks, got {x.shape[0]} tokens; pad the sequence"
        )
    chunks = x.tensor_split(count)
    return [(chunks[rank], chunks[-1 - rank]) if zigzag else (chunks[rank],) for rank in range(ranks)]


def starts_of(rank: int, ranks: int, tokens: int, *, zigzag: bool) -> list[int]:
    """Return where a rank's one or two chunks start in a sequence of ``tokens`` tokens."""
    size = tokens // (2 * ranks if zigzag else ranks)
    return [rank * size, (2 * ranks - 1 - rank) * size] if zigzag else [rank * size]
