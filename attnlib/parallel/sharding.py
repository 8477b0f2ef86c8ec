"""Which tokens of a sequence a rank has, and how parts become the whole again.

Of ``n`` ranks in zigzag order, rank ``r`` has the chunks ``r`` and ``2 n - 1 - r`` of ``2 n``: under a causal
mask early queries see few keys and late ones many, and so every rank has as much to compute. Otherwise it has
chunk ``r`` of ``n``.
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
        """How many tokens these are."""
        return self.end - self.start


@dataclass(frozen=True)
class Sharing:
    """How the ranks of a one-dimensional mesh share a sequence."""

    mesh: "DeviceMesh"
    zigzag: bool

    @property
    def ranks(self) -> int:
        """How many ranks share a sequence."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        """Their process group."""
        return self.mesh.get_group()

    def ranges(self, rank: int, tokens: int) -> list[TokenRange]:
        """The tokens of a rank in the whole sequence, if every rank has so many, in the order in which it has
        them.
        """
        starts = starts_of(rank, self.ranks, tokens * self.ranks, zigzag=self.zigzag)
        return [TokenRange(start, start + tokens // len(starts)) for start in starts]


@kind
def shard(x: Tensor, mesh: "DeviceMesh", *, dim: int = 1, zigzag: bool = True) -> Tensor:
    """This rank's tokens of x, which every rank has whole; ``dim`` is that of tokens. Position ids are
    sharded alike.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh.
        ValueError: the tokens cannot be shared out evenly.
    """
    check_mesh(mesh, "cp")
    own = _chunks(x.movedim(dim, 0), mesh.size(), zigzag=zigzag)[mesh.get_local_rank()]
    return torch.cat(own).movedim(0, dim)


@kind
def unshard(x: Tensor, mesh: "DeviceMesh", *, dim: int = 1, zigzag: bool = True) -> Tensor:
    """The tokens of all ranks in their order, on every rank; gradients of all ranks are summed into each
    part.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh.
        ValueError: in zigzag order, an odd number of tokens, which no rank has of :func:`shard`.
    """
    check_mesh(mesh, "cp")
    return _Whole.apply(x.movedim(dim, 0), mesh.get_group(), zigzag).movedim(0, dim)


class _Whole(torch.autograd.Function):
    """The tokens of all ranks in their order, of a rank's tokens ``[tokens here, ...]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, zigzag: bool) -> Tensor:
        ctx.group, ctx.zigzag = group, zigzag
        return joined(gathered(x, group), zigzag=zigzag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return summed(dealt(grad, ctx.group.size(), zigzag=ctx.zigzag), ctx.group), None, None


def dealt(x: Tensor, ranks: int, *, zigzag: bool) -> Tensor:
    """x ``[tokens, ...]`` as ``[ranks, tokens of a rank, ...]``."""
    return torch.cat(sum(_chunks(x, ranks, zigzag=zigzag), ())).unflatten(0, (ranks, -1))


def joined(parts: Tensor, *, zigzag: bool) -> Tensor:
    """Parts ``[ranks, tokens of a rank, ...]`` as ``[tokens, ...]``."""
    if not zigzag:
        return parts.flatten(0, 1)
    if parts.shape[1] % 2:
        raise ValueError(
            f"x: expected two equal chunks of tokens in zigzag order, got {parts.shape[1]} tokens"
        )
    early, late = parts.chunk(2, 1)
    return torch.cat((*early.unbind(), *late.unbind()[::-1]))


def _chunks(x: Tensor, ranks: int, *, zigzag: bool) -> list[tuple[Tensor, ...]]:
    """Of x ``[tokens, ...]`` the chunks that each rank has."""
    count = 2 * ranks if zigzag else ranks
    if x.shape[0] % count:
        raise ValueError(
            f"x: expected tokens in {count} equal chunks, got {x.shape[0]} tokens; pad the sequence"
        )
    chunks = x.tensor_split(count)
    return [(chunks[rank], chunks[-1 - rank]) if zigzag else (chunks[rank],) for rank in range(ranks)]


def starts_of(rank: int, ranks: int, tokens: int, *, zigzag: bool) -> list[int]:
    """Where the chunks of a rank begin in a sequence of so many tokens."""
    size = tokens // (2 * ranks if zigzag else ranks)
    return [rank * size, (2 * ranks - 1 - rank) * size] if zigzag else [rank * size]
