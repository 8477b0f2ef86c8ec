"""Whose query heads meet in a cache that ranks share: those of all of them, or the same ones."""

from ..kv import KVView
from .tensor_parallel import ShardedHeads, Share


def with_heads_of(view: KVView, share: Share, *, heads: int, total: int, kv_heads: int) -> KVView:
    """A view that ranks share, for ``heads`` query heads of ``total`` here, which read some of ``kv_heads``
    KV heads.

    Raises:
        ValueError: ranks that share the view have other KV heads than this one, or some have the same query
        heads and
            others do not, or nobody knows.
    """
    if heads == total or view.ranks.count == 1:
        return view
    if not isinstance(share, ShardedHeads):
        raise ValueError(
            f"q_proj: expected all {total} heads, or to be sharded by parallelize_module, over a cache that "
            f"ranks share, got {heads} heads; nobody knows which the other ranks have"
        )
    if kv_heads == 1 and share.mesh == view.ranks.mesh:
        return view.with_own_heads()
    firsts = _firsts(view, share)
    if firsts is None or len({*firsts}) == 1:
        return view
    read = {first * kv_heads // total for first in firsts}
    if len({*firsts}) < len(firsts) or len(read) > 1 or share.kv_heads(kv_heads)[1] > 1:
        raise ValueError(
            "mesh: expected a cache that ranks share whose query heads read the same KV head, or who have "
            f"the same query heads, got ranks whose heads begin at {firsts} of {total}, over {kv_heads} KV "
            "heads; make the cache with mesh= of such ranks, or without"
        )
    return view.with_own_heads()


def _firsts(view: KVView, share: ShardedHeads) -> list[int] | None:
    """The first query head of each rank that shares the view; None where other shares of the heads are
    alike.
    """
    placed = {
        int(rank): at for at, rank in zip(_indices(share), share.mesh.mesh.flatten().tolist(), strict=True)
    }
    sharing = view.ranks.mesh.mesh.flatten().tolist()
    known = [rank for rank in sharing if rank in placed]
    if len(known) == len(sharing):
        return [placed[rank] * share.count for rank in sharing]
    if len(known) == 1:  # a mesh across those of the heads, on each of which this rank's place is the same
        return None
    raise ValueError(
        f"mesh: expected a cache that ranks of the heads' mesh {share.mesh} share, or ranks across it, got "
        f"{view.ranks.mesh}, of which some are"
    )


def _indices(share: ShardedHeads) -> list[int]:
    """Which part of the heads each rank of the heads' mesh has, in the order of its ranks."""
    parts = [0]
    for dim, shared in enumerate(share.shares):
        size = share.mesh.size(dim)
        parts = [part * size + n if shared else part for part in parts for n in range(size)]
    return parts
