"""The buffers of this rank's tokens in a cache that is sharded over ranks.

A page of the allocator stores ``page_size`` tokens on each rank, at the same slots. So the allocator's plan
is valid on every rank, and every rank makes the same plan.
"""

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...dispatch.storage import peer_memory
from ...internal.checks import is_recorded
from ...kv import KVLayout, KVView
from ...rope.rope import Angles
from ..buffer import Buffer, Schedules
from ..pages import PageAllocator
from ..sequences import Request
from .attend import LocalShard, ShardedRoute, new_tokens
from .ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Sharding(NamedTuple):
    """The cache option that shards layers without a window over ``ranks``, by token."""

    ranks: Ranks

    @classmethod
    def of(cls, mesh: "DeviceMesh", device: torch.device | str | None) -> "Sharding":
        """Shard over the ranks of a mesh, which write into each other's memory if their devices can.

        Raises:
            TypeError, ValueError: as :func:`check_mesh`.
        """
        ranks, device = Ranks.of(mesh), torch.empty(0, device=device).device
        return cls(replace(ranks, memory=peer_memory(ranks.group, device)))

    @property
    def shards(self) -> int:
        """Return how many ranks divide the tokens of a page."""
        return self.ranks.count

    def buffers(self, allocator: PageAllocator, page_table: Tensor) -> "ShardedBuffers":
        """Return the buffers of this rank's tokens, for a page allocator without a window."""
        return ShardedBuffers(self.ranks, allocator, page_table)

    def check_replay(self, request: Request) -> None:
        """Raise RuntimeError if the graph of a packed step was captured for one token per sequence or fewer.

        We assume so if a step has no more tokens than sequences, and raise if some sequence gets several.
        """
        if request.packed and not request.is_single and request.shape[0] <= len(request.tokens):
            raise RuntimeError(
                "replay: over a cache that ranks share, a graph of no more tokens than sequences was "
                f"captured for at most one of each, got {list(request.tokens.values())}; leave sequences "
                "without tokens out of the step"
            )

    def check_whole(self, name: str) -> None:
        """Raise NotImplementedError: each rank stores only some tokens of a sequence."""
        raise NotImplementedError(
            f"{name}: expected a cache that has every token of a sequence, got one that {self.shards} ranks "
            "share; make one without mesh=, or keep the tokens themselves and compute their keys again"
        )


class ShardedStep(NamedTuple):
    """The tokens that this rank stores, for steps of one shape; row ``i`` is the step's i-th sequence.

    If no sequence gets more than one token, ``lengths`` include the step's tokens. If one gets several,
    ``is_before`` is True: ``lengths`` are those before the step, and the new tokens are read separately. In a
    dense step, ``new_starts`` counts the left-padding tokens among the new ones.
    """

    ranks: Ranks
    starts: Tensor
    lengths: Tensor
    schedules: Schedules
    is_single: bool
    is_before: bool
    new_starts: Tensor | None

    def routed(self, view: KVView) -> KVView:
        """Return the view with a route; ``append`` adds the shard if new tokens are read separately."""
        return view.with_route(ShardedRoute(self.ranks, None if self.is_before else self._shard(view)))

    def appended(
        self, view: KVView, k: Tensor, v: Tensor | None, angles: Angles | None, *, history: int
    ) -> KVView:
        """Return the view with the step's tokens, beside the tokens that this rank had stored before."""
        if not self.is_before:
            return view
        shard = self._shard(view)._replace(new=new_tokens(view, self.new_starts, k, v, angles))
        if not is_recorded(k) and history == 0:  # a replay may find stored tokens
            shard = shard._replace(stored=None)
        return view.with_route(ShardedRoute(self.ranks, shard))

    def _shard(self, view: KVView) -> LocalShard:
        schedule = self.schedules.get(view.layout.heads)
        bounds = {"starts": self.starts, "lengths": self.lengths, "schedule": schedule}
        return LocalShard(replace(view, **bounds, route=None, positions=None, check=False), self.is_single)


class ShardedBuffers:
    """The lengths and split schedules of this rank's tokens, for a page allocator without a window.

    New tokens are read either with the stored tokens or separately, depending on the step's shape and token
    counts. Each way has its own buffers, because a captured graph of one may be replayed for a step that
    would otherwise use the other. :meth:`Sharding.check_replay` rejects such a replay if a sequence gets
    several tokens.
    """

    is_partial = True

    def __init__(self, ranks: Ranks, allocator: PageAllocator, page_table: Tensor):
        (rows, columns), device = page_table.shape, page_table.device
        limit = columns * allocator.page_size // ranks.count
        self.ranks, self._allocator = ranks, allocator
        self._starts, self._lengths, self._before, self._new_starts = (
            Buffer("i", rows, device) for _ in range(4)
        )
        self._schedules, self._before_schedules = (Schedules(rows, limit, 0, device) for _ in range(2))
        self._shown_starts: array | None = None
        self._is_before = False  # True if the present step's tokens may be read separately

    def add(self, layout: KVLayout) -> None:
        """Add split schedules for layers of this layout."""
        self._schedules.add(layout)
        self._before_schedules.add(layout)

    def local_slots(self, slots: "array[int]") -> "array[int]":
        """Convert global slots of tokens to this rank's slots; -1 for tokens that other ranks store."""
        rank, count = self.ranks.rank, self.ranks.count
        return array("q", [x // count if x % count == rank else -1 for x in slots])

    def update(self, request: Request, *, counted: bool, same_rows: bool) -> None:
        """Write to the buffers which tokens of a step's sequences this rank stores."""
        local = self.ranks.local_tokens
        starts = [holding.start for holding in self._allocator.holdings(request.tokens)]
        lengths = [holding.length for holding in request.holdings]
        counts = request.tokens.values()
        after = [n + new for n, new in zip(lengths, counts, strict=True)] if counted else lengths
        self._lengths.show(array("i", map(local, after)))
        if (first := array("i", map(local, starts))) != self._shown_starts:
            self._shown_starts = None
            self._starts.show(first)
            self._shown_starts = first
        self._is_before = counted and not (request.is_single and not request.packed)
        if self._is_before:
            self._before.show(array("i", map(local, lengths)))
            self._new_starts.show(array("i", [max(0, x - n) for x, n in zip(starts, lengths, strict=True)]))

    def update_schedules(self, lengths: Tensor) -> None:
        """Divide this rank's tokens of the current sequences into splits."""
        rows = len(lengths)
        starts = self._starts.tensor[:rows]
        self._schedules.update(starts, self._lengths.tensor[:rows])
        if self._is_before:
            self._before_schedules.update(starts, self._before.tensor[:rows])

    def slices(self, request: Request, *, writing: bool) -> ShardedStep:
        """Return the slices of the buffers that a step with the shape of ``request`` uses."""
        rows, is_single = len(request.tokens), request.is_single
        is_before = writing and not is_single
        return ShardedStep(
            self.ranks,
            self._starts.tensor[:rows],
            (self._before if is_before else self._lengths).tensor[:rows],
            self._before_schedules if is_before else self._schedules,
            is_single,
            is_before,
            self._new_starts.tensor[:rows] if is_before and not request.packed else None,
        )
