"""Tensor parallelism of layers: each rank computes its own heads.

``torch.distributed.tensor.parallel.parallelize_module`` shards the projections to and from the heads. All
tensors between these projections are plain local tensors. Some tensors are replicated on every rank but used
only for the rank's own heads: MLA's rotary key, sinks, norm weights, and tensors that score functions read.
Each rank computes only a part of their gradients, and :meth:`Share.sum_gradients` sums the parts.
"""

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..call.selection import selection_of
from ..internal.meshes import check_mesh
from ..masks.band import AnyMask
from ..scores import Score

if TYPE_CHECKING:  # importing these modules takes longer than importing attnlib
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle

MARK = "_distribute_module_applied"  # set by parallelize_module on each module that it shards


class Share(NamedTuple):
    """The query heads ``[first, first + count)`` of ``total`` on one rank of a mesh that shards them.

    ``Share()`` is for a rank without tensor parallelism: nothing is sliced, and no gradient is summed.
    """

    first: int = 0
    count: int = 0
    total: int = 0
    mesh: "DeviceMesh | None" = None
    shares: tuple[bool, ...] = ()  # for each mesh dimension: True if it shards the heads

    @property
    def of_gradients(self) -> "tuple[Placement, ...]":
        """The placements of the gradient of a replicated DTensor: partial in dimensions that shard heads."""
        from torch.distributed.tensor import Partial, Replicate

        return tuple(Partial() if shared else Replicate() for shared in self.shares)

    def kv_heads(self, total: int) -> tuple[int, int]:
        """Return which of the ``total`` KV heads this rank's query heads read, as first index and count.

        Raises:
            ValueError: the query heads that read one KV head are sharded unevenly.
        """
        group = self.total // total
        if self.count % group and group % self.count:
            raise ValueError(
                f"q_proj: expected groups of {group} query heads on each rank, or a number that divides a "
                f"group, got {self.count} heads; use another number of ranks"
            )
        return self.first // group, max(1, self.count // group)

    def stored_heads(self, local: int, total: int) -> int:
        """Return how many of ``total`` KV heads this rank stores; unsharded, this is ``local``."""
        return self.kv_heads(total)[1] if self.shares else local

    def local_score(self, score: Score) -> Score:
        """Return the score options with one slope and one sink for each query head of this rank."""
        if not self.shares:
            return score
        return score._replace(**{name: self._local(x) for name, x in score.tensors.items()})

    def local_mask(self, mask: AnyMask, kv_heads: int) -> AnyMask:
        """Return a mask whose lists of selected keys are those of this rank's heads.

        The given lists are those of all query heads or all ``kv_heads``, or one list that all heads share.
        """
        selection = selection_of(mask)
        if not self.shares or selection is None or selection.indices.shape[-2] == 1:
            return mask
        lists = selection.indices.shape[-2]
        if lists not in (self.total, kv_heads):
            expected = f"1, {kv_heads} or {self.total} lists, those of the heads of all ranks"
            raise ValueError(f"indices: expected {expected}, got {lists}")
        first, count = (self.first, self.count) if lists == self.total else self.kv_heads(kv_heads)
        return mask.with_lists(selection.indices.narrow(-2, first, count))

    def _local(self, x: Tensor) -> Tensor:
        """Return this rank's part of x ``[h]``, which has a value for each local head, or for every head."""
        x = x.to_local() if _is_distributed(x) else x
        return x if x.shape[0] == self.count else self.sum_gradients(x).narrow(0, self.first, self.count)

    def local_kv(self, layer: nn.Module, name: str, x: Tensor) -> Tensor:
        """Return the KV heads that this rank's query heads read, from the output x of projection ``name``.

        Raises:
            ValueError: x ``[..., g, d]`` does not have the KV heads that the query heads need.
        """
        total, heads = layer.num_kv_heads, x.shape[-2]
        if not self.shares:
            if heads != total and share_of(getattr(layer, name), total, heads).shares:
                raise ValueError(
                    f"{name}: it is sharded by heads and q_proj is not; shard both, or only q_proj"
                )
            return x
        first, count = self.kv_heads(total)
        if heads == total:  # every rank has computed all KV heads
            return self.sum_gradients(x).narrow(-2, first, count)
        if heads != count:
            raise ValueError(
                f"{name}: expected {count} KV heads for the {self.count} query heads of this rank, or all "
                f"{total}, got {heads}; shard it like q_proj, or not at all"
            )
        return x

    def sum_gradients(self, x: Tensor) -> Tensor:
        """Return ``x``, which is the same on all ranks, with a gradient that is summed over the ranks."""
        if not (self.shares and x.requires_grad and torch.is_grad_enabled()):
            return x
        from torch.distributed.tensor import DTensor, Replicate

        replicated = DTensor.from_local(x, self.mesh, [Replicate()] * len(self.shares))
        return replicated.to_local(grad_placements=self.of_gradients)

    def gathered(self, x: Tensor) -> Tensor:
        """Return all of ``x``, which may be sharded, with a gradient that is summed over the ranks.

        Raises:
            NotImplementedError: ``x`` is sharded over another mesh than the heads.
        """
        if not _is_distributed(x):
            return self.sum_gradients(x)
        if self.shares and x.device_mesh != self.mesh:
            raise NotImplementedError(
                f"score: expected tensors that are whole or sharded over {self.mesh} like the heads, got "
                f"{x.device_mesh}"
            )
        return x.full_tensor(grad_placements=self.of_gradients if self.shares else None)

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return ``norm(x)`` for this rank's heads ``[..., h, d]``.

        Raises:
            NotImplementedError: FSDP shards the norm as a module of its own, so its weights are not gathered.
        """
        if not self.shares:
            return norm(x)
        weights = dict(norm.named_parameters())
        if any(_is_distributed(w) for w in weights.values()):
            if not getattr(norm, MARK, False):
                raise NotImplementedError(
                    "qk_norm: tensor parallelism needs whole norm weights, but FSDP has sharded the norm "
                    "itself; call fully_shard on the layer, not on its norms"
                )
            return norm(x)  # parallelize_module sums the gradients of the norm's weights
        return functional_call(norm, {name: self.sum_gradients(w) for name, w in weights.items()}, (x,))


ALL_HEADS = Share()


def share_of(projection: nn.Module, heads: int, local_heads: int | None = None) -> Share:
    """Return this rank's share of the ``heads`` that ``projection`` computes; ALL_HEADS if it is not sharded.

    ``local_heads`` is the head count of its output; if None, the count is read from the weight. FSDP shards
    weights too, but gathers them before they are used, so only modules marked by ``parallelize_module``
    count.

    Raises:
        ValueError: the heads do not divide evenly among the ranks.
    """
    if local_heads == heads or (local_heads is None and not getattr(projection, MARK, False)):
        return ALL_HEADS
    weight = getattr(projection, "weight", None)
    if not _is_distributed(weight):
        return ALL_HEADS
    from torch.distributed.tensor import Shard

    # type() excludes subclasses: FSDP adds a _StridedShard, and gathers it before the weight is used.
    mesh, shares = weight.device_mesh, tuple(type(p) is Shard and p.dim == 0 for p in weight.placements)
    sizes = [mesh.size(dim) if shared else 1 for dim, shared in enumerate(shares)]
    if (ranks := prod(sizes)) == 1:
        return ALL_HEADS
    if heads % ranks:
        raise ValueError(
            f"tensor parallelism: expected a number of ranks that divides {heads} heads, got {ranks}"
        )
    index = 0
    for dim, size in enumerate(sizes):
        index = index * size + (mesh.get_local_rank(dim) if size > 1 else 0)
    count = heads // ranks
    return Share(index * count, count, heads, mesh, shares)


def share_of_context(layer: nn.Module, context: Tensor) -> Share:
    """Return which query heads this rank has, for a call that only computes the keys and values.

    If the weight is sharded, q_proj is called with one token: its output shows whether heads are gathered.
    """
    if not share_of(layer.q_proj, layer.num_heads).shares:
        return ALL_HEADS
    q = layer.q_proj(context.flatten(0, -2)[:1])
    return share_of(layer.q_proj, layer.num_heads, q.shape[-1] // layer.head_dim)


def plan_of(
    mesh: "DeviceMesh", heads: int, kv_heads: int, columns: tuple[str, ...], of_kv: tuple[str, ...] = ()
) -> "dict[str, ParallelStyle]":
    """Return the plan for ``parallelize_module`` that shards ``columns`` and ``o_proj`` by heads.

    The projections named in ``of_kv`` are sharded too if the KV heads divide evenly among the ranks.
    Otherwise every rank computes all KV heads and reads the ones that its query heads need.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: the heads do not divide evenly among the ranks, or the mesh has several dimensions.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    check_mesh(mesh, "tp")
    ranks = mesh.size()
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(
            f"mesh: expected a number of ranks that divides num_heads={heads}, and that divides "
            f"num_kv_heads={kv_heads} or is a multiple of it, got {ranks}"
        )
    columns += of_kv if kv_heads % ranks == 0 else ()
    return {**{name: ColwiseParallel() for name in columns}, "o_proj": RowwiseParallel()}


def local_weight(module: nn.Module) -> Tensor:
    """Return the weight of a module, or this rank's shard of it."""
    return module.weight.to_local() if _is_distributed(module.weight) else module.weight


def _is_distributed(x: object) -> bool:
    """True if x is a DTensor, without importing DTensor."""
    return hasattr(x, "device_mesh")
