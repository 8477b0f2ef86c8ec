"""Tensor parallelism over a sharded cache: tell a view which query heads each of its ranks has."""

from ..kv import KVView
from .tensor_parallel import Share


def with_heads(view: KVView, share: Share, heads: int, *, total: int, kv_heads: int) -> KVView:
    """Return the view for a call with ``heads`` of ``total`` query heads, which read ``kv_heads`` KV heads.

    The view of a sharded cache records whether its ranks have different query heads or all the same ones.

    Raises:
        ValueError: the ranks that share the view store different KV heads, only some of them have the same
            query heads, or the heads of this rank are unknown.
    """
    if not view.is_partial or heads == total or view.route.ranks.count == 1:
        return view
    if not share.shares:
        raise ValueError(
            f"q_proj: expected all {total} heads, or heads sharded by parallelize_module, over a cache that "
            f"ranks share, got {heads} heads; the heads of the other ranks are unknown"
        )
    if kv_heads == 1 and share.mesh == view.route.ranks.mesh:
        return view.with_own_heads()
    firsts = _first_heads(view, share)
    if firsts is None or len({*firsts}) == 1:
        return view
    read = {first * kv_heads // total for first in firsts}
    if len({*firsts}) < len(firsts) or len(read) > 1 or share.kv_heads(kv_heads)[1] > 1:
        raise ValueError(
            "mesh: expected a cache shared by ranks with query heads that read the same KV head, or with the "
            f"same query heads, got ranks with first heads {firsts} of {total}, over {kv_heads} KV heads; "
            "make the cache with a mesh= of such ranks, or without one"
        )
    return view.with_own_heads()


def _first_heads(view: KVView, share: Share) -> list[int] | None:
    """Return the first query head of each rank that shares the view.

    The result is None if the ranks share the view along one mesh dimension and the heads are sharded along
    another, so that these ranks all have the same query heads.
    """
    placed = {
        int(rank): at for at, rank in zip(_indices(share), share.mesh.mesh.flatten().tolist(), strict=True)
    }
    sharing = view.route.ranks.mesh.mesh.flatten().tolist()
    known = [rank for rank in sharing if rank in placed]
    if len(known) == len(sharing):
        return [placed[rank] * share.count for rank in sharing]
    if len(known) == 1:
        return None
    raise ValueError(
        f"mesh: expected a cache shared within the heads' mesh {share.mesh}, or across it, got "
        f"{view.route.ranks.mesh}, which overlaps it in part"
    )


def _indices(share: Share) -> list[int]:
    """Return the index of each rank's share of the heads, in the order of the mesh."""
    parts = [0]
    for dim, shared in enumerate(share.shares):
        size = share.mesh.size(dim)
        parts = [part * size + n if shared else part for part in parts for n in range(size)]
    return parts
